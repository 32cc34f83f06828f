"""Holds results against published figures: may they be compared, and do they agree?

A published figure is reproduced when the mean over seeds lies within max(5 points, 2 published
standard deviations) of it. Two figures are compared only if they measure the same: the same
simulator, data, settings, number of updates and seeds, and both the last or both the best score.

The settings of a source are those that `ctrl-rl offline train` takes where none is given: the
algorithm's defaults with its presets for the data set.

Reading order: `source_settings` -> `obstacles` -> `compare`.
"""

import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctrl_rl import registry
from offline.published import Published
from offline.results import Result

POINTS = 5.0
"""Distance that always counts as agreement [D4RL points]."""

DEVIATIONS = 2.0
"""Distance that counts as agreement [published standard deviations over seeds]."""


BESIDE = {"adamo", "compile", "episodes", "eval_every", "monitor", "task"}
"""Settings that change no update, but `adamo`, which `optimizer` decides about. What `task` decides
is told as the simulator."""

SAC_N_CRITICS = {
    **{f"halfcheetah-{kind}-v2": 10 for kind in ("medium", "medium-replay", "medium-expert")},
    **{f"walker2d-{kind}-v2": 20 for kind in ("medium", "medium-replay", "medium-expert")},
    **{"hopper-medium-v2": 500, "hopper-medium-replay-v2": 200, "hopper-medium-expert-v2": 200},
}
"""Data set -> critics of the printed SAC-N, of CORL's configurations."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One published figure beside ours."""

    published: Published
    mean: float
    """Of our seeds."""
    std: float
    """Over our seeds, ddof 0, as CORL's."""
    seeds: int
    obstacles: tuple[str, ...]
    """Why the two may not be compared; empty if they may."""
    unknown: tuple[str, ...]
    """What the source does not state, so that it could not be checked."""

    @property
    def kinds(self) -> list[str]:
        """The obstacles in a word each: "simulator", "data", "settings", "steps", ..."""
        return [why.partition(":")[0].removeprefix("other ") for why in self.obstacles]

    @property
    def difference(self) -> float:
        """Ours minus published [points]."""
        return self.mean - self.published.mean

    @property
    def allowed(self) -> float:
        """Largest difference that counts as agreement, either way [points]."""
        return max(POINTS, DEVIATIONS * (self.published.std or 0.0))

    @property
    def missed(self) -> bool:
        """Whether the figure was not reproduced."""
        return not abs(self.difference) <= self.allowed


def source_settings(algo: str, dataset: str) -> dict:
    """Settings of an algorithm and of `offline train` for a data set, as a result has them.

    Raises:
        NotFound: an unknown algorithm.
    """
    from offline.commands.train import OfflineFlags, presets

    module = registry.load("offline_algos", algo)
    kinds = OfflineFlags, typing.get_type_hints(module.train)["config"]
    (_, given), found = presets(module, dataset), {}
    for kind in kinds:
        own = {field.name for field in dataclasses.fields(kind)}
        found |= dataclasses.asdict(kind(**{k: v for k, v in given.items() if k in own}))
    return json.loads(json.dumps(found, default=str))


def other_settings(result: Result, published: Published) -> list[str]:
    """Name, ours and the source's of each setting that the source had otherwise.

    Where the printed name stands for settings of its own, as in "10% BC", these are the source's.
    """
    if not result.config:
        return []
    if result.algo not in registry.names("offline_algos"):
        return [f"those of {result.algo} are not known here"]
    source = source_settings(result.algo, published.dataset)
    if published.algo == "SAC-N":
        source["critics"] = SAC_N_CRITICS.get(published.dataset, "unknown")
    beside = BESIDE | result.variant.keys()
    return [
        f"{key} {result.config[key]}/{wanted}"
        for key, wanted in sorted(source.items())
        if key in result.config.keys() - beside and result.config[key] != wanted
    ]


def obstacles(results: Sequence[Result], published: Published, report: str) -> tuple[str, ...]:
    """Why the seeds of a data set and algorithm may not be held against a published figure.

    Args:
        results: our seeds.
        published: what is printed.
        report: which of our scores is meant, "last" or "best".
    """
    first, found = results[0], []
    if not first.normalized:
        found.append("other scale: returns, not D4RL scores")
    if not first.comparable:
        found.append(f"other simulator: {first.env}, not D4RL's")
    if first.dataset != published.dataset:
        found.append(f"other data: {first.dataset}, not D4RL's {published.dataset}")
    elif first.data.get("origin") != "D4RL":
        found.append(f"other data: {first.data.get('origin', 'unknown origin')}, not D4RL's file")
    if other := other_settings(first, published):
        found.append(f"other settings: {', '.join(other)}")
    if published.steps is not None and first.steps != published.steps:
        found.append(f"other steps: {first.steps:,}, published {published.steps:,}")
    if published.seeds is not None and len(results) != published.seeds:
        found.append(f"other seeds: {len(results)}, published {published.seeds}")
    if published.report is not None and report != published.report:
        found.append(f"other report: {report} score, published {published.report}")
    return tuple(found)


def compare(results: Sequence[Result], published: Published, report: str) -> Comparison:
    """Ours beside one published figure."""
    scores = np.array([result.score(report) for result in results])
    names = ("report", "steps", "seeds", "std")
    return Comparison(
        published=published,
        mean=float(scores.mean()),
        std=float(scores.std()),
        seeds=len(scores),
        obstacles=obstacles(results, published, report),
        unknown=tuple(name for name in names if getattr(published, name) is None),
    )
