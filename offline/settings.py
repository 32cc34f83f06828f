"""What the settings of all offline learners have in common: checks, and the steps they decide."""

import math
from typing import Any

from torch import nn

from ctrl_rl.compiled import MakeOptimizer, MinibatchStep, Objective, pays
from ctrl_rl.networks import ACTIVATIONS
from offline import adamo


def check_settings(config: Any, *more: tuple[str, bool, str]) -> None:
    """Refuse a wrong value of a field that learners share, or of one that `more` names.

    Args:
        config: a learner's frozen dataclass.
        more: of its own fields: name, whether the value is good, what is wanted.

    Raises:
        ValueError: the first such field.
    """
    checks = {
        "total_steps": (lambda x: x >= 1, "at least 1"),
        "batch_size": (lambda x: x >= 1, "at least 1"),
        "learning_rate": (lambda x: 0 < x < math.inf, "positive"),
        "gamma": (lambda x: 0 <= x <= 1, "in 0..1"),
        "polyak": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
        "hidden": (lambda x: bool(x) and min(x) >= 1, "positive widths"),
        "activation": (lambda x: x in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
        "optimizer": (lambda x: x in ("adam", "adamo"), "adam or adamo"),
        "monitor": (lambda x: x in ("off", "warn", "stop"), "off, warn or stop"),
        "compile": (lambda x: x in ("auto", "on", "off"), "auto, on or off"),
    }
    found = [
        (name, good(getattr(config, name)), wanted)
        for name, (good, wanted) in checks.items()
        if hasattr(config, name)
    ]
    for name, good, wanted in (*found, *more):
        if not good:
            raise ValueError(f"{name} must be {wanted}, not {getattr(config, name)!r}")


def compiles(config: Any) -> bool:
    """Whether the updates of a learner with these settings are to be compiled."""
    if config.compile != "auto":
        return config.compile == "on"
    return pays(config.total_steps, config.batch_size, config.hidden)


def minibatch_step(
    config: Any,
    module: nn.Module,
    objective: Objective,
    learning_rate: float | None = None,
    optimizer: MakeOptimizer | None = None,
) -> MinibatchStep:
    """A learner's step on a module by Adam, or by the optimiser that is given.

    `learning_rate` stands in for that of `config`. Stats are for the caller to check.
    """
    rate = config.learning_rate if learning_rate is None else learning_rate
    given = {"check_each": False, "epsilon": 1e-8, "optimizer": optimizer}
    return MinibatchStep(module, objective, rate, None, None, compiles(config), **given)


def value_optimizer(
    config: Any, network: nn.Module, seeds: int, learning_rate: float | None = None
) -> MakeOptimizer | None:
    """What makes the optimiser of a critic of several seeds; None for Adam.

    `learning_rate` stands in for that of `config`.
    """
    if config.optimizer == "adam":
        return None
    rate = config.learning_rate if learning_rate is None else learning_rate
    return lambda _: adamo.make(network, rate, config.adamo, seeds)
