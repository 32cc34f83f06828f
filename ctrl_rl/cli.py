"""`ctrl-rl`: finds a command by name, parses its flags, turns errors into one line.

A command is an entry of the group `ctrl_rl.commands`, "module:function". The function takes one
frozen dataclass, whose fields are the flags and whose docstrings are the help; or it takes
`list[str]` and calls `parse` itself, where its flags depend on its first words. It prints for
people and returns None or a dict for `--json`: {"task", "config", "metrics": {name: {"mean",
"ci95", "n", "unit"}}} and what else it found. "passed": False in it makes the exit status 1.

The first line of a command module's docstring stands in `ctrl-rl --help`, which needs neither
torch nor tyro.
"""

import ast
import contextlib
import dataclasses
import io
import json
import math
import os
import re
import sys
import typing

from ctrl_rl import registry

SCHEMA = 1
"""Version of what `--json` prints."""


class UsageError(ValueError):
    """A command line that cannot be obeyed."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 not passed or broken, 2 the user's error."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug, as_json = _take(argv, "--debug"), _take(argv, "--json")
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    if argv[0] == "--version":
        from ctrl_rl import __version__

        print(__version__)
        return 0
    out = _move_stdout() if as_json else None
    try:
        name = argv[0]
        if name.startswith("-"):
            raise UsageError(f"the command comes first, not {name}; see ctrl-rl --help")
        result = _call(name, argv[1:])
        if out is not None:
            _print_json(out, name, result or {})
        return 1 if result and result.get("passed") is False else 0
    except KeyboardInterrupt:
        if debug:
            raise
        print("aborted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read us has gone
        return 0
    except Exception as error:
        if debug:
            raise
        about = "ctrl-rl" + (f" {argv[0]}" if argv[0] in registry.names("commands") else "")
        text = " ".join(str(error).split()) or type(error).__name__
        ours = isinstance(error, (ValueError, OSError))
        plain = isinstance(error, (ValueError, FloatingPointError))  # of which divergence is one
        where = "" if ours or plain else f"{type(error).__name__}: "
        hint = "" if plain else " (--debug shows where)"
        print(f"{about}: {where}{text}{hint}", file=sys.stderr)
        return 2 if ours else 1


def parse(cls, argv: list[str], prog: str, default=None, description: str | None = None):
    """An instance of dataclass `cls` from flags.

    Raises:
        UsageError: an unknown flag, with the nearest one, or a value of the wrong type.
        SystemExit: after `--help`.
    """
    import tyro

    flags = _flags(cls)
    for word in argv:
        flag = word.split("=")[0]
        names = {flag.replace("_", "-"), flag.rpartition(".")[0].replace("_", "-")}  # or a dict's
        if flag.startswith("--") and not names & {*flags, "--help", "--"}:
            raise UsageError(f"unknown flag {flag}{_nearest_flag(flag, flags)}")
    error = io.StringIO()
    keywords = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(error):
            return tyro.cli(
                cls,
                args=argv,
                prog=prog,
                description=description,
                **keywords,
            )
    except SystemExit as leave:
        if leave.code in (0, None):
            raise
        raise UsageError(_flatten(error.getvalue())) from None


def check_least(config, least: int, *names: str) -> None:
    """Refuse a number below `least`, NaN or infinite in these fields; None is left alone.

    Raises:
        ValueError: the first such field.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least}, not {value}")


def field_docs(cls) -> dict[str, str]:
    """Field -> the docstring under it, from the source of a dataclass and its bases."""
    import inspect
    import textwrap

    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" not in vars(base):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        except (OSError, TypeError):
            continue
        for here, below in zip(body, body[1:], strict=False):
            if (
                isinstance(here, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                docs[here.target.id] = inspect.cleandoc(below.value.value)
    return docs


# Inside -------------------------------------------------------------------------------------


def _call(name: str, argv: list[str]) -> dict | None:
    function = registry.load("commands", name)
    (hint,) = [t for k, t in typing.get_type_hints(function).items() if k != "return"]
    prog = f"ctrl-rl {name}"
    if typing.get_origin(hint) is list:
        return function(argv)
    return function(parse(hint, argv, prog, description=registry.summary("commands", name)))


def _take(argv: list[str], flag: str) -> bool:
    """Remove a flag that every command knows."""
    found = flag in argv
    argv[:] = [word for word in argv if word != flag]
    return found


def _help() -> str:
    names = registry.names("commands")
    width = max(map(len, names), default=0)
    lines = [f"  {name:<{width}}  {registry.summary('commands', name)}" for name in names]
    return "\n".join(
        (
            "usage: ctrl-rl COMMAND ...",
            "",
            "Train a policy in a vectorised simulator and ship it as one proven file.",
            "",
            *lines,
            "",
            "  ctrl-rl COMMAND --help shows every flag with unit and default.",
            "  --json prints one JSON object and nothing else on stdout, --debug a traceback.",
        )
    )


def _flags(cls, prefix: str = "--") -> list[str]:
    """Every flag of a dataclass, nested ones as `--outer.inner`."""
    import tyro

    found = []
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint, extras = hints[field.name], ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, *extras = typing.get_args(hint)
        if any(extra in (tyro.conf.Positional, tyro.conf.Suppress) for extra in extras):
            continue
        name = field.name.replace("_", "-")
        if dataclasses.is_dataclass(hint):
            bare = any(getattr(extra, "name", None) == "" for extra in extras)
            found += _flags(hint, prefix if bare else f"{prefix}{name}.")
        elif hint is bool:
            found += [prefix + name, f"{prefix}no-{name}"]
        else:
            found.append(prefix + name)
    return found


def _nearest_flag(flag: str, flags: list[str]) -> str:
    """As `registry.nearest`: the same name under another prefix, or one under the same prefix."""
    prefix, _, name = flag.removeprefix("--").rpartition(".")
    split = {known: known.removeprefix("--").rpartition(".") for known in flags}
    same_name = [known for known, parts in split.items() if parts[2] == name]
    same_prefix = [known for known, parts in split.items() if prefix and parts[0] == prefix]
    return registry.nearest(flag, same_name or same_prefix or flags)


def _flatten(text: str) -> str:
    """tyro's framed message as one line, without its headings and the help text it repeats."""
    lines = [re.sub(r"[│╭╮╰╯─┌┐└┘]+", " ", line).strip(" -") for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("For full help")]
    if len(lines) > 1 and not lines[0].endswith((".", ":")):
        lines = lines[1:]  # a heading such as "Parsing error"
    one = " ".join(" ".join(lines).split())
    return re.split(r" Argument helptext:| ctrl-rl [\w-]+ --help", one)[0] or "cannot be understood"


def _move_stdout() -> typing.TextIO:
    """File descriptor 1 becomes stderr, also for libraries in C; returns the real stdout."""
    sys.stdout.flush()
    real = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return real


def _print_json(out: typing.TextIO, command: str, result: dict) -> None:
    from ctrl_rl import __version__

    record = {"schema": SCHEMA, "command": command, "version": __version__}
    record |= {"task": None, "config": {}, "metrics": {}} | result
    out.write(json.dumps(_strict(record), allow_nan=False) + "\n")
    out.flush()


def _strict(value):
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


if __name__ == "__main__":
    sys.exit(main())
