"""EDAC: SAC with many critics that are kept apart, and SAC-N as its case without that; one file.

Paper: An, Moon, Kim and Song, "Uncertainty-based offline reinforcement learning with diversified
Q-ensemble", NeurIPS 2021, arXiv:2110.01548; details after CORL's code (Tarasov et al., 2022,
arXiv:2210.07105).

    y       = r + gamma [not terminated] (min_j Qbar_j(s', a') - alpha log pi(a'|s')),
              a' drawn from pi(.|s')
    ES      = mean 1/(N-1) sum_{i != j} <g_i, g_j>,       g_j the unit vector along grad_a Q_j(s, a)
    L_Q     = sum_j mean (Q_j(s, a) - y)^2 + diversity ES
    L_pi    = mean (alpha log pi(a|s) - min_j Q_j(s, a)),               a drawn from pi(.|s)
    L_alpha = mean log alpha (-log pi(a|s) - H)
    Qbar   <- (1 - polyak) Qbar + polyak Q

The least of N critics is a value that doubts actions outside the data, where they disagree. To
disagree with few critics their gradients by the action are pushed apart: `diversity`, eta in the
paper. 0 is SAC-N, which needs more critics for the same. pi is a normal squashed by tanh to the
bounds of each action dimension, as in SAC.

Deviations from CORL's code, each with its reason:

1. Entropies and gradients are those of actions scaled to -1..1, which the critics read; H then is
   minus the number of action dimensions.
2. The gradient by the action is written out by the chain rule, layer by layer: a second derivative
   that compiles into one graph with the rest.
3. Policy and alpha take their steps before the critics, as there, but at once.
4. log_std is held within -20..2, as policies of this kind are elsewhere here; there -5..2. Weights
   start orthogonal.

Tensors: seeds first, minibatch (S, B, ...), critics (S, N, B). `docs/algorithms/edac.md` explains
every logged key.

Reading order: `METRICS` -> `EDACConfig` -> `action_gradient` -> losses -> `EDAC` -> `train`.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctrl_rl.compiled import MakeOptimizer
from ctrl_rl.distributions import SquashedGaussian
from ctrl_rl.networks import action_bounds
from ctrl_rl.policy import LOG_STD_RANGE
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec
from offline import collapse, training
from offline.adamo import AdamOConfig
from offline.cql import actor_loss, critic_loss, temperature_loss
from offline.networks import StackedMLP, StackedQ, normal, stream
from offline.settings import check_settings, minibatch_step, value_optimizer
from offline.training import Evaluate, fit
from offline.transitions import Batch, Transitions

METRICS: dict[str, str] = {
    "loss/critic": "L_Q, mean over the updates since the last row [reward^2]",
    "loss/actor": "L_pi + L_alpha, likewise [reward]",
    "value/q": "mean action value of all critics for the data's actions [reward]",
    "value/spread": "mean standard deviation of the critics there [reward]",
    "value/similarity": "ES, -1 to N - 1; 0 with diversity 0, which does not compute it",
    "policy/entropy": "mean of -log pi of the drawn actions, scaled to -1..1 [nat]",
    "policy/temperature": "alpha, mean over the same updates [reward/nat]",
    "gradient/critic": "Euclidean norm of L_Q's gradient",
    "gradient/actor": "Euclidean norm of the gradient of L_pi and L_alpha",
    **collapse.METRICS,
    **training.METRICS,
}
"""Every key that is logged; an unknown key is an error."""

STATS = (
    *("value/q", "value/spread", "value/similarity", "gradient/critic", "loss/critic"),
    *("policy/entropy", "policy/temperature", "gradient/actor", "loss/actor"),
)
"""What `EDAC.update` reports."""

_LONG = {"total_steps": 3_000_000}

PRESETS: dict[str, dict] = {
    "gym": _LONG,
    "halfcheetah-medium-expert-v2": {**_LONG, "diversity": 5.0},
    "walker2d-medium-expert-v2": {**_LONG, "diversity": 5.0},
    **{
        f"hopper-{kind}-v2": {**_LONG, "critics": 50}
        for kind in ("medium", "medium-replay", "medium-expert")
    },
    "maze2d": {**_LONG, "diversity": 0.1},
    "antmaze": _LONG,
    "adroit": {**_LONG, "critics": 50, "diversity": 200.0},
    "pen-human-v1": {**_LONG, "critics": 20, "diversity": 1000.0},
    **{
        f"pen-{kind}-v1": {**_LONG, "critics": 20, "diversity": 10.0}
        for kind in ("cloned", "expert")
    },
}
"""D4RL's data set, or else its family -> settings of `ctrl-rl offline train` other than its
defaults: CORL's for EDAC. For SAC-N they are diversity 0 and 10 critics for halfcheetah, 20 for
walker2d, 200 or 500 for hopper, 25 for mazes, 100 for Adroit."""


@dataclass(frozen=True, kw_only=True)
class EDACConfig:
    """Settings of EDAC; CORL's for D4RL's locomotion data."""

    total_steps: int = 1_000_000
    """Length of training [updates]."""
    batch_size: int = 256
    """Transitions per update and seed."""
    learning_rate: float = 3e-4
    """Adam's step size for policy, temperature and critics."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.005
    """Share of the critics that the target critics take on."""
    critics: int = 10
    """N."""
    diversity: float = 1.0
    """Weight of ES in L_Q [reward^2], eta in the paper; 0 is SAC-N."""
    target_entropy: float | None = None
    """H for actions scaled to -1..1 [nat]; None for minus the number of action dimensions."""
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
        target = self.target_entropy
        check_settings(
            self,
            ("critics", self.critics >= 2, "at least 2"),
            ("diversity", 0 <= self.diversity < math.inf, "0 or more"),
            ("target_entropy", target is None or math.isfinite(target), "a number or None"),
        )


