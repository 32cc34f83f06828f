"""Cells of a benchmark as jobs: what is still to be trained, the training, and its results.

A job is a run folder of one data set and algorithm with one seed or several that follow one another
and train side by side; see `ctrl_rl.workers` for what runs it. Its results are read from the run
folder alone, so that nothing is lost between the last update and the result, and nothing counts
twice.

    FOLDER/runs/<data set>/<algorithm>/s0-4        run folder of the seeds 0 to 4
    FOLDER/runs/<data set>/<algorithm>/s0-4.log    what it printed
    FOLDER/results/                                see `offline.results`

A seed that diverges ends its job. The folder is then set aside, with "-diverged" after its name,
and the seeds train anew, each in a job of its own, so that only those fail that diverge.

Reading order: `Planned`, `Job` -> `plan_jobs` -> `train_job` -> `results_of`.
"""

import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from ctrl_rl.workers import written_to
from offline.results import Result, checksum, path_of, read, safe_name, write

FREE = {
    "total_steps",
    "seed",
    "seeds",
    "run_dir",
    "stop_after",
    "device",
    "threads",
    "torch_threads",
    "checkpoint_every",
}
"""Flags of `ctrl-rl offline train` that do not make a result another one."""


ASIDE = "-diverged"
"""Ending of a run folder of several seeds that one of them spoiled."""


@dataclass(frozen=True)
class Planned:
    """A data set and algorithm of the benchmark."""

    dataset: str
    """As it was given."""
    name: str
    """Its id; of a file of one's own, its name without ending."""
    algo: str
    variant: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    """The command line of `ctrl-rl offline train`, without seeds and run folder."""
    total_steps: int
    config: dict
    """What decides a result, as its file has it; what is None was left to the learner."""
    checksum: str
    """Of the data as it lies there now."""

    @property
    def label(self) -> str:
        """The algorithm with its settings."""
        return " ".join([self.algo, *(f"{k}={v}" for k, v in self.variant)])


@dataclass(frozen=True)
class Job:
    """Seeds of one data set and algorithm that train side by side."""

    plan: Planned
    seeds: tuple[int, ...]
    """Each one more than that before it."""
    folder: Path
    """The run folder, absolute."""
    out: Path
    """The benchmark's folder, absolute."""

    @property
    def title(self) -> str:
        """For people."""
        first, last = self.seeds[0], self.seeds[-1]
        which = f"s{first}" if first == last else f"s{first}-{last}"
        return f"{self.plan.name} {self.plan.label} {which}"

    @property
    def log(self) -> Path:
        """What the run printed, beside its folder, which is for training to make."""
        return self.folder.with_name(self.folder.name + ".log")


# What is to be done ---------------------------------------------------------------------------


def plan_jobs(plan: Planned, out: Path, seeds: int, per_job: int = 0) -> list[Job]:
    """What is still to be trained: jobs that were begun, then seeds that no job has.

    Args:
        plan: data set and algorithm.
        out: the benchmark's folder, absolute.
        seeds: 0 to this, which is left out.
        per_job: seeds that train side by side; 0 for all of them.

    Raises:
        ValueError: a result or a run of other settings, or of other data, is in the way.
    """
    from ctrl_rl.run_folder import read_config

    todo = [seed for seed in range(seeds) if not finished(plan, out, seed)]
    base = out / "runs" / safe_name(plan.name) / safe_name(plan.label)
    if any(base.glob(f"*{ASIDE}")):
        per_job = 1
    jobs = []
    for path in sorted(base.glob("s*/config.json")):
        if path.parent.name.endswith(ASIDE):
            continue
        config = read_config(path.parent)
        begun = config["run"]["seeds"]
        if not set(begun) & set(todo):
            continue
        _check_same(path.parent, plan, config["run"] | config["algo_config"], config["data"])
        jobs.append(Job(plan, tuple(begun), path.parent, out))
        todo = [seed for seed in todo if seed not in begun]
    size = per_job or len(todo)
    while todo:  # seeds of a job follow one another
        count = next((i for i in range(1, size) if todo[i : i + 1] != [todo[0] + i]), size)
        mine, todo = todo[:count], todo[count:]
        name = f"s{mine[0]}" if len(mine) == 1 else f"s{mine[0]}-{mine[-1]}"
        jobs.append(Job(plan, tuple(mine), base / name, out))
    return jobs


