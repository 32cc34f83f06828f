"""ReBRAC: TD3+BC with a penalty in the critics, too, one file.

Paper: Tarasov, Kurenkov, Nikulin and Kolesnikov, "Revisiting the minimalist approach to offline
reinforcement learning", NeurIPS 2023, arXiv:2305.09836; details after CORL's code of the same
authors.

    eps  ~ clip(N(0, target_noise), -noise_clip, noise_clip)
    a'   = clip(pi_bar(s') + eps, low, high)
    y    = r + gamma [not terminated] (min_i Qbar_i(s', a') - critic_penalty |a' - a'_data|^2)
    L_Q  = mean sum_i (Q_i(s, a) - y)^2
    L_pi = mean (actor_penalty |pi(s) - a|^2 - lambda min_i Q_i(s, pi(s))),
           lambda = 1 / mean |min_i Q_i(s, pi(s))|, a constant of the gradient,
           on every `policy_delay`-th update
    Qbar, pi_bar <- (1 - polyak) Qbar, pi_bar + polyak Q, pi,     on the same updates

a'_data is the action that the data took in s'. Beside the penalties the paper's changes to TD3+BC
are layer normalisation in the critics, a third hidden layer, minibatches of 1,024 and a larger step
size.

Deviations from CORL's code, each with its reason:

1. Noise and penalties are those of actions scaled to -1..1, so that nothing depends on the action's
   units; squares are summed over dimensions.
2. The last step before a time-out is no transition even where its successor is known: no action was
   taken there. CORL drops it, too. What is dropped is counted.
3. Layer normalisation has no parameters of its own and stands before each activation, not behind.
   Weights start orthogonal.
4. The policy takes its step on the first of `policy_delay` updates, not on the last, so that every
   update has figures of both. The targets follow the new networks; in the code the old ones.

Tensors: seeds first, minibatch (S, B, ...), critics (S, 2, B). `docs/algorithms/rebrac.md` explains
every logged key.

Reading order: `METRICS` -> `ReBRACConfig` -> `PairedTransitions` -> losses -> `ReBRAC` -> `train`.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ctrl_rl.compiled import MakeOptimizer
from ctrl_rl.networks import action_bounds
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec
from offline import collapse, training
from offline.adamo import AdamOConfig
from offline.networks import StackedActor, StackedQ, normal, stream
from offline.settings import check_settings, minibatch_step, value_optimizer
from offline.td3_bc import critic_loss, smoothed
from offline.training import Evaluate, fit
from offline.transitions import Transitions

METRICS: dict[str, str] = {
    "loss/critic": "L_Q, mean over the updates since the last row [reward^2]",
    "loss/actor": "L_pi, over those of them that step the policy",
    "value/q": "mean action value of the two critics on the minibatches [reward]",
    "value/penalty": "mean |a' - a'_data|^2 where the value goes on, actions scaled to -1..1",
    "policy/distance": "mean |pi(s) - a|^2, likewise",
    "gradient/critic": "Euclidean norm of L_Q's gradient",
    "gradient/actor": "Euclidean norm of L_pi's gradient",
    **collapse.METRICS,
    **training.METRICS,
}
"""Every key that is logged; an unknown key is an error."""

STATS = (
    *("value/q", "value/penalty", "gradient/critic", "loss/critic"),
    *("policy/distance", "gradient/actor", "loss/actor"),
)
"""What `ReBRAC.update` reports."""

_PENALTIES = {  # actor's, critics'
    "halfcheetah-random-v2": (0.001, 0.1),
    "halfcheetah-medium-v2": (0.001, 0.01),
    "halfcheetah-medium-replay-v2": (0.01, 0.001),
    "halfcheetah-medium-expert-v2": (0.01, 0.1),
    "halfcheetah-full-replay-v2": (0.001, 0.1),
    "halfcheetah-expert-v2": (0.01, 0.01),
    "hopper-random-v2": (0.001, 0.01),
    "hopper-medium-v2": (0.01, 0.01),
    "hopper-medium-replay-v2": (0.05, 0.5),
    "hopper-medium-expert-v2": (0.1, 0.01),
    "hopper-full-replay-v2": (0.01, 0.01),
    "hopper-expert-v2": (0.1, 0.1),
    "walker2d-random-v2": (0.01, 0.0),
    "walker2d-medium-v2": (0.05, 0.1),
    "walker2d-medium-replay-v2": (0.05, 0.01),
    "walker2d-medium-expert-v2": (0.01, 0.01),
    "walker2d-full-replay-v2": (0.01, 0.01),
    "walker2d-expert-v2": (0.01, 0.5),
    "maze2d": (0.003, 0.001),
    "pen-human-v1": (0.1, 0.5),
    "pen-cloned-v1": (0.05, 0.5),
    "pen-expert-v1": (0.01, 0.01),
    "door-human-v1": (0.1, 0.1),
    "door-cloned-v1": (0.01, 0.1),
    "door-expert-v1": (0.05, 0.01),
    "hammer-human-v1": (0.01, 0.5),
    "hammer-cloned-v1": (0.1, 0.5),
    "hammer-expert-v1": (0.01, 0.01),
    "relocate-human-v1": (0.1, 0.01),
    "relocate-cloned-v1": (0.1, 0.01),
    "relocate-expert-v1": (0.05, 0.01),
}

_SLOW = {"learning_rate": 3e-4, "batch_size": 256}

PRESETS: dict[str, dict] = {
    name: {"actor_penalty": actor, "critic_penalty": critic}
    | ({} if name.startswith(("halfcheetah", "hopper", "walker2d")) else _SLOW)
    for name, (actor, critic) in _PENALTIES.items()
}
"""Data set, or family of D4RL -> settings other than the defaults: those of CORL's configurations,
which the authors chose by searching for each data set. Those of AntMaze are not here: they have
rewards times 100 and a step size of the critics' own."""


