"""Proximal policy optimisation, one file.

Paper: Schulman et al., "Proximal policy optimization algorithms", 2017, arXiv:1707.06347.

    r_t       = pi(a_t | s_t) / pi_old(a_t | s_t)
    L_policy  = -mean min(r_t A_t, clip(r_t, 1 - clip_range, 1 + clip_range) A_t)      (eq. 7)
    L_value   = mean (V(s_t) - value_target_t)^2,   value_target = A + V_old           (eq. 9)
    L         = L_policy + value_coef L_value - entropy_coef H(pi)
    A         = generalised advantage estimate, see `ctrl_rl.returns.gae`

Deviations from the paper, each with its reason:

1. A time limit is no failure: the value of the true next observation stands in for what follows,
   and the advantage is cut there. An environment fault counts as a time limit.
2. Observations are normalised with running statistics that advance once per iteration, after the
   update, so that r_t is 1 before the first step.
3. Advantages are normalised over the whole iteration: a minibatch may hold a single sample.
4. With bounded actions the policy is a clipped normal whose tails are point masses at the bounds:
   the number stored is the number sent, and r_t is the ratio of its own probabilities.
5. Actor and critic share no layer. The critic reads the group "critic" where there is one.
6. The gradients of actor and critic are clipped apart: the critic's grows with the reward.
7. With `target_kl` the learning rate follows the KL divergence measured on each minibatch:
   divided by 1.5 above twice the target, multiplied by 1.5 below half of it. That of an iteration's
   first minibatch is 0: the policy has not moved yet.
8. With `mirror`, each sample stands beside its mirror image in its minibatch (Mittal et al.,
   "Symmetry considerations for learning task symmetric robot policies", ICRA 2024,
   arXiv:2403.04359): r_t = pi(M a_t | M s_t) / pi_old(a_t | s_t), with the advantage and the value
   target of (s_t, a_t). That is 1 before the first step only where the policy is symmetric; the
   KL divergence is that of the samples themselves.

In a group of processes each holds its rows of the roll-out and of every minibatch; advantages,
gradients, divergence and statistics are those of all rows: see `ctrl_rl.distributed`.

Tensors: roll-out (T, N, ...), time first; minibatch (B, ...). `docs/algorithms/ppo.md` explains
every logged key.

Reading order: `METRICS` -> `PPOConfig` -> losses -> `Networks` -> `PPO` -> `train`.
"""

import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ctrl_rl import distributed
from ctrl_rl.checkpoints import take_weights
from ctrl_rl.compiled import Diverged, MinibatchStep, diverged, pays
from ctrl_rl.env import Obs, VecEnv
from ctrl_rl.networks import ACTIVATIONS, MLP, PolicyHead
from ctrl_rl.normalize import Normalizer
from ctrl_rl.policy import Policy
from ctrl_rl.returns import gae
from ctrl_rl.rollout import Rollout, collect, episode_figures, selected
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec

METRICS: dict[str, str] = {
    "loss/policy": "clipped objective L_policy, mean over the minibatches of the iteration",
    "loss/value": "mean squared error of the critic [reward^2]",
    "loss/grad_norm": "norm of the gradient before clipping",
    "loss/learning_rate": "step size after the iteration",
    "policy/kl": "mean of r - 1 - log r, an estimate of the divergence from old to new [nat]",
    "policy/clip_fraction": "share of samples with r outside the clip range",
    "policy/entropy": "mean entropy of the policy; of the normal beneath, if clipped [nat]",
    "policy/std": "mean standard deviation of a continuous action [action units]",
    "value/explained_variance": "1 - var(target - V) / var(target): 1 perfect, 0 useless",
    "rollout/episode_return": "mean return of the episodes that ended in the iteration",
    "rollout/episode_length": "mean length of the same episodes [steps]",
    "rollout/terminated": "share of the same episodes that ended by termination",
    "rollout/largest_reward": "largest size of a reward since the last row [reward]",
    "rollout/faults": "worlds that left the numbers and were reset",
    "reward/<term>": "mean of a weighted reward term per step",
    "task/<metric>": "mean of a figure of the task per step",
    "eval/<metric>": "figure of an evaluation",
    "time/env_steps_per_s": "env steps per second of the iteration, evaluation left out",
    "time/collect_s": "roll-out [s]",
    "time/update_s": "update [s]",
}
"""Every key that is logged; an unknown key is an error."""

