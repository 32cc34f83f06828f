"""Finds tasks, algorithms, policies and commands through entry points.

Each installed package names, per group, a literal dict from name to "module:object"; nothing
heavy is imported until an object is asked for.
"""

import ast
import difflib
import importlib
import importlib.util
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

GROUPS = ("tasks", "algos", "offline_algos", "policies", "commands")

ALGOS = {
    "ppo": "ctrl_rl.ppo:",
    "recurrent_ppo": "ctrl_rl.recurrent_ppo:",
    "multi_critic_ppo": "ctrl_rl.multi_critic_ppo:",
    "sac": "ctrl_rl.sac:",
    "td3": "ctrl_rl.td3:",
    "fast_sac": "ctrl_rl.fast_sac:",
    "ddpg": "ctrl_rl.ddpg:",
    "aro_ddpg": "ctrl_rl.aro_ddpg:",
}
"""This package's algorithms. A module with `<NAME>Config`, `METRICS` and `train`."""

COMMANDS = {
    "train": "ctrl_rl.commands.train:main",
    "sweep": "ctrl_rl.commands.sweep:main",
    "eval": "ctrl_rl.commands.eval:main",
    "play": "ctrl_rl.commands.play:main",
    "plot": "ctrl_rl.commands.plot:main",
    "bench": "ctrl_rl.commands.bench:main",
    "import-sb3": "ctrl_rl.commands.import_sb3:main",
    "list": "ctrl_rl.commands.list:main",
    "doctor": "ctrl_rl.commands.doctor:main",
}
"""This package's commands; see `ctrl_rl.cli`."""


class NotFound(ValueError):
    """An unknown name; the message carries the nearest known one."""


@lru_cache
def names(group: str) -> dict[str, str]:
    """Name -> "module:object" of a group, from all installed packages.

    Raises:
        RuntimeError: if two packages give the same name.
    """
    found: dict[str, str] = {}
    for point in sorted(entry_points(group=f"ctrl_rl.{group}"), key=lambda p: p.name):
        for name, target in _load_point(point).items():
            if found.get(name, target) != target:
                raise RuntimeError(f"{group}: {name!r} stands for {found[name]} and {target}")
            found[name] = target
    return found


def _load_point(point) -> dict[str, str]:
    """The dict behind an entry point; a user's own folder of the package's name is named."""
    try:
        return point.load()
    except (ImportError, AttributeError):
        package = point.module.partition(".")[0]
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or [spec.origin]) if spec else []
        ours = point.dist.locate_file(package) if point.dist else None
        if not places or str(ours) in places:
            raise
        raise RuntimeError(
            f"{places[0]} hides the installed package {package!r}; rename it, or run elsewhere"
        ) from None


def load(group: str, name: str) -> Any:
    """The object behind a name. Raises NotFound with the nearest name."""
    known = names(group)
    if name not in known:
        kind = group[:-1].replace("_", " ")
        raise NotFound(f"unknown {kind} {name!r}{nearest(name, known)}")
    module, _, attribute = known[name].partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def summary(group: str, name: str) -> str:
    """First line of a docstring: of the module for a command or algorithm, else of the object.

    It is read from the source, so that nothing is imported.
    """
    module, _, attribute = names(group)[name].partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        return ""
    with open(spec.origin, encoding="utf-8") as file:
        node = module_node = ast.parse(file.read())
    if group not in ("commands", "algos", "offline_algos"):
        parts = (n for n in module_node.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)))
        node = next((n for n in parts if n.name == attribute), module_node)
    return (ast.get_docstring(node) or "").partition("\n")[0]


def nearest(name: str, known) -> str:
    """`; did you mean 'x'?`, or the list of what there is."""
    lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {lower[close[0]]!r}?"
    return f"; known: {', '.join(known)}"
