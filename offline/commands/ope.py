"""What a policy will earn, from recorded data alone: fitted Q evaluation of a run.

The figure is the discounted return from the first states of the data's episodes, of the policy as
it is played without noise. Beside it stands that of the data itself.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ctrl_rl import cli
from offline.ope import FQEConfig


@dataclass(frozen=True, kw_only=True)
class Ope:
    """Which policy, and from what."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run folder, or a checkpoint `.pt`."""
    dataset: str
    """An id of D4RL or Minari, a D4RL-style file or a Minari folder."""
    checkpoint: str | None = None
    """Of a run folder: "last", "best" or a step number; None for best, or last without one."""
    seed: int = 0
    """Decides initial weights and minibatches."""
    seeds: int = 3
    """Estimates made side by side, from `seed` on; their range says how far to trust them."""
    episode_length: int | None = None
    """Steps after which episodes were cut, for a file that does not say."""
    device: str = "cpu"
    """Torch device, "cpu" or "cuda"."""
    torch_threads: int = 1
    """Threads of torch."""
    fqe: FQEConfig = field(default_factory=FQEConfig)
    """Settings of the learner."""

    def __post_init__(self) -> None:
        cli.check_least(self, 1, "seeds", "torch_threads", "episode_length")


def main(argv: list[str]) -> dict:
    """Learn Q of the policy and print its value."""
    args = cli.parse(Ope, argv, "ctrl-rl offline ope", description=__doc__)
    import torch

    torch.set_num_threads(args.torch_threads)
    from ctrl_rl.policy import load_policy
    from offline import datasets, ope
    from offline.training import check_data
    from offline.transitions import Transitions

    policy = load_policy(args.run, args.checkpoint)
    module = getattr(policy, "module", None)
    if module is None or module.states:
        raise ValueError(f"{args.run}: its policy has a memory; fitted Q evaluation needs one "
                         "that acts by the observation alone")  # fmt: skip
    episodes = datasets.load(args.dataset, episode_length=args.episode_length)
    data = Transitions.from_episodes(
        episodes, timeouts="keep", normalize_obs=True, device=args.device
    )
    check_data(data, policy.spec)
    seeds = range(args.seed, args.seed + args.seeds)
    made = ope.fitted_q(args.fqe, data, policy.spec, policy, tuple(seeds))
    values, recorded = made.value(), ope.recorded_value(data, args.fqe.gamma)
    settled = ope.settled(made.course, recorded)
    mean, low, high = (float(x) for x in (values.mean(), values.min(), values.max()))
    print(
        f"fitted Q evaluation: {mean:.4g} (from {low:.4g} to {high:.4g} over {args.seeds} seeds), "
        f"return discounted by {args.fqe.gamma:g}"
    )
    for at in made.course:
        print(f"after {at.updates:,} updates: {at.value:.4g}, TD error {at.residual:.4g}")
    if not settled:
        print(f"warning: these still move; try --fqe.total-steps {2 * args.fqe.total_steps}")
    print(f"the data's own: {recorded:.4g}, mean of {episodes.num_episodes:,} episodes as recorded")
    return {
        "task": policy.spec.task,
        "config": {"run": str(args.run), "dataset": args.dataset},
        "metrics": {
            "fitted_q": {"mean": mean, "ci95": None, "n": args.seeds, "unit": "-"},
            "recorded": {"mean": recorded, "ci95": None, "n": episodes.num_episodes, "unit": "-"},
        },
        "values": values.tolist(),
        "course": [at._asdict() for at in made.course],
        "settled": settled,
    }
