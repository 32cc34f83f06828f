"""Train a policy: `ctrl-rl train TASK`, or go on with `--resume RUN`.

TASK stands first; `--algo NAME` picks the algorithm, ppo if not given. Flags without a prefix are
the same for every task and algorithm; `--algo.X` are the algorithm's and `--task.X` the task's,
whose presets for the algorithm are the defaults. With `--resume RUN` the saved settings are.

`torchrun --nproc-per-node 2 -m ctrl_rl.cli train TASK` shares the environments between processes.
"""

import dataclasses
import datetime
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path

from ctrl_rl import cli, registry


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags that every trainer has."""

    total_steps: int = 1_000_000
    """Length of training [env steps]; may be raised with --resume where no step size falls over
    the run."""
    stop_after: int | None = None
    """Leave with a checkpoint once this many env steps are done; --resume goes on."""
    num_envs: int = 64
    """Parallel environments N; torchrun's processes share them equally."""
    seed: int = 0
    """Decides every random draw."""
    backend: str | None = None
    """Simulator; None for the task's first."""
    device: str = "cpu"
    """Torch device of networks and data, "cpu" or "cuda"; one GPU for each process."""
    threads: int = 0
    """Threads of the simulator in each process; 0 for all cores, shared between them."""
    torch_threads: int = 1
    """Threads of torch; small networks are fastest on one."""
    run_dir: Path | None = None
    """The run folder itself; None for runs/<task>/<algo>/<time>-s<seed>."""
    init_from: Path | None = None
    """Run whose weights and observation statistics are the start."""
    eval_every: int | None = None
    """Env steps between evaluations; None for a fifth of the run, 0 for the end only."""
    eval_episodes: int = 16
    """Episodes of each evaluation, played side by side."""
    checkpoint_every: int | None = None
    """Env steps between checkpoints; None for a tenth of the run, 0 for the end only. An
    evaluation always makes one."""
    video_s: float = 10.0
    """Length of the video made at the end [s]; 0 for none."""

    def __post_init__(self) -> None:
        cli.check_least(self, 1, "total_steps", "num_envs", "eval_episodes", "torch_threads")
        cli.check_least(
            self, 0, "stop_after", "threads", "eval_every", "checkpoint_every", "video_s"
        )


FOLDERS = ("--run-dir", "--resume", "--init-from")
"""Flags that name a run folder."""

LIVE = ("stop_after", "run_dir")
"""Run flags about this sitting, not about the run; they are not kept in config.json."""


PLAIN = {bool, int, float, str, Path, tuple, dict, types.NoneType}
"""Types of fields whose values are checked when a run is read again."""


@dataclass(frozen=True)
class Plan:
    """What a command line asks for."""

    task: str
    algo: str
    flags: RunFlags
    algo_config: typing.Any
    task_config: typing.Any
    folder: Path
    resume: bool


def main(argv: list[str]) -> dict:
    """Train, evaluate, draw the curves, record a video and write the report."""
    if "RANK" not in os.environ:  # torchrun sets it
        return carry_out(read_plan(argv))
    from ctrl_rl import distributed

    with distributed.joined():
        return carry_out(read_plan(argv))


def carry_out(plan: Plan) -> dict:
    """Do what was asked for; in a group of processes rank 0 alone evaluates and reports."""
    flags = plan.flags

    import torch

    torch.set_num_threads(flags.torch_threads)
    from ctrl_rl import distributed
    from ctrl_rl.making import make
    from ctrl_rl.runs import Run

    num_envs, first_index = distributed.share(flags.num_envs)
    env = build(plan, make, num_envs, plan.task_config, flags.seed, first_index)
    run = Run(
        plan.folder,
        eval_every=flags.eval_every,
        checkpoint_every=flags.checkpoint_every,
        stop_after=flags.stop_after,
        resume=plan.resume,
        init_from=flags.init_from,
        settings={
            k: str(v) if isinstance(v, Path) else v
            for k, v in dataclasses.asdict(flags).items()
            if k not in LIVE
        },
    )
    judge = Judge(plan, make) if distributed.rank() == 0 else None
    try:
        registry.load("algos", plan.algo).train(plan.algo_config, env, run, judge)
    finally:
        run.close()
        env.close()
    if judge is None:
        raise SystemExit(0)
    return finish(plan, run, judge)


