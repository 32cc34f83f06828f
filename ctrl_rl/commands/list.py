"""Show what there is: tasks, algorithms, robots, data sets."""

import dataclasses
from typing import Annotated, Literal

import tyro

from ctrl_rl import registry

GROUPS = {"tasks": "tasks", "algos": "algos", "policies": "policies", "commands": "commands"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class List:
    """What to show."""

    what: Annotated[Literal["all", "tasks", "algos", "policies"], tyro.conf.Positional] = "all"
    """Kind of thing."""


def main(args: List) -> dict:
    """Print names, grouped."""
    groups = ("tasks", "algos", "policies") if args.what == "all" else (args.what,)
    found = {group: list(registry.names(group)) for group in groups}
    for group, names in found.items():
        if names:
            print(f"{group}:")
            print("\n".join(f"  {name}" for name in names))
    return found
