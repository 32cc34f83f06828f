"""Time a task on this machine: env steps per second, alone and in training."""

import dataclasses
import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import tyro

from ctrl_rl import cli

SLICES = 5
"""Slices of the bare environment; the median counts."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to time. Nothing is written."""

    task: Annotated[str, tyro.conf.Positional]
    """Task id."""
    algo: str = "ppo"
    """Algorithm; its preset for the task decides the networks and the update."""
    num_envs: int | None = None
    """Parallel environments N; None for the preset's."""
    seconds: float = 10.0
    """Time for each of the two parts [s]; compilation comes on top."""
    seed: int = 0
    """Decides starts and actions."""
    backend: str | None = None
    """Simulator; None for the task's first."""
    device: str = "cpu"
    """Torch device of environments and networks."""
    threads: int = 0
    """Threads of the simulator; 0 for all cores."""
    torch_threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be positive, not {self.seconds}")
        cli.check_least(self, 1, "num_envs", "torch_threads")
        cli.check_least(self, 0, "threads")


def main(args: Bench) -> dict:
    """Step with random actions, then train, and print the rates."""
    import torch

    torch.set_num_threads(args.torch_threads)
    from ctrl_rl import registry
    from ctrl_rl.commands.train import RunFlags
    from ctrl_rl.making import make, preset
    from ctrl_rl.runs import Run

    learner = registry.load("algos", args.algo)
    presets = registry.load("tasks", args.task).presets.get(args.algo, {})
    num_envs = args.num_envs or presets.get("num_envs", RunFlags().num_envs)
    env = make(
        args.task,
        num_envs,
        backend=args.backend,
        device=args.device,
        seed=args.seed,
        threads=args.threads,
    )
    try:
        rates = [_steps_per_s(env, args.seconds / SLICES, args.seed) for _ in range(SLICES)]
        alone = statistics.median(rates)
        steps = max(round(alone * args.seconds / 2), 1)
        config = preset(args.task, args.algo, total_steps=steps)
        run = learner.train(config, env, Run(eval_every=0, checkpoint_every=0))
    finally:
        env.close()
    rows = [row["time/env_steps_per_s"] for row in run.rows]
    training = statistics.median(rows[len(rows) > 1 :])  # the first iteration warms up
    print(f"{args.task}, {num_envs} environments, {args.algo}, {args.device}")
    print(f"  environments alone  {alone:>12,.0f} env steps/s")
    print(f"  in training         {training:>12,.0f} env steps/s, {len(rows)} iterations")
    unit = "env steps/s"
    return {
        "task": args.task,
        "config": dataclasses.asdict(args),
        "metrics": {
            "alone": {"mean": alone, "ci95": None, "n": SLICES, "unit": unit},
            "training": {"mean": training, "ci95": None, "n": len(rows), "unit": unit},
        },
    }


def _steps_per_s(env, seconds: float, seed: int) -> float:
    """Rate of one slice, with random actions drawn beforehand."""
    import torch

    from ctrl_rl.spec import Discrete

    generator = torch.Generator(env.device).manual_seed(seed)
    spec, n = env.spec.action, env.spec.num_envs
    if isinstance(spec, Discrete):
        size = (16, n)
        actions = torch.randint(spec.n, size, generator=generator, device=env.device)
    else:
        low = torch.tensor([max(d.low, -1.0) for d in spec], device=env.device)
        high = torch.tensor([min(d.high, 1.0) for d in spec], device=env.device)
        draw = torch.rand(16, n, len(spec), generator=generator, device=env.device)
        actions = low + (high - low) * draw
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        env.step(actions[count % 16])
        count += 1
    if env.device.type == "cuda":
        torch.cuda.synchronize(env.device)
        elapsed = time.perf_counter() - start
    return count * n / elapsed
