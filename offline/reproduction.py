"""Holds results against published figures: may they be compared, and do they agree?

A published figure is reproduced when the mean over seeds lies within max(5 points, 2 published
standard deviations) of it. Two figures are compared only if they measure the same: the same
simulator, data, number of updates and seeds, and both the last or both the best score.

Reading order: `obstacles` -> `compare`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offline.published import Published
from offline.results import Result

POINTS = 5.0
"""Distance that always counts as agreement [D4RL points]."""

DEVIATIONS = 2.0
"""Distance that counts as agreement [published standard deviations over seeds]."""


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
        """The obstacles in a word each: "simulator", "data", "steps", "seeds", ..."""
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
