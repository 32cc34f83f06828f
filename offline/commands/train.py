"""Train on recorded data: --algo NAME --dataset ID|FILE, or go on with --resume RUN.

`--dataset` is an id of D4RL or Minari, a D4RL-style file or a Minari folder; `ctrl-rl dataset list`
shows the ids. `--algo.X` are the algorithm's settings. Their defaults, and those of `--reward` and
`--normalize-obs`, are what the algorithm's source uses for the data set or its family, known by
its name, whatever its version, or else by the task in its metadata; whose they are is printed.
With `--resume RUN` the saved settings are.
"""

import dataclasses
import datetime
import typing
from dataclasses import dataclass
from pathlib import Path

from ctrl_rl import cli, registry
from ctrl_rl.commands.train import parse_flags, rebuild, take


@dataclass(frozen=True, kw_only=True)
class OfflineFlags:
    """Flags that every offline learner has."""

    total_steps: int = 1_000_000
    """Length of training [updates]; may be raised with --resume where no step size falls over the
    run."""
    stop_after: int | None = None
    """Leave with a checkpoint at the next multiple of 250 updates once this many are done; --resume
    goes on."""
    seed: int = 0
    """Decides every random draw."""
    seeds: int = 1
    """Seeds learned side by side, from `seed` on."""
    task: str | None = None
    """Task to evaluate in; None for the one that the data set was recorded in, if it is here."""
    reward: str = "raw"
    """What is learned from: "raw" rewards, "locomotion" (divided by the range of returns, times
    1000) or "antmaze" (minus 1). Evaluations give raw returns."""
    timeouts: str = "drop"
    """The last step before a time-out: "drop" it as D4RL does, or "keep" it where the file holds
    what followed."""
    normalize_obs: bool = False
    """Standardise observations; the statistics travel with the policy."""
    episode_length: int | None = None
    """Steps after which episodes were cut, for a file that does not say."""
    eval_every: int | None = None
    """Updates between evaluations, each at the next multiple of 250; None for a fifth of the run, 0
    for the end only."""
    episodes: int = 10
    """Episodes of each evaluation, played side by side."""
    checkpoint_every: int | None = None
    """Updates between checkpoints, each at the next multiple of 250; None for a tenth of the run, 0
    for the end only. An evaluation always makes one."""
    device: str = "cpu"
    """Torch device of networks and data, "cpu" or "cuda"."""
    threads: int = 0
    """Threads of the simulator; 0 for all cores."""
    torch_threads: int = 1
    """Threads of torch."""
    run_dir: Path | None = None
    """The run folder itself; None for runs/<data set>/<algo>/<time>-s<seed>."""

    def __post_init__(self) -> None:
        least_one = ("total_steps", "seeds", "episodes", "torch_threads", "episode_length")
        cli.check_least(self, 1, *least_one)
        cli.check_least(self, 0, "stop_after", "threads", "eval_every", "checkpoint_every")


LIVE = ("stop_after", "run_dir")
"""Flags about this sitting, not about the run; they are not kept in config.json."""


@dataclass(frozen=True)
class Plan:
    """What a command line asks for."""

    algo: str
    dataset: str
    flags: OfflineFlags
    algo_config: typing.Any
    folder: Path
    resume: bool
    settings_of: str | None = None
    """Whose settings the defaults are: a data set's or a family's; None for the algorithm's own."""


