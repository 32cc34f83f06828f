"""Soft actor-critic, one file.

Paper: Haarnoja et al., "Soft actor-critic algorithms and applications", 2018, arXiv:1812.05905.

    y     = r + gamma [not terminated] (min_i Qbar_i(s', a') - alpha log pi(a'|s'))    (eq. 6)
    L_Q   = mean sum_i 1/2 (Q_i(s, a) - y)^2,           a' drawn from pi(.|s')          (eq. 5)
    L_pi  = mean (alpha log pi(a|s) - min_i Q_i(s, a)),  a drawn from pi(.|s)           (eq. 9)
    L_alpha = mean log alpha (-log pi(a|s) - H)                                         (eq. 18)
    Qbar <- (1 - polyak) Qbar + polyak Q

pi is a normal squashed by tanh to the bounds of each action dimension.

Deviations from the paper, each with its reason:

1. A time limit is no failure: y goes on from the true next observation. A step that ended in a
   fault is not learned from.
2. The density is that of the action in its own units, and so is its entropy. The target H is given
   for actions scaled to -1..1 and shifted by sum log half_range, so that alpha does not depend on
   the units.
3. L_alpha has log alpha for alpha, as the authors' code has: alpha stays positive, and its steps
   are relative.
4. The critics read the action scaled to -1..1, and the group "critic" where there is one.
5. Weights start orthogonal (`ctrl_rl.networks.MLP`).
6. Steps before `warmup_steps` take uniform actions, as the authors' code does.

In a group of processes each has a replay of its own environments and draws its part of every
minibatch from it; gradients are those of all parts: see `ctrl_rl.distributed`.

Tensors: environments (N, ...), minibatch (B, ...), critics first (2, B). `docs/algorithms/sac.md`
explains every logged key.

Reading order: `METRICS` -> `SACConfig` -> losses -> `Actor` -> `SAC` -> `train`.
"""

import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ctrl_rl import distributed
from ctrl_rl.buffers import WARMUP, Batch, ReplayBuffer, updates_due
from ctrl_rl.checkpoints import take_weights
from ctrl_rl.compiled import Diverged, MinibatchStep, diverged, pays
from ctrl_rl.distributions import SquashedGaussian
from ctrl_rl.env import Obs, VecEnv
from ctrl_rl.explosion import REWARD
from ctrl_rl.hindsight import Hindsight, goal_groups
from ctrl_rl.networks import ACTIVATIONS, MLP, QEnsemble, action_bounds, entropy_target
from ctrl_rl.policy import LOG_STD_RANGE, Policy
from ctrl_rl.rollout import Tally, faults_of_all_ranks
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec

METRICS: dict[str, str] = {
    "loss/critic": "L_Q, mean over the updates since the last row [reward^2]",
    "loss/actor": "L_pi, likewise [reward]",
    "value/q": "mean action value of the two critics on the minibatches [reward]",
    "policy/entropy": "mean of -log pi of the drawn actions, in action units [nat]",
    "policy/temperature": "alpha, mean over the same updates [reward/nat]",
    "replay/size": "transitions in the replay buffer",
    "rollout/episode_return": "mean return of the episodes that ended since the last row",
    "rollout/episode_length": "mean length of the same episodes [steps]",
    "rollout/terminated": "share of the same episodes that ended by termination",
    "rollout/largest_reward": "largest size of a reward since the last row [reward]",
    "rollout/faults": "worlds that left the numbers and were reset",
    "reward/<term>": "mean of a weighted reward term per step",
    "task/<metric>": "mean of a figure of the task per step",
    "eval/<metric>": "figure of an evaluation",
    "time/env_steps_per_s": "env steps per second, evaluation left out",
    "time/updates_per_s": "updates per second of updating",
    "time/collect_s": "acting, stepping and storing [s]",
    "time/update_s": "updates [s]",
}
"""Every key that is logged; an unknown key is an error."""

