"""How long until HalfCheetah returns 3000: FastSAC against stable-baselines3's SAC.

Each learner trains in its own interpreter with the settings of its preset or its defaults, and
stops when the mean return of an evaluation reaches the goal. Both are judged in gymnasium's
HalfCheetah-v5, deterministic, `episodes` episodes each time. The clock runs from the first line of
building the learner, compilation included; imports and evaluations are left out.

Ours must need at most a third of the reference's time, by medians over five seeds.
"""

import statistics
import sys
from collections.abc import Sequence

from benchmarks import peers
from benchmarks.cells import Cell, main

TASK, GOAL, EPISODES = "HalfCheetah-v5", 3000.0, 5
SEEDS = range(5)
MAX_RATIO = 1 / 3
SCRIPTS = {peers.OURS: "fast_halfcheetah_ours.py", "sb3": "fast_halfcheetah_sb3.py"}
DESIGNS = {
    peers.OURS: {"max_steps": 1_000_000, "sim_threads": 2, "torch_threads": 1},
    "sb3": {"max_steps": 300_000, "evaluate_every": 5_000, "torch_threads": 2},
}
"""Two threads of torch are the quicker choice for stable-baselines3's SAC on two cores."""

CELLS = [
    Cell(
        name=f"{peer}-s{seed}",
        config={"peer": peer, "task": TASK, "seed": seed, "goal": GOAL, "episodes": EPISODES}
        | DESIGNS[peer],
    )
    for seed in SEEDS
    for peer in SCRIPTS
]


def measure(config: dict) -> dict:
    """Train until the goal.

    Returns:
        `curve`: [seconds, env steps, mean return] of each evaluation; `goal_s`, seconds until the
        first that reached the goal, None where none did within `max_steps`.
    """
    threads = config["torch_threads"]
    answer = peers.call(config["peer"], SCRIPTS[config["peer"]], config, threads)
    return {**answer["result"], "versions": answer["versions"]}


def verdict(ours: Sequence[float | None], reference: Sequence[float | None]) -> dict:
    """Medians over seeds of the time to the goal [s], and whether their ratio is small enough.

    A seed that never got there counts as infinitely slow; a median of those is None.
    """
    medians = [
        statistics.median([float("inf") if x is None else x for x in times])
        for times in (ours, reference)
    ]
    known = [None if m == float("inf") else m for m in medians]
    ratio = medians[0] / medians[1] if None not in known else None
    passed = known[0] is not None and medians[0] <= MAX_RATIO * medians[1]
    return {"median_s": known[0], "reference_s": known[1], "ratio": ratio, "passed": passed}


if __name__ == "__main__":
    sys.exit(main("fast_halfcheetah", CELLS, measure))
