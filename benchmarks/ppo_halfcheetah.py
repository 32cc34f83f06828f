"""Return of PPO on HalfCheetah after one million steps: ours against stable-baselines3.

The same settings (`ppo_settings.py`), five seeds each, one thread each; every policy is played
by the same judge in gymnasium's HalfCheetah-v5. `python -m benchmarks.table` judges: the
interquartile mean of ours must be at least 0.9 of the reference's.
"""

import sys

import numpy as np

from benchmarks import peers
from benchmarks.cells import Cell, main
from benchmarks.ppo_settings import SETTINGS, TASK
from ctrl_rl.curves import iqm

SEEDS = range(5)
RESAMPLES = 10_000
SCRIPTS = {peers.OURS: "ours_ppo.py train", "sb3": "sb3_ppo.py train"}
DESIGNS = {
    peers.OURS: {"compile": "on", "sim_threads": 1, "torch_threads": 1},
    "sb3": {"vec_env": "DummyVecEnv", "torch_threads": 1},
}

CELLS = [
    Cell(
        name=f"{peer}-s{seed}",
        config={
            "peer": peer,
            "task": TASK,
            "seed": seed,
            "episodes": 20,
            "settings": SETTINGS,
            **DESIGNS[peer],
        },
    )
    for seed in SEEDS
    for peer in SCRIPTS
]


def measure(config: dict) -> dict:
    """Train once in the peer's interpreter; its returns and versions."""
    answer = peers.call(config["peer"], SCRIPTS[config["peer"]], config)
    return {**answer["result"], "versions": answer["versions"]}


def verdict(ours: np.ndarray, reference: np.ndarray) -> dict:
    """Interquartile means over seeds, their ratio and its 95 % bootstrap interval.

    Seeds are resampled within each library (one task, so its seeds are the stratum).

    Args:
        ours: mean return of each seed (S,).
        reference: the same of the reference.
    """
    draw = np.random.default_rng(0).integers
    resampled = [x[draw(0, len(x), (RESAMPLES, len(x)))] for x in (ours, reference)]
    ratios = iqm(resampled[0].T) / iqm(resampled[1].T)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return {
        "iqm": float(iqm(ours)),
        "iqm_reference": float(iqm(reference)),
        "ratio": float(iqm(ours) / iqm(reference)),
        "ci95": (float(low), float(high)),
    }


if __name__ == "__main__":
    sys.exit(main("ppo_halfcheetah", CELLS, measure))