# Losses -------------------------------------------------------------------------------------

_SLOPES = {
    "elu": lambda y: y.clamp(max=0.0) + 1,
    "relu": lambda y: (y > 0).to(y.dtype),
    "tanh": lambda y: 1 - y.square(),
}
"""Derivative of each activation, as a function of its result."""


def action_gradient(critic: StackedQ, obs: Tensor, action: Tensor, activation: str) -> Tensor:
    """Gradient (S, N, B, A) of each Q by the action scaled to -1..1.

    Args:
        critic: without layer normalisation.
        obs: (S, B, d)
        action: (S, B, A), in action units.
        activation: the critic's.
    """
    net: Any = critic.net
    scaled = (2 * action - (critic.high + critic.low)) / (critic.high - critic.low)
    x = torch.cat([obs, scaled], -1)[:, None].expand(-1, net.members, -1, -1).flatten(0, 1)
    *hidden, last = net.layers
    slopes = []
    for layer in hidden:
        x = net.activation(torch.baddbmm(layer.bias, x, layer.weight))
        slopes.append(_SLOPES[activation](x))
    gradient = last.weight.transpose(1, 2).expand(-1, x.shape[1], -1)
    for layer, slope in zip(reversed(hidden), reversed(slopes), strict=True):
        gradient = (gradient * slope) @ layer.weight.transpose(1, 2)
    return gradient[..., obs.shape[-1] :].unflatten(0, (net.seeds, net.members))


def similarity(gradient: Tensor) -> Tensor:
    """ES (S,) from the gradients (S, N, B, A)."""
    unit = gradient / (gradient.norm(dim=3, keepdim=True) + 1e-10)
    # sum_{i != j} <g_i, g_j> = |sum_i g_i|^2 - sum_i |g_i|^2
    apart = unit.sum(1).square().sum(2) - unit.square().sum((1, 3))
    return apart.mean(1) / (gradient.shape[1] - 1)


def soft_target(
    reward: Tensor,
    terminated: Tensor,
    next_q: Tensor,
    next_log_prob: Tensor,
    temperature: Tensor,
    gamma: float,
) -> Tensor:
    """y (S, B) from Qbar(s', a') (S, N, B), log pi(a'|s') (S, B) and alpha (S,)."""
    next_value = next_q.amin(1) - temperature[:, None] * next_log_prob
    return reward + gamma * (1 - terminated) * next_value


