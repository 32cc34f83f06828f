"""Holds results against published figures: may they be compared, and do they agree?

A published figure is reproduced when the mean over seeds lies within max(5 points, 2 published
standard deviations) of it. Two figures are compared only if they measure the same: the same
simulator, data, settings, number of updates and seeds, and both the last or both the best score.

The settings of a source are what it ran a figure with (`offline.published.source_settings`), which
need not be our presets for the data set. Where they are not known, that is told.

Reading order: `other_settings` -> `obstacles` -> `compare`.
"""

import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctrl_rl import registry
from offline.published import Published, source_settings
from offline.results import Result

POINTS = 5.0
"""Distance that always counts as agreement [D4RL points]."""

DEVIATIONS = 2.0
"""Distance that counts as agreement [published standard deviations over seeds]."""


BESIDE = {"adamo", "compile", "episodes", "eval_every", "monitor", "task", "total_steps"}
"""Settings that change no update, but `adamo`, which `optimizer` decides about. What `task` decides
is told as the simulator, and `total_steps` as the steps."""


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
    """What is not known of the source, so that it could not be checked."""

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


def defaults(algo: str) -> dict:
    """Settings of an algorithm and of `offline train` without any preset, as a result has them.

    Raises:
        NotFound: an unknown algorithm.
    """
    from offline.commands.train import OfflineFlags

    module, found = registry.load("offline_algos", algo), {}
    for kind in (OfflineFlags, typing.get_type_hints(module.train)["config"]):
        found |= dataclasses.asdict(kind())
    return json.loads(json.dumps(found, default=str))


def other_settings(result: Result, published: Published) -> list[str]:
    """Name, ours and the source's of each setting that the source had otherwise.

    What the source has and we have no counterpart for is among them. Empty where the source's
    settings are not known. What our variant's name says, as in "10% BC", is not looked at: it is
    what the two have in common.
    """
    given = source_settings(published)
    if not result.config or given is None:
        return []
    if result.algo not in registry.names("offline_algos"):
        return [f"those of {result.algo} are not known here"]
    own, found = defaults(result.algo), []
    for key, wanted in sorted((own | given).items()):
        ours = result.config.get(key, wanted) if key in own else "none here"
        if ours != wanted and key not in BESIDE | result.variant.keys():
            found.append(f"{key} {ours}/{wanted}")
    return found


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
    unknown = [name for name in names if getattr(published, name) is None]
    if source_settings(published) is None:
        unknown.append("settings")
    return Comparison(
        published=published,
        mean=float(scores.mean()),
        std=float(scores.std()),
        seeds=len(scores),
        obstacles=obstacles(results, published, report),
        unknown=tuple(unknown),
    )
