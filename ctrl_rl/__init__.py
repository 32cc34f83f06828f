"""Train a policy in a vectorised simulator and ship it as one proven file.

Lazy: importing the package loads neither torch nor a simulator.
"""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "make": "ctrl_rl.making",
    "check_env": "ctrl_rl.env",
    "evaluate": "ctrl_rl.evaluation",
    "load_policy": "ctrl_rl.policy",
    "Run": "ctrl_rl.runs",
}
_MODULES = ("spec", "env", "random", "ppo", "evaluation", "policy", "runs", "registry")

__all__ = [*_LAZY, *_MODULES]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"ctrl_rl.{name}")
    raise AttributeError(f"module 'ctrl_rl' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