class Judge:
    """Evaluates during training, in environments of its own.

    Each evaluation plays the same episodes from the same start, so that checkpoints are compared
    on equal terms and a resumed run finds the figures of an uninterrupted one.
    """

    def __init__(self, plan: Plan, make) -> None:
        from ctrl_rl.evaluation import SELECTION_SEED

        flags = plan.flags
        self.episodes = flags.eval_episodes
        self.build = lambda: build(
            plan, make, flags.eval_episodes, plan.task_config.evaluation(),
            flags.seed + SELECTION_SEED,
        )  # fmt: skip
        self.env = self.start = self.result = None

    def __call__(self, policy) -> dict[str, float]:
        """Figures of a policy, for the log."""
        from ctrl_rl.evaluation import evaluate

        if self.env is None:
            self.env = self.build()
            self.start = self.env.state_dict()
        self.env.load_state_dict(self.start)
        self.result = evaluate(policy, self.env, self.episodes)
        return self.result.log()


def build(plan: Plan, make, num_envs: int, config, seed: int, first_index: int = 0):
    """Environments of the plan's task."""
    from ctrl_rl import distributed

    flags = plan.flags
    return make(
        plan.task,
        num_envs,
        backend=flags.backend,
        device=distributed.local_device(flags.device),
        seed=seed,
        first_index=first_index,
        threads=distributed.local_threads(flags.threads),
        config=config,
    )


def finish(plan: Plan, run, judge: Judge) -> dict:
    """Evaluation file, video and report of what was trained; the object for `--json`."""
    from ctrl_rl.policy import load_policy
    from ctrl_rl.report import add_evaluation, read_evaluations, write_report
    from ctrl_rl.run_folder import read_config

    step = run.rows[-1]["step"] if run.rows else 0
    evaluated = read_evaluations(plan.folder).get("randomised", {}).get("env_steps") == step
    if step >= run.total_steps and judge.result is None and not evaluated:
        judge(load_policy(plan.folder, "last"))  # a kill came after the last checkpoint
    metrics = {}
    if judge.result is not None:
        metrics = judge.result.to_dict()
        found = {"checkpoint": "last", "env_steps": step, "deterministic": True}
        add_evaluation(plan.folder, "randomised", {**found, "metrics": metrics})
        for name, metric in judge.result.metrics.items():
            print(f"  {name:<24} {metric}")
    if plan.flags.video_s and step >= run.total_steps:
        film(plan)
    print(f"report: {write_report(plan.folder)}")
    return {
        "task": plan.task,
        "config": read_config(plan.folder),
        "metrics": metrics,
        "run": str(plan.folder),
        "env_steps": step,
    }


def film(plan: Plan) -> None:
    """Record the last policy; where that cannot be, say why."""
    from ctrl_rl.evaluation import EVALUATION_SEED
    from ctrl_rl.making import make
    from ctrl_rl.policy import load_policy
    from ctrl_rl.video import CannotFilm, record

    env = build(plan, make, 1, plan.task_config.evaluation(), plan.flags.seed + EVALUATION_SEED)
    try:
        policy = load_policy(plan.folder, "last")
        record(policy, env, plan.folder / "video.mp4", plan.flags.video_s)
        print(f"video: {plan.folder / 'video.mp4'}")
    except CannotFilm as reason:
        print(f"no video: {reason}")
    finally:
        env.close()


# From words to a plan -----------------------------------------------------------------------


