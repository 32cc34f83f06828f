"""Implicit Q-learning, one file.

Paper: Kostrikov, Nair and Levine, "Offline reinforcement learning with implicit Q-learning", ICLR
2022, arXiv:2110.06169.

    A     = min_i Qbar_i(s, a) - V(s)
    L_V   = mean |expectile - [A < 0]| A^2                                             (eq. 5)
    y     = r + gamma [not terminated] V(s')
    L_Q   = mean sum_i (Q_i(s, a) - y)^2                                               (eq. 6)
    L_pi  = -mean min(exp(inverse_temperature A), 100) log pi(a|s)                     (eq. 7)
    Qbar <- (1 - polyak) Qbar + polyak Q

pi is a normal whose mean is squashed by tanh to the bounds and whose deviation does not depend on
the observation; it acts by its mean. Its step size falls to 0 along half a cosine over the run.
No action outside the data is ever asked for its value. Rewards of D4RL's locomotion data are scaled
("locomotion") and of AntMaze shifted ("antmaze") by presets of `Transitions.from_episodes`.

Settings of the paper (appendix B) that are not the defaults: AntMaze expectile 0.9, inverse
temperature 10; Adroit and kitchen expectile 0.7, inverse temperature 0.5, and dropout of 0.1 in
the policy.

Deviations from the paper, each with its reason:

1. The density is that of actions scaled to -1..1, so that the deviation does not depend on the
   action's units; the critics read actions scaled like this, too.
2. A is that of before the update of V, in L_pi, too: the authors' code computes it anew. This
   spares a pass through V.
3. Weights start orthogonal.
4. With `deterministic` the policy has no deviation, and (pi(s) - a)^2, summed over dimensions,
   stands for -log pi: as in CORL (Tarasov et al., 2022, arXiv:2210.07105) for some data sets.

Tensors: seeds first, minibatch (S, B, ...), critics (S, 2, B). `docs/algorithms/iql.md` explains
every logged key.

Reading order: `METRICS` -> `IQLConfig` -> losses -> `Actor` -> `IQL` -> `train`.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ctrl_rl.compiled import MakeOptimizer
from ctrl_rl.networks import action_bounds
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec
from offline import training
from offline.adamo import AdamOConfig
from offline.networks import StackedActor, StackedMLP, StackedQ, dropout_masks, stream
from offline.settings import check_settings, minibatch_step, value_optimizer
from offline.td3_bc import critic_loss
from offline.training import Evaluate, fit
from offline.transitions import Batch, Transitions

METRICS: dict[str, str] = {
    "loss/value": "L_V, mean over the updates since the last row [reward^2]",
    "loss/critic": "L_Q, likewise [reward^2]",
    "loss/actor": "L_pi, likewise",
    "value/v": "mean V(s) on the minibatches [reward]",
    "value/q": "mean action value of the two critics there [reward]",
    "policy/weight": "mean weight of an action in L_pi; its bound is 100",
    "gradient/value": "Euclidean norm of L_V's gradient",
    "gradient/critic": "Euclidean norm of L_Q's gradient",
    "gradient/actor": "Euclidean norm of L_pi's gradient",
    **training.METRICS,
}
"""Every key that is logged; an unknown key is an error."""

STATS = (
    *("value/v", "gradient/value", "loss/value"),
    *("policy/weight", "gradient/actor", "loss/actor"),
    *("value/q", "gradient/critic", "loss/critic"),
)
"""What `IQL.update` reports."""

PRESETS: dict[str, dict] = {
    "gym": {"reward": "locomotion"},
    "antmaze": {"reward": "antmaze", "expectile": 0.9, "inverse_temperature": 10.0},
    "adroit": {"inverse_temperature": 0.5, "dropout": 0.1},
    "kitchen": {"inverse_temperature": 0.5, "dropout": 0.1},
}
"""D4RL's family -> settings of `ctrl-rl offline train` other than its defaults: the paper's, on
purpose. CORL's are others, see `data/published/settings.json`."""

LARGEST_WEIGHT = 100.0
"""Bound of an action's weight (code of Kostrikov et al.)."""

LOG_STD_RANGE = (-5.0, 2.0)
"""Bounds of the policy's log_std, for actions scaled to -1..1 (code of Kostrikov et al.)."""


