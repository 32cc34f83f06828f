"""Figures, intervals and pictures of a benchmark, beside the published ones, on one page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ctrl_rl import cli


@dataclass(frozen=True, kw_only=True)
class Report:
    """What to report on."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of `ctrl-rl offline bench`; report.html, report.md and report.json are written
    there."""


def main(argv: list[str]) -> dict:
    """Write the report and print its scores."""
    args = cli.parse(Report, argv, "ctrl-rl offline report", description=__doc__)
    from offline import report

    found, files = report.write(args.folder)
    print(report.measured_on(found))
    width = max(len(f"{cell['dataset']} {cell['algo']}") for cell in found["cells"])
    metrics = {}
    for cell in found["cells"]:
        name, parts = f"{cell['dataset']} {cell['algo']}", []
        unit = "D4RL score" if cell["normalized"] else "return"
        for kind in ("last", "best"):
            of, n = cell[kind], len(cell["seeds"])
            interval = "" if of["ci95"] is None else " [{:.4g}, {:.4g}]".format(*of["ci95"])
            parts.append(f"{kind} {of['value']:.4g}{interval}")
            metrics[f"{name} {kind}"] = {
                "mean": of["value"],
                "ci95": of["ci95"],
                "n": n,
                "unit": unit,
            }
        print(f"{name:<{width}}  {n} seeds  {',  '.join(parts)}")
    for cell in found["missing"]:
        why = cell["error"] or "not trained"
        print(f"missing: {cell['dataset']} {cell['algo']} seed {cell['seed']}: {why}")
    for file in files:
        print(file)
    return {
        "config": {"folder": str(args.folder)},
        "metrics": metrics,
        "aggregates": found["aggregates"],
        "missing": found["missing"],
        "files": [str(file) for file in files],
    }