@dataclass(frozen=True, kw_only=True)
class ReBRACConfig:
    """Settings of ReBRAC; the paper's for D4RL's locomotion data."""

    total_steps: int = 1_000_000
    """Length of training [updates]."""
    batch_size: int = 1024
    """Transitions per update and seed."""
    learning_rate: float = 1e-3
    """Adam's step size for policy and critics."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.005
    """Share of the networks that the target networks take on."""
    actor_penalty: float = 0.01
    """Weight of the policy's distance from the data's actions."""
    critic_penalty: float = 0.01
    """Weight of that of the next action, in the critics' target [reward]."""
    policy_delay: int = 2
    """Updates of the critics per update of the policy and of the targets."""
    target_noise: float = 0.2
    """Standard deviation of what is added to the target action [half ranges]."""
    noise_clip: float = 0.5
    """Largest size of the latter [half ranges]."""
    hidden: tuple[int, ...] = (256, 256, 256)
    """Widths of the hidden layers of policy and critics."""
    layer_norm: bool = True
    """Normalise the hidden layers of the critics."""
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
        not_negative = ("actor_penalty", "critic_penalty", "target_noise", "noise_clip")
        check_settings(
            self,
            ("policy_delay", self.policy_delay >= 1, "at least 1"),
            *((n, 0 <= getattr(self, n) < math.inf, "0 or more") for n in not_negative),
        )


class PairedBatch(NamedTuple):
    """B transitions for each of S seeds, each with the action that followed."""

    obs: Tensor
    """(S, B, d)"""
    action: Tensor
    """(S, B, A)"""
    reward: Tensor
    """(S, B)"""
    next_obs: Tensor
    """(S, B, d); means nothing where `terminated` is 1"""
    terminated: Tensor
    """(S, B)"""
    next_action: Tensor
    """(S, B, A), the data's in next_obs; means nothing where `terminated` is 1"""


