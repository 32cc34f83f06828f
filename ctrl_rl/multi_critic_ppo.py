"""Proximal policy optimisation with several critics, one file.

The reward terms are put into groups; each group has a critic and an advantage of its own:

    A_g = gae of the group's reward and critic,   A = sum_g weight_g (A_g - mean A_g) / std A_g
    L   = L_policy(A) + value_coef sum_g mean (V_g(s) - value_target_g)^2 - entropy_coef H(pi)

In this form, without weights, it trains whole-body end-effector tracking of a legged manipulator in
arXiv:2507.08656 (2025); a critic per task: Mysore et al., "Multi-critic actor learning", ICLR 2022.
Everything else is as in `ctrl_rl.ppo`.

What is particular:

1. A group's size no longer decides its say: a group of large rewards cannot drown another in the
   noise of one common critic, and `group_weights` alone sets the trade-off. The same holds for a
   group whose advantages are all but equal: it is scaled up, so a group should be one that varies.
   One whose advantages are exactly equal adds nothing.
2. Each critic is a network of its own, not a head on a shared trunk: groups differ in size by
   orders of magnitude, and in a shared trunk the gradient of the largest would decide the
   features. Their gradients are clipped apart for the same reason.
3. With one group the weighted sum is normalised as in PPO, and both learn the same to the bit.
4. Termination, time limit and fault cut all groups alike.

Tensors: roll-out (T, N, ...), time first; minibatch (B, ...); G groups stand last.
`docs/algorithms/multi_critic_ppo.md` explains every logged key.

Reading order: `MultiCriticPPOConfig` -> groups -> loss -> `Networks` -> `MultiCriticPPO` ->
`train`.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import partial, reduce

import torch
from torch import Tensor, nn

from ctrl_rl import distributed, explosion, ppo
from ctrl_rl.checkpoints import take_weights
from ctrl_rl.compiled import Diverged, MinibatchStep, diverged, pays
from ctrl_rl.env import Obs, VecEnv
from ctrl_rl.networks import MLP, PolicyHead
from ctrl_rl.normalize import Normalizer
from ctrl_rl.policy import Policy
from ctrl_rl.ppo import BLOCK, STATS, adapt, clipped_objective, kl_estimate, standardized
from ctrl_rl.returns import gae
from ctrl_rl.rollout import Rollout, collect, episode_figures, selected
from ctrl_rl.runs import Run
from ctrl_rl.spec import Discrete, EnvSpec

METRICS: dict[str, str] = ppo.METRICS | {
    "loss/value": "sum over groups of the mean squared error of their critics [reward^2]",
    "value/explained_variance": "its mean over the groups, see below",
    "value/explained_variance/<group>": "1 - var(target - V) / var(target): 1 perfect, 0 useless",
    "value/advantage_std/<group>": "deviation of the group's advantages before they are normalised",
}
"""Every key that is logged; an unknown key is an error."""


@dataclass(frozen=True, kw_only=True)
class MultiCriticPPOConfig:
    """Settings of PPO with several critics; a task's `presets` hold the values that suit it."""

    total_steps: int = 1_000_000
    """Length of training [env steps]."""
    seed: int = 0
    """Decides initial weights, action noise and the order of samples."""
    reward_groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Group -> names of its reward terms; each of the task's terms stands in exactly one."""
    group_weights: dict[str, float] = field(default_factory=dict)
    """Group -> weight of its normalised advantage; 1 where none is given."""
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
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        shared = {f.name for f in fields(ppo.PPOConfig)} & {f.name for f in fields(self)}
        ppo.PPOConfig(**{name: getattr(self, name) for name in shared})  # refuses what PPO refuses
        unknown = sorted(set(self.group_weights) - set(self.reward_groups))
        if unknown:
            raise ValueError(f"group_weights names {', '.join(unknown)}, no group of reward_groups")
        for group, weight in self.group_weights.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"group_weights of {group} must be 0 or more, not {weight!r}")


# Groups -------------------------------------------------------------------------------------


def check_groups(groups: Mapping[str, tuple[str, ...]], terms: Iterable[str], task: str) -> None:
    """See that each reward term of the task stands in exactly one group.

    Raises:
        ValueError: no group, an unknown term, one that is left out, or one that is named twice.
    """
    known = list(terms)
    named = [term for group in groups.values() for term in group]
    faults = {
        "names what is no reward term": [t for t in dict.fromkeys(named) if t not in known],
        "leaves out": [t for t in known if t not in named],
        "names more than once": [t for t in known if named.count(t) > 1],
        "has no term for": [group for group, members in groups.items() if not members],
    }
    for what, names in faults.items():
        if names:
            raise ValueError(
                f"reward_groups {what}: {', '.join(names)}; the terms of {task} are "
                f"{', '.join(known)}"
            )


def term_names(env: VecEnv) -> list[str]:
    """Names of the environment's reward terms, in its order; its state is left as it was."""
    saved, spec = env.state_dict(), env.spec
    if isinstance(spec.action, Discrete):
        action = torch.zeros(spec.num_envs, dtype=torch.int64, device=env.device)
    else:
        action = torch.zeros(spec.num_envs, spec.action_size, device=env.device)
    names = list(env.step(action).info.reward_terms)
    env.load_state_dict(saved)
    return names


