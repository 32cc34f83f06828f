"""Twin delayed deep deterministic policy gradient, one file.

Paper: Fujimoto et al., "Addressing function approximation error in actor-critic methods", ICML
2018, arXiv:1802.09477.

    eps  ~ clip(N(0, target_noise), -noise_clip, noise_clip)                           (eq. 14)
    a'   = clip(pi_bar(s') + eps, low, high)
    y    = r + gamma [not terminated] min_i Qbar_i(s', a')                             (eq. 10)
    L_Q  = mean sum_i (Q_i(s, a) - y)^2
    L_pi = -mean Q_1(s, pi(s)),                            on every `policy_delay`-th update
    Qbar, pi_bar <- (1 - polyak) Qbar, pi_bar + polyak Q, pi,     on the same updates

pi is a network squashed by tanh to the bounds of each action dimension.

Deviations from the paper, each with its reason:

1. A time limit is no failure: y goes on from the true next observation. A step that ended in a
   fault is not learned from.
2. All noise is given for actions scaled to -1..1, drawn for each sample and dimension, and
   stretched to the dimension's range.
3. The critics read the action scaled to -1..1, and the group "critic" where there is one.
4. Weights start orthogonal (`ctrl_rl.networks.MLP`).

In a group of processes each has a replay of its own environments and draws its part of every
minibatch from it; gradients are those of all parts: see `ctrl_rl.distributed`.

Tensors: environments (N, ...), minibatch (B, ...), critics first (2, B). `docs/algorithms/td3.md`
explains every logged key.

Reading order: `METRICS` -> `TD3Config` -> losses -> `TD3` -> `train`.
"""

import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrl_rl import distributed
from ctrl_rl.buffers import WARMUP, Batch, ReplayBuffer, updates_due
from ctrl_rl.checkpoints import take_weights
from ctrl_rl.compiled import Diverged, MinibatchStep, diverged, pays
from ctrl_rl.env import Obs, VecEnv
from ctrl_rl.explosion import REWARD
from ctrl_rl.hindsight import Hindsight, goal_groups
from ctrl_rl.networks import ACTIVATIONS, DeterministicActor, QEnsemble, action_bounds
from ctrl_rl.policy import Policy
from ctrl_rl.rollout import Tally, faults_of_all_ranks
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec

METRICS: dict[str, str] = {
    "loss/critic": "L_Q, mean over the updates since the last row [reward^2]",
    "loss/actor": "L_pi, mean over those of them that step the actor [reward]",
    "value/q": "mean action value of the two critics on the minibatches [reward]",
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
class TD3Config:
    """Settings of TD3; a task's `presets` hold the values that suit it."""

    total_steps: int = 1_000_000
    """Length of training [env steps]."""
    seed: int = 0
    """Decides initial weights, action noise and what is drawn from the replay."""
    warmup_steps: int = 10_000
    """Steps with uniform actions and without updates at the start [env steps]."""
    updates_per_step: float = 1.0
    """Updates per env step, whatever the number of environments."""
    buffer_size: int = 1_000_000
    """Transitions that the replay buffer holds."""
    batch_size: int = 256
    """Transitions per update."""
    learning_rate: float = 3e-4
    """Adam's step size for actor and critics."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.005
    """Share of the networks that the target networks take on."""
    policy_delay: int = 2
    """Updates of the critics per update of the actor and of the targets."""
    exploration_noise: float = 0.1
    """Standard deviation of what is added to actions in training [half ranges]."""
    target_noise: float = 0.2
    """Standard deviation of what is added to the target action [half ranges]."""
    noise_clip: float = 0.5
    """Largest size of the latter [half ranges]."""
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
        at_least_one = ("total_steps", "buffer_size", "batch_size", "policy_delay")
        positive = ("updates_per_step", "learning_rate")
        not_negative = ("exploration_noise", "target_noise", "noise_clip", "hindsight")
        checks = [(name, getattr(self, name) >= 1, "at least 1") for name in at_least_one]
        checks += [(name, 0 < getattr(self, name) < math.inf, "positive") for name in positive]
        checks += [(n, 0 <= getattr(self, n) < math.inf, "0 or more") for n in not_negative]
        checks += [
            ("warmup_steps", 0 <= self.warmup_steps < self.total_steps, WARMUP),
            ("gamma", 0 <= self.gamma <= 1, "in 0..1"),
            ("polyak", 0 < self.polyak <= 1, "above 0 and at most 1"),
            ("hidden", bool(self.hidden) and min(self.hidden) >= 1, "positive widths"),
            ("activation", self.activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
            ("compile", self.compile in ("auto", "on", "off"), "auto, on or off"),
        ]
        for name, good, wanted in checks:
            if not good:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}")


# Losses -------------------------------------------------------------------------------------


def smoothed(action: Tensor, noise: Tensor, config: TD3Config, low: Tensor, high: Tensor) -> Tensor:
    """a' (B, A) from pi_bar(s') and standard normal noise, in action units within the bounds."""
    noise = (config.target_noise * noise).clamp(-config.noise_clip, config.noise_clip)
    return torch.clamp(action + (high - low) / 2 * noise, low, high)


def clipped_target(reward: Tensor, discount: Tensor, next_q: Tensor) -> Tensor:
    """y (B,) from the target critics' Qbar(s', a') (2, B)."""
    return reward + discount * next_q.amin(0)


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """L_Q from Q(s, a) (2, B) and y (B,)."""
    return (q - target).square().mean(1).sum()


