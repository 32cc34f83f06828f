"""Train data sets x algorithms x seeds, each cell once, and keep a result of every one.

`ctrl-rl offline bench hopper-medium-v2 --algo "bc,td3_bc,td3_bc alpha=1" --seeds 5 --out FOLDER`
trains as `ctrl-rl offline train` would. The seeds of a data set and algorithm are one job, trained
side by side, in FOLDER/runs; each seed's result is a file in FOLDER/results, which `report` and
`reproduce` read. The same command again trains what is missing: finished cells stand, a killed job
goes on from its checkpoint. By default jobs are processes of this machine; `--address` is for Ray.

Reading order: `Bench` -> `main` -> `plan_cells` -> `train_jobs` -> the summary; then
`offline.benchmark`.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ctrl_rl import cli
from ctrl_rl.checkpoints import write_text
from ctrl_rl.workers import alone, import_ray, on_ray, on_this_machine
from offline.benchmark import FREE, Job, Planned, finished, plan_jobs, train_job
from offline.results import Result, path_of, read

FORMAT = 1
"""Version of bench.json."""

OWN = {
    "algo": "--algo",
    "dataset": "the data sets that stand first",
    "seed": "--seeds",
    "seeds": "--seeds",
    "run-dir": "--out",
    "resume": "the same command again",
    "stop-after": "--set total-steps",
}
"""Flags of `ctrl-rl offline train` that a benchmark decides itself, and by what."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to train, and where."""

    datasets: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Ids of D4RL or Minari, files or folders."""
    algo: str = "td3_bc"
    """Algorithms, with commas between; settings may follow a name, as in
    "bc,td3_bc,td3_bc alpha=1 hidden=64 64"."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A flag of `ctrl-rl offline train` for all cells, without its dashes, as in
    total-steps=50000; may be repeated."""
    seeds: int = 5
    """Seeds 0, 1, ... of each data set and algorithm."""
    out: Path = Path("bench")
    """Folder of runs and results; on a cluster one that all its machines share."""
    seeds_per_job: int = 0
    """Seeds trained side by side in one process; 0 for all of them."""
    jobs: int = 1
    """Processes at once on this machine."""
    address: str | None = None
    """Ray cluster, "auto" for the one this machine belongs to, "local" for Ray on this machine
    alone; None for plain processes."""
    cpus: int = 1
    """Cores of a job on Ray."""
    gpus: float = 0.0
    """GPUs of a job on Ray; a part of one lets jobs share it."""
    retries: int = 3
    """How often a job whose process was killed goes on from its checkpoint."""

    def __post_init__(self) -> None:
        cli.check_least(self, 1, "seeds", "jobs", "cpus")
        cli.check_least(self, 0, "seeds_per_job", "gpus", "retries")


def main(argv: list[str]) -> dict:
    """Train what is missing, and say what there is."""
    args = cli.parse(Bench, argv, "ctrl-rl offline bench", description=__doc__)
    planned = plan_cells(args)
    if args.address is not None:
        import_ray()
    out = args.out.resolve()
    lines: dict[tuple[str, str, int], str] = {}
    with alone(out, "benchmark"):
        todo = missing_jobs(planned, args)
        cells = [(plan.name, plan.label, seed) for plan in planned for seed in range(args.seeds)]
        count = len(cells) - sum(len(job.seeds) for job in todo)
        logs = f"; logs: {args.out}/runs/*/*/*.log" if todo else ""
        print(f"{count} of {len(cells)} cells are finished{logs}", flush=True)
        try:
            if todo:
                train_jobs(args, todo, lines)
            # Seeds whose job one of them spoiled get jobs of their own.
            if anew := [job for job in missing_jobs(planned, args) if job not in todo]:
                train_jobs(args, anew, lines)
        finally:
            summary = summarise(out, cells, lines)
    metrics = print_summary(summary, out)
    print(f"ctrl-rl offline report {args.out}")
    return {
        "config": dataclasses.asdict(args) | {"out": str(args.out)},
        "metrics": metrics,
        "cells": summary,
        "passed": all(cell["status"] == "finished" for cell in summary),
    }


# Cells --------------------------------------------------------------------------------------


def plan_cells(args: Bench) -> list[Planned]:
    """Every data set with every algorithm, read as `ctrl-rl offline train` will read it.

    Raises:
        NotFound: unknown algorithm or data set.
        ValueError: a setting that train refuses, a data set that is not here or cannot be played,
            or one that comes twice.
    """
    from offline.commands import train
    from offline.datasets import data_checksum, locate
    from offline.playing import find_task

    if not args.datasets:
        raise cli.UsageError("offline bench needs a data set; ctrl-rl dataset list shows them")
    common = [word for text in args.set for word in _flag(text)]
    if "--threads" not in common:
        share = args.cpus if args.address else max(1, (os.cpu_count() or 1) // args.jobs)
        common += ["--threads", str(share)]
    found: dict[tuple[str, str], Planned] = {}
    for dataset in args.datasets:
        path, entry = locate(dataset)
        name = entry.dataset if entry else path.stem if path.is_file() else dataset
        if Path(dataset).expanduser().exists():  # a process of Ray works in another folder
            dataset = str(path.resolve())
        checksum = data_checksum(dataset)
        for text in args.algo.split(","):
            algo, variant = _variant(text)
            own = [w for k, v in variant for w in (f"--algo.{k.replace('_', '-')}", *v.split())]
            words = ("--algo", algo, "--dataset", dataset, *common, *own)
            plan = train.read_plan(list(words))
            if plan.flags.device.startswith("cuda") and args.address and not args.gpus:
                raise cli.UsageError("jobs on a GPU need a share of it, such as --gpus 1")
            if entry and not plan.flags.task and find_task({"dataset": name}) is None:
                raise ValueError(f"no task here is that of {name}: there would be no scores")
            config = dataclasses.asdict(plan.flags) | dataclasses.asdict(plan.algo_config)
            config = {k: v for k, v in config.items() if k not in FREE}
            planned = Planned(
                dataset=dataset,
                name=name,
                algo=algo,
                variant=tuple(variant),
                words=words,
                total_steps=plan.algo_config.total_steps,
                config=json.loads(json.dumps(config, default=str)),
                checksum=checksum,
            )
            if (name, planned.label) in found:
                raise cli.UsageError(f"a cell comes twice: {name} {planned.label}")
            found[name, planned.label] = planned
    return list(found.values())


def _flag(text: str) -> list[str]:
    """A word of --set as words of `ctrl-rl offline train`."""
    name, equals, value = text.removeprefix("--").partition("=")
    name = name.strip().replace("_", "-")
    if not name or (equals and not value.strip()):
        raise cli.UsageError(f"--set {text!r} is neither NAME=VALUE nor the NAME of a switch")
    if name in OWN:
        raise cli.UsageError(f"--set cannot decide {name}; {OWN[name]} does")
    return [f"--{name}", *value.split()]


def _variant(text: str) -> tuple[str, list[tuple[str, str]]]:
    """An algorithm and its settings: "bc", "td3_bc alpha=1 hidden=64 64"."""
    algo, *words = text.split() or [""]
    found: list[tuple[str, str]] = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name and value:
            found.append((name.replace("-", "_"), value))
        elif not equals and found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {word}")
        else:
            raise cli.UsageError(f"--algo {text.strip()!r} is not NAME SETTING=VALUE ...")
    if not algo or "=" in algo:
        raise cli.UsageError(f"--algo {text.strip()!r} does not begin with an algorithm")
    return algo, found


# Jobs ---------------------------------------------------------------------------------------


def missing_jobs(planned: Sequence[Planned], args: Bench) -> list[Job]:
    """Jobs of all cells that have no result."""
    out = args.out.resolve()
    return [job for plan in planned for job in plan_jobs(plan, out, args.seeds, args.seeds_per_job)]


def train_jobs(args: Bench, jobs: list[Job], lines: dict[tuple[str, str, int], str]) -> None:
    """Train side by side; `lines` gets what went wrong with those that failed."""
    ended = 0

    def done(job: Job, line: str | None) -> None:
        """Say how one ended."""
        nonlocal ended
        ended += 1
        left = [s for s in job.seeds if not finished(job.plan, job.out, s)]
        if line is None and left:
            line = "it was stopped" if job.folder.exists() else "its folder is not seen from here"
        said = "finished"
        if line is not None:
            said = f"failed: {line}; see {job.log}"
        for seed in job.seeds:
            lines.pop((job.plan.name, job.plan.label, seed), None)
            if line is not None and seed in left:
                lines[job.plan.name, job.plan.label, seed] = line
        print(f"[{ended}/{len(jobs)}] {job.title}: {said}", flush=True)

    if args.address is None:
        on_this_machine(train_job, jobs, done, at_once=args.jobs, retries=args.retries)
    else:
        address = None if args.address == "local" else args.address
        on_ray(
            train_job,
            jobs,
            done,
            address=address,
            cpus=args.cpus,
            gpus=args.gpus,
            retries=args.retries,
        )


# Summary ------------------------------------------------------------------------------------


def summarise(
    out: Path,
    cells: Sequence[tuple[str, str, int]],
    lines: dict[tuple[str, str, int], str],
) -> list[dict]:
    """Status of every cell, kept as bench.json beside those of earlier commands."""
    found = []
    for dataset, label, seed in cells:
        done = path_of(out, dataset, label, seed).is_file()
        error = lines.get((dataset, label, seed))
        status = "failed" if error else "finished" if done else "open"
        found.append(
            {"dataset": dataset, "algo": label, "seed": seed, "status": status, "error": error}
        )
    path, names = out / "bench.json", set(cells)
    earlier = json.loads(path.read_text())["cells"] if path.is_file() else []
    earlier = [c for c in earlier if (c["dataset"], c["algo"], c["seed"]) not in names]
    content = {"format": FORMAT, "cells": earlier + found}
    write_text(path, json.dumps(content, indent=1) + "\n")
    return found


def print_summary(cells: Sequence[dict], out: Path) -> dict:
    """The table for people, and the cells that are not there; metrics for `--json`."""
    import numpy as np

    from offline.statistics import estimate, mean

    groups: dict[str, list[Result]] = {}
    for cell in cells:
        group = groups.setdefault(f"{cell['dataset']} {cell['algo']}", [])
        path = path_of(out, cell["dataset"], cell["algo"], cell["seed"])
        if cell["status"] == "finished":
            group.append(read(path))
    width, metrics = max(map(len, groups), default=0), {}
    print(f"{'':<{width}}  seeds  mean last score, 95 % interval over seeds")
    for name, results in groups.items():
        text = "-"
        if results:
            found = estimate(mean, np.array([[r.last] for r in results]))
            unit = "D4RL score" if results[0].normalized else "return"
            text = f"{found} {unit}"
            metrics[f"{name}: last"] = {
                "mean": float(found.value),
                "ci95": found.ci95,
                "n": len(results),
                "unit": unit,
            }
        print(f"{name:<{width}}  {len(results):>5}  {text}")
    for cell in cells:
        if cell["status"] != "finished":
            why = f": {cell['error']}" if cell["error"] else ""
            print(f"{cell['status']}: {cell['dataset']} {cell['algo']} s{cell['seed']}{why}")
    return metrics