def finished(plan: Planned, out: Path, seed: int) -> bool:
    """Whether the cell has its result.

    Raises:
        ValueError: the result was made with other settings, or from other data.
    """
    path = path_of(out, plan.name, plan.label, seed)
    if not path.is_file():
        return False
    result = read(path)
    _check_same(path, plan, result.config, result.data)
    if result.steps > plan.total_steps:
        raise ValueError(
            f"{path} has {result.steps:,} steps, not {plan.total_steps:,}; they may be raised, not "
            "lowered"
        )
    return result.steps == plan.total_steps


def _check_same(where: Path, plan: Planned, kept: dict, data: dict) -> None:
    """Refuse what was made with other settings or from other data."""
    for key, value in plan.config.items():
        if value is not None and key in kept and kept[key] != value:
            raise ValueError(
                f"{where} was made with another {key} ({kept[key]!r}, now {value!r}); choose "
                "another --out"
            )
    before = checksum(data)
    if before and before != plan.checksum:
        raise ValueError(
            f"{where} was made from other data than {plan.dataset} holds now (checksum "
            f"{before[:12]}, now {plan.checksum[:12]}); choose another --out"
        )


# A job, in its own process ------------------------------------------------------------------


def train_job(job: Job) -> str | None:
    """Train or go on with one job and write its results, in a process of its own.

    Returns:
        One line if it failed, else None.
    """
    from ctrl_rl.compiled import Diverged
    from offline.commands import train

    folder, steps = job.folder, str(job.plan.total_steps)
    words = ["--dataset", job.plan.dataset]
    if (folder / "config.json").is_file():
        words += ["--resume", str(folder), "--total-steps", steps]
    else:
        seeds = ["--seed", str(job.seeds[0]), "--seeds", str(len(job.seeds))]
        words = [*job.plan.words, *seeds, "--run-dir", str(folder)]
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with written_to(job.log):
        print(f"process {os.getpid()}, {time.strftime('%F %T')}: train {' '.join(words)}")
        try:
            if not (results := results_of(job)):  # a kill may have come after the last step
                train.main(words)
                results = results_of(job)
            for result in results:
                write(result, job.out)
        except Exception as error:
            traceback.print_exc()
            if isinstance(error, Diverged) and len(job.seeds) > 1:
                folder.rename(folder.with_name(folder.name + ASIDE))
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return kind + (" ".join(str(error).split()) or "no reason given")
    return None


def results_of(job: Job) -> list[Result]:
    """The results of a run that has all its updates and the last evaluation; else none.

    Raises:
        ValueError: it was trained to the end and never evaluated.
    """
    from ctrl_rl.run_folder import BEST_KEY, read_config, read_metrics
    from offline.datasets import locate
    from offline.scores import Score, find_reference, played_in

    if not (job.folder / "config.json").is_file():
        return []
    config, results = read_config(job.folder), []
    path, entry = locate(job.plan.dataset)
    origin = "D4RL" if entry else "Minari" if path.is_dir() else "a file of one's own"
    data = {"origin": origin} | {k: v for k, v in config["data"].items() if k != "file"}
    settings, env = config["run"] | config["algo_config"], played_in(config["task"])
    reference = find_reference({"dataset": config["data"]["dataset"], "task": config["task"]})
    for seed in job.seeds:
        rows = read_metrics(job.folder if len(job.seeds) == 1 else job.folder / f"s{seed}")
        if not rows or rows[-1]["step"] != job.plan.total_steps:
            return []
        curve = [
            [int(row["step"]), row[BEST_KEY], row.get("eval/normalized_score")]
            for row in rows
            if BEST_KEY in row
        ]
        if not curve or curve[-1][0] < job.plan.total_steps:
            raise ValueError(
                f"{job.title} was not evaluated at the end; --set task=TASK says where"
            )
        normalized = all(point[2] is not None for point in curve)
        scores = [point[2 if normalized else 1] for point in curve]
        last = Score(episode_return=curve[-1][1], reference=reference, played_in=env)
        results.append(
            Result(
                dataset=job.plan.name,
                algo=job.plan.algo,
                variant=dict(job.plan.variant),
                seed=seed,
                steps=curve[-1][0],
                env=env,
                comparable=last.comparable,
                normalized=normalized,
                curve=curve,
                last=scores[-1],
                best=max(scores),
                config={k: v for k, v in settings.items() if k not in FREE and v is not None},
                data=data,
                versions=config["versions"],
            )
        )
    return results
