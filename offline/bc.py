"""Behaviour cloning, of all recorded behaviour or of the best episodes (%BC), one file.

    L = mean (pi(s) - a)^2

pi is a network squashed by tanh to the bounds of each action dimension: the form in which TD3+BC
(Fujimoto and Gu, 2021, arXiv:2106.06860) compares itself with cloning, and CORL (Tarasov et al.,
2022, arXiv:2210.07105) with %BC. `top_fraction` 0.1 keeps the tenth of the episodes with the
largest return (Chen et al., "Decision transformer", NeurIPS 2021, arXiv:2106.01345, section 5.1,
where the tenth is one of time steps).

Deviations, each with its reason:

1. (pi(s) - a)^2 is that of actions scaled to -1..1, so that nothing depends on their units.
2. Observations are standardised, where they are, by the statistics of all transitions.
3. Weights start orthogonal.

Tensors: seeds first, minibatch (S, B, ...). `docs/algorithms/bc.md` explains every logged key.

Reading order: `METRICS` -> `BCConfig` -> loss -> `best_episodes` -> `BC` -> `train`.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrl_rl.networks import action_bounds
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec
from offline import training
from offline.networks import StackedActor, stream
from offline.settings import check_settings, minibatch_step
from offline.training import Evaluate, fit
from offline.transitions import Batch, Transitions

METRICS: dict[str, str] = {
    "loss/actor": "L, mean over the updates since the last row, actions scaled to -1..1",
    "gradient/actor": "Euclidean norm of its gradient",
    **training.METRICS,
}
"""Every key that is logged; an unknown key is an error."""

STATS = ("gradient/actor", "loss/actor")
"""What `BC.update` reports."""


PRESETS: dict[str, dict] = {
    family: {"normalize_obs": True} for family in ("gym", "maze2d", "antmaze", "adroit")
}
"""D4RL's family -> settings of `ctrl-rl offline train` other than its defaults: CORL's."""


@dataclass(frozen=True, kw_only=True)
class BCConfig:
    """Settings of behaviour cloning; CORL's."""

    total_steps: int = 1_000_000
    """Length of training [updates]."""
    batch_size: int = 256
    """Transitions per update and seed."""
    learning_rate: float = 3e-4
    """Adam's step size."""
    top_fraction: float = 1.0
    """Share of the episodes that are cloned, those with the largest return; 0.1 is CORL's %BC."""
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers."""
    activation: str = "relu"
    """"elu", "relu" or "tanh"."""
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        wanted = "above 0 and at most 1"
        check_settings(self, ("top_fraction", 0 < self.top_fraction <= 1, wanted))


def cloning_loss(action: Tensor, data_action: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """L (S,) from pi(s) and a (S, B, A), over samples and dimensions, scaled to -1..1."""
    return ((action - data_action) / ((high - low) / 2)).square().mean((1, 2))


def best_episodes(data: Transitions, fraction: float) -> Transitions:
    """The transitions of the episodes with the largest return, at least of one; rows are shared.

    Returns are those of the file, whatever the reward preset, and count all steps of an episode.
    Of episodes with equal returns the earlier ones are kept.
    """
    if fraction == 1:
        return data
    d, count = data.obs_size, max(1, int(fraction * len(data.lengths)))
    reward = data.raw_reward(data.rows[:, d + data.action_size].double())
    # The row after an episode's last step holds no reward.
    ends = data.starts + data.lengths
    running = torch.cat([reward.new_zeros(1), reward.cumsum(0)])
    returns = running[ends] - running[data.starts]
    best = returns.argsort(descending=True, stable=True)[:count]
    kept = torch.zeros(len(data.lengths), dtype=torch.bool, device=data.device)
    kept[best] = True
    episode = torch.searchsorted(data.starts, data.index, right=True) - 1
    index = data.index[kept[episode]]
    if len(index) == 0:
        raise ValueError(
            f"top_fraction {fraction}: the best {count} episodes hold no usable transition"
        )
    found = {"top_fraction": fraction, "episodes_kept": count, "transitions": len(index)}
    return Transitions(
        *(data.rows, index, data.obs_size, data.action_size, data.starts, data.lengths),
        normalizer=data.normalizer,
        reward_scale=data.reward_scale,
        reward_shift=data.reward_shift,
        report=data.report | found,
    )


class BC:
    """Networks and optimiser of S seeds; no data inside.

    Args:
        config: settings.
        data: what will be learned from: its sizes, device and normaliser count.
        spec: what the policy reads and gives.
        seeds: decide initial weights; S of them, learned side by side.

    Raises:
        ValueError: the spec's actions are discrete or unbounded.
    """

    name, metrics, stats = "bc", METRICS, STATS

    def __init__(
        self, config: BCConfig, data: Transitions, spec: EnvSpec, seeds: Sequence[int] = (0,)
    ) -> None:
        self.config, self.spec, self.seeds = config, spec, tuple(seeds)
        self.device, self.normalizer = data.device, data.normalizer
        start = [stream(seed, "weights") for seed in seeds]
        self.actor = StackedActor(
            *(data.obs_size, *action_bounds(spec, self.name)),
            *(config.hidden, config.activation, start),
        ).to(self.device)
        self.actor_step = minibatch_step(config, self.actor, self._objective)

    def update(self, batch: Batch) -> Tensor:
        """One step; figures (K, S) named by `STATS`."""
        return self.actor_step(batch.obs, batch.action)

    def policy_section(self, seed: int) -> dict:
        """Policy of the seed at this place of the job, as `ctrl_rl.policy` reads it."""
        noise_std = torch.zeros(self.spec.action_size, device=self.device)
        return self.actor.section(seed, noise_std, self.spec, self.normalizer)

    def state_dict(self) -> dict:
        """Everything that decides the future of training but what is drawn, as a copy."""
        return deepcopy({n: getattr(self, n).state_dict() for n in ("actor", "actor_step")})

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name, saved in state.items():
            getattr(self, name).load_state_dict(saved)

    def _objective(self, actor, obs, action):
        """L of a minibatch; no other figure."""
        loss = cloning_loss(actor(obs), action, actor.low, actor.high)
        return loss, loss.detach()[None][:0]


def train(
    config: BCConfig,
    data: Transitions,
    spec: EnvSpec,
    seeds: Sequence[int] = (0,),
    run: Run | None = None,
    evaluate: Evaluate | None = None,
) -> Run:
    """Train on recorded transitions, or go on where `run` stopped; see `offline.training.fit`."""
    data = best_episodes(data, config.top_fraction)
    return fit(BC(config, data, spec, seeds), data, run, evaluate)
