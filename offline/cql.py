"""Conservative Q-learning, CQL(H), one file.

Paper: Kumar, Zhou, Tucker and Levine, "Conservative Q-learning for offline reinforcement learning",
NeurIPS 2020, arXiv:2006.04779.

    y       = r + gamma [not terminated] min_i Qbar_i(s', a'),      a' drawn from pi(.|s')
    gap_i   = mean (log sum_a exp(Q_i(s, a) - log density(a)) - Q_i(s, a_data))        (eq. 4)
    L_Q     = mean sum_i (Q_i(s, a_data) - y)^2 + lambda conservatism sum_i gap_i
    L_pi    = mean (alpha log pi(a|s) - min_i Q_i(s, a)),           a drawn from pi(.|s)
    L_alpha = mean log alpha (-log pi(a|s) - H)
    L_lambda = lambda conservatism mean_i (target_gap - gap_i)
    Qbar   <- (1 - polyak) Qbar + polyak Q

The sum over a estimates an integral by importance sampling: `num_actions` each drawn uniformly
within the bounds, from pi(.|s) and from pi(.|s'), all as actions in s, each by its own density
(appendix F). pi is a normal squashed by tanh to the bounds of each action dimension, as in SAC.

Deviations from the paper, each with its reason:

1. Densities, that of uniform actions included, are those of actions in their own units: uniform
   over the whole range, log density -sum log(high - low), -A log 2 for bounds of -1..1.
2. Without `target_gap`, the default, lambda is 1. With it, the paper's Lagrange form, log lambda is
   what L_lambda is minimised over, by Adam at the critics' step size, and lambda at most 1e6, as in
   CORL. The paper uses this form for AntMaze, Adroit and kitchen.
3. The defaults for locomotion are CORL's (Tarasov et al., 2022, arXiv:2210.07105), which this can
   be compared with: conservatism 10, three layers, no behaviour cloning at the start.
4. The critics read the action scaled to -1..1. Weights start orthogonal. H is that of actions
   scaled to -1..1.
5. log_std is what the network gives, as in the authors' code (aviralkumar2907/CQL at d67dbe9). In
   CORL it is times a learned factor, 1 at the start, plus a learned offset, -1 at the start: its
   policy begins at a deviation of 1/e, ours at 1.
6. L_pi asks the critics as they are after their step, as SAC does here; in CORL and in the authors'
   code it asks them as they were before. One graph per step needs no values of another's.
7. lambda starts at 1, as in the authors' code, and in CORL at e. CORL's lambda conservatism
   multiplies gap_i - target_gap, as here; the authors' conservatism multiplies the gap alone.
8. What CORL adds for AntMaze is not here: the largest target of ten next actions, gap_i at least
   -200, rewards 10 r - 5, and five layers in one critic and three in the other.

Tensors: seeds first, minibatch (S, B, ...), critics (S, 2, B); N drawn actions (S, B, N, A).
`docs/algorithms/cql.md` explains every logged key.

Reading order: `METRICS` -> `CQLConfig` -> losses -> `Actor` -> `CQL` -> `train`.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

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
from offline.networks import StackedMLP, StackedQ, normal, stream, uniform
from offline.settings import check_settings, minibatch_step, value_optimizer
from offline.td3_bc import critic_loss
from offline.training import Evaluate, fit
from offline.transitions import Batch, Transitions

METRICS: dict[str, str] = {
    "loss/critic": "L_Q, mean over the updates since the last row [reward^2]",
    "loss/actor": "L_pi + L_alpha, likewise [reward]",
    "value/q": "mean action value of the two critics for the data's actions [reward]",
    "value/gap": "gap_i, mean of the two critics [reward]",
    "value/conservatism": "lambda conservatism, weight of the gap in L_Q [reward]",
    "policy/entropy": "mean of -log pi of the drawn actions, in action units [nat]",
    "policy/temperature": "alpha, mean over the same updates [reward/nat]",
    "gradient/critic": "Euclidean norm of L_Q's gradient",
    "gradient/actor": "Euclidean norm of the gradient of L_pi and L_alpha",
    **collapse.METRICS,
    **training.METRICS,
}
"""Every key that is logged; an unknown key is an error."""

STATS = (
    *("value/q", "value/gap", "value/conservatism", "gradient/critic", "loss/critic"),
    *("policy/entropy", "policy/temperature", "gradient/actor", "loss/actor"),
)
"""What `CQL.update` reports."""

LARGEST_FACTOR = 1e6
"""Bound of lambda (code of CORL)."""

PRESETS: dict[str, dict] = {
    "gym": {"normalize_obs": True},
    "hopper-medium-v2": {"normalize_obs": True, "reward": "locomotion"},
    "maze2d": {"normalize_obs": True, "target_gap": 5.0},
    "antmaze": {"reward": "antmaze", "conservatism": 5.0},
    "adroit": {"normalize_obs": True, "actor_learning_rate": 1e-4, "conservatism": 1.0},
}
"""D4RL's data set, or else its family -> settings of `ctrl-rl offline train` other than its
defaults: CORL's; for AntMaze the paper's start of its Lagrange form."""


@dataclass(frozen=True, kw_only=True)
class CQLConfig:
    """Settings of CQL; CORL's for D4RL's locomotion data."""

    total_steps: int = 1_000_000
    """Length of training [updates]."""
    batch_size: int = 256
    """Transitions per update and seed."""
    learning_rate: float = 3e-4
    """Adam's step size for the critics."""
    actor_learning_rate: float = 3e-5
    """Adam's step size for policy and temperature."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.005
    """Share of the critics that the target critics take on."""
    conservatism: float = 10.0
    """Weight of the gap in L_Q [reward]; 5 or 10 in the paper's code."""
    target_gap: float | None = None
    """Gap that a factor of `conservatism` is adapted to hold [reward]; None for a factor of 1."""
    num_actions: int = 10
    """Actions drawn of each of the three kinds."""
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
        target, gap = self.target_entropy, self.target_gap
        check_settings(
            self,
            ("actor_learning_rate", 0 < self.actor_learning_rate < math.inf, "positive"),
            ("conservatism", 0 <= self.conservatism < math.inf, "0 or more"),
            ("target_gap", gap is None or math.isfinite(gap), "a number or None"),
            ("num_actions", self.num_actions >= 1, "at least 1"),
            ("target_entropy", target is None or math.isfinite(target), "a number or None"),
        )