def read_plan(argv: list[str]) -> Plan:
    """Read the command line in two passes: task and algorithm, then their fields.

    Raises:
        NotFound: unknown task or algorithm.
        ValueError: anything else the command line gets wrong.
    """
    argv = list(argv)
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        flag, _, value = word.partition("=") if "=" in word else (word, "", following)
        if flag in FOLDERS and value == "":  # Path("") would be the current folder
            raise cli.UsageError(f"{flag} names no folder")
    task = argv.pop(0) if argv and not argv[0].startswith("-") else None
    resume = take(argv, "--resume")
    algo = take(argv, "--algo")
    saved, where = None, Path()
    if resume is not None:
        from ctrl_rl.run_folder import read_config

        where = Path(resume) / "config.json"
        saved = read_config(Path(resume))
        for name, given in (("task", task), ("algo", algo)):
            if given not in (None, saved[name]):
                raise ValueError(f"{resume} is a run of {saved[name]}, not of {given}")
        task, algo = saved["task"], saved["algo"]
    algo = algo or "ppo"
    if algo in registry.names("offline_algos"):
        how = f"--resume {resume}" if resume else f"--algo {algo} --dataset ID"
        raise ValueError(f"{algo} learns from recorded data: ctrl-rl offline train {how}")
    asks_help = "-h" in argv or "--help" in argv
    if task is None and not asks_help:
        raise cli.UsageError("train needs a task; ctrl-rl list tasks shows them")

    algo_cls = typing.get_type_hints(registry.load("algos", algo).train)["config"]
    task_cls = registry.load("tasks", task).Config if task else None
    if saved is None:
        presets = dict(registry.load("tasks", task).presets.get(algo, {})) if task else {}
        own = {f.name for f in dataclasses.fields(RunFlags)}
        flags = RunFlags(**{k: presets.pop(k) for k in list(presets) if k in own})
        algo_config, task_config = algo_cls(**presets), task_cls() if task_cls else None
    else:
        # A run started from Python has only the algorithm's word on what both say.
        own = {f.name for f in dataclasses.fields(RunFlags)}
        shared = {k: v for k, v in saved["algo_config"].items() if k in own}
        flags = rebuild(RunFlags, {**saved["run"], **shared, "run_dir": resume}, where)
        algo_config = rebuild(algo_cls, saved["algo_config"], where)
        task_config = rebuild(task_cls, saved["task_config"], where)

    about = (
        __doc__ if task else f"{__doc__}\nctrl-rl train TASK --help shows the task's fields too."
    )
    prog = f"ctrl-rl train {task or 'TASK'}"
    parsed = parse_flags(argv, prog, about, algo, flags, algo_config, task_config)
    assert task is not None  # without one, --help has left by now
    flags = parsed.run
    if resume is not None and flags.run_dir != Path(resume):
        raise ValueError("--run-dir and --resume name two folders; leave one out")
    values = {f.name: getattr(parsed.algo, f.name) for f in dataclasses.fields(algo_cls)}
    shared = set(values) & {f.name for f in dataclasses.fields(RunFlags)}
    algo_config = algo_cls(**values | {name: getattr(flags, name) for name in shared})
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = flags.run_dir or Path("runs") / task / algo / f"{time}-s{flags.seed}"
    return Plan(task, algo, flags, algo_config, parsed.task, folder, resume is not None)


def parse_flags(argv, prog, about, algo, flags, algo_config, task_config=None):
    """Second pass: bare run flags, `--algo.X` without what the run flags decide, `--task.X`."""
    import tyro

    own = {f.name for f in dataclasses.fields(flags)}
    algo_cls, algo_config = type(algo_config), with_named_keys(algo_config, argv)
    hidden = [
        (
            f.name,
            tyro.conf.Suppress[f.type],
            dataclasses.field(default=getattr(algo_config, f.name)),
        )
        for f in dataclasses.fields(algo_config)
        if f.name in own
    ]
    algo_flags = dataclasses.make_dataclass(
        algo_cls.__name__, hidden, bases=(algo_cls,), frozen=True, kw_only=True
    )
    algo_flags.__doc__ = f"Settings of {algo}."
    values = {f.name: getattr(algo_config, f.name) for f in dataclasses.fields(algo_config)}
    fields = [
        ("run", typing.Annotated[type(flags), tyro.conf.arg(name="")], flags),
        ("algo", algo_flags, algo_flags(**values)),
    ]
    if task_config is not None:
        fields.append(("task", type(task_config), task_config))
    whole = dataclasses.make_dataclass(
        "Train",
        [(n, t, dataclasses.field(default_factory=lambda d=d: d)) for n, t, d in fields],
        frozen=True,
    )
    return cli.parse(whole, argv, prog, description=about)


