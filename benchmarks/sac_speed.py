"""SAC on HalfCheetah: updates per second and the whole loop, ours against stable-baselines3.

The same settings (`sac_settings.py`) on both sides, on one and on two torch threads; all take
turns, and the best of each side counts. `updates` draws from a replay of random steps; `loop` is
the library's own training with one update per env step, the shortened warm-up left out.
"""

import sys

from benchmarks import flops, peers
from benchmarks.cells import Cell, main
from benchmarks.learner_race import race
from benchmarks.sac_settings import SAC

TASK, OBS, ACTIONS = "HalfCheetah-v5", 17, 6
DESIGNS = {
    "ours, compiled": {"peer": peers.OURS, "script": "ours_sac.py", "compile": "on"},
    "ours, eager": {"peer": peers.OURS, "script": "ours_sac.py", "compile": "off"},
    "sb3": {"peer": "sb3", "script": "sb3_sac.py"},
}

CELLS = [
    Cell(
        name=mode,
        config={
            "mode": mode,
            "floor": floor,
            "task": TASK,
            "settings": {**SAC, "warmup_steps": 1000},
            "filled": 10_000,
            "designs": DESIGNS,
            "threads": (1, 2),
            "seconds": 3.0,
            "rounds": 7,
            "warm_up": 1,
        },
    )
    for mode, floor in (("updates", 1.4), ("loop", None))
]


def measure(config: dict) -> dict:
    """One cell; the unit of work is an update, and with `loop` the env step around it."""
    shared = {key: config[key] for key in ("task", "settings", "filled")}
    shared |= {"algo": "sac", "seed": 0, "sim_threads": 1}
    s = config["settings"]
    flop = flops.sac_update(OBS, ACTIONS, s["hidden"], s["batch_size"])
    return race(config, shared, flop, config["mode"])


if __name__ == "__main__":
    sys.exit(main("sac_speed", CELLS, measure))