LOG_EVERY = 1000
"""Env steps behind a row of the log; the run is asked for evaluation and checkpoint as often."""


@dataclass(frozen=True, kw_only=True)
class SACConfig:
    """Settings of SAC; a task's `presets` hold the values that suit it."""

    total_steps: int = 1_000_000
    """Length of training [env steps]."""
    seed: int = 0
    """Decides initial weights, action noise and what is drawn from the replay."""
    warmup_steps: int = 5_000
    """Steps with uniform actions and without updates at the start [env steps]."""
    updates_per_step: float = 1.0
    """Updates per env step, whatever the number of environments."""
    buffer_size: int = 1_000_000
    """Transitions that the replay buffer holds."""
    batch_size: int = 256
    """Transitions per update."""
    learning_rate: float = 3e-4
    """Adam's step size for actor, critics and temperature."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.005
    """Share of the critics that the target critics take on per update."""
    temperature: float | None = None
    """alpha, kept [reward/nat]; None adapts it to the target entropy."""
    initial_temperature: float = 1.0
    """alpha at the start, if it is adapted [reward/nat]."""
    target_entropy: float | None = None
    """H for actions scaled to -1..1, below log 2 per dimension [nat]; None for -1 per dimension."""
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers of actor and critics."""
    activation: str = "relu"
    """"elu", "relu" or "tanh"."""
    hindsight: int = 0
    """Transitions drawn with a goal from the future for each drawn as it was, 4 in the paper; in
    tasks with goals only. 0 for none; see `ctrl_rl.hindsight`."""
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        at_least_one = ("total_steps", "buffer_size", "batch_size")
        positive = ("updates_per_step", "learning_rate", "initial_temperature")
        checks = [(name, getattr(self, name) >= 1, "at least 1") for name in at_least_one]
        checks += [(name, 0 < getattr(self, name) < math.inf, "positive") for name in positive]
        checks += [
            ("warmup_steps", 0 <= self.warmup_steps < self.total_steps, WARMUP),
            ("hindsight", self.hindsight >= 0, "0 or more"),
            ("gamma", 0 <= self.gamma <= 1, "in 0..1"),
            ("polyak", 0 < self.polyak <= 1, "above 0 and at most 1"),
            (
                "temperature",
                self.temperature is None or 0 < self.temperature < math.inf,
                "positive or None",
            ),
            (
                "target_entropy",
                self.target_entropy is None or math.isfinite(self.target_entropy),
                "a number or None",
            ),
            ("hidden", bool(self.hidden) and min(self.hidden) >= 1, "positive widths"),
            ("activation", self.activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
            ("compile", self.compile in ("auto", "on", "off"), "auto, on or off"),
        ]
        for name, good, wanted in checks:
            if not good:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}")
        if self.temperature is not None:
            for name, default in (("target_entropy", None), ("initial_temperature", 1.0)):
                if getattr(self, name) != default:
                    raise ValueError(f"{name} has no effect with a kept temperature: leave one out")


STATS = ("value/q", "loss/critic", "policy/entropy", "policy/temperature", "loss/actor")
"""What `SAC.update` reports."""


# Losses -------------------------------------------------------------------------------------


def soft_target(
    reward: Tensor, discount: Tensor, next_q: Tensor, next_log_prob: Tensor, temperature: Tensor
) -> Tensor:
    """y (B,) from the target critics' Qbar(s', a') (2, B)."""
    return reward + discount * (next_q.amin(0) - temperature * next_log_prob)


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """L_Q from Q(s, a) (2, B) and y (B,)."""
    return 0.5 * (q - target).square().mean(1).sum()


def actor_loss(log_prob: Tensor, q: Tensor, temperature: Tensor) -> Tensor:
    """L_pi from log pi(a|s) (B,) and Q(s, a) (2, B)."""
    return (temperature * log_prob - q.amin(0)).mean()