class Actor(nn.Module):
    """The policy, and log alpha; densities are those of actions scaled to -1..1."""

    low: Tensor
    high: Tensor

    def __init__(
        self, config: EDACConfig, obs_size: int, low: Tensor, high: Tensor, generators
    ) -> None:
        super().__init__()
        sizes = (obs_size, *config.hidden, 2 * len(low))
        self.net = StackedMLP(1, sizes, config.activation, generators, 0.01)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.log_temperature = nn.Parameter(torch.zeros(len(generators)))
        target = config.target_entropy
        self.target_entropy = -float(len(low)) if target is None else target

    def draw(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions (S, B, A) in action units for noise of that shape; log pi (S, B)."""
        mean, log_std = self.net(obs)[:, 0].chunk(2, -1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        pi = SquashedGaussian(mean, log_std, self.low, self.high)
        action, log_prob = pi.sample_with_log_prob(noise)
        return action, log_prob + ((self.high - self.low) / 2).log().sum()


# The learner --------------------------------------------------------------------------------


class EDAC:
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

    name, metrics, stats = "edac", METRICS, STATS

    def __init__(
        self,
        config: EDACConfig,
        data: Transitions,
        spec: EnvSpec,
        seeds: Sequence[int] = (0,),
        critic_optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.config, self.spec, self.seeds = config, spec, tuple(seeds)
        self.device, self.normalizer = data.device, data.normalizer
        start = [stream(seed, "weights") for seed in seeds]
        bounds = action_bounds(spec, self.name)
        shape = config.hidden, config.activation, start
        self.actor = Actor(config, data.obs_size, *bounds, start).to(self.device)
        self.critic = StackedQ(config.critics, data.obs_size, *bounds, *shape).to(self.device)
        self.target = deepcopy(self.critic).requires_grad_(False)
        self.noise = [stream(seed, "noise", self.device) for seed in seeds]
        self.actor_step = minibatch_step(config, self.actor, self._actor_objective)
        optimizer = critic_optimizer or value_optimizer(config, self.critic, len(self.seeds))
        self.critic_step = minibatch_step(
            config, self.critic, self._critic_objective, optimizer=optimizer
        )
        self._targets: list[Tensor] = [*self.target.parameters()]
        self._sources: list[Tensor] = [*self.critic.parameters()]

    def update(self, batch: Batch) -> Tensor:
        """One step of policy and temperature, then of the critics, then of the target critics.

        Returns:
            Figures (K, S) named by `STATS`.
        """
        here, there = normal(self.noise, 2, *batch.action.shape[1:]).unbind(1)
        of_actor = self.actor_step(batch.obs, here)
        of_critic = self.critic_step(*batch, there)
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore
                self._targets, self._sources, self.config.polyak
            )
        return torch.cat([of_critic, of_actor])

    def next_action(self, next_obs: Tensor) -> Tensor:
        """The middles (S, B, A) of what the critics' targets bootstrap from."""
        noise = next_obs.new_zeros(*next_obs.shape[:2], self.spec.action_size)
        return self.actor.draw(next_obs, noise)[0]

    def extra_reward(self) -> float:
        """alpha times the largest entropy [reward]: a uniform policy's, or the one aimed at."""
        entropy = max(self.spec.action_size * math.log(2), abs(self.actor.target_entropy))
        return float(self.actor.log_temperature.detach().exp().max()) * entropy

    def policy_section(self, seed: int) -> dict:
        """Policy of the seed at this place of the job, as `ctrl_rl.policy` reads it."""
        return {
            "format": 1,
            "kind": "squashed_gaussian_mlp",
            "spec": self.spec.to_json(),
            "group": "actor",
            "hidden": list(self.config.hidden),
            "activation": self.config.activation,
            "normalizer": None if self.normalizer is None else self.normalizer.section(),
            "bound": "tanh",
            "weights": self.actor.net.weights_of(seed),
        }

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
        """L_Q of a minibatch; mean Q, spread and ES."""
        config = self.config
        with torch.no_grad():
            alpha = self.actor.log_temperature.exp()
            next_action, next_log_prob = self.actor.draw(next_obs, noise)
            next_q = self.target(next_obs, next_action)
            y = soft_target(reward, terminated, next_q, next_log_prob, alpha, config.gamma)
        q = critic(obs, action)
        loss, alike = critic_loss(q, y), torch.zeros_like(q[:, 0, 0])
        if config.diversity:
            alike = similarity(action_gradient(critic, obs, action, config.activation))
            loss = loss + config.diversity * alike
        found = q.detach()
        return loss, torch.stack([found.mean((1, 2)), found.std(1).mean(1), alike.detach()])

    def _actor_objective(self, actor, obs, noise):
        """L_pi and L_alpha of a minibatch; entropy and temperature."""
        action, log_prob = actor.draw(obs, noise)
        alpha = actor.log_temperature.detach().exp()
        loss = actor_loss(log_prob, self.critic(obs, action), alpha) + temperature_loss(
            actor.log_temperature, log_prob.detach(), actor.target_entropy
        )
        return loss, torch.stack([-log_prob.detach().mean(1), alpha])


_PARTS = ("actor", "critic", "target", "actor_step", "critic_step")


def train(
    config: EDACConfig,
    data: Transitions,
    spec: EnvSpec,
    seeds: Sequence[int] = (0,),
    run: Run | None = None,
    evaluate: Evaluate | None = None,
    critic_optimizer: MakeOptimizer | None = None,
) -> Run:
    """Train on recorded transitions, or go on where `run` stopped; see `offline.training.fit`."""
    return fit(EDAC(config, data, spec, seeds, critic_optimizer), data, run, evaluate)