def main(argv: list[str]) -> dict:
    """Load the data, train, evaluate and draw the curves."""
    plan = read_plan(argv)
    flags = plan.flags

    import torch

    torch.set_num_threads(flags.torch_threads)
    from ctrl_rl.runs import Run
    from offline import datasets, scores
    from offline.playing import Judge, recorded_config, spec_of, task_config
    from offline.transitions import Transitions

    run = Run(
        plan.folder,
        eval_every=flags.eval_every,
        checkpoint_every=flags.checkpoint_every,
        stop_after=flags.stop_after,
        resume=plan.resume,
        settings={k: v for k, v in dataclasses.asdict(flags).items() if k not in LIVE},
    )
    judge = None
    try:
        episodes = datasets.load(plan.dataset, episode_length=flags.episode_length)
        metadata = episodes.metadata
        data = Transitions.from_episodes(
            episodes, flags.reward, flags.timeouts, flags.normalize_obs, flags.device
        )
        del episodes
        place = datasets.locate(plan.dataset)[0].resolve()
        known = {k: metadata[k] for k in ("sha256", "digest") if k in metadata}
        data.report |= {"dataset": metadata["dataset"], "file": str(place), **known}
        spec, task, reason = spec_of(data, metadata, flags.task)
        if not plan.resume:
            print(f"settings of {plan.settings_of or f'{plan.algo} alone, for no data set'}")
        for line in facts(data.report):
            print(line)
        if task is None:
            print(reason)
        else:
            settings = recorded_config(metadata, task)
            data.report["task_config"] = settings
            config = task_config(task, settings, plan.dataset)
            reference = scores.find_reference(metadata)
            judge = Judge(task, flags.episodes, reference, flags.device, flags.threads, config)
        seeds = tuple(range(flags.seed, flags.seed + flags.seeds))
        learner = registry.load("offline_algos", plan.algo)
        learner.train(plan.algo_config, data, spec, seeds, run, judge)
    finally:
        run.close()
        if judge is not None:
            judge.close()
    return finish(plan, run, judge)


def facts(report: dict) -> list[str]:
    """Lines on what is learned from: counts, what was dropped, the reward, warnings."""
    dropped = [
        f"{report[key]:,} {why}"
        for key, why in (
            ("dropped_at_timeouts", "at time-outs"),
            ("dropped_unknown_successor", "whose successor is unknown"),
        )
        if report[key]
    ]
    reward = report["reward"]
    lines = [
        f"{report['dataset']}: {report['transitions']:,} transitions of {report['episodes']:,} "
        f"episodes" + (f"; dropped {' and '.join(dropped)}" if dropped else ""),
        f"rewards {reward['preset']}: {reward['scale']:.6g} r {reward['shift']:+g}, within "
        f"{reward['min']:.4g} and {reward['max']:.4g}, mean {reward['mean']:.4g}",
    ]
    if report["obs_normalized"]:
        lines.append("observations are standardised")
    return [*lines, *(f"warning: {text}" for text in report["warnings"])]


def finish(plan: Plan, run, judge) -> dict:
    """Print the last evaluation; the object for `--json`."""
    from ctrl_rl.run_folder import BEST_KEY, read_config
    from offline import scores

    last = run.rows[-1] if run.rows else {}
    if judge is not None and BEST_KEY in last:
        score = scores.Score(
            episode_return=last[BEST_KEY],
            reference=judge.reference,
            played_in=scores.played_in(judge.task),
        )
        print(f"{score}, mean of {plan.flags.seeds} seeds" if plan.flags.seeds > 1 else score)
    count = plan.flags.episodes * plan.flags.seeds
    metrics = {
        key.removeprefix("eval/"): {"mean": value, "ci95": None, "n": count, "unit": "-"}
        for key, value in last.items()
        if key.startswith("eval/")
    }
    return {
        "task": None if judge is None else judge.task,
        "config": read_config(plan.folder),
        "metrics": metrics,
        "run": str(plan.folder),
        "updates": last.get("step", 0),
    }


# From words to a plan -----------------------------------------------------------------------