def group_rewards(
    reward_terms: Mapping[str, Tensor], groups: Mapping[str, tuple[str, ...]]
) -> list[Tensor]:
    """The reward of each group (T, N) float32: its terms added in the environment's order."""
    return [
        reduce(torch.add, [x for name, x in reward_terms.items() if name in members]).float()
        for members in groups.values()
    ]


def combined(advantages: list[Tensor], weights: list[float]) -> Tensor:
    """A (T, N) from the advantages of the groups."""
    parts = [w * standardized(a) for a, w in zip(advantages, weights, strict=True)]
    return reduce(torch.add, parts)


# Loss ---------------------------------------------------------------------------------------


def multi_critic_ppo_loss(
    networks: "Networks", batch: tuple[Tensor, ...], config: MultiCriticPPOConfig
):
    """L of a minibatch.

    Args:
        networks: actor and critics.
        batch: normalised actor observation (B, d), critic observation (B, e), action (B, A) or
            (B,), old_log_prob, advantage (B,), value_target (B, G).
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
    value_loss = (networks.values(critic_obs) - value_target).square().mean(0).sum()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    with torch.no_grad():
        clip_fraction = ((ratio - 1).abs() > config.clip_range).float().mean()
        stats = (policy_loss, value_loss, kl_estimate(log_ratio), clip_fraction, entropy)
        return loss, torch.stack(stats)


class Networks(nn.Module):
    """Actor and critics, which share no layer, and the policy head.

    Critics are children of their own, `critic_0` for the first group, so that each has its own
    bound of the gradient.
    """

    def __init__(
        self, config: MultiCriticPPOConfig, spec: EnvSpec, generator: torch.Generator
    ) -> None:
        super().__init__()
        shape = lambda group, out: (spec.obs_size(group), *config.hidden, out)  # noqa: E731
        self.actor = MLP(shape("actor", spec.action_size), config.activation, 0.01, generator)
        self.num_groups = len(config.reward_groups)
        for i in range(self.num_groups):
            critic = MLP(shape(spec.critic_group, 1), config.activation, 1.0, generator)
            self.add_module(f"critic_{i}", critic)
        self.policy = PolicyHead(spec, config.initial_std)

    def values(self, obs: Tensor) -> Tensor:
        """V_g of each group, (B, G)."""
        critics = [getattr(self, f"critic_{i}") for i in range(self.num_groups)]
        return torch.cat([critic(obs) for critic in critics], 1)


# The learner --------------------------------------------------------------------------------


class MultiCriticPPO:
    """Networks, optimiser, observation statistics and random generator; no environment inside.

    Args:
        config: settings.
        spec: the environment's contract.
        device: torch device of networks and data.

    Raises:
        ValueError: `num_minibatches` does not divide the samples of an iteration.
    """

    def __init__(
        self, config: MultiCriticPPOConfig, spec: EnvSpec, device: torch.device | str
    ) -> None:
        self.config, self.spec, self.device = config, spec, torch.device(device)
        samples = config.num_steps * spec.num_envs
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
        updates = config.num_epochs * config.num_minibatches * (config.total_steps // samples + 1)
        self.step = MinibatchStep(
            self.networks,
            lambda networks, *batch: multi_critic_ppo_loss(networks, batch, config),
            config.learning_rate,
            config.max_grad_norm,
            None if config.target_kl is None else partial(adapt, config.target_kl),
            config.compile == "on"
            or (config.compile == "auto" and pays(updates, self.batch_size, config.hidden)),
        )
        self.unfinished = torch.zeros(2, spec.num_envs, dtype=torch.float64, device=self.device)
        """Return and length so far of the episodes that the next roll-out continues."""

    def draw_noise(self) -> Tensor:
        """Standard normal (T, N, A), what `act` needs for an iteration."""
        shape = (self.config.num_steps, self.spec.num_envs, self.spec.action_size)
        return torch.randn(shape, generator=self.generator, device=self.device)

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
            rewards = group_rewards(rollout.reward_terms, config.reward_groups)
            flags = rollout.terminated, rollout.truncated
            advantages = [
                gae(reward, v, next_v, *flags, config.gamma, config.gae_lambda)
                for reward, v, next_v in zip(
                    rewards, value.unbind(2), next_value.unbind(2), strict=True
                )
            ]
            weights = [config.group_weights.get(group, 1.0) for group in config.reward_groups]
            value_target = torch.stack(advantages, 2) + value
            obs = {
                g: self._normalize(g, rollout.obs[g]).flatten(0, 1)
                for g in dict.fromkeys(self.groups)
            }
            rest = [
                rollout.action,
                self.networks.policy(rollout.head).log_prob(rollout.action),
                combined(advantages, weights),
                value_target,
            ]
            columns = [*(obs[g] for g in self.groups), *(x.flatten(0, 1) for x in rest)]
        stats = []
        for _ in range(config.num_epochs):
            order = torch.randperm(len(columns[-1]), generator=self.generator, device=self.device)
            for rows in order.split(self.batch_size):
                stats.append(self.step(*selected(columns, rows)))
        self._update_normalizers(rollout)
        mean = torch.stack(stats).mean(0).tolist()
        metrics: dict[str, float] = dict(zip((*STATS, "loss/grad_norm"), mean[:-1], strict=True))
        metrics["loss/learning_rate"] = self.step.learning_rate.item()
        if not self.networks.policy.discrete:
            metrics["policy/std"] = self.networks.policy.log_std.exp().mean().item()
        explained = []
        for i, (group, advantage) in enumerate(zip(config.reward_groups, advantages, strict=True)):
            metrics[f"value/advantage_std/{group}"] = advantage.std(correction=0).item()
            _, variance = distributed.moments(value_target[..., i])
            if variance > 0:
                _, unexplained = distributed.moments((value_target - value)[..., i])
                explained.append(1 - (unexplained / variance).item())
                metrics[f"value/explained_variance/{group}"] = explained[-1]
        if explained:
            metrics["value/explained_variance"] = sum(explained) / len(explained)
        episodes, self.unfinished = episode_figures(
            self.unfinished, rollout.reward, rollout.terminated, rollout.ended
        )
        largest = max(reward.abs().max().item() for reward in rewards)
        return metrics | episodes | {explosion.REWARD: largest}

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
                "unfinished": self.unfinished,
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.warm_start(state)
        self.step.load_state_dict(state["step"])
        self.generator.set_state(state["generator"])
        self.unfinished = state["unfinished"].to(self.device)

    def warm_start(self, state: dict) -> None:
        """Take weights and observation statistics of another run; the rest begins anew.

        Raises:
            ValueError: its networks have other sizes, or only one of the two has statistics.
        """
        take_weights(self, state, "networks", "normalizers")

    def _normalize(self, group: str, obs: Tensor) -> Tensor:
        return self.normalizers[group](obs) if self.config.normalize_obs else obs

    def _values(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """V_g(obs) and V_g(next_obs), (T, N, G) each, from one call of each critic."""
        group = self.groups[1]
        parts = (rollout.obs[group].flatten(0, 1), rollout.last_obs[group])
        obs = torch.cat([*parts, rollout.ended_next_obs[group]])
        blocks = self._normalize(group, obs).split(BLOCK)
        value = torch.cat([self.networks.values(x) for x in blocks])
        num_steps, num_envs = rollout.reward.shape
        shifted = value[: (num_steps + 1) * num_envs].view(num_steps + 1, num_envs, -1)
        next_value = shifted[1:].clone()
        next_value[rollout.ended] = value[(num_steps + 1) * num_envs :]
        return shifted[:-1], next_value

    def _update_normalizers(self, rollout: Rollout) -> None:
        """Every observation of the iteration once; the last one belongs to the next iteration."""
        for group, normalizer in self.normalizers.items():
            reached = rollout.ended_next_obs[group][~rollout.ended_faulty]
            normalizer.update(torch.cat([rollout.obs[group].flatten(0, 1), reached]))


def train(
    config: MultiCriticPPOConfig,
    env: VecEnv,
    run: Run | None = None,
    evaluate: Callable[[Policy], dict[str, float]] | None = None,
) -> Run:
    """Train from the environment's current state, or go on where `run` stopped.

    Arguments and result are those of `ctrl_rl.ppo.train`.

    Raises:
        ValueError: the groups do not hold each of the environment's reward terms exactly once.
        Diverged: the update met a number that is not finite; the last checkpoint stands.
    """
    distributed.refuse_group("multi_critic_ppo")
    check_groups(config.reward_groups, term_names(env), env.spec.task)
    run = Run() if run is None else run
    learner = MultiCriticPPO(config, env.spec, env.device)
    if initial := run.initial(env.spec, "multi_critic_ppo"):
        learner.warm_start(initial)
    run.start(METRICS, config, env, "multi_critic_ppo")
    step = run.resume(learner=learner, env=env)
    while step < config.total_steps and not run.stopping(step):
        began = time.perf_counter()
        rollout, metrics = collect(learner.act, env, learner.draw_noise())
        collected = time.perf_counter()
        for t, fault in rollout.faults:
            run.report_fault(step + (t + 1) * env.spec.num_envs, fault)
        step += rollout.reward.numel()
        try:
            metrics |= learner.update(rollout)
        except Diverged as error:
            raise diverged(step, error) from None
        updated = time.perf_counter()
        metrics["time/collect_s"] = collected - began
        metrics["time/update_s"] = updated - collected
        metrics["time/env_steps_per_s"] = rollout.reward.numel() / (updated - began)
        run.log(step, metrics)
        if run.due("eval", step) and evaluate is not None:
            run.log(step, evaluate(Policy.from_section(learner.policy_section(), learner.device)))
        if run.due("checkpoint", step):
            run.save(step, learner.policy_section(), learner.state_dict(), env.state_dict())
    run.finish()
    return run
