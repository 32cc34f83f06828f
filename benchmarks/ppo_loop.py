"""Env steps per second of PPO's loop without physics: ours against rsl_rl and skrl.

`dummy_env.py` costs next to nothing, so that what is timed is acting, storing and updating. Steps,
epochs, minibatches, networks and observation normaliser are equal; each library runs its own
training loop with its fastest settings (see `*_loop.py`), on one and on two threads, and its best
counts. Large matrix products take turns with them: `share_of_peak` is what a loop needs in
floating-point operations (`flops.py`), over what the products reach on as many threads.
"""

import sys

from benchmarks import dummy_env, flops, peers
from benchmarks.cells import Cell, main

THREADS = (1, 2)
SETTINGS = {
    "num_steps": 24,
    "epochs": 5,
    "minibatches": 4,
    "learning_rate": 1e-3,
    "max_grad_norm": 1.0,
}
LIBRARIES = {
    "ours, compiled": {"peer": peers.OURS, "script": "ours_loop.py", "compile": "on"},
    "ours, eager": {"peer": peers.OURS, "script": "ours_loop.py", "compile": "off"},
    "rsl_rl, compiled": {"peer": "rsl_rl", "script": "rsl_rl_loop.py", "compile": "on"},
    "rsl_rl, eager": {"peer": "rsl_rl", "script": "rsl_rl_loop.py", "compile": "off"},
    "skrl": {"peer": "skrl", "script": "skrl_loop.py", "compile": "off"},
}
FLOORS = {(64, (64, 64)): 2.5, (1024, (64, 64)): 1.6, (256, (512, 256, 128)): 1.15}
"""(environments, hidden layers) -> least ratio of ours to the better of the two."""

CELLS = [
    Cell(
        name=f"{num_envs}-envs-{'x'.join(map(str, hidden))}",
        config={
            "num_envs": num_envs,
            "hidden": hidden,
            "floor": floor,
            "settings": SETTINGS,
            "designs": LIBRARIES,
            "threads": THREADS,
            "seconds": 2.0,
            "rounds": 7,
            "warm_up": 1,
        },
    )
    for (num_envs, hidden), floor in FLOORS.items()
]


def measure(config: dict) -> dict:
    """Median env steps per second of each design, and ours over the best reference."""
    shared = {key: config[key] for key in ("num_envs", "hidden", "settings")}
    designs = {
        f"{name}, {threads} thread{'s' * (threads > 1)}": (
            design["peer"],
            design["script"],
            {**shared, "compile": design["compile"], "torch_threads": threads},
        )
        for name, design in config["designs"].items()
        for threads in config["threads"]
    }
    products = {
        f"products, {threads}": (peers.OURS, "matmul.py", {"torch_threads": threads})
        for threads in config["threads"]
    }
    rates, versions = peers.race(
        {**designs, **products},
        seconds=config["seconds"],
        rounds=config["rounds"],
        warm_up=config["warm_up"],
    )
    peak = {threads: rates.pop(f"products, {threads}") for threads in config["threads"]}
    needed = flops.ppo_env_step(
        dummy_env.OBS, dummy_env.ACTIONS, config["hidden"], config["settings"]["epochs"]
    )
    return {
        "env_steps_per_s": rates,
        **ratio_to_best(rates),
        "flop_per_env_step": needed,
        "peak_flop_per_s": {str(threads): p["per_s"] for threads, p in peak.items()},
        "share_of_peak": {
            name: round(r["per_s"] * needed / peak[designs[name][2]["torch_threads"]]["per_s"], 4)
            for name, r in rates.items()
        },
        "versions": versions,
    }


def ratio_to_best(rates: dict[str, dict]) -> dict:
    """Our best design over the best of the others; names of ours begin with "ours"."""
    best = {
        ours: max((n for n in rates if n.startswith("ours") == ours), key=lambda n: _per_s(rates, n))
        for ours in (True, False)
    }
    return {
        "best": best[True],
        "best_reference": best[False],
        "ratio": round(_per_s(rates, best[True]) / _per_s(rates, best[False]), 3),
    }


def _per_s(rates: dict[str, dict], name: str) -> float:
    return rates[name]["per_s"]


if __name__ == "__main__":
    sys.exit(main("ppo_loop", CELLS, measure))
