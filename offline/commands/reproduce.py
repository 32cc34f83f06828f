"""Hold a benchmark's results against a published table; exit status 1 where they do not agree.

A figure is missed when the mean of our seeds is more than max(5 points, 2 published standard
deviations) away from it. A cell that was not trained fails too, and so does one that may not be
compared: another simulator, other data, other settings than the source's, another number of steps
or seeds, last against best. `--allow-env-mismatch` lets such cells be judged all the same; what is
different is still listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ctrl_rl import cli
from ctrl_rl.registry import NotFound, nearest
from offline.published import NAMES, Published, stem_of, table
from offline.reproduction import Comparison, compare
from offline.results import Result, load

GOOD = ("agrees", "agrees, not comparable")
"""Verdicts that do not fail."""


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """What to hold against what."""

    table: Annotated[str, tyro.conf.Positional]
    """Published table, such as corl-gym."""
    results: Path
    """Folder of `ctrl-rl offline bench`."""
    report: Literal["last", "best"] = "last"
    """Which score: of the last evaluation, or each seed's largest."""
    algo: str | None = None
    """Algorithms that must be there, with commas between, ours or as printed; None for all of the
    table."""
    dataset: str | None = None
    """Data sets that must be there, with commas between; None for all of the table."""
    allow_env_mismatch: bool = False
    """Judge cells that are not comparable too."""


def main(argv: list[str]) -> dict:
    """Compare, print a line for each figure, and say whether all agree."""
    args = cli.parse(Reproduce, argv, "ctrl-rl offline reproduce", description=__doc__)
    cells = wanted(args)
    groups = load(args.results)
    lines = []
    for cell in cells:
        found = ours(groups, cell)
        comparison = compare(found, cell, args.report) if found else None
        lines.append(_line(cell, found, comparison, args.allow_env_mismatch))
    width = max(len(line["name"]) for line in lines)
    for line in lines:
        print(f"{line['name']:<{width}}  {line['text']}")
    counts = {v: sum(line["verdict"] == v for line in lines) for v in _verdicts(lines)}
    print(f"{args.table}, {args.report}: " + ", ".join(f"{n} {v}" for v, n in counts.items()))
    for reason in dict.fromkeys(reason for line in lines for reason in line["obstacles"]):
        print(f"  {reason}")
    for source in dict.fromkeys(cell.source for cell in cells):
        print(f"published by: {source}")
    config = {"table": args.table, "results": str(args.results), "report": args.report}
    return {
        "config": config | {"allow_env_mismatch": args.allow_env_mismatch},
        "metrics": {
            line["name"]: {"mean": line["mean"], "ci95": None, "n": line["seeds"], "unit": "-"}
            for line in lines
            if line["mean"] is not None
        },
        "cells": [{k: v for k, v in line.items() if k != "text"} for line in lines],
        "passed": all(line["verdict"] in GOOD for line in lines),
    }


def wanted(args: Reproduce) -> list[Published]:
    """The figures of the table that are asked for.

    Raises:
        NotFound: a table, an algorithm or a data set that is not published there.
    """
    cells = table(args.table)
    same = [cell for cell in cells if cell.report in (args.report, None)]
    cells = same or cells  # a table of the other report is shown as not comparable
    for key, given in (("algo", args.algo), ("dataset", args.dataset)):
        if given is None:
            continue
        names = [name.strip() for name in given.split(",")]
        if key == "algo":
            names = [NAMES.get(name, name) for name in names]
        known = dict.fromkeys(getattr(cell, key) for cell in cells)
        for name in names:
            if name not in known:
                raise NotFound(f"{args.table} has no {name!r}{nearest(name, known)}")
        cells = [cell for cell in cells if getattr(cell, key) in names]
    return list(cells)


def ours(
    groups: Mapping[tuple[str, str], Sequence[Result]], cell: Published
) -> Sequence[Result] | None:
    """Our seeds of a published cell, or of the set of our own that is named after its data.

    Raises:
        ValueError: two sets could stand for it.
    """
    found = {
        dataset: results
        for (dataset, label), results in groups.items()
        if NAMES.get(label) == cell.algo and stem_of(dataset) == stem_of(cell.dataset)
    }
    if cell.dataset in found or not found:
        return found.get(cell.dataset)
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(found)} could both stand for {cell.dataset}; keep them in two folders"
        )
    (results,) = found.values()
    return results


# Inside -------------------------------------------------------------------------------------


def _line(
    cell: Published, results: Sequence[Result] | None, found: Comparison | None, allow: bool
) -> dict:
    """One cell: verdict, figures and text."""
    printed = f"published {cell.mean:.1f}" + ("" if cell.std is None else f" ± {cell.std:.1f}")
    line = {
        "name": f"{cell.dataset} {cell.algo}",
        "verdict": "missing",
        "published": cell.mean,
        "published_std": cell.std,
        "mean": None,
        "std": None,
        "seeds": 0,
        "allowed": None,
        "obstacles": [],
        "unknown": [],
        "text": f"missing: {printed}, nothing of ours",
    }
    if found is None or results is None:
        return line
    # A return is no D4RL score, whatever is allowed.
    judged = not found.obstacles or (allow and results[0].normalized)
    verdict = ("missed" if found.missed else "agrees") if judged else "not comparable"
    text = (
        f"{verdict}: ours {found.mean:.1f} ± {found.std:.1f} ({found.seeds} seeds), {printed}, "
        f"difference {found.difference:+.1f}, allowed {found.allowed:.1f}"
    )
    if found.obstacles:
        text += f"; other {', '.join(found.kinds)}"
    if found.unknown:
        text += f"; not known of the source: {', '.join(found.unknown)}"
    if judged and found.obstacles:
        verdict += ", not comparable"
    return line | {
        "verdict": verdict,
        "mean": found.mean,
        "std": found.std,
        "seeds": found.seeds,
        "allowed": found.allowed,
        "obstacles": list(found.obstacles),
        "unknown": list(found.unknown),
        "text": text,
    }


def _verdicts(lines: list[dict]) -> list[str]:
    """Verdicts that occur, the good ones first."""
    order = (*GOOD, "missed", "missed, not comparable", "not comparable", "missing")
    return [verdict for verdict in order if any(line["verdict"] == verdict for line in lines)]
