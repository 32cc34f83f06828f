"""Train a policy in a vectorised simulator and ship it as one proven file.

Lazy: importing the package loads neither torch nor a simulator.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what `__getattr__` finds, for editors and type checkers
    from ctrl_rl import env, evaluation, policy, ppo, random, registry, runs, sac, spec, td3
    from ctrl_rl.env_check import check_env
    from ctrl_rl.evaluation import evaluate
    from ctrl_rl.making import make, preset
    from ctrl_rl.policy import load_policy
    from ctrl_rl.runs import Run

__version__ = "0.1.0"

_LAZY = {
    "make": "ctrl_rl.making",
    "preset": "ctrl_rl.making",
    "check_env": "ctrl_rl.env_check",
    "evaluate": "ctrl_rl.evaluation",
    "load_policy": "ctrl_rl.policy",
    "Run": "ctrl_rl.runs",
}
_MODULES = (
    *("spec", "env", "random", "evaluation", "policy", "runs", "registry"),
    *("ppo", "sac", "td3"),
)

__all__ = [
    "Run",
    "check_env",
    "env",
    "evaluate",
    "evaluation",
    "load_policy",
    "make",
    "policy",
    "ppo",
    "preset",
    "random",
    "registry",
    "runs",
    "sac",
    "spec",
    "td3",
]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"ctrl_rl.{name}")
    raise AttributeError(f"module 'ctrl_rl' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