KL_FACTOR = 1.5
"""Step of the adaptive learning rate."""
LEARNING_RATE_RANGE = (1e-5, 1e-2)
"""Bounds of the adaptive learning rate."""
BLOCK = 2048
"""Rows that the critic reads at a time when it values a roll-out: on a CPU what it computes then
stays in the cache, and takes half as long."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of PPO; a task's `presets` hold the values that suit it."""

    total_steps: int = 1_000_000
    """Length of training [env steps]."""
    seed: int = 0
    """Decides initial weights, action noise and the order of samples."""
    num_steps: int = 64
    """Steps T per environment and iteration."""
    num_epochs: int = 5
    """Passes over an iteration's samples."""
    num_minibatches: int = 4
    """Minibatches per pass; must divide T times the number of environments."""
    learning_rate: float = 1e-3
    """Adam's step size; with `target_kl` the initial one, within 1e-5 .. 1e-2."""
    target_kl: float | None = 0.01
    """KL divergence per minibatch that the learning rate is adapted to [nat]; None keeps it."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """Bias (0) against variance (1) of the advantage."""
    clip_range: float = 0.2
    """How far the probability ratio pays to move from 1."""
    value_coef: float = 1.0
    """Weight of the value loss [1/reward^2]."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus [1/nat]."""
    max_grad_norm: float = 1.0
    """Larger gradients of actor, log_std or critic are scaled down to this norm."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of actor and critic."""
    activation: str = "elu"
    """"elu", "relu" or "tanh"."""
    initial_std: float = 1.0
    """Standard deviation of a continuous action at the start [action units]."""
    normalize_obs: bool = True
    """Normalise observations by running statistics."""
    mirror: bool = False
    """Learn from mirror images too, where the task has a mirror symmetry; doubles the update."""
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        at_least_one = ("total_steps", "num_steps", "num_epochs", "num_minibatches")
        positive = ("learning_rate", "clip_range", "max_grad_norm", "initial_std")
        checks = [(name, getattr(self, name) >= 1, "at least 1") for name in at_least_one]
        checks += [(name, 0 < getattr(self, name) < math.inf, "positive") for name in positive]
        checks += [(n, 0 <= getattr(self, n) <= 1, "in 0..1") for n in ("gamma", "gae_lambda")]
        checks += [
            (n, 0 <= getattr(self, n) < math.inf, "0 or more")
            for n in ("value_coef", "entropy_coef")
        ]
        checks += [
            (
                "target_kl",
                self.target_kl is None or 0 < self.target_kl < math.inf,
                "positive or None",
            ),
            ("hidden", bool(self.hidden) and min(self.hidden) >= 1, "positive widths"),
            ("activation", self.activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
            ("compile", self.compile in ("auto", "on", "off"), "auto, on or off"),
        ]
        for name, good, wanted in checks:
            if not good:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}")
        if self.target_kl is not None:
            low, high = LEARNING_RATE_RANGE
            if not low <= self.learning_rate <= high:  # the first step would clamp it
                raise ValueError(
                    f"learning_rate must be in {low:g}..{high:g} with target_kl, which adapts it "
                    f"within that range, not {self.learning_rate!r}; target_kl None keeps it"
                )
            if self.num_epochs * self.num_minibatches == 1:
                raise ValueError(
                    "target_kl needs two minibatches in an iteration: before the first the policy "
                    "has not moved, and a divergence of 0 only raises learning_rate; "
                    "raise num_epochs or num_minibatches, or set target_kl None"
                )


STATS = ("loss/policy", "loss/value", "policy/kl", "policy/clip_fraction", "policy/entropy")
"""What `ppo_loss` reports of a minibatch."""


# Losses -------------------------------------------------------------------------------------


