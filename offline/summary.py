"""What a benchmark's results say: figures with intervals, aggregates, pairs, published beside.

Everything that `ctrl-rl offline report` shows, as plain values; last and best scores never mix.
Aggregates are over the data sets on which every algorithm has D4RL scores, and over the seeds that
an algorithm has on all of them. Formulas: `offline.statistics`.

Reading order: `summarise` -> `_cell` -> `_aggregate`.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from offline import published, statistics
from offline.reproduction import compare
from offline.results import Result, load

SCHEMA = 1
"""Version of report.json."""

REPORTS = ("last", "best")

AGGREGATES = {"iqm": statistics.iqm, "median": statistics.median, "mean": statistics.mean}

TAUS = 81
"""Thresholds of a performance profile, from the lowest score to the highest."""

PROFILE_RESAMPLES = 1000
"""Bootstrap resamples of a profile's band, which has an interval at each threshold."""

DONE_TO_DATA = ("timeouts", "obs_normalized", "dropped_at_timeouts", "dropped_unknown_successor")
"""What a result's data says of its treatment; the reward preset is a setting."""

Groups = Mapping[tuple[str, str], Sequence[Result]]
"""(data set, algorithm) -> its seeds."""


def summarise(folder: Path) -> dict:
    """All figures of a benchmark's folder.

    Raises:
        ValueError: see `offline.results.load`.
    """
    groups = load(folder)
    datasets = list(dict.fromkeys(dataset for dataset, _ in groups))
    algos = list(dict.fromkeys(label for _, label in groups))
    curves = {
        name: {x: _curve(groups[name, x]) for x in algos if (name, x) in groups}
        for name in datasets
    }
    return {
        "schema": SCHEMA,
        "folder": str(folder),
        "datasets": {name: _measured_on(groups, name) for name in datasets},
        "algos": algos,
        "settings": {label: _settings(groups, label) for label in algos},
        "cells": [_cell(results) for results in groups.values()],
        "aggregates": {report: _aggregate(groups, algos, report) for report in REPORTS},
        "missing": _missing(Path(folder), groups, datasets, algos),
        "curves": curves,
    }


# One data set, one algorithm ----------------------------------------------------------------


def _measured_on(groups: Groups, dataset: str) -> dict:
    """Simulators, data and lengths behind the figures of a data set."""
    members = [r for (name, _), results in groups.items() if name == dataset for r in results]
    data = {}
    for r in members:  # what was done to it differs between algorithms, the file does not
        key = r.data.get("origin", "unknown origin"), r.checksum, r.data.get("transitions")
        data[key] = dict(zip(("origin", "checksum", "transitions"), key, strict=True))
    return {
        "env": sorted({r.env for r in members}),
        "comparable": all(r.comparable for r in members),
        "normalized": all(r.normalized for r in members),
        "data": list(data.values()),
        "steps": sorted({r.steps for r in members}),
    }


def _settings(groups: Groups, label: str) -> dict:
    """Settings of an algorithm, and what was done to its data; a list where data sets differ."""
    found: dict[str, list] = {}
    for (_, name), results in groups.items():
        if name == label:
            done = {k: results[0].data[k] for k in DONE_TO_DATA if k in results[0].data}
            for key, value in (results[0].config | done).items():
                values = found.setdefault(key, [])
                if value not in values:
                    values.append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in found.items()}


def _cell(results: Sequence[Result]) -> dict:
    """Last and best score over seeds, each with the published figures of its kind."""
    first = results[0]
    cell = {
        "dataset": first.dataset,
        "algo": first.label,
        "seeds": [r.seed for r in results],
        "steps": first.steps,
        "normalized": first.normalized,
    }
    for report in REPORTS:
        scores = np.array([r.score(report) for r in results])
        cell[report] = {
            "scores": scores.tolist(),
            "std": float(scores.std()),
            **_figure(statistics.estimate(statistics.mean, scores[:, None])),
            "published": [
                _beside(results, figure, report)
                for figure in published.find(first.dataset, first.label, report)
            ],
        }
    return cell


def _beside(results: Sequence[Result], figure: published.Published, report: str) -> dict:
    found = compare(results, figure, report)
    keys = ("table", "dataset", "algo", "report", "mean", "std", "seeds", "steps", "source", "note")
    return {key: getattr(figure, key) for key in keys} | {
        "obstacles": list(found.obstacles),
        "kinds": found.kinds,
        "unknown": list(found.unknown),
        "difference": found.difference,
        "allowed": found.allowed,
    }