def read_plan(argv: list[str]) -> Plan:
    """Read the command line in two passes: algorithm and data set, then their settings.

    Raises:
        NotFound: unknown algorithm or data set.
        ValueError: anything else the command line gets wrong.
    """
    argv = list(argv)
    words = {name: take(argv, f"--{name}") for name in ("resume", "algo", "dataset")}
    resume, algo, dataset = words["resume"], words["algo"], words["dataset"]
    asks_help = "-h" in argv or "--help" in argv
    saved, where = None, Path()
    if resume is not None:
        saved, where = read_saved(Path(resume))
        if algo not in (None, saved["algo"]):
            raise ValueError(f"{resume} is a run of {saved['algo']}, not of {algo}")
        algo, dataset = saved["algo"], dataset or saved["data"]["file"]
    algo = algo or ("td3_bc" if asks_help else None)
    if algo is None or (dataset is None and not asks_help):
        raise cli.UsageError("offline train needs --algo and --dataset; ctrl-rl list algos and "
                             "ctrl-rl dataset list show them")  # fmt: skip
    if algo in registry.names("algos"):
        raise ValueError(f"{algo} learns in a simulator: ctrl-rl train TASK --algo {algo}")
    if algo in ("diffuser", "metadiffuser"):
        raise ValueError(f"{algo} is trained from Python: see docs/algorithms/metadiffuser.md")
    module = registry.load("offline_algos", algo)
    algo_cls = typing.get_type_hints(module.train)["config"]
    own = {f.name for f in dataclasses.fields(OfflineFlags)}
    settings_of = None
    if saved is None:
        settings_of, found = presets(module, dataset)
        settings = dict(found)
        flags = OfflineFlags(**{k: settings.pop(k) for k in list(settings) if k in own})
        algo_config = algo_cls(**settings)
    else:
        shared = {k: v for k, v in saved["algo_config"].items() if k in own}
        kept = {k: v for k, v in saved["run"].items() if k in own and k != "seeds"}
        kept["seeds"] = len(saved["run"]["seeds"])
        flags = rebuild(OfflineFlags, {**kept, **shared, "run_dir": resume}, where)
        algo_config = rebuild(algo_cls, saved["algo_config"], where)
    prog = "ctrl-rl offline train"
    parsed = parse_flags(argv, prog, __doc__, algo, flags, algo_config)
    flags = parsed.run
    if resume is not None and flags.run_dir != Path(resume):
        raise ValueError("--run-dir and --resume name two folders; leave one out")
    values = {f.name: getattr(parsed.algo, f.name) for f in dataclasses.fields(algo_cls)}
    shared = set(values) & own
    algo_config = algo_cls(**values | {name: getattr(flags, name) for name in shared})
    assert dataset is not None  # without one, --help has left by now
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = Path(dataset).stem if Path(dataset).exists() else dataset
    folder = flags.run_dir or Path("runs") / name / algo / f"{time}-s{flags.seed}"
    return Plan(algo, dataset, flags, algo_config, folder, resume is not None, settings_of)


def presets(module, dataset: str | None) -> tuple[str | None, dict]:
    """Settings of the algorithm's source for the data set, or else for its family, and whose.

    A data set is known by its name without a version, as beside published figures; a file of D4RL's
    by its id. The family is known by that name, too, or else by the task that our own data names.
    Flags and `--algo.X`; without name and empty where the source has none.
    """
    from offline import datasets
    from offline.playing import family_of, recorded_task
    from offline.published import stem_of

    known, name = getattr(module, "PRESETS", {}), dataset or ""
    path = Path(name).expanduser()
    if dataset is not None and path.exists():
        _, entry = datasets.locate(path)
        name = path.name.removesuffix(".hdf5") if entry is None else entry.dataset
    stem = stem_of(name.replace("_", "-"))  # D4RL names some of its files like this
    for key, settings in known.items():
        if stem_of(key) == stem:
            return key, settings
    family = family_of(name)
    if family is None and dataset is not None:
        family = family_of(recorded_task(path) or "")
    return (f"the {family} family", known[family]) if family in known else (None, {})


def read_saved(folder: Path) -> tuple[dict, Path]:
    """Configuration of an offline run to go on with, and its path.

    Raises:
        ValueError: no run, one of another kind, or one seed of a job.
    """
    from ctrl_rl.checkpoints import check_kinds
    from ctrl_rl.run_folder import read_config

    saved, where = read_config(folder), folder / "config.json"
    if "data" not in saved:
        raise ValueError(f"{folder} is no offline run: ctrl-rl train --resume {folder}")
    check_kinds(saved, {"data": dict}, f"{where} is damaged: it")
    check_kinds(saved["data"], {"file": str}, f"{where} is damaged: its data")
    check_kinds(saved["run"], {"seeds": list}, f"{where} is damaged: its run")
    if "job" in saved:
        raise ValueError(f"{folder} is one seed of a job; go on with --resume {folder.parent}")
    return saved, where
