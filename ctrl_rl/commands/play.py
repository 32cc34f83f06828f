"""Watch a policy live and command it from the keyboard."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ctrl_rl.spec import CommandDim

KEY_PAIRS = (("up", "down"), ("left", "right"), ("q", "e"), ("w", "s"), ("a", "d"))
"""More and less of each command, in the order of `spec.command`."""

STEPS = 10
"""Key presses from the middle of a command's range to its end."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """What to watch and where."""

    policy: Annotated[Path, tyro.conf.Positional]
    """A run folder, a checkpoint `.pt`, or `policy.onnx`."""
    checkpoint: str | None = None
    """Of a run folder: "last", "best" or a step number; None for best, or last without one."""
    task: str | None = None
    """Another task with the same observation and action; None for the policy's own."""
    web: bool = False
    """Show it in a browser; otherwise in a window."""
    port: int = 8080
    """Of the browser view; the next free one if it is taken."""
    nominal: bool = False
    """Switch randomisation, noise and pushes off."""
    speed: float = 1.0
    """Seconds of simulation per second."""
    seconds: float | None = None
    """Simulated time after which to stop [s]; None to go on until the viewer is closed."""
    seed: int = 0
    """Of the environment."""
    backend: str | None = None
    """Simulator; None for the task's first."""


def main(args: Play) -> dict:
    """Open the viewer and play until it is closed."""
    import torch

    torch.set_num_threads(1)
    from ctrl_rl import registry
    from ctrl_rl.commands.eval import task_config
    from ctrl_rl.evaluation import EVALUATION_SEED
    from ctrl_rl.making import make
    from ctrl_rl.policy import check_fits, load_policy

    if not args.speed > 0:
        raise ValueError(f"--speed must be positive, not {args.speed}")
    policy = load_policy(args.policy, args.checkpoint)
    task = args.task or policy.spec.task
    config = task_config(args.policy, policy, registry.load("tasks", task), task)
    env = make(
        task,
        1,
        backend=args.backend,
        seed=args.seed + EVALUATION_SEED,
        threads=1,
        config=config.nominal() if args.nominal else config.evaluation(),
    )
    check_fits(policy, env.spec)
    operator = Operator(env.spec.command)
    viewer = env.open_viewer(operator.help(), web=args.web, port=args.port)
    try:
        print(f"{task} in {viewer.where}; Ctrl-C ends")
        for key, what in operator.help().items():
            print(f"  {key:<6} {what}")
        steps = play(policy, env, viewer, operator, args.seconds, args.speed)
    finally:
        viewer.close()
        env.close()
    return {"task": task, "env_steps": steps}


class Operator:
    """Turns keys into a command within the range the policy was trained on."""

    def __init__(self, dims: Sequence[CommandDim]) -> None:
        self.dims = tuple(dims)[: len(KEY_PAIRS)]
        self.values = [0.0] * len(dims)
        self.wants_reset = False

    def press(self, key: str) -> None:
        """Take in one key; unknown ones do nothing."""
        if key == "space":
            self.values = [0.0] * len(self.values)
        elif key == "r":
            self.wants_reset = True
        for i, (dim, pair) in enumerate(zip(self.dims, KEY_PAIRS, strict=False)):
            if key in pair:
                step = max(abs(dim.low), abs(dim.high)) / STEPS
                value = self.values[i] + (step if key == pair[0] else -step)
                self.values[i] = round(min(max(value, dim.low), dim.high), 6)

    def help(self) -> dict[str, str]:
        """Key -> what it does."""
        text = {}
        for dim, (more, less) in zip(self.dims, KEY_PAIRS, strict=False):
            text |= {more: f"{dim.name} +", less: f"{dim.name} -"}
        return text | ({"space": "stop"} if self.dims else {}) | {"r": "reset"}


def play(
    policy, env, viewer, operator: Operator, seconds: float | None = None, speed: float = 1.0
) -> int:
    """Step row 0 in real time under the operator's command, and show it.

    Args:
        policy: as `load_policy` gives it. One with a method `receive` is told the reward (1,) of
            each step.
        env: one environment.
        viewer: see `robots.viewer.Viewer`.
        operator: takes the keys.
        seconds: simulated time [s]; None until the viewer is closed.
        speed: simulated seconds per second; infinity does not wait.

    Returns:
        Env steps played.
    """
    import torch

    step_dt, steps, episode_return = env.spec.step_dt, 0, 0.0
    receive = getattr(policy, "receive", None)
    obs = env.reset()
    policy.reset()
    due = time.monotonic()
    while viewer.running() and (seconds is None or steps * step_dt < seconds - 1e-9):
        for key in viewer.keys():
            operator.press(key)
        if env.spec.command:
            env.hold_command(torch.tensor(operator.values))
        if operator.wants_reset:
            operator.wants_reset = False
            obs, episode_return = env.reset(), 0.0
            policy.reset()
        result = env.step(policy(obs).to(env.device))
        if receive is not None:
            receive(result.reward)
        obs, steps = result.obs, steps + 1
        episode_return += float(result.reward[0])
        ended = bool(result.terminated[0] | result.truncated[0])
        commands = zip(env.spec.command, operator.values, strict=True)
        lines = [(dim.name, f"{value:+.2f} {dim.unit}") for dim, value in commands]
        lines += [("time", f"{steps * step_dt:.1f} s"), ("return", f"{episode_return:.1f}")]
        viewer.show(env.sim.qpos[0].cpu().numpy(), lines)
        if ended:
            policy.reset()
            episode_return = 0.0
        due += step_dt / speed
        late = time.monotonic() - due
        if late < 0:
            time.sleep(-late)
        elif late > 0.5:  # too slow a machine runs in slow motion instead of catching up
            due = time.monotonic()
    return steps
