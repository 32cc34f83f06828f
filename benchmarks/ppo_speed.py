"""Env steps per second of PPO on HalfCheetah: ours against stable-baselines3.

The same settings (`ppo_settings.py`) on both sides; each library runs its own training loop,
which is stopped between iterations so that all take turns. The reference is run with both of its
vectorisations and with one and two torch threads, and its best counts.

`steps` cells time a whole training of one million steps from an empty process, imports and
compilation included.
"""

import sys
import time

from benchmarks import peers
from benchmarks.cells import Cell, main
from benchmarks.ppo_settings import SETTINGS, TASK

SCRIPTS = {peers.OURS: "ours_ppo.py", "sb3": "sb3_ppo.py"}

DESIGNS = {
    "ours, compiled": {"peer": peers.OURS, "compile": "on", "sim_threads": 0, "torch_threads": 1},
    "ours, eager": {"peer": peers.OURS, "compile": "off", "sim_threads": 0, "torch_threads": 1},
    "sb3, DummyVecEnv": {"peer": "sb3", "vec_env": "DummyVecEnv", "torch_threads": 1},
    "sb3, SubprocVecEnv": {"peer": "sb3", "vec_env": "SubprocVecEnv", "torch_threads": 1},
    "sb3, DummyVecEnv, 2 threads": {"peer": "sb3", "vec_env": "DummyVecEnv", "torch_threads": 2},
}

CELLS = [
    Cell(
        name="rate",
        config={
            "task": TASK,
            "settings": SETTINGS,
            "designs": DESIGNS,
            "seconds": 2.0,
            "rounds": 5,
            "warm_up": 1,
        },
    ),
    *(
        Cell(
            name=f"steps-{name}",
            config={"task": TASK, "settings": SETTINGS, "design": DESIGNS[design]},
        )
        for name, design in (
            ("ours-compiled", "ours, compiled"),
            ("ours-eager", "ours, eager"),
            ("sb3", "sb3, DummyVecEnv"),
        )
    ),
]


def measure(config: dict) -> dict:
    """One cell."""
    return _rate(config) if "designs" in config else _whole(config)


def _rate(config: dict) -> dict:
    """Median env steps per second of each design, and the ratios to the reference's best."""
    shared = {"task": config["task"], "settings": config["settings"], "seed": 0}
    rates, versions = peers.race(
        {
            name: (design["peer"], f"{SCRIPTS[design['peer']]} speed", {**shared, **design})
            for name, design in config["designs"].items()
        },
        seconds=config["seconds"],
        rounds=config["rounds"],
        warm_up=config["warm_up"],
    )
    best = max((n for n in rates if n.startswith("sb3")), key=lambda n: rates[n]["per_s"])
    return {
        "env_steps_per_s": rates,
        "best_reference": best,
        "ratio": {n: round(r["per_s"] / rates[best]["per_s"], 3) for n, r in rates.items()},
        "versions": versions,
    }


def _whole(config: dict) -> dict:
    """Wall time of training from an empty process [s]."""
    design = config["design"]
    job = {"task": config["task"], "settings": config["settings"], "seed": 0, **design}
    start = time.perf_counter()
    answer = peers.call(
        design["peer"],
        f"{SCRIPTS[design['peer']]} train",
        {**job, "episodes": 0},
        threads=design["torch_threads"],
    )
    wall = time.perf_counter() - start
    return {"wall_s": round(wall, 1), **answer["result"], "versions": answer["versions"]}


if __name__ == "__main__":
    sys.exit(main("ppo_speed", CELLS, measure))
