"""Scores of the offline learners on data of our own, by `ctrl-rl offline bench`.

Five of them learn from all four files of `benchmarks.offline_data`, five seeds of 50,000 updates
each, and are judged: "better" than BC means that the 95 % interval of the difference of the
interquartile means leaves out 0. The others are shown on hopper-medium-replay, with as many updates
as about ten minutes of one core are good for.

A cell is one data set and one algorithm. Runs and results lie in `data/bench`, which is not
committed: a second try goes on from the checkpoints there, and `ctrl-rl offline report data/bench`
makes the whole report. Two cells at a time are trained by

    ctrl-rl offline bench data/*.hdf5 --jobs 2 --out data/bench --algo ... --set ...

with the words of the cells; afterwards this command finds all seeds finished, and collects them.
"""

import sys

import numpy as np

from benchmarks.cells import Absent, Cell, main, run_cli
from benchmarks.offline_data import DATA
from offline.results import checksum, path_of, read
from offline.statistics import Estimate, estimate, iqm, iqm_difference

BENCH = DATA / "bench"
DATASETS = tuple(
    f"{body}-{kind}"
    for kind in ("medium-replay", "medium-expert")
    for body in ("hopper", "halfcheetah")
)
JUDGED = {
    "bc": "bc",
    "td3_bc": "td3_bc",
    "iql": "iql",
    "por": "por execute_hidden=256 256",
    "td3_bc-adamo": "td3_bc optimizer=adamo",
}
"""Name in that of a cell -> what `--algo` takes."""

SHOWN = {
    "bc-best-tenth": ("bc top_fraction=0.1", 50_000),
    "cql": ("cql", 5_000),
    "awac": ("awac", 10_000),
    "rebrac": ("rebrac", 10_000),
    "edac": ("edac", 2_500),
    "decision_transformer": ("decision_transformer", 2_500),
}
"""The same, and how many updates."""

SEEDS = 5


def cell(dataset: str, name: str, algo: str, total_steps: int) -> Cell:
    """One data set, one algorithm."""
    settings = {"total-steps": total_steps, "eval-every": total_steps // 10, "episodes": 20}
    config = {"dataset": dataset, "algo": algo, "seeds": SEEDS, "settings": settings}
    return Cell(name=f"{dataset}-{name}", config=config)


CELLS = [
    *(cell(d, name, algo, 50_000) for d in DATASETS for name, algo in JUDGED.items()),
    *(cell(DATASETS[0], name, algo, steps) for name, (algo, steps) in SHOWN.items()),
]


def measure(config: dict) -> dict:
    """Train all seeds of the cell, and collect what `offline bench` found.

    Returns:
        Of each seed the last and the best score, and its curve [[updates, return, score], ...];
        where it was evaluated, settings, and the data's checksum.
    """
    data = DATA / f"{config['dataset']}.hdf5"
    if not data.exists():
        raise Absent(f"{data} is not there: python -m benchmarks.offline_data")
    flags = [w for k, v in config["settings"].items() for w in ("--set", f"{k}={v}")]
    run_cli("offline", "bench", str(data), "--algo", config["algo"],
            "--seeds", str(config["seeds"]), *flags, "--out", str(BENCH))  # fmt: skip
    paths = [path_of(BENCH, config["dataset"], config["algo"], s) for s in range(config["seeds"])]
    results = [read(path) for path in paths]
    return {
        "last": [r.last for r in results],
        "best": [r.best for r in results],
        "curves": [r.curve for r in results],
        "env": results[0].env,
        "learner": results[0].config,
        "sha256": checksum(results[0].data),
    }


def better(ours: list[float], baseline: list[float]) -> tuple[float, float, Estimate]:
    """Interquartile means of both, and their difference with its interval."""
    columns = [np.array(scores)[:, None] for scores in (ours, baseline)]
    first, second = (float(iqm(column)) for column in columns)
    return first, second, estimate(iqm_difference, *columns)


if __name__ == "__main__":
    sys.exit(main("offline_quality", CELLS, measure))