# Losses -------------------------------------------------------------------------------------


def uniform_actions(random: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Actions (..., A) over the whole range from numbers in 0..1, and their log density ()."""
    return torch.lerp(low, high, random), -(high - low).log().sum()


def gaps(q_drawn: Tensor, log_density: Tensor, q_data: Tensor) -> Tensor:
    """gap_i (S, 2), how far drawn actions are valued above the data's.

    Args:
        q_drawn: Q_i(s, a) of the drawn actions (S, 2, B, M).
        log_density: of each of them (S, B, M).
        q_data: Q_i(s, a_data) (S, 2, B).
    """
    return ((q_drawn - log_density[:, None]).logsumexp(3) - q_data).mean(2)


def actor_loss(log_prob: Tensor, q: Tensor, temperature: Tensor) -> Tensor:
    """L_pi (S,) from log pi(a|s) (S, B), Q(s, a) (S, 2, B) and alpha (S,)."""
    return (temperature[:, None] * log_prob - q.amin(1)).mean(1)


def temperature_loss(log_temperature: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """L_alpha (S,): alpha falls while the entropy is above its target, and rises below it."""
    return log_temperature * (-log_prob.mean(1) - target_entropy)


def factor_loss(factor: Tensor, conservatism: float, gap: Tensor, target_gap: float) -> Tensor:
    """L_lambda (S,) of lambda (S,) and the mean gap (S,): lambda rises while the gap is larger."""
    return factor * conservatism * (target_gap - gap)


class Factor(nn.Module):
    """lambda (S,) of the seeds."""

    def __init__(self, seeds: int) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(seeds))

    def forward(self) -> Tensor:
        """The factor of each seed."""
        return self.log.exp().clamp(max=LARGEST_FACTOR)


class Actor(nn.Module):
    """The policy, and log alpha."""

    low: Tensor
    high: Tensor

    def __init__(
        self, config: CQLConfig, obs_size: int, low: Tensor, high: Tensor, generators
    ) -> None:
        super().__init__()
        sizes = (obs_size, *config.hidden, 2 * len(low))
        self.net = StackedMLP(1, sizes, config.activation, generators, 0.01)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.log_temperature = nn.Parameter(torch.zeros(len(generators)))
        target = -float(len(low)) if config.target_entropy is None else config.target_entropy
        self.target_entropy = target + ((high - low) / 2).log().sum().item()  # in action units

    def draw(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions for noise (S, B, N, A), N in each of the states (S, B, d); log pi (S, B, N)."""
        mean, log_std = self.net(obs)[:, 0].chunk(2, -1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        shape = noise.shape
        spread = mean[:, :, None].expand(shape), log_std[:, :, None].expand(shape)
        return SquashedGaussian(*spread, self.low, self.high).sample_with_log_prob(noise)


# The learner --------------------------------------------------------------------------------


class CQL:
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

    name, metrics, stats = "cql", METRICS, STATS

    def __init__(
        self,
        config: CQLConfig,
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
        self.critic = StackedQ(2, data.obs_size, *bounds, *shape).to(self.device)
        self.target = deepcopy(self.critic).requires_grad_(False)
        self._parts = _PARTS
        self.factor = Factor(len(self.seeds)).to(self.device)
        self.noise = [stream(seed, "noise", self.device) for seed in seeds]
        optimizer = critic_optimizer or value_optimizer(config, self.critic, len(self.seeds))
        self.critic_step = minibatch_step(
            config, self.critic, self._critic_objective, optimizer=optimizer
        )
        if config.target_gap is not None:
            self._parts = *_PARTS, "factor", "factor_step"
            self.factor_step = minibatch_step(config, self.factor, self._factor_objective)
        rate = config.actor_learning_rate
        self.actor_step = minibatch_step(config, self.actor, self._actor_objective, rate)
        self._targets: list[Tensor] = [*self.target.parameters()]
        self._sources: list[Tensor] = [*self.critic.parameters()]

    def update(self, batch: Batch) -> Tensor:
        """One step of critics, lambda, policy and temperature, in this order, then of the targets.

        Returns:
            Figures (K, S) named by `STATS`.
        """
        (_, b, a), n = batch.action.shape, self.config.num_actions
        random = uniform(self.noise, b, n, a)
        noise = normal(self.noise, 2 * n + 2, b, a).transpose(1, 2)
        of_critic = self.critic_step(*batch, random, noise[:, :, :-1])
        if self.config.target_gap is not None:
            self.factor_step(of_critic[STATS.index("value/gap")])
        of_actor = self.actor_step(batch.obs, noise[:, :, -1:])
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore
                self._targets, self._sources, self.config.polyak
            )
        return torch.cat([of_critic, of_actor])

    def next_action(self, next_obs: Tensor) -> Tensor:
        """The middles (S, B, A) of what the critics' targets bootstrap from."""
        noise = next_obs.new_zeros(*next_obs.shape[:2], 1, self.spec.action_size)
        return self.actor.draw(next_obs, noise)[0][:, :, 0]

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
        parts = {name: getattr(self, name).state_dict() for name in self._parts}
        noise = [generator.get_state() for generator in self.noise]
        return deepcopy({**parts, "noise": noise})

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in self._parts:
            getattr(self, name).load_state_dict(state[name])
        for generator, saved in zip(self.noise, state["noise"], strict=True):
            generator.set_state(saved)

    def _critic_objective(self, critic, obs, action, reward, next_obs, terminated, random, noise):
        """L_Q of a minibatch; mean Q and gap."""
        n, bounds = self.config.num_actions, (self.actor.low, self.actor.high)
        with torch.no_grad():
            here, log_here = self.actor.draw(obs, noise[:, :, :n])
            there, log_there = self.actor.draw(next_obs, noise[:, :, n:])
            next_q = self.target(next_obs, there[:, :, -1]).amin(1)
            y = reward + self.config.gamma * (1 - terminated) * next_q
            anywhere, log_anywhere = uniform_actions(random, *bounds)
            drawn = torch.cat([anywhere, here, there[:, :, :-1]], 2)
            log_anywhere = log_anywhere.expand(log_here.shape)
            log_density = torch.cat([log_anywhere, log_here, log_there[:, :, :-1]], 2)
        q = critic(obs, action)
        gap = gaps(values_of(critic, obs, drawn), log_density, q)
        weight = self.factor().detach() * self.config.conservatism
        loss = critic_loss(q, y) + weight * gap.sum(1)
        return loss, torch.stack([q.detach().mean((1, 2)), gap.detach().mean(1), weight])

    def _factor_objective(self, factor, gap):
        """L_lambda of the seeds' gaps (S,); no figures."""
        target_gap = self.config.target_gap
        assert target_gap is not None
        loss = factor_loss(factor(), self.config.conservatism, gap, target_gap)
        return loss, loss.detach()[None][:0]

    def _actor_objective(self, actor, obs, noise):
        """L_pi and L_alpha of a minibatch; entropy and temperature."""
        action, log_prob = (x[:, :, 0] for x in actor.draw(obs, noise))
        alpha = actor.log_temperature.detach().exp()
        q = self.critic(obs, action)
        loss = actor_loss(log_prob, q, alpha) + temperature_loss(
            actor.log_temperature, log_prob.detach(), actor.target_entropy
        )
        return loss, torch.stack([-log_prob.detach().mean(1), alpha])


def values_of(critic: StackedQ, obs: Tensor, drawn: Tensor) -> Tensor:
    """Q_i(s, a) (S, 2, B, M) of M actions (S, B, M, A) in each state (S, B, d)."""
    s, b, m, a = drawn.shape
    rows = obs[:, :, None].expand(-1, -1, m, -1).reshape(s, b * m, -1)
    return critic(rows, drawn.reshape(s, b * m, a)).unflatten(2, (b, m))


_PARTS = ("actor", "critic", "target", "actor_step", "critic_step")


def train(
    config: CQLConfig,
    data: Transitions,
    spec: EnvSpec,
    seeds: Sequence[int] = (0,),
    run: Run | None = None,
    evaluate: Evaluate | None = None,
    critic_optimizer: MakeOptimizer | None = None,
) -> Run:
    """Train on recorded transitions, or go on where `run` stopped; see `offline.training.fit`."""
    return fit(CQL(config, data, spec, seeds, critic_optimizer), data, run, evaluate)