def actor_loss(q: Tensor) -> Tensor:
    """L_pi from Q(s, pi(s)) (2, B); the first critic counts."""
    return -q[0].mean()


# The learner --------------------------------------------------------------------------------


class TD3:
    """Networks, optimisers and random generator; no environment and no replay inside.

    Args:
        config: settings.
        spec: the environment's contract; of this process's environments, in a group of them.
        device: torch device of networks and data.

    Raises:
        ValueError: the task's actions are discrete or unbounded.
    """

    def __init__(self, config: TD3Config, spec: EnvSpec, device: torch.device | str) -> None:
        num_envs, spec = spec.num_envs, distributed.whole(spec)
        self.config, self.spec, self.device = config, spec, torch.device(device)
        self.num_envs, self.batch_size = (
            num_envs,
            distributed.share(config.batch_size, "samples")[0],
        )
        low, high = action_bounds(spec, "td3")
        start = torch.Generator().manual_seed(config.seed)
        self.generator = torch.Generator(self.device).manual_seed(config.seed + 1)
        self.critic_group = spec.critic_group
        shape = low, high, config.hidden, config.activation, start
        self.actor = DeterministicActor(spec.obs_size("actor"), *shape).to(self.device)
        self.critic = QEnsemble(2, spec.obs_size(self.critic_group), *shape).to(self.device)
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critic = deepcopy(self.critic).requires_grad_(False)
        self.noise_std = config.exploration_noise * (self.actor.high - self.actor.low) / 2
        updates = int(config.updates_per_step * config.total_steps)
        compiled = config.compile == "on" or (
            config.compile == "auto" and pays(updates, self.batch_size, config.hidden)
        )
        step = lambda module, objective: MinibatchStep(  # noqa: E731
            module, objective, config.learning_rate, None, None, compiled, 1e-8, check_each=False
        )
        self.critic_step = step(self.critic, self._critic_objective)
        self.actor_step = step(self.actor, self._actor_objective)
        self._targets: list[Tensor] = [
            *self.target_critic.parameters(),
            *self.target_actor.parameters(),
        ]
        self._sources: list[Tensor] = [*self.critic.parameters(), *self.actor.parameters()]
        self.updates = 0
        self.tally = Tally(num_envs, self.device)

    def make_replay(self) -> ReplayBuffer:
        """An empty buffer for what this learner reads.

        Raises:
            ValueError: `hindsight` is asked for in a task without goals, or by several processes.
        """
        groups = ["actor", self.critic_group]
        if self.config.hindsight:
            distributed.refuse_group("td3 with hindsight")
            groups += goal_groups(self.spec)
        sizes = {g: self.spec.obs_size(g) for g in dict.fromkeys(groups)}
        size = self.config.buffer_size // distributed.world_size()
        return ReplayBuffer(size, self.num_envs, sizes, self.spec.action_size, self.device)

    @torch.no_grad()
    def act(self, obs: Obs) -> Tensor:
        """The policy's action (N, A) with exploration noise, in the env's units."""
        action = self.actor(obs["actor"])
        noisy = action + self.noise_std * self._noise(len(action))
        return torch.clamp(noisy, self.actor.low, self.actor.high)

    def act_randomly(self) -> Tensor:
        """An action (N, A) uniform within the bounds."""
        shape = (self.spec.num_envs, self.spec.action_size)
        x = torch.rand(shape, generator=self.generator, device=self.device)
        x = distributed.own(x, dim=0)
        return torch.lerp(self.actor.low, self.actor.high, x)

    def update(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """One step of the critics; on every `policy_delay`-th also of actor and targets.

        Returns:
            Figures of the critics and, where it took a step, of the actor, for `figures`.
        """
        group = self.critic_group
        of_critic = self.critic_step(
            *(batch.obs[group], batch.action, batch.reward, batch.discount),
            *(batch.next_obs["actor"], batch.next_obs[group], self._noise(len(batch.reward))),
        )
        self.updates += 1
        if self.updates % self.config.policy_delay:
            return of_critic, None
        of_actor = self.actor_step(batch.obs["actor"], batch.obs[group])
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore
                self._targets, self._sources, self.config.polyak
            )
        return of_critic, of_actor

    def figures(self, stats: list[tuple[Tensor, Tensor | None]]) -> dict[str, float]:
        """Means of what the updates returned.

        Raises:
            Diverged: a loss or a gradient was not finite in one of them.
        """
        of_critic = torch.stack([critic for critic, _ in stats]).mean(0)
        self.critic_step.check(of_critic)
        q, _, loss = of_critic.tolist()
        found = {"value/q": q, "loss/critic": loss}
        if steps := [actor for _, actor in stats if actor is not None]:
            of_actor = torch.stack(steps).mean(0)
            self.actor_step.check(of_actor)
            found["loss/actor"] = of_actor[-1].item()
        return found

    def policy_section(self) -> dict:
        """The policy alone, as `ctrl_rl.policy.Policy.from_section` reads it."""
        return {
            "format": 1,
            "kind": "deterministic_mlp",
            "spec": self.spec.to_json(),
            "group": "actor",
            "hidden": list(self.config.hidden),
            "activation": self.config.activation,
            "normalizer": None,
            "bound": "tanh",
            "weights": {k: v.clone() for k, v in self.actor.net.state_dict().items()},
            "noise_std": self.noise_std.clone(),
        }

    def state_dict(self) -> dict:
        """Everything that decides the future of training but the replay, as a copy."""
        return deepcopy(
            {
                "actor": self.actor.state_dict(),
                "critic": self.critic.state_dict(),
                "target_actor": self.target_actor.state_dict(),
                "target_critic": self.target_critic.state_dict(),
                "actor_step": self.actor_step.state_dict(),
                "critic_step": self.critic_step.state_dict(),
                "updates": self.updates,
                "generator": distributed.concatenated(self.generator.get_state(), dim=0),
                "unfinished": distributed.concatenated(self.tally.unfinished, dim=1),
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.warm_start(state)
        self.actor_step.load_state_dict(state["actor_step"])
        self.critic_step.load_state_dict(state["critic_step"])
        self.updates = state["updates"]
        self.generator.set_state(distributed.own(state["generator"], dim=0))
        self.tally.unfinished = distributed.own(state["unfinished"], dim=1).to(self.device)

    def warm_start(self, state: dict) -> None:
        """Take the weights of another run; the rest begins anew.

        Raises:
            ValueError: its networks have other sizes, or it is a run of another algorithm.
        """
        take_weights(self, state, "actor", "critic", "target_actor", "target_critic")

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
            bounds = self.actor.low, self.actor.high
            next_action = smoothed(self.target_actor(next_obs), noise, self.config, *bounds)
            y = clipped_target(reward, discount, self.target_critic(next_critic_obs, next_action))
        q = critic(obs, action)
        return critic_loss(q, y), q.detach().mean()[None]

    def _actor_objective(self, actor, obs, critic_obs):
        """L_pi of a minibatch; no other figure."""
        loss = actor_loss(self.critic(critic_obs, actor(obs)))
        return loss, loss.detach()[None][:0]


def train(
    config: TD3Config,
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
    td3 = TD3(config, env.spec, env.device)
    replay, steps = td3.make_replay(), config.total_steps // distributed.world_size()
    hindsight = Hindsight(replay, env, config.hindsight) if config.hindsight else None
    if initial := run.initial(env.spec, "td3"):
        td3.warm_start(initial)
    run.start(METRICS, config, env, "td3", replay.nbytes_after(steps))
    step = run.resume(learner=td3, env=env, replay=replay)
    obs, num_envs = env.observe(), td3.spec.num_envs
    while step < config.total_steps and not run.stopping(step):
        began, update_s, stats, faults, first = time.perf_counter(), 0.0, [], [], step
        while step < min(first + LOG_EVERY, config.total_steps):
            action = td3.act(obs) if step >= config.warmup_steps else td3.act_randomly()
            result = env.step(action)
            replay.add(obs, action, result)
            td3.tally.add(result)
            obs, step = result.obs, step + num_envs
            faults += [(step, fault) for fault in result.info.faults]
            stepped = time.perf_counter()
            due = (step - num_envs, step, config.warmup_steps, config.updates_per_step)
            for _ in range(updates_due(*due)):
                if hindsight:
                    batch = hindsight.sample(config.batch_size, td3.generator, config.gamma)
                else:
                    drawn = distributed.own(replay.draw(config.batch_size, td3.generator), dim=0)
                    batch = replay.gather(drawn, gamma=config.gamma)
                stats.append(td3.update(batch))
            update_s += time.perf_counter() - stepped
        for at, fault in faults_of_all_ranks(faults, td3.num_envs):
            run.report_fault(at, fault)
        size = int(distributed.total(torch.tensor(len(replay))))
        metrics = {**td3.tally.flush(), "replay/size": size}
        if hindsight:
            metrics[REWARD] = max(metrics[REWARD], hindsight.largest_reward())
        if stats:
            try:
                metrics |= td3.figures(stats)
            except Diverged as error:
                raise diverged(step, error) from None
            metrics["time/updates_per_s"] = len(stats) / update_s
        wall_s = time.perf_counter() - began
        metrics["time/collect_s"], metrics["time/update_s"] = wall_s - update_s, update_s
        metrics["time/env_steps_per_s"] = (step - first) / wall_s
        run.log(step, metrics)
        if run.due("eval", step) and evaluate is not None:
            run.log(step, evaluate(Policy.from_section(td3.policy_section(), td3.device)))
        if run.due("checkpoint", step):
            state = td3.policy_section(), td3.state_dict(), env.state_dict(), replay.state_dict()
            run.save(step, *state)
    run.finish()
    return run