class PairedTransitions(Transitions):
    """Those transitions whose value ends there or whose next action is known.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, data: Transitions) -> None:
        d, a = data.obs_size, data.action_size
        last = torch.zeros(len(data.rows), dtype=torch.bool, device=data.device)
        last[data.starts + data.lengths - 1] = True
        ends = data.rows[:, d + a + 1] > 0
        index = data.index[~last[data.index] | ends[data.index]]
        if len(index) == 0:
            raise ValueError("no transition is followed by another: ReBRAC needs the next action")
        found = {"transitions": len(index), "dropped_unknown_action": len(data) - len(index)}
        super().__init__(
            *(data.rows, index, d, a, data.starts, data.lengths),
            normalizer=data.normalizer,
            reward_scale=data.reward_scale,
            reward_shift=data.reward_shift,
            report=data.report | found,
        )
        width = data.rows.shape[1]
        self._pairs = data.rows.as_strided((len(data.rows) - 1, width + d + a), (width, 1))

    def batch(self, index: Tensor) -> Any:
        """The transitions at rows `index` (S, B), as `PairedBatch`."""
        found = self._pairs.index_select(0, index.reshape(-1)).view(*index.shape, -1)
        d, a = self.obs_size, self.action_size
        obs, action, reward, terminated, next_obs, next_action = found.split((d, a, 1, 1, d, a), -1)
        rest = reward.squeeze(-1), next_obs, terminated.squeeze(-1), next_action
        return PairedBatch(obs, action, *rest)


# Losses -------------------------------------------------------------------------------------


def distance(action: Tensor, data_action: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Squared distance (S, B) of actions (S, B, A), scaled to -1..1."""
    return ((action - data_action) / ((high - low) / 2)).square().sum(2)


def penalized_target(
    reward: Tensor, terminated: Tensor, next_q: Tensor, penalty: Tensor, gamma: float
) -> Tensor:
    """y (S, B) from Qbar(s', a') (S, 2, B) and critic_penalty |a' - a'_data|^2 (S, B)."""
    return reward + gamma * (1 - terminated) * (next_q.amin(1) - penalty)


def actor_loss(q: Tensor, distance: Tensor, actor_penalty: float) -> Tensor:
    """L_pi (S,) from Q(s, pi(s)) (S, 2, B) and the squared distance (S, B)."""
    least = q.amin(1)
    size = least.detach().abs().mean(1).clamp(min=1e-6)
    return actor_penalty * distance.mean(1) - least.mean(1) / size


# The learner --------------------------------------------------------------------------------


