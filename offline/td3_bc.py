"""TD3+BC: TD3 that stays near the data, one file.

Paper: Fujimoto and Gu, "A minimalist approach to offline reinforcement learning", NeurIPS 2021,
arXiv:2106.06860.

    eps  ~ clip(N(0, target_noise), -noise_clip, noise_clip)
    a'   = clip(pi_bar(s') + eps, low, high)
    y    = r + gamma [not terminated] min_i Qbar_i(s', a')
    L_Q  = mean sum_i (Q_i(s, a) - y)^2
    L_pi = -lambda mean Q_1(s, pi(s)) + mean (pi(s) - a)^2,                    (eq. 3 and 5)
           lambda = alpha / mean |Q_1(s, pi(s))|, a constant of the gradient,  (eq. 5)
           on every `policy_delay`-th update
    Qbar, pi_bar <- (1 - polyak) Qbar, pi_bar + polyak Q, pi,     on the same updates

pi is a network squashed by tanh to the bounds of each action dimension. The paper standardises
observations: `Transitions.from_episodes(..., normalize_obs=True)`.

Deviations from the paper, each with its reason:

1. Noise and (pi(s) - a)^2 are those of actions scaled to -1..1, so that nothing depends on the
   action's units. D4RL's actions are scaled like this already.
2. The critics read the action scaled to -1..1. Weights start orthogonal.
3. The policy takes its step on the first of `policy_delay` updates, not on the last, so that every
   update has figures of both.

Tensors: seeds first, minibatch (S, B, ...), critics (S, 2, B). `docs/algorithms/td3_bc.md` explains
every logged key.

Reading order: `METRICS` -> `TD3BCConfig` -> losses -> `TD3BC` -> `train`.
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
from offline.bc import cloning_loss
from offline.networks import StackedActor, StackedQ, normal, stream
from offline.settings import check_settings, minibatch_step, value_optimizer
from offline.training import Evaluate, fit
from offline.transitions import Batch, Transitions

METRICS: dict[str, str] = {
    "loss/critic": "L_Q, mean over the updates since the last row [reward^2]",
    "loss/actor": "L_pi, over those of them that step the policy",
    "value/q": "mean action value of the two critics on the minibatches [reward]",
    "policy/distance": "mean (pi(s) - a)^2, actions scaled to -1..1",
    "gradient/critic": "Euclidean norm of L_Q's gradient",
    "gradient/actor": "Euclidean norm of L_pi's gradient",
    **collapse.METRICS,
    **training.METRICS,
}
"""Every key that is logged; an unknown key is an error."""

STATS = (
    *("value/q", "gradient/critic", "loss/critic"),
    *("policy/distance", "gradient/actor", "loss/actor"),
)
"""What `TD3BC.update` reports."""


PRESETS: dict[str, dict] = {
    **{family: {"normalize_obs": True} for family in ("gym", "maze2d", "adroit")},
    "antmaze": {"normalize_obs": True, "reward": "antmaze"},
}
"""D4RL's family -> settings of `ctrl-rl offline train` other than its defaults: the paper's for
gym, where CORL (Tarasov et al., 2022, arXiv:2210.07105) has the same, and CORL's elsewhere."""


@dataclass(frozen=True, kw_only=True)
class TD3BCConfig:
    """Settings of TD3+BC; the paper's for D4RL's locomotion data."""

    total_steps: int = 1_000_000
    """Length of training [updates]."""
    batch_size: int = 256
    """Transitions per update and seed."""
    learning_rate: float = 3e-4
    """Adam's step size for policy and critics."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.005
    """Share of the networks that the target networks take on."""
    alpha: float = 2.5
    """Weight of the value against the distance from the data's actions; 0 is behaviour cloning."""
    policy_delay: int = 2
    """Updates of the critics per update of the policy and of the targets."""
    target_noise: float = 0.2
    """Standard deviation of what is added to the target action [half ranges]."""
    noise_clip: float = 0.5
    """Largest size of the latter [half ranges]."""
    hidden: tuple[int, ...] = (256, 256)
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
        not_negative = ("alpha", "target_noise", "noise_clip")
        check_settings(
            self,
            ("policy_delay", self.policy_delay >= 1, "at least 1"),
            *((n, 0 <= getattr(self, n) < math.inf, "0 or more") for n in not_negative),
        )


