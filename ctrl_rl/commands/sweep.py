"""Train many runs, over tasks, algorithms, settings and seeds, on Ray.

`ctrl-rl sweep TASK ... --algo ppo --set algo.learning-rate=1e-3,3e-4 --seeds 5 --out FOLDER`
trains each combination, a cell, as `ctrl-rl train` would, in FOLDER/<task>/<algo>/<settings>/s<n>.
A cell whose worker is killed goes on from its checkpoint. The same command again trains what is
missing: finished cells stand, stopped ones go on.

Reading order: `Sweep` -> `plan_cells` -> `train_cells` -> `train_cell`, in a worker -> summary.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ctrl_rl import cli, registry
from ctrl_rl.commands.train import LIVE, Plan, read_plan
from ctrl_rl.workers import alone, import_ray, on_ray, written_to

FORMAT = 1
"""Version of summary.json."""

OWN = {
    "seed": "--seeds",
    "run-dir": "--out",
    "algo": "--algo",
    "resume": "the same command again",
    "stop-after": "--set total-steps",
}
"""Flags of `ctrl-rl train` that a sweep decides itself, and by what."""

FREE = {*LIVE, "threads", "checkpoint_every", "video_s", "total_steps"}
"""Run flags that do not make a finished or stopped cell another one."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to train, and where."""

    tasks: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Task ids."""
    algo: str = "ppo"
    """Algorithms, with commas between."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A flag of `ctrl-rl train` without its dashes and the values to try, as in
    algo.learning-rate=1e-3,3e-4 or "algo.hidden=64 64,128 128"; may be repeated."""
    seeds: int = 5
    """Seeds 0, 1, ... of each combination."""
    out: Path = Path("sweeps")
    """Folder of the runs; on a cluster one that all its machines share."""
    address: str | None = None
    """Ray cluster, "auto" for the one this machine belongs to; None for this machine alone."""
    cpus: int = 1
    """Cores of a cell, also its simulator threads; so many cells run at once as there is room."""
    gpus: float = 0.0
    """GPUs of a cell; a part of one lets cells share it."""
    retries: int = 3
    """How often a cell whose worker was killed goes on from its checkpoint."""

    def __post_init__(self) -> None:
        cli.check_least(self, 1, "seeds", "cpus")
        cli.check_least(self, 0, "gpus", "retries")


@dataclass(frozen=True)
class Cell:
    """One run of the sweep."""

    task: str
    algo: str
    settings: tuple[tuple[str, str], ...]
    """Flag of `ctrl-rl train` without dashes, and value."""
    seed: int
    folder: Path
    """The run folder, absolute."""
    words: tuple[str, ...]
    """The command line of `ctrl-rl train`, without the run folder."""
    total_steps: int

    @property
    def group(self) -> str:
        """What its seeds have in common, for people."""
        return " ".join((self.task, self.algo, *(f"{k}={v}" for k, v in self.settings)))

    @property
    def log(self) -> Path:
        """What the run printed, beside its folder, which is for `ctrl-rl train` to make."""
        return self.folder.with_name(self.folder.name + ".log")


def main(args: Sweep) -> dict:
    """Train what is missing, and sum up what there is."""
    cells = plan_cells(args)
    import_ray()
    out = args.out.resolve()
    with alone(out, "sweep"):
        todo = [cell for cell in cells if not finished(cell)]
        done = f"{len(cells) - len(todo)} of {len(cells)} cells are finished"
        print(f"{done}; {args.out}", flush=True)
        lines: dict[Cell, str] = {}
        try:
            if todo:
                train_cells(args, todo, lines)
        finally:
            summary = summarise(cells, lines)
            (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print_summary(summary, args.out)
    return {
        "task": ",".join(args.tasks),
        "config": dataclasses.asdict(args) | {"out": str(args.out)},
        "metrics": {
            f"{group['name']}: {name}": metric
            for group in summary["groups"]
            for name, metric in group["metrics"].items()
        },
        "cells": summary["cells"],
        "passed": all(cell["status"] == "finished" for cell in summary["cells"]),
    }


# Cells --------------------------------------------------------------------------------------


def plan_cells(args: Sweep) -> list[Cell]:
    """Every combination, each read as `ctrl-rl train` will read it.

    Raises:
        NotFound: unknown task or algorithm.
        ValueError: a setting that train refuses, a combination that comes twice, or a run in the
            folder that was made with other settings.
    """
    if not args.tasks:
        raise cli.UsageError("sweep needs a task; ctrl-rl list tasks shows them")
    settings = [_values(text) for text in args.set]
    names = [name for name, _ in settings]
    silent = {k for k, values in settings if len(values) == 1 and k.replace("-", "_") in FREE}
    if twice := {name for name in names if names.count(name) > 1}:
        raise cli.UsageError(f"--set {twice.pop()} is given twice; put its values into one")
    own = [("video-s", "0"), ("threads", str(args.cpus))]
    own = [pair for pair in own if pair[0] not in names]
    cells, plans = [], []
    for task, algo, *chosen in itertools.product(
        args.tasks, args.algo.split(","), *(values for _, values in settings)
    ):
        given = tuple(zip(names, chosen, strict=True))
        named = tuple(pair for pair in given if pair[0] not in silent)
        folder = _folder(args.out.resolve() / task / algo, named)
        for seed in range(args.seeds):
            words = [task, "--algo", algo, "--seed", str(seed)]
            for name, value in (*own, *given):
                words += [f"--{name}", *value.split()]
            plan = read_plan(words)
            if plan.flags.device.startswith("cuda") and not args.gpus:
                raise cli.UsageError("cells on a GPU need a share of it, such as --gpus 1")
            cell = Cell(
                task, algo, named, seed, folder / f"s{seed}", tuple(words), plan.flags.total_steps
            )
            _check_kept(cell, plan)
            same = dataclasses.replace(plan, folder=Path())
            if same in plans:
                other = cells[plans.index(same)]
                raise cli.UsageError(
                    f"a combination comes twice: {cell.group} and {other.group}, seed {seed}"
                )
            cells.append(cell)
            plans.append(same)
    return cells


def _values(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.removeprefix("--").partition("=")
    name = name.strip().replace("_", "-")
    parts = [value.strip() for value in values.split(",")]
    if not (name and equals and all(parts)):
        raise cli.UsageError(f"--set {text!r} is not NAME=VALUE or NAME=VALUE,VALUE,...")
    if name in OWN:
        raise cli.UsageError(f"--set cannot decide {name}; {OWN[name]} does")
    return name, parts


def _folder(base: Path, given: tuple[tuple[str, str], ...]) -> Path:
    """Its name tells the settings; one too long for a file system ends in their hash."""
    name = re.sub(r"[^\w.,=+-]+", "_", ",".join(f"{k}={v}" for k, v in given)) or "preset"
    if len(name) > 200:
        name = f"{name[:180]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return base / name


def _check_kept(cell: Cell, plan: Plan) -> None:
    """Refuse to go on in a run that was made with other settings."""
    if not (cell.folder / "config.json").is_file():
        return
    kept = read_plan(["--resume", str(cell.folder)])
    if kept.flags.total_steps > cell.total_steps:
        raise ValueError(
            f"{cell.folder} was started for {kept.flags.total_steps:,} env steps, not "
            f"{cell.total_steps:,}; they may be raised, not lowered"
        )
    for part in ("flags", "algo_config", "task_config"):
        old, new = (dataclasses.asdict(getattr(p, part)) for p in (kept, plan))
        for key, value in new.items():
            # Decided when the run began; a device has several names, and `Run` compares it.
            left = part == "flags" and (value is None or key == "device")
            if key not in FREE and not left and old[key] != value:
                raise ValueError(
                    f"{cell.folder} was made with another {key} ({old[key]!r}, now {value!r}); "
                    "choose another --out"
                )


def finished(cell: Cell) -> bool:
    """Whether the run has all its steps, the last evaluation and the last checkpoint."""
    return last_figures(cell) is not None


def last_figures(cell: Cell) -> dict[str, float] | None:
    """The last evaluation of a finished run, {metric: figure}; None for one that is not."""
    from ctrl_rl.checkpoints import load_checkpoint
    from ctrl_rl.run_folder import read_metrics

    rows = read_metrics(cell.folder)
    if not rows or rows[-1]["step"] < cell.total_steps:
        return None
    step = int(rows[-1]["step"])
    figures = {k.removeprefix("eval/"): v for k, v in rows[-1].items() if k.startswith("eval/")}
    try:  # written last of all that a checkpoint consists of
        saved = load_checkpoint(cell.folder / "checkpoints" / "last.pt", {"step": int})["step"]
    except ValueError:
        return None
    return figures if figures and saved == step else None


# On Ray -------------------------------------------------------------------------------------


def train_cells(args: Sweep, cells: list[Cell], lines: dict[Cell, str]) -> None:
    """Train the cells side by side; `lines` gets what went wrong with those that failed."""
    ended = 0

    def done(cell: Cell, line: str | None) -> None:
        """Say how one ended."""
        nonlocal ended
        ended += 1
        figures = last_figures(cell)
        if line is None and figures is None:
            line = "it was stopped" if cell.folder.exists() else "its folder is not seen from here"
        if line is None:
            value = figures.get("episode_return") if figures else None
            said = "finished" if value is None else f"finished, return {value:.4g}"
        else:
            lines[cell] = line
            said = f"failed: {line}; see {cell.log}"
        print(f"[{ended}/{len(cells)}] {cell.group} s{cell.seed}: {said}", flush=True)

    on_ray(
        train_cell,
        cells,
        done,
        address=args.address,
        cpus=args.cpus,
        gpus=args.gpus,
        retries=args.retries,
    )


def train_cell(cell: Cell) -> str | None:
    """Train or go on with one run, in a worker of its own.

    Returns:
        One line if it failed, else None.
    """
    from ctrl_rl.commands import train

    folder = cell.folder
    if (folder / "config.json").is_file():
        words = ["--resume", str(folder), "--total-steps", str(cell.total_steps)]
    else:
        words = [*cell.words, "--run-dir", str(folder)]
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with written_to(cell.log):
        print(f"process {os.getpid()}, {time.strftime('%F %T')}: train {' '.join(words)}")
        try:
            train.main(words)
        except Exception as error:
            traceback.print_exc()
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return kind + (" ".join(str(error).split()) or "no reason given")
    return None


# Summary ------------------------------------------------------------------------------------


def summarise(cells: list[Cell], lines: dict[Cell, str]) -> dict:
    """What summary.json holds: every cell, and each combination's figures over its seeds."""
    import torch

    from ctrl_rl.evaluation import bootstrap

    found, groups = [], {}
    for cell in cells:
        figures = last_figures(cell)
        status = "finished" if figures is not None else "failed" if cell in lines else "open"
        groups.setdefault(cell.group, []).append((cell, figures))
        found.append(
            {
                "name": f"{cell.group} s{cell.seed}",
                "status": status,
                "error": lines.get(cell),
                "run": str(cell.folder),
                "metrics": figures or {},
            }
        )
    summed = []
    for name, members in groups.items():
        first = members[0][0]
        done = [figures for _, figures in members if figures is not None]
        units = {"episode_length": "steps"}
        units |= getattr(registry.load("tasks", first.task), "metric_units", {})
        metrics = {}
        for key in done[0] if done else ():
            values = torch.tensor([figures[key] for figures in done], dtype=torch.float64)
            metrics[key] = {
                "mean": values.mean().item(),
                "ci95": bootstrap(values),
                "n": len(done),
                "unit": units.get(key, "-"),
            }
        summed.append(
            {
                "name": name,
                "task": first.task,
                "algo": first.algo,
                "settings": dict(first.settings),
                "seeds": len(members),
                "finished": len(done),
                "metrics": metrics,
            }
        )
    return {"format": FORMAT, "groups": summed, "cells": found}


def print_summary(summary: dict, out: Path) -> None:
    """The table for people, and the cells that are not there."""
    width = max(len(group["name"]) for group in summary["groups"])
    print(f"{'':<{width}}  seeds  last return, 95 % interval over seeds")
    for group in summary["groups"]:
        metric = group["metrics"].get("episode_return")
        text = "-"
        if metric:
            text = f"{metric['mean']:.4g}"
            if metric["ci95"]:
                text += " [{:.4g}, {:.4g}]".format(*metric["ci95"])
        seeds = f"{group['finished']}/{group['seeds']}"
        print(f"{group['name']:<{width}}  {seeds:>5}  {text}")
    for cell in summary["cells"]:
        if cell["status"] != "finished":
            print(
                f"{cell['status']}: {cell['name']}"
                + (f": {cell['error']}" if cell["error"] else "")
            )
    print(out / "summary.json")
