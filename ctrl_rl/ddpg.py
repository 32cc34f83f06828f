"""Deep deterministic policy gradient, one file: the discounted baseline of ARO-DDPG.

Paper: Lillicrap et al., "Continuous control with deep reinforcement learning", ICLR 2016,
arXiv:1509.02971 (algorithm 1; settings: section 7).

    y    = r + gamma [not terminated] Qbar(s', pi_bar(s'))
    L_Q  = mean (Q(s, a) - y)^2
    L_pi = -mean Q(s, pi(s))
    Qbar, pi_bar <- (1 - polyak) Qbar, pi_bar + polyak Q, pi,     after each update
    n    <- (1 - ou_theta) n + ou_sigma N(0, 1),     added to actions; 0 when an episode begins

pi is a network squashed by tanh to the bounds of each action dimension.

Deviations from the paper, each with its reason:

1. A time limit is no failure: y goes on from the true next observation. A step that ended in a
   fault is not learned from.
2. The noise n is given for actions scaled to -1..1, and stretched to the dimension's range.
3. No batch normalisation and no weight decay of the critic; the action enters the critic at its
   first layer, scaled to -1..1. The first two are left out by most later implementations.
4. The first `warmup_steps` actions are uniform, so that the first batches are diverse.
5. The critic reads the group "critic" where there is one. Weights start orthogonal.

Tensors: environments (N, ...), minibatch (B, ...). `docs/algorithms/ddpg.md` explains every logged
key.

Reading order: `METRICS` -> `DDPGConfig` -> losses -> `DDPG` -> `train`. The twin
`ctrl_rl/aro_ddpg.py` keeps the same names and order.
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
from ctrl_rl.networks import ACTIVATIONS, DeterministicActor, QEnsemble, action_bounds
from ctrl_rl.policy import Policy
from ctrl_rl.rollout import Tally
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec

METRICS: dict[str, str] = {
    "loss/critic": "L_Q, mean over the updates since the last row [reward^2]",
    "loss/actor": "L_pi, mean over the same updates [reward]",
    "value/q": "mean action value of the critic on the minibatches [reward]",
    "replay/size": "transitions in the replay buffer",
    "rollout/average_reward": "mean reward per step since the last row, noise included",
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
class DDPGConfig:
    """Settings of DDPG; the paper's, where it has them."""

    total_steps: int = 1_000_000
    """Length of training [env steps]."""
    seed: int = 0
    """Decides initial weights, action noise and what is drawn from the replay."""
    warmup_steps: int = 5_000
    """Steps with uniform actions and without updates at the start [env steps]."""
    updates_per_step: float = 1.0
    """Updates per env step, whatever the number of environments."""
    update_every: int = 1
    """Env steps between rounds of updates."""
    buffer_size: int = 1_000_000
    """Transitions that the replay buffer holds."""
    batch_size: int = 64
    """Transitions per update."""
    actor_learning_rate: float = 1e-4
    """Adam's step size for the actor."""
    critic_learning_rate: float = 1e-3
    """Adam's step size for the critic."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.001
    """Share of the networks that the target networks take on."""
    ou_theta: float = 0.15
    """Share of the exploration noise that is forgotten per step."""
    ou_sigma: float = 0.2
    """Standard deviation of what is added to it per step [half ranges]."""
    hidden: tuple[int, ...] = (400, 300)
    """Widths of the hidden layers of actor and critic."""
    activation: str = "relu"
    """"elu", "relu" or "tanh"."""
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        at_least_one = ("total_steps", "update_every", "buffer_size", "batch_size")
        positive = ("updates_per_step", "actor_learning_rate", "critic_learning_rate")
        checks = [(name, getattr(self, name) >= 1, "at least 1") for name in at_least_one]
        checks += [(name, 0 < getattr(self, name) < math.inf, "positive") for name in positive]
        checks += [
            ("warmup_steps", 0 <= self.warmup_steps < self.total_steps, WARMUP),
            ("gamma", 0 <= self.gamma <= 1, "in 0..1"),
            ("polyak", 0 < self.polyak <= 1, "above 0 and at most 1"),
            ("ou_theta", 0 < self.ou_theta <= 1, "above 0 and at most 1"),
            ("ou_sigma", 0 <= self.ou_sigma < math.inf, "0 or more"),
            ("hidden", bool(self.hidden) and min(self.hidden) >= 1, "positive widths"),
            ("activation", self.activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
            ("compile", self.compile in ("auto", "on", "off"), "auto, on or off"),
        ]
        for name, good, wanted in checks:
            if not good:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}")


# Losses -------------------------------------------------------------------------------------


def discounted_target(reward: Tensor, discount: Tensor, next_q: Tensor) -> Tensor:
    """y (B,) from the target critic's Qbar(s', pi_bar(s')) (1, B)."""
    return reward + discount * next_q[0]


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """L_Q from Q(s, a) (1, B) and y (B,)."""
    return (q - target).square().mean(1).sum()


def actor_loss(q: Tensor) -> Tensor:
    """L_pi from Q(s, pi(s)) (1, B)."""
    return -q[0].mean()


def next_noise(noise: Tensor, normal: Tensor, theta: float, sigma: float) -> Tensor:
    """n of the next step from this one's and standard normals, (N, A) each: Ornstein-Uhlenbeck."""
    return (1 - theta) * noise + sigma * normal


def noise_deviation(theta: float, sigma: float) -> float:
    """Standard deviation that n tends to: 0.38 with the paper's 0.15 and 0.2 [half ranges]."""
    return sigma / math.sqrt(1 - (1 - theta) ** 2)


# The learner --------------------------------------------------------------------------------


class DDPG:
    """Networks, optimisers, noise and random generator; no environment and no replay inside.

    Args:
        config: settings.
        spec: the environment's contract.
        device: torch device of networks and data.

    Raises:
        ValueError: the task's actions are discrete or unbounded.
    """

    def __init__(self, config: DDPGConfig, spec: EnvSpec, device: torch.device | str) -> None:
        self.config, self.spec, self.device = config, spec, torch.device(device)
        low, high = action_bounds(spec, "ddpg")
        start = torch.Generator().manual_seed(config.seed)
        self.generator = torch.Generator(self.device).manual_seed(config.seed + 1)
        self.critic_group = spec.critic_group
        shape = (low, high, config.hidden, config.activation, start)
        self.actor = DeterministicActor(spec.obs_size("actor"), *shape).to(self.device)
        self.critic = QEnsemble(1, spec.obs_size(self.critic_group), *shape).to(self.device)
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critic = deepcopy(self.critic).requires_grad_(False)
        updates = int(config.updates_per_step * config.total_steps)
        compiled = config.compile == "on" or (
            config.compile == "auto" and pays(updates, config.batch_size, config.hidden)
        )
        step = lambda module, objective, learning_rate: MinibatchStep(  # noqa: E731
            module, objective, learning_rate, None, None, compiled, 1e-8, check_each=False
        )
        self.critic_step = step(self.critic, self._critic_objective, config.critic_learning_rate)
        self.actor_step = step(self.actor, self._actor_objective, config.actor_learning_rate)
        self._targets: list[Tensor] = [
            *self.target_critic.parameters(),
            *self.target_actor.parameters(),
        ]
        self._sources: list[Tensor] = [*self.critic.parameters(), *self.actor.parameters()]
        self.noise = torch.zeros(spec.num_envs, spec.action_size, device=self.device)
        """n (N, A) of the last step [half ranges]."""
        self.tally = Tally(spec.num_envs, self.device)

    def make_replay(self) -> ReplayBuffer:
        """An empty buffer for what this learner reads."""
        sizes = {g: self.spec.obs_size(g) for g in dict.fromkeys(("actor", self.critic_group))}
        size = self.config.buffer_size
        return ReplayBuffer(size, self.spec.num_envs, sizes, self.spec.action_size, self.device)

    @torch.no_grad()
    def act(self, obs: Obs) -> Tensor:
        """The policy's action (N, A) with the next step's noise, in the env's units."""
        normal = torch.randn(self.noise.shape, generator=self.generator, device=self.device)
        self.noise = next_noise(self.noise, normal, self.config.ou_theta, self.config.ou_sigma)
        low, high = self.actor.low, self.actor.high
        return torch.clamp(self.actor(obs["actor"]) + (high - low) / 2 * self.noise, low, high)

    def act_randomly(self) -> Tensor:
        """An action (N, A) uniform within the bounds."""
        x = torch.rand(self.noise.shape, generator=self.generator, device=self.device)
        return torch.lerp(self.actor.low, self.actor.high, x)

    def forget_noise(self, ended: Tensor) -> None:
        """The noise of rows whose episode ended, (N,) bool, begins at 0 again."""
        self.noise = self.noise * ~ended[:, None]

    def sample(self, replay: ReplayBuffer) -> Batch:
        """A minibatch for `update`."""
        return replay.sample(self.config.batch_size, self.generator, gamma=self.config.gamma)

    def update(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One step of critic, actor and targets.

        Returns:
            Figures of the critic and of the actor, for `figures`.
        """
        group = self.critic_group
        of_critic = self.critic_step(
            *(batch.obs[group], batch.action, batch.reward, batch.discount),
            *(batch.next_obs["actor"], batch.next_obs[group]),
        )
        of_actor = self.actor_step(batch.obs["actor"], batch.obs[group])
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore
                self._targets, self._sources, self.config.polyak
            )
        return of_critic, of_actor

    def figures(self, stats: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Means of what the updates returned.

        Raises:
            Diverged: a loss or a gradient was not finite in one of them.
        """
        of_critic, of_actor = (torch.stack(x).mean(0) for x in zip(*stats, strict=True))
        self.critic_step.check(of_critic)
        self.actor_step.check(of_actor)
        q, _, loss = of_critic.tolist()
        return {"value/q": q, "loss/critic": loss, "loss/actor": of_actor[-1].item()}

    def policy_section(self) -> dict:
        """The policy alone, as `ctrl_rl.policy.Policy.from_section` reads it."""
        deviation = noise_deviation(self.config.ou_theta, self.config.ou_sigma)
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
            "noise_std": deviation * (self.actor.high - self.actor.low) / 2,
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
                "generator": self.generator.get_state(),
                "noise": self.noise,
                "unfinished": self.tally.unfinished,
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.warm_start(state)
        self.actor_step.load_state_dict(state["actor_step"])
        self.critic_step.load_state_dict(state["critic_step"])
        self.generator.set_state(state["generator"])
        self.noise = state["noise"].to(self.device)
        self.tally.unfinished = state["unfinished"].to(self.device)

    def warm_start(self, state: dict) -> None:
        """Take the weights of another run; the rest begins anew.

        Raises:
            ValueError: its networks have other sizes, or it is a run of another algorithm.
        """
        take_weights(self, state, "actor", "critic", "target_actor", "target_critic")

    def _critic_objective(self, critic, obs, action, reward, discount, next_obs, next_critic_obs):
        """L_Q of a minibatch and mean Q."""
        with torch.no_grad():
            next_q = self.target_critic(next_critic_obs, self.target_actor(next_obs))
            y = discounted_target(reward, discount, next_q)
        q = critic(obs, action)
        return critic_loss(q, y), q.detach().mean()[None]

    def _actor_objective(self, actor, obs, critic_obs):
        """L_pi of a minibatch; no other figure."""
        loss = actor_loss(self.critic(critic_obs, actor(obs)))
        return loss, loss.detach()[None][:0]


def train(
    config: DDPGConfig,
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
        ValueError: the task's actions are discrete or unbounded, or there are several processes.
    """
    distributed.refuse_group("ddpg")
    run = Run() if run is None else run
    ddpg = DDPG(config, env.spec, env.device)
    replay = ddpg.make_replay()
    if initial := run.initial(env.spec, "ddpg"):
        ddpg.warm_start(initial)
    run.start(METRICS, config, env, "ddpg", replay.nbytes_after(config.total_steps))
    step = run.resume(learner=ddpg, env=env, replay=replay)
    obs, num_envs, every = env.observe(), env.spec.num_envs, config.update_every
    while step < config.total_steps and not run.stopping(step):
        began, update_s, stats, rewards, first = time.perf_counter(), 0.0, [], [], step
        while step < min(first + LOG_EVERY, config.total_steps):
            action = ddpg.act(obs) if step >= config.warmup_steps else ddpg.act_randomly()
            result = env.step(action)
            replay.add(obs, action, result)
            ddpg.forget_noise(result.terminated | result.truncated)
            ddpg.tally.add(result)
            rewards.append(result.reward)
            before, obs, step = step, result.obs, step + num_envs
            for fault in result.info.faults:
                run.report_fault(step, fault)
            stepped = time.perf_counter()
            rounds = before - before % every, step - step % every
            for _ in range(updates_due(*rounds, config.warmup_steps, config.updates_per_step)):
                stats.append(ddpg.update(ddpg.sample(replay)))
            update_s += time.perf_counter() - stepped
        metrics = {**ddpg.tally.flush(), "replay/size": len(replay)}
        metrics["rollout/average_reward"] = torch.stack(rewards).double().mean().item()
        if stats:
            try:
                metrics |= ddpg.figures(stats)
            except Diverged as error:
                raise diverged(step, error) from None
            metrics["time/updates_per_s"] = len(stats) / update_s
        wall_s = time.perf_counter() - began
        metrics["time/collect_s"], metrics["time/update_s"] = wall_s - update_s, update_s
        metrics["time/env_steps_per_s"] = (step - first) / wall_s
        run.log(step, metrics)
        if run.due("eval", step) and evaluate is not None:
            run.log(step, evaluate(Policy.from_section(ddpg.policy_section(), ddpg.device)))
        if run.due("checkpoint", step):
            state = ddpg.policy_section(), ddpg.state_dict(), env.state_dict(), replay.state_dict()
            run.save(step, *state)
    run.finish()
    return run