def temperature_loss(log_temperature: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """L_alpha: alpha falls while the entropy is above its target, and rises below it."""
    return log_temperature * (-log_prob.mean() - target_entropy)


class Actor(nn.Module):
    """The policy, and log alpha: a parameter, or a constant where it is kept."""

    low: Tensor
    high: Tensor
    log_temperature: Tensor

    def __init__(
        self, config: SACConfig, obs_size: int, low: Tensor, high: Tensor, generator
    ) -> None:
        super().__init__()
        sizes = (obs_size, *config.hidden, 2 * len(low))
        self.net = MLP(sizes, config.activation, 0.01, generator)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.adapts = config.temperature is None
        alpha = config.initial_temperature if config.temperature is None else config.temperature
        if self.adapts:
            self.log_temperature = nn.Parameter(torch.tensor(math.log(alpha)))
        else:
            self.register_buffer("log_temperature", torch.tensor(math.log(alpha)))
        self.target_entropy = entropy_target(config.target_entropy, low, high)

    def distribution(self, obs: Tensor) -> SquashedGaussian:
        """pi(.|s) for (B, d)."""
        mean, log_std = self.net(obs).chunk(2, -1)
        return SquashedGaussian(mean, log_std.clamp(*LOG_STD_RANGE), self.low, self.high)


# The learner --------------------------------------------------------------------------------


class SAC:
    """Networks, optimisers and random generator; no environment and no replay inside.

    Args:
        config: settings.
        spec: the environment's contract; of this process's environments, in a group of them.
        device: torch device of networks and data.

    Raises:
        ValueError: the task's actions are discrete or unbounded, or none has the target entropy.
    """

    def __init__(self, config: SACConfig, spec: EnvSpec, device: torch.device | str) -> None:
        num_envs, spec = spec.num_envs, distributed.whole(spec)
        self.config, self.spec, self.device = config, spec, torch.device(device)
        self.num_envs, self.batch_size = (
            num_envs,
            distributed.share(config.batch_size, "samples")[0],
        )
        low, high = action_bounds(spec, "sac")
        start = torch.Generator().manual_seed(config.seed)
        self.generator = torch.Generator(self.device).manual_seed(config.seed + 1)
        self.critic_group = spec.critic_group
        self.actor = Actor(config, spec.obs_size("actor"), low, high, start).to(self.device)
        self.critic = QEnsemble(
            2, spec.obs_size(self.critic_group), low, high, config.hidden, config.activation, start
        ).to(self.device)
        self.target = deepcopy(self.critic).requires_grad_(False)
        updates = int(config.updates_per_step * config.total_steps)
        compiled = config.compile == "on" or (
            config.compile == "auto" and pays(updates, self.batch_size, config.hidden)
        )
        step = lambda module, objective: MinibatchStep(  # noqa: E731
            module, objective, config.learning_rate, None, None, compiled, 1e-8, check_each=False
        )
        self.critic_step = step(self.critic, self._critic_objective)
        self.actor_step = step(self.actor, self._actor_objective)
        self._targets: list[Tensor] = [*self.target.parameters()]
        self._sources: list[Tensor] = [*self.critic.parameters()]
        self.tally = Tally(num_envs, self.device)

    def make_replay(self) -> ReplayBuffer:
        """An empty buffer for what this learner reads.

        Raises:
            ValueError: `hindsight` is asked for in a task without goals, or by several processes.
        """
        groups = ["actor", self.critic_group]
        if self.config.hindsight:
            distributed.refuse_group("sac with hindsight")
            groups += goal_groups(self.spec)
        sizes = {g: self.spec.obs_size(g) for g in dict.fromkeys(groups)}
        size = self.config.buffer_size // distributed.world_size()
        return ReplayBuffer(size, self.num_envs, sizes, self.spec.action_size, self.device)

    @torch.no_grad()
    def act(self, obs: Obs) -> Tensor:
        """An action (N, A) drawn from the policy, in the env's units."""
        return self.actor.distribution(obs["actor"]).sample(self._noise(len(obs["actor"])))

    def act_randomly(self) -> Tensor:
        """An action (N, A) uniform within the bounds."""
        shape = (self.spec.num_envs, self.spec.action_size)
        x = torch.rand(shape, generator=self.generator, device=self.device)
        x = distributed.own(x, dim=0)
        return torch.lerp(self.actor.low, self.actor.high, x)

    def update(self, batch: Batch) -> Tensor:
        """One step of critics, actor and temperature, in this order, then of the target critics.

        Returns:
            Figures named by `STATS`, to be averaged by `figures`.
        """
        group = self.critic_group
        noise = self._noise(len(batch.reward), 2)
        obs, next_obs = batch.obs["actor"], batch.next_obs["actor"]
        of_critic = self.critic_step(
            *(batch.obs[group], batch.action, batch.reward, batch.discount),
            *(next_obs, batch.next_obs[group], noise[0]),
        )
        of_actor = self.actor_step(obs, batch.obs[group], noise[1])
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore
                self._targets, self._sources, self.config.polyak
            )
        return torch.cat([of_critic, of_actor])

    def figures(self, stats: list[Tensor]) -> dict[str, float]:
        """Means of what the updates returned.

        Raises:
            Diverged: a loss or a gradient was not finite in one of them.
        """
        mean = torch.stack(stats).mean(0)
        self.critic_step.check(mean[:3])
        self.actor_step.check(mean[3:])
        q, _, critic, entropy, temperature, _, actor = mean.tolist()
        return dict(zip(STATS, (q, critic, entropy, temperature, actor), strict=True))

    def policy_section(self) -> dict:
        """The policy alone, as `ctrl_rl.policy.Policy.from_section` reads it."""
        return {
            "format": 1,
            "kind": "squashed_gaussian_mlp",
            "spec": self.spec.to_json(),
            "group": "actor",
            "hidden": list(self.config.hidden),
            "activation": self.config.activation,
            "normalizer": None,
            "bound": "tanh",
            "weights": {k: v.clone() for k, v in self.actor.net.state_dict().items()},
        }

    def state_dict(self) -> dict:
        """Everything that decides the future of training but the replay, as a copy."""
        return deepcopy(
            {
                "actor": self.actor.state_dict(),
                "critic": self.critic.state_dict(),
                "target": self.target.state_dict(),
                "actor_step": self.actor_step.state_dict(),
                "critic_step": self.critic_step.state_dict(),
                "generator": distributed.concatenated(self.generator.get_state(), dim=0),
                "unfinished": distributed.concatenated(self.tally.unfinished, dim=1),
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.warm_start(state)
        self.actor_step.load_state_dict(state["actor_step"])
        self.critic_step.load_state_dict(state["critic_step"])
        self.generator.set_state(distributed.own(state["generator"], dim=0))
        self.tally.unfinished = distributed.own(state["unfinished"], dim=1).to(self.device)

    def warm_start(self, state: dict) -> None:
        """Take weights and temperature of another run; the rest begins anew.

        Raises:
            ValueError: its networks have other sizes, or it is a run of another algorithm.
        """
        take_weights(self, state, "actor", "critic", "target")
        if self.config.temperature is not None:  # kept, whatever the other run's was
            self.actor.log_temperature.fill_(math.log(self.config.temperature))

    def _noise(self, rows: int, *lead: int) -> Tensor:
        """Standard normal (*lead, rows, A), this process's part of what is drawn for all."""
        shape = (*lead, rows * distributed.world_size(), self.spec.action_size)
        noise = torch.randn(shape, generator=self.generator, device=self.device)
        return distributed.own(noise, dim=-2)

    def _critic_objective(
        self, critic, obs, action, reward, discount, next_obs, next_critic_obs, noise
    ):
        """L_Q of a minibatch and mean Q."""
        with torch.no_grad():
            next_action, log_prob = self.actor.distribution(next_obs).sample_with_log_prob(noise)
            next_q = self.target(next_critic_obs, next_action)
            alpha = self.actor.log_temperature.exp()
            y = soft_target(reward, discount, next_q, log_prob, alpha)
        q = critic(obs, action)
        return critic_loss(q, y), q.detach().mean()[None]

    def _actor_objective(self, actor, obs, critic_obs, noise):
        """L_pi + L_alpha of a minibatch; entropy and alpha."""
        action, log_prob = actor.distribution(obs).sample_with_log_prob(noise)
        alpha = actor.log_temperature.detach().exp()
        loss = actor_loss(log_prob, self.critic(critic_obs, action), alpha)
        if actor.adapts:
            of_alpha = temperature_loss(
                actor.log_temperature, log_prob.detach(), actor.target_entropy
            )
            loss = loss + of_alpha - of_alpha.detach()  # its gradient, without its value
        return loss, torch.stack([-log_prob.detach().mean(), alpha])


def train(
    config: SACConfig,
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
        Diverged: an update met a number that is not finite; the last checkpoint stands.
        ValueError: the task's actions are discrete or unbounded.
    """
    run = Run() if run is None else run
    sac = SAC(config, env.spec, env.device)
    replay, steps = sac.make_replay(), config.total_steps // distributed.world_size()
    hindsight = Hindsight(replay, env, config.hindsight) if config.hindsight else None
    if initial := run.initial(env.spec, "sac"):
        sac.warm_start(initial)
    run.start(METRICS, config, env, "sac", replay.nbytes_after(steps))
    step = run.resume(learner=sac, env=env, replay=replay)
    obs, num_envs = env.observe(), sac.spec.num_envs
    while step < config.total_steps and not run.stopping(step):
        began, update_s, stats, faults, first = time.perf_counter(), 0.0, [], [], step
        while step < min(first + LOG_EVERY, config.total_steps):
            action = sac.act(obs) if step >= config.warmup_steps else sac.act_randomly()
            result = env.step(action)
            replay.add(obs, action, result)
            sac.tally.add(result)
            obs, step = result.obs, step + num_envs
            faults += [(step, fault) for fault in result.info.faults]
            stepped = time.perf_counter()
            due = (step - num_envs, step, config.warmup_steps, config.updates_per_step)
            for _ in range(updates_due(*due)):
                if hindsight:
                    batch = hindsight.sample(config.batch_size, sac.generator, config.gamma)
                else:
                    drawn = distributed.own(replay.draw(config.batch_size, sac.generator), dim=0)
                    batch = replay.gather(drawn, gamma=config.gamma)
                stats.append(sac.update(batch))
            update_s += time.perf_counter() - stepped
        for at, fault in faults_of_all_ranks(faults, sac.num_envs):
            run.report_fault(at, fault)
        size = int(distributed.total(torch.tensor(len(replay))))
        metrics = {**sac.tally.flush(), "replay/size": size}
        if hindsight:
            metrics[REWARD] = max(metrics[REWARD], hindsight.largest_reward())
        if stats:
            try:
                metrics |= sac.figures(stats)
            except Diverged as error:
                raise diverged(step, error) from None
            metrics["time/updates_per_s"] = len(stats) / update_s
        wall_s = time.perf_counter() - began
        metrics["time/collect_s"], metrics["time/update_s"] = wall_s - update_s, update_s
        metrics["time/env_steps_per_s"] = (step - first) / wall_s
        run.log(step, metrics)
        if run.due("eval", step) and evaluate is not None:
            run.log(step, evaluate(Policy.from_section(sac.policy_section(), sac.device)))
        if run.due("checkpoint", step):
            state = sac.policy_section(), sac.state_dict(), env.state_dict(), replay.state_dict()
            run.save(step, *state)
    run.finish()
    return run
