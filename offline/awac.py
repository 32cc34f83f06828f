"""AWAC: advantage-weighted actor-critic, one file.

Paper: Nair, Gupta, Dalal and Levine, "AWAC: accelerating online reinforcement learning with offline
datasets", 2020, arXiv:2006.09359.

    y     = r + gamma [not terminated] min_i Qbar_i(s', a'),           a' drawn from pi(.|s')
    L_Q   = mean sum_i (Q_i(s, a) - y)^2
    A     = min_i Q_i(s, a) - min_i Q_i(s, a~),                        a~ drawn from pi(.|s)
    L_pi  = -mean min(exp(inverse_temperature A), 100) log pi(a|s)
    Qbar <- (1 - polyak) Qbar + polyak Q

in this order, A with the new Q. The loss of the policy is that of IQL; the values are those of the
policy itself, not of the best of the data's actions. pi is a normal whose deviation does not depend
on the observation; drawn actions are clipped to the bounds; it acts by its mean.

Defaults are CORL's for D4RL's locomotion data (Tarasov et al., 2022, arXiv:2210.07105, its
configurations): inverse temperature 3 (1 / 0.3333), three hidden layers, standardised observations.

Deviations from CORL, each with its reason:

1. The mean is squashed by tanh to the bounds, and the density is that of actions scaled to -1..1,
   so that nothing depends on the action's units; the critics read actions scaled like this, too.
2. log_std is held within -5..2, not -20..2, so that no density overflows.
3. Weights start orthogonal.

Tensors: seeds first, minibatch (S, B, ...), critics (S, 2, B). `docs/algorithms/awac.md` explains
every logged key.

Reading order: `METRICS` -> `AWACConfig` -> `drawn` -> `AWAC` -> `train`. The losses are those of
`offline.iql` and `offline.td3_bc`.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrl_rl.compiled import MakeOptimizer
from ctrl_rl.networks import action_bounds
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec
from offline import collapse, training
from offline.adamo import AdamOConfig
from offline.iql import LOG_STD_RANGE, Actor, actor_loss, weights_of
from offline.networks import StackedActor, StackedQ, normal, stream
from offline.settings import check_settings, minibatch_step, value_optimizer
from offline.td3_bc import clipped_target, critic_loss
from offline.training import Evaluate, fit
from offline.transitions import Batch, Transitions

METRICS: dict[str, str] = {
    "loss/critic": "L_Q, mean over the updates since the last row [reward^2]",
    "loss/actor": "L_pi, likewise",
    "value/q": "mean action value of the two critics on the minibatches [reward]",
    "policy/weight": "mean weight of an action in L_pi; its bound is 100",
    "gradient/critic": "Euclidean norm of L_Q's gradient",
    "gradient/actor": "Euclidean norm of L_pi's gradient",
    **collapse.METRICS,
    **training.METRICS,
}
"""Every key that is logged; an unknown key is an error."""

STATS = (
    *("value/q", "gradient/critic", "loss/critic"),
    *("policy/weight", "gradient/actor", "loss/actor"),
)
"""What `AWAC.update` reports."""

PRESETS: dict[str, dict] = {
    "gym": {"normalize_obs": True},
    "maze2d": {"normalize_obs": True, "inverse_temperature": 10.0},
    "antmaze": {"normalize_obs": True, "reward": "antmaze", "inverse_temperature": 10.0},
    "adroit": {"normalize_obs": True, "inverse_temperature": 10.0},
}
"""D4RL's family -> settings of `ctrl-rl offline train` other than its defaults: CORL's."""


@dataclass(frozen=True, kw_only=True)
class AWACConfig:
    """Settings of AWAC; CORL's for D4RL's locomotion data."""

    total_steps: int = 1_000_000
    """Length of training [updates]."""
    batch_size: int = 256
    """Transitions per update and seed."""
    learning_rate: float = 3e-4
    """Adam's step size for policy and critics."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.005
    """Share of the critics that the target critics take on."""
    inverse_temperature: float = 3.0
    """Factor of the advantage in an action's weight [1/reward], 1 / lambda in the paper; 0 is
    behaviour cloning."""
    hidden: tuple[int, ...] = (256, 256, 256)
    """Widths of the hidden layers of policy and critics."""
    activation: str = "relu"
    """"elu", "relu" or "tanh"."""
    optimizer: str = "adam"
    """That of the critics: "adam", or "adamo" with the settings in `adamo`."""
    adamo: AdamOConfig = AdamOConfig()
    """Settings of `offline.adamo`; without effect where `optimizer` is "adam"."""
    monitor: str = "off"
    """Whether the critics are watched for collapse: "off", "warn", or "stop" the run then."""
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        good = 0 <= self.inverse_temperature < math.inf
        check_settings(self, ("inverse_temperature", good, "0 or more"))


