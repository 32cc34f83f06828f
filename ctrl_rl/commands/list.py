"""Show what there is: tasks, algorithms, robots, commands."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ctrl_rl import registry

GROUPS = ("tasks", "algos", "offline_algos", "policies", "commands")


@dataclass(frozen=True, kw_only=True)
class List:
    """What to show."""

    what: Annotated[
        Literal["all", "tasks", "algos", "policies", "robots", "commands"], tyro.conf.Positional
    ] = "all"
    """Kind of thing; algos are of both kinds, those that learn in a simulator and those that learn
    from recorded data; "all" leaves out robots, for which every task is built."""


def main(args: List) -> dict:
    """Print names with a line on each."""
    groups = {"all": GROUPS, "algos": ("algos", "offline_algos")}.get(args.what, (args.what,))
    found = {group: robots() if group == "robots" else described(group) for group in groups}
    width = max((len(name) for names in found.values() for name in names), default=0)
    for group, names in found.items():
        if names:
            print(f"{group.replace('_', ' ')}:")
            print("\n".join(f"  {name:<{width}}  {text}" for name, text in names.items()))
    return found


def described(group: str) -> dict[str, str]:
    """Name -> first line of its docstring."""
    return {name: registry.summary(group, name) for name in registry.names(group)}


def robots() -> dict[str, str]:
    """Robot -> its joints and the tasks it stands in."""
    found: dict[str, tuple[int, list[str]]] = {}
    for task in registry.names("tasks"):
        env = registry.load("tasks", task)(num_envs=1, threads=1)
        if env.spec.robot is not None:
            robot = env.spec.robot
            found.setdefault(robot.name, (len(robot.joints), []))[1].append(task)
        env.close()
    return {name: f"{n} joints; {', '.join(tasks)}" for name, (n, tasks) in found.items()}