def _curve(results: Sequence[Result]) -> dict:
    """Scores (R, X) at the updates at which all seeds were evaluated."""
    steps = sorted(set.intersection(*({point[0] for point in r.curve} for r in results)))
    column = 2 if results[0].normalized else 1
    scores = []
    for result in results:
        at = {point[0]: point[column] for point in result.curve}
        scores.append([at[step] for step in steps])
    return {"steps": steps, "scores": scores}


# Over data sets -----------------------------------------------------------------------------


def _aggregate(groups: Groups, algos: Sequence[str], report: str) -> dict:
    """Aggregates, pairs and profiles of all algorithms over the data sets that they share."""
    every = dict.fromkeys(dataset for dataset, _ in groups)
    left_out, tasks = {}, []
    for dataset in every:
        absent = [label for label in algos if (dataset, label) not in groups]
        if absent:
            left_out[dataset] = f"no results of {', '.join(absent)}"
        elif not all(groups[dataset, label][0].normalized for label in algos):
            left_out[dataset] = "returns, not D4RL scores"
        else:
            tasks.append(dataset)
    found = {"tasks": tasks, "left_out": left_out, "algos": {}, "pairs": [], "taus": []}
    if not tasks:
        return found
    matrices, seeds = {}, {}
    for label in algos:
        shared = set.intersection(*({r.seed for r in groups[task, label]} for task in tasks))
        if not shared:
            raise ValueError(f"{label} has no seed in common over {', '.join(tasks)}")
        seeds[label] = sorted(shared)
        columns = [
            [r.score(report) for r in groups[task, label] if r.seed in shared] for task in tasks
        ]
        matrices[label] = np.array(columns).T
    low = min(matrix.min() for matrix in matrices.values())
    high = max(matrix.max() for matrix in matrices.values())
    margin = 0.02 * max(high - low, 1.0)
    taus = np.linspace(low - margin, high + margin, TAUS)
    found["taus"] = taus.tolist()
    for label, matrix in matrices.items():
        profile = statistics.estimate(
            lambda scores: statistics.performance_profile(scores, taus),
            matrix,
            resamples=PROFILE_RESAMPLES,
        )
        found["algos"][label] = {
            "seeds": seeds[label],
            **{k: _figure(statistics.estimate(f, matrix)) for k, f in AGGREGATES.items()},
            "profile": {
                key: None if values is None else np.asarray(values).tolist()
                for key, values in vars(profile).items()
            },
        }
    for x, y in itertools.combinations(algos, 2):
        found["pairs"].append(_pair(x, y, matrices[x], matrices[y]))
    return found


def _pair(x: str, y: str, ours: np.ndarray, theirs: np.ndarray) -> dict:
    """How likely x beats y, and by how much; `better` where the interval leaves out 0."""
    improvement = statistics.estimate(statistics.probability_of_improvement, ours, theirs)
    difference = statistics.estimate(statistics.iqm_difference, ours, theirs)
    better = None
    if (ci95 := difference.ci95) is not None:
        better = x if ci95[0] > 0 else y if ci95[1] < 0 else None
    return {
        "x": x,
        "y": y,
        "probability": _figure(improvement),
        "iqm_difference": _figure(difference),
        "better": better,
    }


def _missing(
    folder: Path, groups: Groups, datasets: Sequence[str], algos: Sequence[str]
) -> list[dict]:
    """Cells of the grid without a result, and why, where the benchmark knows."""
    path = folder / "bench.json"
    asked = {}
    if path.is_file():
        try:
            cells = json.loads(path.read_text())["cells"]
            asked = {(c["dataset"], c["algo"], c["seed"]): c["error"] for c in cells}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged; delete it or run the benchmark again") from None
    seeds = {r.seed for results in groups.values() for r in results}
    grid = dict.fromkeys([*asked, *itertools.product(datasets, algos, sorted(seeds))])
    have = {(*key, r.seed) for key, results in groups.items() for r in results}
    return [
        {"dataset": cell[0], "algo": cell[1], "seed": cell[2], "error": asked.get(cell)}
        for cell in grid
        if cell not in have
    ]


def _figure(found: statistics.Estimate) -> dict:
    """A figure as JSON has it."""
    return {"value": float(found.value), "ci95": found.ci95}
