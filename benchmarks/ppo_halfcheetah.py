"""Return of PPO on HalfCheetah after one million steps: ours against stable-baselines3.

The same settings (`ppo_settings.py`), five seeds each, one thread each; every policy is played
by the same judge in gymnasium's HalfCheetah-v5. `python -m benchmarks.table` judges: the
interquartile mean of ours must be at least 0.9 of the reference's.
"""

import sys

from benchmarks import peers
from benchmarks.cells import Cell, main
from benchmarks.ppo_settings import SETTINGS, TASK

SEEDS = range(5)
SCRIPTS = {peers.OURS: "ours_ppo.py train", "sb3": "sb3_ppo.py train"}

CELLS = [
    Cell(
        name=f"{peer}-s{seed}",
        config={
            "peer": peer,
            "task": TASK,
            "seed": seed,
            "episodes": 20,
            "vec_env": "DummyVecEnv",
            "torch_threads": 1,
            "settings": SETTINGS,
        },
    )
    for seed in SEEDS
    for peer in SCRIPTS
]


def measure(config: dict) -> dict:
    """Train once in the peer's interpreter; its returns and versions."""
    answer = peers.call(config["peer"], SCRIPTS[config["peer"]], config)
    return {**answer["result"], "versions": answer["versions"]}


if __name__ == "__main__":
    sys.exit(main("ppo_halfcheetah", CELLS, measure))