@dataclass(frozen=True, kw_only=True)
class IQLConfig:
    """Settings of IQL; the paper's for D4RL's locomotion data."""

    total_steps: int = 1_000_000
    """Length of training [updates]."""
    batch_size: int = 256
    """Transitions per update and seed."""
    learning_rate: float = 3e-4
    """Adam's step size; the policy's is this one at the start."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.005
    """Share of the critics that the target critics take on."""
    expectile: float = 0.7
    """Which expectile of Q(s, a) over the data's actions V is; 0.5 is their mean."""
    inverse_temperature: float = 3.0
    """Factor of the advantage in an action's weight [1/reward]; 0 is behaviour cloning."""
    deterministic: bool = False
    """The policy has no deviation and is regressed on actions."""
    dropout: float = 0.0
    """Share of the outputs of the policy's hidden layers that an update leaves out."""
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers of all networks."""
    activation: str = "relu"
    """"elu", "relu" or "tanh"."""
    optimizer: str = "adam"
    """That of critics and V: "adam", or "adamo" with the settings in `adamo`."""
    adamo: AdamOConfig = AdamOConfig()
    """Settings of `offline.adamo`; without effect where `optimizer` is "adam"."""
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        check_settings(
            self,
            ("expectile", 0 < self.expectile < 1, "above 0 and below 1"),
            ("inverse_temperature", 0 <= self.inverse_temperature < math.inf, "0 or more"),
            ("dropout", 0 <= self.dropout < 1, "0 or more and below 1"),
        )


# Losses -------------------------------------------------------------------------------------


def expectile_loss(advantage: Tensor, expectile: float) -> Tensor:
    """L_V (S,) from A (S, B)."""
    weight = (expectile - (advantage < 0).to(advantage.dtype)).abs()
    return (weight * advantage.square()).mean(1)


def weights_of(advantage: Tensor, inverse_temperature: float) -> Tensor:
    """Weight of each action in L_pi, as A."""
    # Cut before the exponential, so that it never overflows.
    return (inverse_temperature * advantage).clamp(max=math.log(LARGEST_WEIGHT)).exp()


def actor_loss(weight: Tensor, log_prob: Tensor) -> Tensor:
    """L_pi (S,) from weights and log pi(a|s) (S, B)."""
    return -(weight * log_prob).mean(1)


class Actor(nn.Module):
    """pi: the mean of its actions, and the log of their deviation where it has one."""

    def __init__(self, mean: StackedActor, deterministic: bool) -> None:
        super().__init__()
        self.mean = mean
        self.log_std = None
        if not deterministic:
            self.log_std = nn.Parameter(torch.zeros(mean.net.seeds, 1, len(mean.low)))

    def log_prob(self, obs: Tensor, action: Tensor, masks: Sequence[Tensor] = ()) -> Tensor:
        """log pi(a|s) (S, B) of actions scaled to -1..1; of a deterministic one -|pi(s) - a|^2."""
        error = (action - self.mean(obs, masks)) / ((self.mean.high - self.mean.low) / 2)
        if self.log_std is None:
            return -error.square().sum(2)
        log_std = self.log_std.clamp(*LOG_STD_RANGE)
        z = error * (-log_std).exp()
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(2)

    def noise_std(self, seed: int) -> Tensor:
        """Deviation (A,) of one seed's actions from their mean, in action units."""
        half_range = (self.mean.high - self.mean.low) / 2
        if self.log_std is None:
            return torch.zeros_like(half_range)
        return self.log_std[seed, 0].detach().clamp(*LOG_STD_RANGE).exp() * half_range


# The learner --------------------------------------------------------------------------------


