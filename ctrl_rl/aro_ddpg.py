"""ARO-DDPG, one file: off-policy deterministic actor-critic for the average reward.

Paper: Saxena, Khastagir, Kolathaya, Bhatnagar, "Off-policy average reward actor-critic with
deterministic policy search", ICML 2023, arXiv:2305.12239. Lines marked (code) follow the authors'
code for its task cheetah run; the paper's own list of settings was not at hand.

The objective is the gain rho, the reward per step in the long run. Q is the differential value,
how much more than rho per step is to come; it has no discount and is known up to a constant:

    Q(s, a) = r - rho + Q(s', pi(s'))

    y    = r + min_i Qbar_i(s', pi_bar(s'))                                            (code)
    L_Q  = 1/2 sum_i mean (Q_i(s, a) + rho - y)^2                                      (code)
    L_pi = -mean min_i Q_i(s, pi(s)),       on every `actor_every`-th update           (code)
    Qbar, pi_bar <- (1 - polyak) Qbar, pi_bar + polyak Q, pi,     on the same updates  (code)
    rho    starts at 0 and steps down the gradient of L_Q with the critics             (code)
    n    <- (1 - ou_theta) n + ou_sigma N(0, 1),     added to actions, never set back  (code)

What an end means, where the code has (1 - done) Qbar and a `done` that is its time limit. Our
reading throughout:

- A time limit belongs to training and not to the task: y goes on from the true next observation.
- A termination belongs to the task, and an average counts what follows. Its s' is the first
  observation of the next episode, and `reset_cost` is taken off its reward. A Qbar of 0 would mean
  nothing there, since Q is known up to a constant.
- A step that ended in a fault is not learned from.

rho trails the average reward, and meanwhile Q drifts by a constant, which changes no action: a
common error steps many weights of the critics and the one of rho, so that the critics take most of
it and pass it on to their targets (our reading; the docs page has figures). They come to rest only
where rho is the gain, or lower by the mean of Q_i - min_i Q_i where the critics differ.

Deviations from the code beyond that, each with its reason:

1. The noise n is given for actions scaled to -1..1, and stretched to the dimension's range; the
   critics read scaled actions. The code has bounds of -1 and 1 alone.
2. No update falls in the warm-up, and the first one that steps the actor is the `actor_every`-th.
3. The critics read the group "critic" where there is one. Weights start orthogonal.

Tensors: environments (N, ...), minibatch (B, ...), critics first (2, B).
`docs/algorithms/aro_ddpg.md` explains every logged key.

Reading order: `METRICS` -> `ARODDPGConfig` -> losses -> `Critics` -> `ARODDPG` -> `train`. The twin
`ctrl_rl/ddpg.py`, whose actor and noise are used here, keeps the same names and order.
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
from ctrl_rl.ddpg import next_noise, noise_deviation
from ctrl_rl.env import Obs, VecEnv
from ctrl_rl.networks import ACTIVATIONS, DeterministicActor, QEnsemble, action_bounds
from ctrl_rl.policy import Policy
from ctrl_rl.rollout import Tally
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec

METRICS: dict[str, str] = {
    "loss/critic": "L_Q, mean over the updates since the last row [reward^2]",
    "loss/actor": "L_pi, mean over those of them that step the actor [reward]",
    "value/gain": "rho, the learnt reward per step, at the row [reward]",
    "value/q": "mean Q_i on the minibatches; its constant is arbitrary [reward]",
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
class ARODDPGConfig:
    """Settings of ARO-DDPG; the defaults are those of the authors' code."""

    total_steps: int = 1_000_000
    """Length of training [env steps]."""
    seed: int = 0
    """Decides initial weights, action noise and what is drawn from the replay."""
    warmup_steps: int = 5_000
    """Steps with uniform actions and without updates at the start [env steps]."""
    updates_per_step: float = 1.0
    """Updates per env step, whatever the number of environments."""
    update_every: int = 1_000
    """Env steps between rounds of updates."""
    actor_every: int = 2
    """Updates of the critics per update of the actor and of the targets."""
    buffer_size: int = 100_000
    """Transitions that the replay buffer holds."""
    batch_size: int = 256
    """Transitions per update."""
    actor_learning_rate: float = 3e-4
    """Adam's step size for the actor."""
    critic_learning_rate: float = 3e-4
    """Adam's step size for the critics and the gain."""
    reset_cost: float = 0.0
    """Taken off the reward of a step that terminates [reward]; 0 makes a fall a free new start."""
    polyak: float = 0.005
    """Share of the networks that the target networks take on."""
    ou_theta: float = 0.15
    """Share of the exploration noise that is forgotten per step."""
    ou_sigma: float = 0.2
    """Standard deviation of what is added to it per step [half ranges]."""
    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers of actor and critics."""
    activation: str = "relu"
    """"elu", "relu" or "tanh"."""
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        at_least_one = ("total_steps", "update_every", "actor_every", "buffer_size", "batch_size")
        positive = ("updates_per_step", "actor_learning_rate", "critic_learning_rate")
        checks = [(name, getattr(self, name) >= 1, "at least 1") for name in at_least_one]
        checks += [(name, 0 < getattr(self, name) < math.inf, "positive") for name in positive]
        checks += [
            ("warmup_steps", 0 <= self.warmup_steps < self.total_steps, WARMUP),
            ("reset_cost", 0 <= self.reset_cost < math.inf, "0 or more"),
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


def differential_target(reward: Tensor, next_q: Tensor) -> Tensor:
    """y (B,) from the target critics' Qbar(s', pi_bar(s')) (2, B); rho stands in L_Q."""
    return reward + next_q.amin(0)


def critic_loss(q: Tensor, gain: Tensor, target: Tensor) -> Tensor:
    """L_Q from Q(s, a) (2, B), rho () and y (B,)."""
    return 0.5 * (q + gain - target).square().mean(1).sum()


def actor_loss(q: Tensor) -> Tensor:
    """L_pi from Q(s, pi(s)) (2, B)."""
    return -q.amin(0).mean()


class Critics(nn.Module):
    """Q_1, Q_2 and the gain rho, which are learnt together."""

    def __init__(self, *args) -> None:
        super().__init__()
        self.q = QEnsemble(2, *args)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """(B, d) and (B, A) in action units to (2, B)."""
        return self.q(obs, action)


# The learner --------------------------------------------------------------------------------


class ARODDPG:
    """Networks, optimisers, noise and random generator; no environment and no replay inside.

    Args:
        config: settings.
        spec: the environment's contract.
        device: torch device of networks and data.

    Raises:
        ValueError: the task's actions are discrete or unbounded.
    """

    def __init__(self, config: ARODDPGConfig, spec: EnvSpec, device: torch.device | str) -> None:
        self.config, self.spec, self.device = config, spec, torch.device(device)
        low, high = action_bounds(spec, "aro_ddpg")
        start = torch.Generator().manual_seed(config.seed)
        self.generator = torch.Generator(self.device).manual_seed(config.seed + 1)
        self.critic_group = spec.critic_group
        shape = (low, high, config.hidden, config.activation, start)
        self.actor = DeterministicActor(spec.obs_size("actor"), *shape).to(self.device)
        self.critic = Critics(spec.obs_size(self.critic_group), *shape).to(self.device)
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
        self.updates = 0
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

    def sample(self, replay: ReplayBuffer) -> Batch:
        """A minibatch for `update`: see `continuing`."""
        return self.continuing(replay, replay.draw(self.config.batch_size, self.generator))

    def continuing(self, replay: ReplayBuffer, index: Tensor) -> Batch:
        """The steps at `index` (B,), where a termination goes on in the next episode at a cost."""
        batch = replay.gather(index, 1, gamma=1.0)
        terminated = batch.discount == 0
        restart = replay.following(index)
        next_obs = {
            group: torch.where(terminated[:, None], restart[group], obs)
            for group, obs in batch.next_obs.items()
        }
        return batch._replace(
            reward=batch.reward - self.config.reset_cost * terminated,
            next_obs=next_obs,
            discount=torch.ones_like(batch.discount),
        )

    def update(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """One step of critics and gain; on every `actor_every`-th also of actor and targets.

        Returns:
            Figures of the critics and, where it took a step, of the actor, for `figures`.
        """
        group = self.critic_group
        of_critic = self.critic_step(
            *(batch.obs[group], batch.action, batch.reward),
            *(batch.next_obs["actor"], batch.next_obs[group]),
        )
        self.updates += 1
        if self.updates % self.config.actor_every:
            return of_critic, None
        of_actor = self.actor_step(batch.obs["actor"], batch.obs[group])
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore
                self._targets, self._sources, self.config.polyak
            )
        return of_critic, of_actor

    def figures(self, stats: list[tuple[Tensor, Tensor | None]]) -> dict[str, float]:
        """Means of what the updates returned, and the gain.

        Raises:
            Diverged: a loss or a gradient was not finite in one of them.
        """
        of_critic = torch.stack([critic for critic, _ in stats]).mean(0)
        self.critic_step.check(of_critic)
        q, _, loss = of_critic.tolist()
        found = {"value/gain": self.critic.gain.item(), "value/q": q, "loss/critic": loss}
        if steps := [actor for _, actor in stats if actor is not None]:
            of_actor = torch.stack(steps).mean(0)
            self.actor_step.check(of_actor)
            found["loss/actor"] = of_actor[-1].item()
        return found

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
                "updates": self.updates,
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
        self.updates = state["updates"]
        self.generator.set_state(state["generator"])
        self.noise = state["noise"].to(self.device)
        self.tally.unfinished = state["unfinished"].to(self.device)

    def warm_start(self, state: dict) -> None:
        """Take the weights of another run; the rest begins anew.

        Raises:
            ValueError: its networks have other sizes, or it is a run of another algorithm.
        """
        take_weights(self, state, "actor", "critic", "target_actor", "target_critic")

    def _critic_objective(self, critic, obs, action, reward, next_obs, next_critic_obs):
        """L_Q of a minibatch and mean Q."""
        with torch.no_grad():
            next_q = self.target_critic(next_critic_obs, self.target_actor(next_obs))
            y = differential_target(reward, next_q)
        q = critic(obs, action)
        return critic_loss(q, critic.gain, y), q.detach().mean()[None]

    def _actor_objective(self, actor, obs, critic_obs):
        """L_pi of a minibatch; no other figure."""
        loss = actor_loss(self.critic(critic_obs, actor(obs)))
        return loss, loss.detach()[None][:0]


def train(
    config: ARODDPGConfig,
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
    distributed.refuse_group("aro_ddpg")
    run = Run() if run is None else run
    aro = ARODDPG(config, env.spec, env.device)
    replay = aro.make_replay()
    if initial := run.initial(env.spec, "aro_ddpg"):
        aro.warm_start(initial)
    run.start(METRICS, config, env, "aro_ddpg", replay.nbytes_after(config.total_steps))
    step = run.resume(learner=aro, env=env, replay=replay)
    obs, num_envs, every = env.observe(), env.spec.num_envs, config.update_every
    while step < config.total_steps and not run.stopping(step):
        began, update_s, stats, rewards, first = time.perf_counter(), 0.0, [], [], step
        while step < min(first + LOG_EVERY, config.total_steps):
            action = aro.act(obs) if step >= config.warmup_steps else aro.act_randomly()
            result = env.step(action)
            replay.add(obs, action, result)
            aro.tally.add(result)
            rewards.append(result.reward)
            before, obs, step = step, result.obs, step + num_envs
            for fault in result.info.faults:
                run.report_fault(step, fault)
            stepped = time.perf_counter()
            rounds = before - before % every, step - step % every
            for _ in range(updates_due(*rounds, config.warmup_steps, config.updates_per_step)):
                stats.append(aro.update(aro.sample(replay)))
            update_s += time.perf_counter() - stepped
        metrics = {**aro.tally.flush(), "replay/size": len(replay)}
        metrics["rollout/average_reward"] = torch.stack(rewards).double().mean().item()
        if stats:
            try:
                metrics |= aro.figures(stats)
            except Diverged as error:
                raise diverged(step, error) from None
            metrics["time/updates_per_s"] = len(stats) / update_s
        wall_s = time.perf_counter() - began
        metrics["time/collect_s"], metrics["time/update_s"] = wall_s - update_s, update_s
        metrics["time/env_steps_per_s"] = (step - first) / wall_s
        run.log(step, metrics)
        if run.due("eval", step) and evaluate is not None:
            run.log(step, evaluate(Policy.from_section(aro.policy_section(), aro.device)))
        if run.due("checkpoint", step):
            state = aro.policy_section(), aro.state_dict(), env.state_dict(), replay.state_dict()
            run.save(step, *state)
    run.finish()
    return run
