"""Says when a critic has left everything that a policy could earn, though it is still a number.

With rewards of size R at most and a discount gamma per step, no return is larger than
R / (1 - gamma). A critic may overshoot while it learns; one whose mean value, or whose root mean
squared error, is `SLACK` times that feeds on itself, and from there on only gets worse.

Reading order: `value_bound` -> `explosion`.
"""

from collections.abc import Iterable

SLACK = 10.0
"""Ours; a critic that overshoots while it learns is not to be stopped."""

LONGEST = 10_000.0
"""Steps that stand for 1 / (1 - gamma) where there is no discount: the differential values of an
average-reward learner, and gamma 1."""

REWARD = "rollout/largest_reward"
"""The figure by which a learner takes part: largest size of a reward since the last row."""


def value_bound(rows: Iterable[dict[str, float]], gamma: float | None) -> float:
    """Largest |value| that rewards of these rows allow, the entropy's part of a reward included.

    Args:
        rows: figures of the run so far; rewards below 1 count as 1, so that a sparse task's first
            critic, before any reward, is none that exploded.
        gamma: discount per step, None without one.
    """
    sizes = [
        row[REWARD] + abs(row.get("policy/temperature", 0.0) * row.get("policy/entropy", 0.0))
        for row in rows
        if REWARD in row
    ]
    horizon = LONGEST if gamma is None else 1 / max(1 - gamma, 1 / LONGEST)
    return max([1.0, *sizes]) * horizon


def explosion(figures: dict[str, float], bound: float) -> str:
    """What is wrong with a row's figures; empty if nothing is.

    Args:
        figures: of them "value/q" [reward], and the mean squared error "loss/critic" or
            "loss/value" [reward^2].
        bound: see `value_bound`.
    """
    limit = SLACK * bound
    for key, size in (("value/q", limit), ("loss/critic", limit**2), ("loss/value", limit**2)):
        if key in figures and not abs(figures[key]) <= size:
            return (
                f"{key} is {figures[key]:.4g}, and the rewards so far allow values of "
                f"{bound:.4g} at most"
            )
    return ""