def drawn(actor: Actor, obs: Tensor, noise: Tensor) -> Tensor:
    """Actions (S, B, A) of the policy from standard normal noise, clipped to the bounds."""
    assert actor.log_std is not None
    low, high = actor.mean.low, actor.mean.high
    std = actor.log_std.clamp(*LOG_STD_RANGE).exp() * (high - low) / 2
    return torch.clamp(actor.mean(obs) + std * noise, low, high)


class AWAC:
    """Networks, optimisers and random generators of S seeds; no data inside.

    Args:
        config: settings.
        data: what will be learned from: its sizes, device and normaliser count.
        spec: what the policy reads and gives.
        seeds: decide initial weights and drawn actions; S of them, learned side by side.
        critic_optimizer: makes the critics' optimiser; None for what `config` says.

    Raises:
        ValueError: the spec's actions are discrete or unbounded.
    """

    name, metrics, stats = "awac", METRICS, STATS

    def __init__(
        self,
        config: AWACConfig,
        data: Transitions,
        spec: EnvSpec,
        seeds: Sequence[int] = (0,),
        critic_optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.config, self.spec, self.seeds = config, spec, tuple(seeds)
        self.device, self.normalizer = data.device, data.normalizer
        start = [stream(seed, "weights") for seed in seeds]
        bounds = action_bounds(spec, self.name)
        shape = (data.obs_size, *bounds, config.hidden, config.activation, start)
        self.actor = Actor(StackedActor(*shape), deterministic=False).to(self.device)
        self.critic = StackedQ(2, *shape).to(self.device)
        self.target = deepcopy(self.critic).requires_grad_(False)
        self.noise = [stream(seed, "noise", self.device) for seed in seeds]
        optimizer = critic_optimizer or value_optimizer(config, self.critic, len(self.seeds))
        self.critic_step = minibatch_step(
            config, self.critic, self._critic_objective, optimizer=optimizer
        )
        self.actor_step = minibatch_step(config, self.actor, self._actor_objective)
        self._targets: list[Tensor] = [*self.target.parameters()]
        self._sources: list[Tensor] = [*self.critic.parameters()]

    def update(self, batch: Batch) -> Tensor:
        """One step of critics and policy, in this order, then of the target critics.

        Returns:
            Figures (K, S) named by `STATS`.
        """
        there, here = normal(self.noise, 2, *batch.action.shape[1:]).unbind(1)
        of_critic = self.critic_step(*batch, there)
        of_actor = self.actor_step(batch.obs, batch.action, here)
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore
                self._targets, self._sources, self.config.polyak
            )
        return torch.cat([of_critic, of_actor])

    def next_action(self, next_obs: Tensor) -> Tensor:
        """The means (S, B, A) of what the critics' targets bootstrap from."""
        return self.actor.mean(next_obs)

    def policy_section(self, seed: int) -> dict:
        """Policy of the seed at this place of the job, as `ctrl_rl.policy` reads it."""
        std = self.actor.noise_std(seed)
        return self.actor.mean.section(seed, std, self.spec, self.normalizer)

    def state_dict(self) -> dict:
        """Everything that decides the future of training but what is drawn, as a copy."""
        parts = {name: getattr(self, name).state_dict() for name in _PARTS}
        noise = [generator.get_state() for generator in self.noise]
        return deepcopy({**parts, "noise": noise})

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        for generator, saved in zip(self.noise, state["noise"], strict=True):
            generator.set_state(saved)

    def _critic_objective(self, critic, obs, action, reward, next_obs, terminated, noise):
        """L_Q of a minibatch and mean Q."""
        with torch.no_grad():
            next_q = self.target(next_obs, drawn(self.actor, next_obs, noise))
            y = clipped_target(reward, terminated, next_q, self.config.gamma)
        q = critic(obs, action)
        return critic_loss(q, y), q.detach().mean((1, 2))[None]

    def _actor_objective(self, actor, obs, action, noise):
        """L_pi of a minibatch and the mean weight."""
        with torch.no_grad():
            own = self.critic(obs, drawn(actor, obs, noise)).amin(1)
            advantage = self.critic(obs, action).amin(1) - own
            weight = weights_of(advantage, self.config.inverse_temperature)
        return actor_loss(weight, actor.log_prob(obs, action)), weight.mean(1)[None]


_PARTS = ("actor", "critic", "target", "actor_step", "critic_step")


def train(
    config: AWACConfig,
    data: Transitions,
    spec: EnvSpec,
    seeds: Sequence[int] = (0,),
    run: Run | None = None,
    evaluate: Evaluate | None = None,
    critic_optimizer: MakeOptimizer | None = None,
) -> Run:
    """Train on recorded transitions, or go on where `run` stopped; see `offline.training.fit`."""
    return fit(AWAC(config, data, spec, seeds, critic_optimizer), data, run, evaluate)
