"""Says when a critic or a temperature has left everything that a policy could earn.

It is then still a number, but feeds on itself, and from there on only gets worse.

With rewards of size R at most and a discount gamma per step, no return is larger than
R / (1 - gamma). A critic may overshoot while it learns; one whose mean value, or whose root mean
squared error, is `SLACK` times that has exploded. The entropy's part of a reward counts towards R.
It is the learner's own doing, so it has a bound of its own: `BONUS` times the largest reward. A
critic of atoms cannot leave them, and its loss is a cross-entropy: that one's bound is `NATS`.

Reading order: `value_bound` -> `explosion`.
"""

import math
from collections.abc import Iterable

SLACK = 10.0
"""Ours; a critic that overshoots while it learns is not to be stopped."""

BONUS = 1000.0
"""Ours; the entropy's part of a step's reward in largest rewards. Temperatures of healthy runs stay
below 1 largest reward per nat, but 20 actions that collapse at the start are 400 nat away."""

NATS = 1000.0
"""Ours; such a cross-entropy says e^-500 of what happened, by each of two critics."""

LONGEST = 10_000.0
"""Steps that stand for 1 / (1 - gamma) where there is no discount: the differential values of an
average-reward learner, and gamma 1."""

REWARD = "rollout/largest_reward"
"""The figure by which a learner takes part: largest size of a reward since the last row."""


def largest_reward(rows: Iterable[dict[str, float]]) -> float:
    """R of these rows; rewards below 1 count as 1.

    So a sparse task's first critic, before any reward, is none that exploded.
    """
    return max([1.0, *(row[REWARD] for row in rows if REWARD in row)])


def entropy_bonus(row: dict[str, float]) -> float:
    """The entropy's part of a reward in a row's figures, 0 without a temperature.

    An entropy below a nat counts as one: it passes through 0, whatever the temperature.
    """
    return row.get("policy/temperature", 0.0) * max(1.0, abs(row.get("policy/entropy", 0.0)))


def value_bound(rows: Iterable[dict[str, float]], gamma: float | None) -> float:
    """Largest |value| that rewards of these rows allow, the entropy's part of a reward included.

    Args:
        rows: figures of the run so far, none of them with an entropy beyond its bound.
        gamma: discount per step, None without one.
    """
    sizes = [row[REWARD] + entropy_bonus(row) for row in rows if REWARD in row]
    horizon = LONGEST if gamma is None else 1 / max(1 - gamma, 1 / LONGEST)
    return max([1.0, *sizes]) * horizon


def explosion(rows: list[dict[str, float]], gamma: float | None) -> str:
    """What is wrong with the last of these rows; empty if nothing is.

    Args:
        rows: figures of the run so far; of them "policy/temperature" [reward/nat],
            "policy/entropy" [nat], "value/q" [reward], and "loss/critic" or "loss/value", a mean
            squared error [reward^2] or, beside "value/edge_mass", a cross-entropy [nat].
        gamma: discount per step, None without one.
    """
    figures = rows[-1]
    if not math.isfinite(figures[REWARD]):
        return f"{REWARD} is {figures[REWARD]}: a reward of the environment is no finite number"
    most, bonus = BONUS * largest_reward(rows), entropy_bonus(figures)
    if not bonus <= most:
        temperature, entropy = figures["policy/temperature"], figures.get("policy/entropy", 0.0)
        return (
            f"policy/temperature is {temperature:.4g}, and the rewards so far allow "
            f"{most / max(1.0, abs(entropy)):.4g} at most, at an entropy of {entropy:.4g} nat"
        )
    if "value/edge_mass" in figures:
        if not abs(figures["loss/critic"]) <= NATS:
            return f"loss/critic is {figures['loss/critic']:.4g}, and {NATS:.4g} nat are the most"
        return ""
    bound = value_bound(rows, gamma)
    limit = SLACK * bound
    for key, size in (("value/q", limit), ("loss/critic", limit**2), ("loss/value", limit**2)):
        if key in figures and not abs(figures[key]) <= size:
            return (
                f"{key} is {figures[key]:.4g}, and the rewards so far allow values of "
                f"{bound:.4g} at most"
            )
    return ""