def with_named_keys(config, argv):
    """Settings whose dictionaries also hold the keys that words `--algo.FIELD.KEY` name.

    tyro gives a flag to each key of a default; a new one begins empty, or as 0. Groups, which are
    tuples, stand in the place of all that there were: else one of a preset could not be left out.
    With them go the numbers of groups that are gone.
    """
    hints, changed, gone = typing.get_type_hints(type(config)), {}, set()
    for field in dataclasses.fields(config):
        if typing.get_origin(hints[field.name]) is dict:
            start = f"--algo.{field.name}."
            words = [word.partition("=")[0].replace("-", "_") for word in argv]
            keys = [w[len(start) :] for w in words if w.startswith(start.replace("-", "_"))]
            kind = typing.get_args(hints[field.name])[1]
            new = {key: (typing.get_origin(kind) or kind)() for key in keys}
            kept = getattr(config, field.name)
            if new and typing.get_origin(kind) is tuple:
                gone |= kept.keys() - new.keys()
            changed[field.name] = new | {k: v for k, v in kept.items() if k not in gone}
    return dataclasses.replace(config, **changed)


def rebuild(cls, data: dict, where: Path | None = None):
    """An instance of a configuration dataclass from decoded JSON, equal to the one saved.

    Args:
        cls: the dataclass.
        data: its fields.
        where: the file that `data` stands in, for errors.

    Raises:
        ValueError: a key that the class does not have: the run is of another version; or a value
            that the class does not take.
    """
    hints = typing.get_type_hints(cls)
    try:
        unknown = sorted(set(data) - set(hints))
        if unknown:
            raise ValueError(f"{cls.__name__} of this version has no {', '.join(unknown)}")
        values = {k: _typed(hints[k], v, f"{cls.__name__}.{k}") for k, v in data.items()}
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


def _typed(hint, value, name: str):
    """JSON knows no tuples, paths, dataclasses and infinities; `name` is the field, for errors."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    kinds = args if origin in (typing.Union, types.UnionType) else (origin or hint,)
    if value is None:
        return None
    if float in kinds and (type(value) is int or value in ("inf", "-inf")):
        return float(value)
    read_as = {list: tuple, str: Path if Path in kinds else str}.get(type(value), type(value))
    if set(kinds) <= PLAIN and read_as not in kinds:
        known = " or ".join(k.__name__ for k in kinds if k is not types.NoneType)
        raise ValueError(f"{name} must be {known}, not {value!r}")
    if dataclasses.is_dataclass(hint):
        return rebuild(hint, value)
    if isinstance(value, list):
        inner = args[0] if args and args[-1] is Ellipsis else None
        each = [inner] * len(value) if inner else (args or [None] * len(value))
        return tuple(_typed(k, v, name) for k, v in zip(each, value, strict=False))
    if origin is dict:
        return {k: _typed(args[1], v, name) for k, v in value.items()}
    return read_as(value) if read_as is Path else value


def take(argv: list[str], flag: str) -> str | None:
    """Remove `--flag VALUE` or `--flag=VALUE`."""
    for i, word in enumerate(argv):
        if word == flag:
            if i + 1 == len(argv):
                raise cli.UsageError(f"{flag} needs a value")
            value = argv[i + 1]
            del argv[i : i + 2]
            return value
        if word.startswith(flag + "="):
            del argv[i]
            return word.partition("=")[2]
    return None