# Losses -------------------------------------------------------------------------------------


def smoothed(
    action: Tensor, noise: Tensor, config: TD3BCConfig, low: Tensor, high: Tensor
) -> Tensor:
    """a' (S, B, A) from pi_bar(s') and standard normal noise, in action units within the bounds."""
    noise = (config.target_noise * noise).clamp(-config.noise_clip, config.noise_clip)
    return torch.clamp(action + (high - low) / 2 * noise, low, high)


def clipped_target(reward: Tensor, terminated: Tensor, next_q: Tensor, gamma: float) -> Tensor:
    """y (S, B) from the target critics' Qbar(s', a') (S, 2, B)."""
    return reward + gamma * (1 - terminated) * next_q.amin(1)


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """L_Q (S,) from Q(s, a) (S, 2, B) and y (S, B)."""
    return (q - target[:, None]).square().mean(2).sum(1)


def actor_loss(q: Tensor, distance: Tensor, alpha: float) -> Tensor:
    """L_pi (S,) from Q_1(s, pi(s)) (S, B) and the distance (S,)."""
    size = q.detach().abs().mean(1)
    return -alpha * q.mean(1) / size.clamp(min=1e-6) + distance


# The learner --------------------------------------------------------------------------------


class TD3BC:
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

    name, metrics, stats = "td3_bc", METRICS, STATS

    def __init__(
        self,
        config: TD3BCConfig,
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
        self.critic = StackedQ(2, *shape).to(self.device)
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

    def update(self, batch: Batch) -> Tensor:
        """One step of the critics; on the first of `policy_delay` also of policy and targets.

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

    def policy_section(self, seed: int) -> dict:
        """Policy of the seed at this place of the job, as `ctrl_rl.policy` reads it."""
        noise_std = torch.zeros(self.spec.action_size, device=self.device)
        return self.actor.section(seed, noise_std, self.spec, self.normalizer)

    def state_dict(self) -> dict:
        """Everything that decides the future of training but what is drawn, as a copy."""
        return deepcopy(
            {
                "actor": self.actor.state_dict(),
                "critic": self.critic.state_dict(),
                "target_actor": self.target_actor.state_dict(),
                "target_critic": self.target_critic.state_dict(),
                "actor_step": self.actor_step.state_dict(),
                "critic_step": self.critic_step.state_dict(),
                "updates": self.updates,
                "of_actor": self._of_actor,
                "noise": [generator.get_state() for generator in self.noise],
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in ("actor", "critic", "target_actor", "target_critic"):
            getattr(self, name).load_state_dict(state[name])
        self.actor_step.load_state_dict(state["actor_step"])
        self.critic_step.load_state_dict(state["critic_step"])
        self.updates = state["updates"]
        self._of_actor = state["of_actor"].to(self.device)
        for generator, saved in zip(self.noise, state["noise"], strict=True):
            generator.set_state(saved)

    def _critic_objective(self, critic, obs, action, reward, next_obs, terminated, noise):
        """L_Q of a minibatch and mean Q."""
        with torch.no_grad():
            bounds = self.actor.low, self.actor.high
            next_action = smoothed(self.target_actor(next_obs), noise, self.config, *bounds)
            next_q = self.target_critic(next_obs, next_action)
            y = clipped_target(reward, terminated, next_q, self.config.gamma)
        q = critic(obs, action)
        return critic_loss(q, y), q.detach().mean((1, 2))[None]

    def _actor_objective(self, actor, obs, action):
        """L_pi of a minibatch and the distance from the data."""
        chosen = actor(obs)
        far = cloning_loss(chosen, action, actor.low, actor.high)
        loss = actor_loss(self.critic(obs, chosen, members=1)[:, 0], far, self.config.alpha)
        return loss, far.detach()[None]


def train(
    config: TD3BCConfig,
    data: Transitions,
    spec: EnvSpec,
    seeds: Sequence[int] = (0,),
    run: Run | None = None,
    evaluate: Evaluate | None = None,
    critic_optimizer: MakeOptimizer | None = None,
) -> Run:
    """Train on recorded transitions, or go on where `run` stopped; see `offline.training.fit`."""
    return fit(TD3BC(config, data, spec, seeds, critic_optimizer), data, run, evaluate)