def clipped_objective(ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """L_policy from r (B,) and A (B,); a scalar to be minimised."""
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """KL(old || new) from log r (B,) of actions drawn from old: mean of r - 1 - log r >= 0.

    J. Schulman, "Approximating KL divergence", 2020: unbiased, and of lower variance than -log r.
    """
    return (log_ratio.expm1() - log_ratio).mean()


def ppo_loss(networks: "Networks", batch: tuple[Tensor, ...], config: PPOConfig):
    """L of a minibatch.

    Args:
        networks: actor and critic.
        batch: normalised actor observation (B, d), critic observation (B, e), action (B, A) or
            (B,), old_log_prob, advantage, value_target (B,); with `mirror`, every second row is
            the image of the one before.
        config: coefficients.

    Returns:
        L, and the figures named by `STATS` as one tensor.
    """
    actor_obs, critic_obs, action, old_log_prob, advantage, value_target = batch
    distribution = networks.policy(networks.actor(actor_obs))
    log_ratio = distribution.log_prob(action) - old_log_prob
    ratio = log_ratio.exp()
    entropy = distribution.entropy().mean()
    policy_loss = clipped_objective(ratio, advantage, config.clip_range)
    value_loss = (networks.critic(critic_obs)[:, 0] - value_target).square().mean()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    with torch.no_grad():
        clip_fraction = ((ratio - 1).abs() > config.clip_range).float().mean()
        kl = kl_estimate(log_ratio[:: 1 + config.mirror])
        stats = (policy_loss, value_loss, kl, clip_fraction, entropy)
        return loss, torch.stack(stats)


def adapted_learning_rate(learning_rate: Tensor, kl: Tensor, target_kl: float) -> Tensor:
    """Smaller if the policy moved too far from the old one, larger if not far enough."""
    factor = 1 + (kl < target_kl / 2) * (KL_FACTOR - 1) - (kl > 2 * target_kl) * (1 - 1 / KL_FACTOR)
    return (learning_rate * factor).clamp(*LEARNING_RATE_RANGE)


class Networks(nn.Module):
    """Actor and critic, which share no layer, and the policy head."""

    def __init__(self, config: PPOConfig, spec: EnvSpec, generator: torch.Generator) -> None:
        super().__init__()
        shape = lambda group, out: (spec.obs_size(group), *config.hidden, out)  # noqa: E731
        self.actor = MLP(shape("actor", spec.action_size), config.activation, 0.01, generator)
        self.critic = MLP(shape(spec.critic_group, 1), config.activation, 1.0, generator)
        self.policy = PolicyHead(spec, config.initial_std)


# The learner --------------------------------------------------------------------------------


class PPO:
    """Networks, optimiser, observation statistics and random generator; no environment inside.

    Args:
        config: settings.
        spec: the environment's contract; of this process's environments, in a group of them.
        device: torch device of networks and data.

    Raises:
        ValueError: `num_minibatches` does not divide the samples of an iteration, or `mirror` is
            asked for in a task without one.
    """

    def __init__(self, config: PPOConfig, spec: EnvSpec, device: torch.device | str) -> None:
        num_envs, spec = spec.num_envs, distributed.whole(spec)
        self.config, self.spec, self.device = config, spec, torch.device(device)
        self.samples = samples = config.num_steps * spec.num_envs
        self.batch_size = samples // config.num_minibatches
        if samples % config.num_minibatches:
            raise ValueError(
                f"num_minibatches {config.num_minibatches} does not divide the {samples} samples "
                f"of an iteration ({config.num_steps} steps x {spec.num_envs} environments)"
            )
        start = torch.Generator().manual_seed(config.seed)
        self.generator = torch.Generator(self.device).manual_seed(config.seed + 1)
        self.networks = Networks(config, spec, start).to(self.device)
        self.groups = ("actor", spec.critic_group)
        self.normalizers = {
            g: Normalizer(spec.obs_size(g)).to(self.device)
            for g in self.groups
            if config.normalize_obs
        }
        self.images = {n: self._image(n) for n in (*self.groups, "action") if config.mirror}
        updates = config.num_epochs * config.num_minibatches * (config.total_steps // samples + 1)
        rows = (1 + config.mirror) * self.batch_size // distributed.world_size()
        self.step = MinibatchStep(
            self.networks,
            lambda networks, *batch: ppo_loss(networks, batch, config),
            config.learning_rate,
            config.max_grad_norm,
            None if config.target_kl is None else partial(adapt, config.target_kl),
            config.compile == "on"
            or (config.compile == "auto" and pays(updates, rows, config.hidden)),
        )
        self.unfinished = torch.zeros(2, num_envs, dtype=torch.float64, device=self.device)
        """Return and length so far of the episodes that the next roll-out continues."""

    def draw_noise(self) -> Tensor:
        """Standard normal (T, N, A), what `act` needs for an iteration."""
        shape = (self.config.num_steps, self.spec.num_envs, self.spec.action_size)
        noise = torch.randn(shape, generator=self.generator, device=self.device)
        return distributed.own(noise, dim=1)

    @torch.no_grad()
    def act(self, obs: Obs, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The actor's output (N, A) and an action drawn from it, in the env's units."""
        head = self.networks.actor(self._normalize("actor", obs["actor"]))
        return head, self.networks.policy(head).sample(noise)

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Learn from a roll-out, then let the observation statistics take it in.

        Raises:
            Diverged: loss or gradient is not finite; the weights stay those of the step before.
        """
        config = self.config
        with torch.no_grad():
            value, next_value = self._values(rollout)
            advantage = gae(
                rollout.reward,
                value,
                next_value,
                rollout.terminated,
                rollout.truncated,
                config.gamma,
                config.gae_lambda,
            )
            value_target = advantage + value
            log_prob = self.networks.policy(rollout.head).log_prob(rollout.action)
            obs = {
                g: self._normalize(g, self._samples(g, rollout.obs[g]))
                for g in dict.fromkeys(self.groups)
            }
            columns = [*(obs[g] for g in self.groups), self._samples("action", rollout.action)]
            for x in (log_prob, standardized(advantage), value_target):
                columns.append(self._samples("", x))
        stats = []
        for _ in range(config.num_epochs):
            order = torch.randperm(self.samples, generator=self.generator, device=self.device)
            order, sizes = distributed.own_samples(order, self.batch_size, self.spec.num_envs)
            if config.mirror:
                order = torch.stack([2 * order, 2 * order + 1], 1).flatten()
                sizes = [2 * size for size in sizes]
            for rows in order.split(sizes):
                stats.append(self.step(*selected(columns, rows)))
        self._update_normalizers(rollout)
        mean = torch.stack(stats).mean(0).tolist()
        metrics: dict[str, float] = dict(zip((*STATS, "loss/grad_norm"), mean[:-1], strict=True))
        metrics["loss/learning_rate"] = self.step.learning_rate.item()
        if not self.networks.policy.discrete:
            metrics["policy/std"] = self.networks.policy.log_std.exp().mean().item()
        _, variance = distributed.moments(value_target)
        if variance > 0:
            _, unexplained = distributed.moments(value_target - value)
            metrics["value/explained_variance"] = 1 - (unexplained / variance).item()
        episodes, self.unfinished = episode_figures(
            self.unfinished, rollout.reward, rollout.terminated, rollout.ended
        )
        return metrics | episodes

    def policy_section(self) -> dict:
        """The policy alone, as `ctrl_rl.policy.Policy.from_section` reads it."""
        section = {
            "format": 1,
            "kind": "categorical_mlp" if self.networks.policy.discrete else "gaussian_mlp",
            "spec": self.spec.to_json(),
            "group": "actor",
            "hidden": list(self.config.hidden),
            "activation": self.config.activation,
            "normalizer": None,
            "bound": "clip" if self.networks.policy.bounded else "none",
            "weights": {k: v.clone() for k, v in self.networks.actor.state_dict().items()},
        }
        if self.config.normalize_obs:
            section["normalizer"] = self.normalizers["actor"].section()
        if not self.networks.policy.discrete:
            section["log_std"] = self.networks.policy.log_std.detach().clone()
        return section

    def state_dict(self) -> dict:
        """Everything that decides the future of training, as a copy."""
        return deepcopy(
            {
                "networks": self.networks.state_dict(),
                "step": self.step.state_dict(),
                "normalizers": {g: n.state_dict() for g, n in self.normalizers.items()},
                "generator": self.generator.get_state(),
                "unfinished": distributed.concatenated(self.unfinished, dim=1),
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.warm_start(state)
        self.step.load_state_dict(state["step"])
        self.generator.set_state(state["generator"])
        self.unfinished = distributed.own(state["unfinished"], dim=1).to(self.device)

    def warm_start(self, state: dict) -> None:
        """Take weights and observation statistics of another run; the rest begins anew.

        Raises:
            ValueError: its networks have other sizes, or only one of the two has statistics.
        """
        take_weights(self, state, "networks", "normalizers")

    def _normalize(self, group: str, obs: Tensor) -> Tensor:
        return self.normalizers[group](obs) if self.config.normalize_obs else obs

    def _image(self, name: str) -> tuple[Tensor, Tensor]:
        """Columns (d,) and signs (d,) of a group, or of "action", in the mirror."""
        column, sign = self.spec.mirrored(name)
        return torch.tensor(column, device=self.device), torch.tensor(sign, device=self.device)

    def _samples(self, name: str, x: Tensor) -> Tensor:
        """(T, N, ...) to (T N, ...) or, with `mirror`, (2 T N, ...): each row and then its image.

        The image of what is neither a group nor "action" is the same.
        """
        x = x.flatten(0, 1)
        if not self.config.mirror:
            return x
        image = x
        if name in self.images:
            column, sign = self.images[name]
            image = x[:, column] * sign
        return torch.stack([x, image], 1).flatten(0, 1)

    def _values(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """V(obs) and V(next_obs), (T, N) each, from one call of the critic."""
        group = self.groups[1]
        parts = (rollout.obs[group].flatten(0, 1), rollout.last_obs[group])
        obs = torch.cat([*parts, rollout.ended_next_obs[group]])
        blocks = self._normalize(group, obs).split(BLOCK)
        value = torch.cat([self.networks.critic(x)[:, 0] for x in blocks])
        num_steps, num_envs = rollout.reward.shape
        shifted = value[: (num_steps + 1) * num_envs].view(num_steps + 1, num_envs)
        next_value = shifted[1:].clone()
        next_value[rollout.ended] = value[(num_steps + 1) * num_envs :]
        return shifted[:-1], next_value

    def _update_normalizers(self, rollout: Rollout) -> None:
        """Every observation of the iteration once; the last one belongs to the next iteration."""
        for group, normalizer in self.normalizers.items():
            reached = rollout.ended_next_obs[group][~rollout.ended_faulty]
            normalizer.update(torch.cat([rollout.obs[group].flatten(0, 1), reached]))


def adapt(target_kl: float, learning_rate: Tensor, stats: Tensor) -> Tensor:
    """`adapted_learning_rate` from the figures named by `STATS`."""
    return adapted_learning_rate(learning_rate, stats[STATS.index("policy/kl")], target_kl)


def standardized(advantage: Tensor) -> Tensor:
    """Mean 0, deviation 1 over the iteration; all zero when all are equal.

    In float64, where equal numbers have a deviation of 0 and not of a rounding error.
    """
    mean, variance = distributed.moments(advantage)
    return ((advantage.double() - mean) / (variance.sqrt() + 1e-8)).float()


def train(
    config: PPOConfig,
    env: VecEnv,
    run: Run | None = None,
    evaluate: Callable[[Policy], dict[str, float]] | None = None,
) -> Run:
    """Train from the environment's current state, or go on where `run` stopped.

    Args:
        config: settings.
        env: the training environment.
        run: where to log and save, a `ctrl_rl.Run`; None keeps the log in memory.
        evaluate: `evaluate(policy) -> {key: figure}`, called when the run says that it is due.

    Returns:
        The run; its `rows` hold what was logged.

    Raises:
        Diverged: the update met a number that is not finite; the last checkpoint stands.
    """
    run = Run() if run is None else run
    ppo = PPO(config, env.spec, env.device)
    if initial := run.initial(env.spec, "ppo"):
        ppo.warm_start(initial)
    run.start(METRICS, config, env, "ppo")
    step = run.resume(learner=ppo, env=env)
    while step < config.total_steps and not run.stopping(step):
        began = time.perf_counter()
        rollout, metrics = collect(ppo.act, env, ppo.draw_noise())
        collected = time.perf_counter()
        for t, fault in rollout.faults:
            run.report_fault(step + (t + 1) * ppo.spec.num_envs, fault)
        step += ppo.samples
        try:
            metrics |= ppo.update(rollout)
        except Diverged as error:
            raise diverged(step, error) from None
        updated = time.perf_counter()
        metrics["time/collect_s"] = collected - began
        metrics["time/update_s"] = updated - collected
        metrics["time/env_steps_per_s"] = ppo.samples / (updated - began)
        run.log(step, metrics)
        if run.due("eval", step) and evaluate is not None:
            run.log(step, evaluate(Policy.from_section(ppo.policy_section(), ppo.device)))
        if run.due("checkpoint", step):
            run.save(step, ppo.policy_section(), ppo.state_dict(), env.state_dict())
    run.finish()
    return run