class ReBRAC:
    """Networks, optimisers and random generators of S seeds; no data inside.

    Args:
        config: settings.
        data: what will be learned from: its sizes, device and normaliser count.
        spec: what the policy reads and gives.
        seeds: decide initial weights and noise; S of them, learned side by side.
        critic_optimizer: makes the critics' optimiser; None for what `config` says.

    Raises:
        ValueError: the spec's actions are discrete or unbounded.
    """

    name, metrics, stats = "rebrac", METRICS, STATS

    def __init__(
        self,
        config: ReBRACConfig,
        data: Transitions,
        spec: EnvSpec,
        seeds: Sequence[int] = (0,),
        critic_optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.config, self.spec, self.seeds = config, spec, tuple(seeds)
        self.device, self.normalizer = data.device, data.normalizer
        low, high = action_bounds(spec, self.name)
        start = [stream(seed, "weights") for seed in seeds]
        shape = (data.obs_size, low, high, config.hidden, config.activation, start)
        self.actor = StackedActor(*shape).to(self.device)
        self.critic = StackedQ(2, *shape, config.layer_norm).to(self.device)
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critic = deepcopy(self.critic).requires_grad_(False)
        self.noise = [stream(seed, "noise", self.device) for seed in seeds]
        optimizer = critic_optimizer or value_optimizer(config, self.critic, len(self.seeds))
        self.critic_step = minibatch_step(
            config, self.critic, self._critic_objective, optimizer=optimizer
        )
        self.actor_step = minibatch_step(config, self.actor, self._actor_objective)
        self._targets: list[Tensor] = [
            *self.target_critic.parameters(),
            *self.target_actor.parameters(),
        ]
        self._sources: list[Tensor] = [*self.critic.parameters(), *self.actor.parameters()]
        self.updates = 0
        self._of_actor = torch.zeros(3, len(self.seeds), device=self.device)

    def update(self, batch: Any) -> Tensor:
        """One step of the critics; on the first of `policy_delay` also of policy and targets.

        Args:
            batch: a `PairedBatch`.

        Returns:
            Figures (K, S) named by `STATS`; those of the policy are of its last step.
        """
        noise = normal(self.noise, *batch.action.shape[1:])
        of_critic = self.critic_step(*batch, noise)
        if self.updates % self.config.policy_delay == 0:
            self._of_actor = self.actor_step(batch.obs, batch.action)
            with torch.no_grad():
                torch._foreach_lerp_(  # pyright: ignore
                    self._targets, self._sources, self.config.polyak
                )
        self.updates += 1
        return torch.cat([of_critic, self._of_actor])

    def next_action(self, next_obs: Tensor) -> Tensor:
        """Actions (S, B, A) that the critics' targets bootstrap from, without noise."""
        return self.target_actor(next_obs)

    def extra_reward(self) -> float:
        """The largest penalty in the critics' target [reward]: from one corner to the opposite."""
        return self.config.critic_penalty * 4 * self.spec.action_size

    def policy_section(self, seed: int) -> dict:
        """Policy of the seed at this place of the job, as `ctrl_rl.policy` reads it."""
        noise_std = torch.zeros(self.spec.action_size, device=self.device)
        return self.actor.section(seed, noise_std, self.spec, self.normalizer)

    def state_dict(self) -> dict:
        """Everything that decides the future of training but what is drawn, as a copy."""
        return deepcopy(
            {
                **{name: getattr(self, name).state_dict() for name in _PARTS},
                "updates": self.updates,
                "of_actor": self._of_actor,
                "noise": [generator.get_state() for generator in self.noise],
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.updates = state["updates"]
        self._of_actor = state["of_actor"].to(self.device)
        for generator, saved in zip(self.noise, state["noise"], strict=True):
            generator.set_state(saved)

    def _critic_objective(
        self, critic, obs, action, reward, next_obs, terminated, data_action, noise
    ):
        """L_Q of a minibatch, mean Q and mean penalty."""
        config, bounds = self.config, (self.actor.low, self.actor.high)
        with torch.no_grad():
            next_action = smoothed(self.target_actor(next_obs), noise, config, *bounds)  # pyright: ignore
            far = distance(next_action, data_action, *bounds)
            next_q = self.target_critic(next_obs, next_action)
            penalty = config.critic_penalty * far
            y = penalized_target(reward, terminated, next_q, penalty, config.gamma)
            goes_on = 1 - terminated
            mean_far = (far * goes_on).sum(1) / goes_on.sum(1).clamp(min=1)
        q = critic(obs, action)
        return critic_loss(q, y), torch.stack([q.detach().mean((1, 2)), mean_far])

    def _actor_objective(self, actor, obs, action):
        """L_pi of a minibatch and the distance from the data."""
        chosen = actor(obs)
        far = distance(chosen, action, actor.low, actor.high)
        loss = actor_loss(self.critic(obs, chosen), far, self.config.actor_penalty)
        return loss, far.detach().mean(1)[None]


_PARTS = ("actor", "critic", "target_actor", "target_critic", "actor_step", "critic_step")


def train(
    config: ReBRACConfig,
    data: Transitions,
    spec: EnvSpec,
    seeds: Sequence[int] = (0,),
    run: Run | None = None,
    evaluate: Evaluate | None = None,
    critic_optimizer: MakeOptimizer | None = None,
) -> Run:
    """Train on recorded transitions, or go on where `run` stopped; see `offline.training.fit`."""
    data = PairedTransitions(data)
    return fit(ReBRAC(config, data, spec, seeds, critic_optimizer), data, run, evaluate)
