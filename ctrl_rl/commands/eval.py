"""Measure a policy: each figure with its 95 % interval."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ctrl_rl import cli


@dataclass(frozen=True, kw_only=True)
class Eval:
    """What to measure and how."""

    policy: Annotated[Path, tyro.conf.Positional]
    """A run folder, a checkpoint `.pt`, or `policy.onnx`."""
    checkpoint: str | None = None
    """Of a run folder: "last", "best" or a step number; None for best, or last without one."""
    task: str | None = None
    """Another task with the same observation and action; None for the policy's own."""
    episodes: int = 100
    """Episodes K."""
    num_envs: int | None = None
    """Environments side by side; None for one per episode, at most 128."""
    nominal: bool = False
    """Switch randomisation, noise and pushes off."""
    stochastic: bool = False
    """Sample actions as in training; otherwise the mean action."""
    seed: int = 0
    """Of the environments and of sampled actions; added to a number that training never uses."""
    backend: str | None = None
    """Simulator; None for the task's first."""
    device: str = "cpu"
    """Torch device of the environments."""
    threads: int = 0
    """Threads of the simulator; 0 for all cores."""
    torch_threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        cli.check_least(self, 1, "episodes", "num_envs", "torch_threads")
        cli.check_least(self, 0, "threads")


def main(args: Eval) -> dict:
    """Play the episodes, print the figures, keep those of a run in its evaluation.json."""
    import dataclasses

    import torch

    torch.set_num_threads(args.torch_threads)
    from ctrl_rl import registry
    from ctrl_rl.checkpoints import load_checkpoint
    from ctrl_rl.evaluation import EVALUATION_SEED, evaluate
    from ctrl_rl.making import make
    from ctrl_rl.policy import load_policy
    from ctrl_rl.report import add_evaluation, write_report
    from ctrl_rl.run_folder import find_checkpoint

    policy = load_policy(args.policy, args.checkpoint)
    task = args.task or policy.spec.task
    config = task_config(args.policy, policy, registry.load("tasks", task), task)
    env = make(
        task,
        args.num_envs or min(args.episodes, 128),
        backend=args.backend,
        device=args.device,
        seed=args.seed + EVALUATION_SEED,
        threads=args.threads,
        config=config.nominal() if args.nominal else config.evaluation(),
    )
    try:
        result = evaluate(
            policy, env, args.episodes, deterministic=not args.stochastic, seed=args.seed
        )
    finally:
        env.close()
    variant = "nominal" if args.nominal else "randomised"
    print(f"{task}, {variant}, {args.episodes} episodes of {args.policy}")
    for name, metric in result.metrics.items():
        print(f"  {name:<24} {metric}")
    found = {
        "checkpoint": None,
        "env_steps": None,
        "deterministic": not args.stochastic,
        "metrics": result.to_dict(),
    }
    if args.policy.is_dir():
        path = find_checkpoint(args.policy, args.checkpoint)
        found |= {"checkpoint": path.stem, "env_steps": load_checkpoint(path)["step"]}
        if task == policy.spec.task and not args.stochastic:
            add_evaluation(args.policy, variant, found)
            print(f"report: {write_report(args.policy)}")
    settings = {
        k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(args).items()
    }
    return {"task": task, "variant": variant, **found, "config": settings}


def task_config(path: Path, policy, task_class, task: str):
    """The task's configuration the policy was trained with; its default for another task.

    Args:
        path: where the policy was loaded from.
        policy: it.
        task_class: of the task to play.
        task: its id.
    """
    from ctrl_rl.commands.train import rebuild
    from ctrl_rl.run_folder import read_config

    if task != policy.spec.task:
        return task_class.Config()
    if path.suffix == ".onnx":
        return rebuild(task_class.Config, policy.card["task_config"], path)
    folder = path.resolve().parent.parent if path.suffix == ".pt" else path
    if path.suffix == ".pt" and not (folder / "config.json").is_file():
        return task_class.Config()  # a checkpoint that was taken out of its run
    found = read_config(folder)["task_config"]
    return rebuild(task_class.Config, found, folder / "config.json")