class IQL:
    """Networks and optimisers of S seeds; no data inside.

    Args:
        config: settings.
        data: what will be learned from: its sizes, device and normaliser count.
        spec: what the policy reads and gives.
        seeds: decide initial weights and dropout; S of them, learned side by side.
        critic_optimizer: makes the optimiser of the critics; None for what `config` says.

    Raises:
        ValueError: the spec's actions are discrete or unbounded.
    """

    name, metrics, stats = "iql", METRICS, STATS
    fixed_length = True

    def __init__(
        self,
        config: IQLConfig,
        data: Transitions,
        spec: EnvSpec,
        seeds: Sequence[int] = (0,),
        critic_optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.config, self.spec, self.seeds = config, spec, tuple(seeds)
        self.device, self.normalizer = data.device, data.normalizer
        start = [stream(seed, "weights") for seed in seeds]
        shape = config.hidden, config.activation, start
        bounds = action_bounds(spec, self.name)
        mean = StackedActor(data.obs_size, *bounds, *shape)
        self.actor = Actor(mean, config.deterministic).to(self.device)
        self.critic = StackedQ(2, data.obs_size, *bounds, *shape).to(self.device)
        sizes = (data.obs_size, *config.hidden, 1)
        self.value = StackedMLP(1, sizes, config.activation, start).to(self.device)
        self.target = deepcopy(self.critic).requires_grad_(False)
        self.noise = [stream(seed, "dropout", self.device) for seed in seeds]
        of_value = value_optimizer(config, self.value, len(self.seeds))
        of_critic = critic_optimizer or value_optimizer(config, self.critic, len(self.seeds))
        self.value_step = minibatch_step(
            config, self.value, self._value_objective, optimizer=of_value
        )
        self.actor_step = minibatch_step(config, self.actor, self._actor_objective)
        self.critic_step = minibatch_step(
            config, self.critic, self._critic_objective, optimizer=of_critic
        )
        self._targets: list[Tensor] = [*self.target.parameters()]
        self._sources: list[Tensor] = [*self.critic.parameters()]
        self.updates = 0

    def update(self, batch: Batch) -> Tensor:
        """One step of V, policy and critics, then of the target critics.

        Returns:
            Figures (K, S) named by `STATS`.
        """
        rate = self.config.learning_rate / 2
        rate *= 1 + math.cos(math.pi * self.updates / self.config.total_steps)
        self.actor_step.learning_rate.fill_(rate)
        obs, action, reward, next_obs, terminated = batch
        # The advantages ride on the figures of V's step.
        of_value = self.value_step(obs, action)
        of_value, advantage = of_value[[0, -2, -1]], of_value[1:-2].T
        masks = dropout_masks(self.noise, self.config.dropout, obs.shape[1], self.config.hidden)
        of_actor = self.actor_step(obs, action, advantage, *masks)
        of_critic = self.critic_step(obs, action, reward, next_obs, terminated)
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore
                self._targets, self._sources, self.config.polyak
            )
        self.updates += 1
        return torch.cat([of_value, of_actor, of_critic])

    def policy_section(self, seed: int) -> dict:
        """Policy of the seed at this place of the job, as `ctrl_rl.policy` reads it."""
        std = self.actor.noise_std(seed)
        return self.actor.mean.section(seed, std, self.spec, self.normalizer)

    def state_dict(self) -> dict:
        """Everything that decides the future of training but what is drawn, as a copy."""
        parts = {name: getattr(self, name).state_dict() for name in _PARTS}
        noise = [generator.get_state() for generator in self.noise]
        return deepcopy({**parts, "noise": noise, "updates": self.updates})

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        for generator, saved in zip(self.noise, state["noise"], strict=True):
            generator.set_state(saved)
        self.updates = state["updates"]

    def _value_objective(self, value, obs, action):
        """L_V of a minibatch; mean V, then A of each sample."""
        with torch.no_grad():
            q = self.target(obs, action).amin(1)
        v = value(obs)[:, 0, :, 0]
        advantage = q - v
        figures = torch.cat([v.detach().mean(1)[None], advantage.detach().T])
        return expectile_loss(advantage, self.config.expectile), figures

    def _actor_objective(self, actor, obs, action, advantage, *masks):
        """L_pi of a minibatch and the mean weight."""
        weight = weights_of(advantage, self.config.inverse_temperature)
        log_prob = actor.log_prob(obs, action, masks)
        return actor_loss(weight, log_prob), weight.mean(1)[None]

    def _critic_objective(self, critic, obs, action, reward, next_obs, terminated):
        """L_Q of a minibatch and mean Q."""
        with torch.no_grad():
            next_value = self.value(next_obs)[:, 0, :, 0]
            y = reward + self.config.gamma * (1 - terminated) * next_value
        q = critic(obs, action)
        return critic_loss(q, y), q.detach().mean((1, 2))[None]


_PARTS = ("actor", "critic", "value", "target", "actor_step", "critic_step", "value_step")


def train(
    config: IQLConfig,
    data: Transitions,
    spec: EnvSpec,
    seeds: Sequence[int] = (0,),
    run: Run | None = None,
    evaluate: Evaluate | None = None,
    critic_optimizer: MakeOptimizer | None = None,
) -> Run:
    """Train on recorded transitions, or go on where `run` stopped; see `offline.training.fit`."""
    return fit(IQL(config, data, spec, seeds, critic_optimizer), data, run, evaluate)
