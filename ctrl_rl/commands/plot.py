"""Draw runs beside each other, seeds as one line with its interval."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What to draw."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders; those of one task and algorithm are seeds of one line. One run alone gets all
    its figures in its curves.png."""
    key: str = "eval/episode_return"
    """Column of metrics.csv."""
    out: Path = Path("curves.png")
    """Picture to write when there are several runs."""


def main(args: Plot) -> dict:
    """Draw, and print the figures at the last step."""
    from ctrl_rl import curves
    from ctrl_rl.run_folder import read_config

    if not args.runs:
        raise ValueError("plot needs at least one run folder")
    if len(args.runs) == 1:
        path = curves.draw_run(args.runs[0])
        if path is None:
            raise ValueError(f"{args.runs[0]} has logged nothing yet")
        print(path)
        return {"task": read_config(args.runs[0])["task"], "file": str(path)}
    lines, left_out = curves.draw_comparison(args.runs, args.out, args.key)
    for run in left_out:
        print(f"left out: {run} has not logged {args.key}")
    for name, line in lines.items():
        last = line["last"]
        interval = "" if last["ci95"] is None else " [{:.4g}, {:.4g}]".format(*last["ci95"])
        print(f"  {name}: {line['statistic']} of {line['runs']}, last {last['mean']:.4g}{interval}")
    print(args.out)
    return {
        "file": str(args.out),
        "config": {"key": args.key, "runs": [str(run) for run in args.runs]},
        "left_out": [str(run) for run in left_out],
        "metrics": {name: line["last"] for name, line in lines.items()},
        "statistics": {name: line["statistic"] for name, line in lines.items()},
    }
