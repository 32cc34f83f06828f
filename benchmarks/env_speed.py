"""Environment steps per second and memory: ours against envpool, gymnasium and bare physics.

256 environments and random actions on all sides. Ours gives float32 tensors with observation,
reward terms, flags and final observations, and resets ended environments within the step; the
peers give numpy arrays. `physics` is `mujoco.batch` alone, handed chunks of 16 control steps of
the same model from states that the task reaches under the same actions.
"""

import sys

from benchmarks import peers
from benchmarks.cells import Cell, main

DESIGNS = {
    "ours": (peers.OURS, "ours_env.py env"),
    "physics": (peers.OURS, "ours_env.py rollout"),
    "envpool": ("envpool", "envpool_env.py"),
    "gymnasium": ("gymnasium", "gymnasium_env.py"),
}
BODIES = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")
GO1 = {"task": "Go1-Velocity-Flat-v0", "actions": "normal", "std": 0.5, "threads": 2}
SLICES = {"seconds": 1.0, "rounds": 9, "warm_up": 1}

CELLS = [
    *(
        Cell(
            name=task,
            config={
                "task": task,
                "num_envs": 256,
                "threads": 2,
                "actions": "uniform",
                "chunk": 16,
                "designs": ["ours", "physics", "envpool", "gymnasium"],
                **SLICES,
            },
        )
        for task in BODIES
    ),
    *(
        Cell(
            name=f"{GO1['task']}-{num_envs}",
            config={
                **GO1,
                "num_envs": num_envs,
                "chunk": 16,
                "designs": ["ours", "physics"],
                **SLICES,
            },
        )
        for num_envs in (256, 1024)
    ),
    Cell(name=f"{GO1['task']}-memory", config={**GO1, "num_envs": 4096}),
]


def measure(config: dict) -> dict:
    """One cell."""
    return _rates(config) if "designs" in config else _memory(config)


def _rates(config: dict) -> dict:
    """Median env steps per second of each design, and ours relative to each."""
    rates, versions = peers.race(
        {name: (*DESIGNS[name], config) for name in config["designs"]},
        seconds=config["seconds"],
        rounds=config["rounds"],
        warm_up=config["warm_up"],
    )
    return {
        "env_steps_per_s": rates,
        "ours_relative_to": {
            name: {key: round(rates["ours"][key] / rate[key], 3) for key in ("per_s", "per_cpu_s")}
            for name, rate in rates.items()
            if name != "ours"
        },
        "versions": versions,
    }


def _memory(config: dict) -> dict:
    """Resident memory that the environments add to a process that has made one [MB]."""
    answer = peers.call(peers.OURS, "ours_env.py memory", config)
    return {**answer["result"], "versions": answer["versions"]}


if __name__ == "__main__":
    sys.exit(main("env_speed", CELLS, measure))
