"""Go on in the simulator: `ctrl-rl offline online RUN` takes a run on recorded data further.

The learner starts with the weights, moments and update of RUN, a run of one seed, and learns from
its data and from what it now does in the task, half and half. The new run folder is RUN/online
unless --run-dir names another; --resume goes on with one.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from ctrl_rl import cli, registry
from offline.online import ALGOS, OnlineConfig


@dataclass(frozen=True, kw_only=True)
class Online:
    """What goes on, and where."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder of `ctrl-rl offline train`."""
    task: str | None = None
    """Task to play in; None for the one of the run."""
    num_envs: int = 1
    """Environments side by side."""
    resume: bool = False
    """Go on with a run folder that was stopped, with the same flags."""
    stop_after: int | None = None
    """Leave with a checkpoint at the next row of the log, one in 1000 env steps, once this many are
    done; --resume goes on."""
    eval_every: int | None = None
    """Env steps between evaluations, each at the next row of the log, one in 1000 env steps; None
    for a fifth of the run, 0 for the end only."""
    episodes: int = 10
    """Episodes of each evaluation, played side by side."""
    checkpoint_every: int | None = None
    """Env steps between checkpoints, each at the next row of the log, one in 1000 env steps; None
    for a tenth of the run, 0 for the end only."""
    threads: int = 0
    """Threads of the simulator; 0 for all cores."""
    torch_threads: int = 1
    """Threads of torch."""
    run_dir: Path | None = None
    """The new run folder; None for RUN/online."""
    online: OnlineConfig = field(default_factory=OnlineConfig)
    """How it goes on."""

    def __post_init__(self) -> None:
        cli.check_least(self, 1, "num_envs", "episodes", "torch_threads")
        cli.check_least(self, 0, "stop_after", "threads", "eval_every", "checkpoint_every")


def main(argv: list[str]) -> dict:
    """Build the learner as it was, and train on."""
    args = cli.parse(Online, argv, "ctrl-rl offline online", description=__doc__)
    from offline.commands.train import read_saved

    saved, _ = read_saved(args.run)
    if saved["algo"] not in ALGOS:
        raise ValueError(f"{args.run} is a run of {saved['algo']}; {', '.join(ALGOS)} go on")
    if len(saved["run"]["seeds"]) != 1:
        raise ValueError(f"{args.run} is a job of several seeds; train one with --seeds 1")

    import torch

    torch.set_num_threads(args.torch_threads)
    from ctrl_rl.making import make
    from ctrl_rl.run_folder import BEST_KEY
    from ctrl_rl.runs import Run
    from offline.online import go_on
    from offline.playing import Judge, task_config

    config = dataclasses.replace(args.online, offline_run=str(args.run))
    folder = args.run_dir or args.run / "online"
    settings = {k: getattr(args, k) for k in ("num_envs", "episodes", "threads", "torch_threads")}
    run = Run(
        folder,
        eval_every=args.eval_every,
        checkpoint_every=args.checkpoint_every,
        stop_after=args.stop_after,
        resume=args.resume,
        settings=settings,
    )
    env = judge = None
    try:
        task, seed = args.task or saved["task"], saved["run"]["seed"]
        registry.load("tasks", task)
        data, learner = restore(args.run, saved, config.updates)
        recorded = saved["data"].get("task_config") if task == saved["task"] else None
        task_settings = task_config(task, recorded, str(args.run / "config.json"))
        env = make(task, args.num_envs, seed=seed, threads=args.threads, config=task_settings)
        judge = Judge(task, args.episodes, None, "cpu", args.threads, task_settings)
        evaluate = lambda policy, judge=judge: judge(policy, seed)  # noqa: E731
        go_on(config, learner, data, env, run, evaluate)
    finally:
        run.close()
        for each in (env, judge):
            if each is not None:
                each.close()
    last = run.rows[-1] if run.rows else {}
    if BEST_KEY in last:
        print(f"return {last[BEST_KEY]:.4g} in {task} after {last['step']:,} env steps")
    metrics = {
        key.removeprefix("eval/"): {"mean": v, "ci95": None, "n": args.episodes, "unit": "-"}
        for key, v in last.items()
        if key.startswith("eval/")
    }
    return {"task": task, "run": str(folder), "metrics": metrics, "env_steps": last.get("step", 0)}


def restore(folder: Path, saved: dict, more: int) -> tuple[Any, Any]:
    """The run's data and its learner where its last checkpoint stands, for so many more updates."""
    import typing

    from ctrl_rl.checkpoints import check_like, load_checkpoint
    from ctrl_rl.commands.train import rebuild
    from ctrl_rl.spec import EnvSpec
    from offline import datasets
    from offline.online import longer
    from offline.results import checksum
    from offline.transitions import Transitions

    flags = saved["run"]
    episodes = datasets.load(saved["data"]["file"], episode_length=flags["episode_length"])
    if checksum(episodes.metadata) != checksum(saved["data"]):
        raise ValueError(f"{saved['data']['file']} is not the data that {folder} was trained on")
    data = Transitions.from_episodes(
        episodes, flags["reward"], flags["timeouts"], flags["normalize_obs"]
    )
    module = registry.load("offline_algos", saved["algo"])
    config_cls = typing.get_type_hints(module.train)["config"]
    config = longer(rebuild(config_cls, saved["algo_config"], folder / "config.json"), more)
    learner_cls = next(x for x in vars(module).values() if getattr(x, "name", "") == saved["algo"])
    spec = EnvSpec.from_dict(saved["spec"])
    learner = learner_cls(config, data, spec, tuple(saved["run"]["seeds"]))
    checkpoint = folder / "checkpoints" / "last.pt"
    content = load_checkpoint(checkpoint, {"step": int, "learner": dict})
    try:
        check_like(content["learner"].get("state"), learner.state_dict(), "learner")
        learner.load_state_dict(content["learner"]["state"])
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{checkpoint} does not fit: {' '.join(str(error).split())}") from None
    return data, learner
