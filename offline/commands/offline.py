"""Learn from recorded data: `ctrl-rl offline train --algo NAME --dataset ID`, and judge it."""

import importlib

from ctrl_rl import cli
from ctrl_rl.registry import nearest

SUBCOMMANDS = {
    "train": "offline.commands.train:main",
}
"""Name -> "module:function"; the function takes the words that follow."""


def main(argv: list[str]) -> dict | None:
    """Run a subcommand."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return None
    if argv[0] not in SUBCOMMANDS:
        raise cli.UsageError(f"unknown subcommand {argv[0]!r}{nearest(argv[0], SUBCOMMANDS)}")
    module, _, function = SUBCOMMANDS[argv[0]].partition(":")
    return getattr(importlib.import_module(module), function)(argv[1:])


def _help() -> str:
    """Every subcommand with the first line of its module."""
    width = max(map(len, SUBCOMMANDS))
    lines = ["usage: ctrl-rl offline SUBCOMMAND ...", "", (__doc__ or "").strip(), ""]
    for name, target in SUBCOMMANDS.items():
        text = importlib.import_module(target.partition(":")[0]).__doc__ or ""
        lines.append(f"  {name:<{width}}  {text.partition(chr(10))[0]}")
    return "\n".join([*lines, "", "  ctrl-rl offline SUBCOMMAND --help shows every flag."])
