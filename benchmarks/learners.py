"""Return of the learners on gymnasium's bodies: ours and stable-baselines3's.

Equal settings (`ppo_settings.py`, `sac_settings.py`), one thread each; every policy is played by
the same judge in gymnasium's own environment, 20 episodes. PPO on HalfCheetah is measured by
`ppo_halfcheetah.py`. `python -m benchmarks.table` judges: with five seeds on a side, the
interquartile mean of ours must be at least 0.9 of the reference's; fewer are shown.

A cell keeps the curve of training: return of the training episodes over env steps, wall-clock and
CPU time. `--jobs 2` runs two cells at a time.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import peers, ppo_halfcheetah, ppo_settings, sac_settings
from benchmarks.cells import RESULTS, Cell, load, main

SCRIPTS = {
    ("ppo", peers.OURS): "ours_ppo.py train",
    ("ppo", "sb3"): "sb3_ppo.py train",
    ("sac", peers.OURS): "ours_sac.py train",
    ("sac", "sb3"): "sb3_sac.py train",
    ("td3", peers.OURS): "ours_sac.py train",
}
SETTINGS = {"ppo": ppo_settings.SETTINGS, "sac": sac_settings.SAC, "td3": sac_settings.TD3}
ITERATION = ppo_settings.SETTINGS["num_envs"] * ppo_settings.SETTINGS["num_steps"]


@dataclass(frozen=True)
class Study:
    """One learner on one task."""

    algo: str
    task: str
    total_steps: int
    seeds: int
    peers: tuple[str, ...]


STUDIES = (
    Study("sac", "HalfCheetah-v5", 100_000, 5, (peers.OURS, "sb3")),
    Study("td3", "HalfCheetah-v5", 100_000, 5, (peers.OURS,)),
    Study("sac", "Hopper-v5", 100_000, 5, (peers.OURS,)),
    Study("td3", "Hopper-v5", 100_000, 5, (peers.OURS,)),
    Study("ppo", "Hopper-v5", 245 * ITERATION, 5, (peers.OURS, "sb3")),
    Study("ppo", "Walker2d-v5", 74 * ITERATION, 3, (peers.OURS, "sb3")),
    Study("ppo", "Ant-v5", 74 * ITERATION, 3, (peers.OURS, "sb3")),
)


def cell(study: Study, peer: str, seed: int) -> Cell:
    """One training."""
    return Cell(
        name=f"{prefix(study.algo, study.task, peer)}{seed}",
        config={
            "algo": study.algo,
            "peer": peer,
            "task": study.task,
            "seed": seed,
            "episodes": 20,
            "settings": {**SETTINGS[study.algo], "total_steps": study.total_steps},
            **ppo_halfcheetah.DESIGNS[peer],
        },
    )


def prefix(algo: str, task: str, peer: str) -> str:
    """Name of a cell without its seed."""
    return f"{algo}-{task.partition('-')[0].lower()}-{peer}-s"


CELLS = [
    cell(study, peer, seed)
    for study in STUDIES
    for seed in range(study.seeds)
    for peer in study.peers
]


def measure(config: dict) -> dict:
    """Train once in the peer's interpreter; its returns, curve and versions."""
    answer = peers.call(config["peer"], SCRIPTS[config["algo"], config["peer"]], config)
    return {**answer["result"], "versions": answer["versions"]}


def measured(algo: str, task: str, peer: str, results: Path = RESULTS) -> dict[str, dict]:
    """The measured cells of a learner on a task."""
    if (algo, task) == ("ppo", ppo_halfcheetah.TASK):
        cells, start = load("ppo_halfcheetah", results), f"{peer}-s"
    else:
        cells, start = load("learners", results), prefix(algo, task, peer)
    return {name: c for name, c in cells.items() if name.startswith(start)}


def seed_means(cells: dict[str, dict]) -> np.ndarray:
    """Mean return of each seed (S,)."""
    return np.array([np.mean(c["result"]["returns"]) for c in cells.values()])


if __name__ == "__main__":
    sys.exit(main("learners", CELLS, measure, parallel=True))
