"""Statistics of few runs on several tasks, after Agarwal et al. 2021.

Source of every formula: Agarwal, Schwarzer, Castro, Courville, Bellemare, "Deep reinforcement
learning at the edge of the statistical precipice", NeurIPS 2021, arXiv:2108.13264; sections are
its. Their library rliable gives the same numbers (tests/test_offline_statistics.py).

Layout: scores are (..., R, T) arrays, R runs (seeds) of T tasks (data sets); the dimensions before
are bootstrap resamples. A statistic takes one or more of them and reduces the last two, so that
`estimate` works with any.

Reading order: aggregates -> `probability_of_improvement` -> `performance_profile` -> `estimate`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

RESAMPLES = 5000
"""Bootstrap resamples of an interval."""


# Statistics ---------------------------------------------------------------------------------


def iqm(scores: np.ndarray) -> np.ndarray:
    """Interquartile mean: of all R * T scores of a resample, the mean of the middle half (4.3).

    A quarter of the scores, rounded down, is left out on each side: scipy's 25 % trimmed mean.
    """
    from scipy.stats import trim_mean

    return trim_mean(_flat(scores), 0.25, axis=-1)


def mean(scores: np.ndarray) -> np.ndarray:
    """Mean over runs and tasks."""
    return _flat(scores).mean(-1)


def median(scores: np.ndarray) -> np.ndarray:
    """Median over tasks of the mean over runs (3)."""
    return np.median(scores.mean(-2), axis=-1)


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How likely a run of X beats one of Y on a task drawn at random (4.3).

    Per task the share of pairs of runs in which X is better, a tie counting half (Mann and
    Whitney's U over its largest value); then the mean over tasks.

    Args:
        x: scores of X (..., R, T).
        y: scores of Y (..., Q, T), of the same tasks.
    """
    ours, theirs = x[..., :, None, :], y[..., None, :, :]
    return ((ours > theirs) + 0.5 * (ours == theirs)).mean((-3, -2, -1))


def iqm_difference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """IQM of X minus IQM of Y."""
    return iqm(x) - iqm(y)


def performance_profile(scores: np.ndarray, taus: np.ndarray) -> np.ndarray:
    """Share of all R * T scores above each threshold (run-score distribution, 4.2).

    Args:
        scores: (..., R, T).
        taus: thresholds (K,).

    Returns:
        (K, ...), from 1 towards 0.
    """
    flat = _flat(scores)
    return np.stack([(flat > tau).mean(-1) for tau in taus])


def _flat(scores: np.ndarray) -> np.ndarray:
    """The last two dimensions as one."""
    return scores.reshape(*scores.shape[:-2], -1)


# Intervals ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A statistic and its 95 % interval."""

    value: np.ndarray
    """() or, of a profile, (K,)."""
    low: np.ndarray | None
    """None where one run per task tells nothing about the spread."""
    high: np.ndarray | None

    @property
    def ci95(self) -> list[float] | None:
        """[low, high] of a single figure."""
        if self.low is None or self.high is None:
            return None
        return [float(self.low), float(self.high)]

    def __str__(self) -> str:
        """For people: `61.3 [58.0, 64.1]`."""
        text = f"{float(self.value):.1f}"
        return text if self.ci95 is None else text + " [{:.1f}, {:.1f}]".format(*self.ci95)


def estimate(
    statistic: Callable[..., np.ndarray], *scores: np.ndarray, resamples: int = RESAMPLES
) -> Estimate:
    """A statistic with its interval by the stratified bootstrap (4.1).

    A resample draws R runs with replacement for each task, and each algorithm, on its own; the
    interval reaches from the 2.5 % to the 97.5 % percentile of the statistic over resamples.

    Args:
        statistic: takes arrays (..., R, T), one per algorithm, and returns (...) or (K, ...).
        scores: one (R, T) array per algorithm; R may differ between them.
        resamples: how many; their generator is seeded, so that a figure does not change by itself.

    Raises:
        ValueError: an array that is not (R, T), is empty, or holds NaN or infinity; arrays of
            different numbers of tasks.
    """
    from scipy.stats import bootstrap

    matrices = [np.asarray(matrix, float) for matrix in scores]
    for matrix in matrices:
        if matrix.ndim != 2 or not matrix.size:
            raise ValueError(f"scores must be runs x tasks, not of shape {matrix.shape}")
        if not np.isfinite(matrix).all():
            run, task = np.argwhere(~np.isfinite(matrix))[0]
            raise ValueError(f"the score of run {run} on task {task} is {matrix[run, task]}")
    tasks = {matrix.shape[1] for matrix in matrices}
    if len(tasks) > 1:
        raise ValueError(f"scores of {' and '.join(map(str, sorted(tasks)))} tasks are compared")
    value = np.asarray(statistic(*matrices), float)
    if any(len(matrix) < 2 for matrix in matrices):
        return Estimate(value, None, None)

    def resampled(*columns, axis):  # scipy resamples each column, a task of an algorithm, alone
        (count,) = tasks
        parts = [columns[i : i + count] for i in range(0, len(columns), count)]
        return statistic(*(np.stack(part, -1) for part in parts))

    found = bootstrap(
        [column for matrix in matrices for column in matrix.T],
        resampled,
        n_resamples=resamples,
        batch=500,
        vectorized=True,
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(value, np.asarray(found.low), np.asarray(found.high))
