"""Soft actor-critic at simulator speed: many environments, large batches, critics of returns.

Papers: Seo et al., "Learning sim-to-real humanoid locomotion in 15 minutes", 2025,
arXiv:2512.01996 (FastSAC), which follows FastTD3, arXiv:2505.22642; Haarnoja et al., "Soft
actor-critic algorithms and applications", 2018, arXiv:1812.05905 (SAC); Bellemare et al., "A
distributional perspective on reinforcement learning", ICML 2017, arXiv:1707.06887 (C51).

A critic gives the distribution of the return as probabilities of atoms z_1 .. z_K:

    p_i(s, a) = softmax(critic_i(s, a)),          Q = mean_i sum_k p_ik z_k
    R, s'    = sum of m <= n discounted rewards, and what followed;  discount = gamma^m, or 0
    target   = project(mean_i pbar_i(s', a') moved to R + discount (z - alpha log pi(a'|s'))),
                                                  a' drawn from pi(.|s')
    L_Q      = -mean sum_i sum_k target_k log p_ik(s, a)
    L_pi     = mean (alpha log pi(a|s) - Q(s, a)),             a drawn from pi(.|s)
    L_alpha  = mean log alpha (-log pi(a|s) - H)
    Qbar    <- (1 - polyak) Qbar + polyak Q
    policy  <- (1 - policy_average) policy + policy_average pi          (weights; acts by its mean)

`project` shares the mass of each moved atom between its two neighbours among z_1 .. z_K, so that
its mean stays. pi is a normal squashed by tanh to the bounds of each action dimension; it acts from
the first step on. The two critics count alike, as in the code of arXiv:2512.01996.

Deviations from the papers, each with its reason:

1. A time limit is no failure: the target goes on from the true next observation. A step that ended
   in a fault is not learned from.
2. The entropy of steps within an n-step window does not count, only that beyond it: the actions
   are those of older policies.
3. Observation statistics advance every `LOG_EVERY` env steps, at the first update if it comes
   before that, and are frozen between: acting and learning see the same ones. The replay holds raw
   observations.
4. The critics start at a value near 0, not in the middle of z_1 .. z_K. Both learn from one target,
   the mean of their distributions, not each from its own: one projection instead of two.
5. The target H is given for actions scaled to -1..1, see `ctrl_rl.sac`; the critics read them so.
6. Adam without weight decay, one step size for all, which may fall linearly; no bfloat16, which is
   slower than float32 on these small layers.
7. What is evaluated and saved is a running average of the actor's weights: the actor itself gets
   better and worse from one moment to the next; the docs page has figures.

Tensors: environments (N, ...), minibatch (B, ...), critics first (2, B, K).
`docs/algorithms/fast_sac.md` explains every logged key.

Reading order: `METRICS` -> `FastSACConfig` -> losses -> `Actor`, `Critic` -> `FastSAC` -> `train`.
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
from ctrl_rl.distributions import SquashedGaussian, project, unit_scaled
from ctrl_rl.env import Obs, Step, VecEnv
from ctrl_rl.networks import ACTIVATIONS, MLP, EnsembleMLP, action_bounds, entropy_target
from ctrl_rl.normalize import Normalizer
from ctrl_rl.policy import LOG_STD_RANGE, Policy
from ctrl_rl.rollout import Tally
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec

METRICS: dict[str, str] = {
    "loss/critic": "L_Q, mean over the updates since the last row [nat]",
    "loss/actor": "L_pi, mean over those of them that step the actor [reward]",
    "loss/learning_rate": "Adam's step size since the last row",
    "value/q": "mean value of the target distributions on the minibatches [reward]",
    "value/edge_mass": "mass of the target distributions on the outermost atoms: 0 is well",
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

LOG_EVERY = 8192
"""Env steps behind a row of the log; fewer where evaluations, checkpoints or a stop are asked for
more often. As often, but whatever the rows, statistics and learning rate advance."""


@dataclass(frozen=True, kw_only=True)
class FastSACConfig:
    """Settings of FastSAC; a task's `presets` hold the values that suit it."""

    total_steps: int = 1_000_000
    """Length of training [env steps]."""
    seed: int = 0
    """Decides initial weights, action noise and what is drawn from the replay."""
    warmup_steps: int = 10_000
    """Steps without updates at the start; the policy acts as it began [env steps]."""
    updates_per_step: float = 1 / 16
    """Updates per env step, whatever the number of environments."""
    buffer_size: int = 1_000_000
    """Transitions that the replay buffer holds."""
    batch_size: int = 1024
    """Transitions per update."""
    return_steps: int = 3
    """Rewards n that the target sums before it asks the critics."""
    policy_delay: int = 2
    """Updates of the critics per update of actor and temperature."""
    learning_rate: float = 1e-3
    """Adam's step size for actor, critics and temperature."""
    final_learning_rate: float | None = None
    """What it falls to by the end of training, in proportion to env steps; None keeps it. With it
    `total_steps` cannot be raised later."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.02
    """Share of the critics that the target critics take on per update."""
    policy_average: float = 0.005
    """Share of the actor that the policy, a running average of its weights, takes on per update of
    the actor; 1 for the actor itself. It is what is evaluated and saved, not what explores."""
    num_atoms: int = 101
    """Atoms K of a critic's distribution."""
    value_bound: float = 100.0
    """The atoms span -value_bound .. value_bound, which must hold every return [reward]."""
    initial_temperature: float = 0.01
    """alpha at the start [reward/nat]."""
    target_entropy: float | None = None
    """H for actions scaled to -1..1, below log 2 per dimension [nat]; None for -1 per dimension."""
    initial_std: float = 0.5
    """Standard deviation of the action before tanh, at the start."""
    action_bound: float | None = None
    """Actions that the task leaves unbounded stay within -action_bound .. action_bound [action
    units]; None refuses them."""
    hidden: tuple[int, ...] = (128, 128)
    """Widths of the actor's hidden layers."""
    critic_hidden: tuple[int, ...] = (256, 256)
    """Widths of the critics' hidden layers, which are layer-normalised."""
    activation: str = "relu"
    """"elu", "relu" or "tanh"."""
    normalize_obs: bool = True
    """Normalise observations by running statistics."""
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        at_least_one = ("total_steps", "buffer_size", "batch_size", "return_steps", "policy_delay")
        positive = ("updates_per_step", "learning_rate", "value_bound", "initial_temperature")
        positive += ("initial_std",)
        checks = [(name, getattr(self, name) >= 1, "at least 1") for name in at_least_one]
        checks += [(name, 0 < getattr(self, name) < math.inf, "positive") for name in positive]
        checks += [
            (n, bool(getattr(self, n)) and min(getattr(self, n)) >= 1, "positive widths")
            for n in ("hidden", "critic_hidden")
        ]
        checks += [
            ("warmup_steps", 0 <= self.warmup_steps < self.total_steps, WARMUP),
            ("gamma", 0 <= self.gamma <= 1, "in 0..1"),
            ("polyak", 0 < self.polyak <= 1, "above 0 and at most 1"),
            ("policy_average", 0 < self.policy_average <= 1, "above 0 and at most 1"),
            ("num_atoms", self.num_atoms >= 2, "at least 2"),
            (
                "target_entropy",
                self.target_entropy is None or math.isfinite(self.target_entropy),
                "a number or None",
            ),
            (
                "final_learning_rate",
                self.final_learning_rate is None or 0 < self.final_learning_rate < math.inf,
                "positive or None",
            ),
            (
                "action_bound",
                self.action_bound is None or 0 < self.action_bound < math.inf,
                "positive or None",
            ),
            ("activation", self.activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
            ("compile", self.compile in ("auto", "on", "off"), "auto, on or off"),
        ]
        for name, good, wanted in checks:
            if not good:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}")


# Losses -------------------------------------------------------------------------------------


def target_distribution(
    reward: Tensor,
    discount: Tensor,
    next_logits: Tensor,
    next_log_prob: Tensor,
    temperature: Tensor,
    atoms: Tensor,
) -> Tensor:
    """Target (B, K) from the target critics' logits (2, B, K): the mean of the two, moved."""
    prob = next_logits.softmax(-1).mean(0)
    moved = atoms - (temperature * next_log_prob)[:, None]
    return project(prob, reward[:, None] + discount[:, None] * moved, atoms)


def critic_loss(logits: Tensor, target: Tensor) -> Tensor:
    """L_Q from logits (2, B, K) and target (B, K): the cross-entropies, added."""
    return -(target * logits.log_softmax(-1)).sum(-1).mean(1).sum()


def actor_loss(log_prob: Tensor, q: Tensor, temperature: Tensor) -> Tensor:
    """L_pi from log pi(a|s) (B,) and Q(s, a) (2, B)."""
    return (temperature * log_prob - q.mean(0)).mean()


class Actor(nn.Module):
    """The policy, and log alpha."""

    low: Tensor
    high: Tensor

    def __init__(
        self, config: FastSACConfig, obs_size: int, low: Tensor, high: Tensor, generator
    ) -> None:
        super().__init__()
        sizes = (obs_size, *config.hidden, 2 * len(low))
        self.net = MLP(sizes, config.activation, 0.01, generator)
        with torch.no_grad():
            last = self.net.layers[-1]
            last.bias[len(low) :] = math.log(config.initial_std)  # pyright: ignore
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.initial_temperature)))
        self.target_entropy = entropy_target(config.target_entropy, low, high)

    def distribution(self, obs: Tensor) -> SquashedGaussian:
        """pi(.|s) for (B, d), normalised."""
        mean, log_std = self.net(obs).chunk(2, -1)
        return SquashedGaussian(mean, log_std.clamp(*LOG_STD_RANGE), self.low, self.high)


class Critic(nn.Module):
    """Two layer-normalised networks that give logits over the atoms."""

    low: Tensor
    high: Tensor
    atoms: Tensor
    """(K,) [reward]"""

    def __init__(
        self, config: FastSACConfig, obs_size: int, low: Tensor, high: Tensor, generator
    ) -> None:
        super().__init__()
        count = config.num_atoms
        sizes = (obs_size + len(low), *config.critic_hidden, count)
        self.net = EnsembleMLP(2, sizes, config.activation, 0.01, generator, layer_norm=True)
        atoms = torch.linspace(-config.value_bound, config.value_bound, count)
        with torch.no_grad():
            # A bell of two spacings around 0. Its floor spares the gradient numbers below 1e-38,
            # with which a product of matrices takes 100 times as long.
            bell = 0.5 * (atoms / (atoms[1] - atoms[0]) / 2).square()
            self.net.layers[-1].bias.copy_(-bell.clamp(max=10.0))
        self.register_buffer("atoms", atoms, persistent=False)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """(B, e) and (B, A) in action units to logits (2, B, K)."""
        scaled = unit_scaled(action, self.low, self.high)
        return self.net(torch.cat([obs, scaled], 1))

    def value(self, obs: Tensor, action: Tensor) -> Tensor:
        """Q (2, B)."""
        return (self(obs, action).softmax(-1) * self.atoms).sum(-1)


# The learner --------------------------------------------------------------------------------


class FastSAC:
    """Networks, optimisers, statistics and random generator; no environment and replay inside.

    Args:
        config: settings.
        spec: the environment's contract.
        device: torch device of networks and data.

    Raises:
        ValueError: the task's actions are discrete, or unbounded and `action_bound` is None;
            or no action has the target entropy.
    """

    def __init__(self, config: FastSACConfig, spec: EnvSpec, device: torch.device | str) -> None:
        self.config, self.spec, self.device = config, spec, torch.device(device)
        low, high = action_bounds(spec, "fast_sac", config.action_bound)
        start = torch.Generator().manual_seed(config.seed)
        self.generator = torch.Generator(self.device).manual_seed(config.seed + 1)
        self.critic_group = spec.critic_group
        self.groups = tuple(dict.fromkeys(("actor", self.critic_group)))
        self.actor = Actor(config, spec.obs_size("actor"), low, high, start).to(self.device)
        critic_size = spec.obs_size(self.critic_group)
        self.critic = Critic(config, critic_size, low, high, start).to(self.device)
        self.target = deepcopy(self.critic).requires_grad_(False)
        self.normalizers = {
            g: Normalizer(spec.obs_size(g)).to(self.device)
            for g in self.groups
            if config.normalize_obs
        }
        updates = int(config.updates_per_step * config.total_steps)
        compiled = config.compile == "on" or (
            config.compile == "auto" and pays(updates, config.batch_size, config.critic_hidden)
        )
        step = lambda module, objective: MinibatchStep(  # noqa: E731
            module, objective, config.learning_rate, None, None, compiled, 1e-8, check_each=False
        )
        self.critic_step = step(self.critic, self._critic_objective)
        self.actor_step = step(self.actor, self._actor_objective)
        self.average = deepcopy(self.actor.net).requires_grad_(False)
        self._targets: list[Tensor] = [*self.target.parameters()]
        self._sources: list[Tensor] = [*self.critic.parameters()]
        self.updates = 0
        self.tally = Tally(spec.num_envs, self.device)
        self._seen: dict[str, list[Tensor]] = {g: [] for g in self.normalizers}

    def make_replay(self) -> ReplayBuffer:
        """An empty buffer for what this learner reads."""
        sizes = {g: self.spec.obs_size(g) for g in self.groups}
        size = self.config.buffer_size
        return ReplayBuffer(size, self.spec.num_envs, sizes, self.spec.action_size, self.device)

    @torch.no_grad()
    def act(self, obs: Obs) -> Tensor:
        """An action (N, A) drawn from the policy, in the env's units."""
        x = self._normalize("actor", obs)
        return self.actor.distribution(x).sample(self._noise(len(x)))

    def see(self, obs: Obs, step: Step) -> None:
        """Note for the statistics what was acted on, and true successors of rows that ended."""
        reached = (step.terminated | step.truncated).clone()
        reached[[fault.row for fault in step.info.faults]] = False
        for group, rows in self._seen.items():
            rows.append(obs[group])
            if step.next_obs is not step.obs:
                rows.append(step.next_obs[group][reached])

    def update_statistics(self) -> None:
        """Let the observation statistics take in what was noted, each observation once."""
        for group, rows in self._seen.items():
            if rows:
                self.normalizers[group].update(torch.cat(rows))
                rows.clear()

    def begin_statistics(self) -> None:
        """See that there are some before the first update.

        Else networks would learn from raw observations and be saved with statistics they never saw.
        """
        if self.updates == 0 and any(n.count == 0 for n in self.normalizers.values()):
            self.update_statistics()

    def set_learning_rate(self, step: int) -> float:
        """Fix the step size of the updates to come, `step` env steps after the start."""
        first, last = self.config.learning_rate, self.config.final_learning_rate
        rate = first if last is None else first + (last - first) * step / self.config.total_steps
        for each in (self.actor_step, self.critic_step):
            each.learning_rate.fill_(rate)
        return rate

    def update(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """One step of the critics, each `policy_delay`-th time of the actor; then the targets.

        Returns:
            Figures of critics and actor, to be averaged by `figures`.
        """
        group, of_actor = self.critic_group, None
        with torch.no_grad():
            critic_obs = self._normalize(group, batch.obs)
            next_obs = [self._normalize(g, batch.next_obs) for g in ("actor", group)]
            noise = self._noise(len(batch.reward))
        of_critic = self.critic_step(
            critic_obs, batch.action, batch.reward, batch.discount, *next_obs, noise
        )
        self.updates += 1
        if self.updates % self.config.policy_delay == 0:
            with torch.no_grad():
                obs, noise = self._normalize("actor", batch.obs), self._noise(len(batch.reward))
            of_actor = self.actor_step(obs, critic_obs, noise)
            with torch.no_grad():
                torch._foreach_lerp_(  # pyright: ignore
                    [*self.average.parameters()],
                    [*self.actor.net.parameters()],
                    self.config.policy_average,
                )
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
        critic = torch.stack([x for x, _ in stats]).mean(0)
        self.critic_step.check(critic)
        q, edge_mass, _, loss = critic.tolist()
        metrics = {"value/q": q, "value/edge_mass": edge_mass, "loss/critic": loss}
        of_actor = [x for _, x in stats if x is not None]
        if of_actor:
            actor = torch.stack(of_actor).mean(0)
            self.actor_step.check(actor)
            keys = ("policy/entropy", "policy/temperature", "loss/actor")
            metrics |= dict(zip(keys, actor[[0, 1, 3]].tolist(), strict=True))
        return metrics

    def policy_section(self) -> dict:
        """The policy alone, as `ctrl_rl.policy.Policy.from_section` reads it."""
        section = {
            "format": 1,
            "kind": "squashed_gaussian_mlp",
            "spec": self.spec.to_json(),
            "group": "actor",
            "hidden": list(self.config.hidden),
            "activation": self.config.activation,
            "normalizer": None,
            "bound": "tanh",
            "weights": {k: v.clone() for k, v in self.average.state_dict().items()},
        }
        if self.config.normalize_obs:
            section["normalizer"] = self.normalizers["actor"].section()
        if self.config.action_bound is not None:
            section["limits"] = {"low": self.actor.low.clone(), "high": self.actor.high.clone()}
        return section

    def state_dict(self) -> dict:
        """Everything that decides the future of training but the replay, as a copy."""
        return deepcopy(
            {
                "actor": self.actor.state_dict(),
                "average": self.average.state_dict(),
                "critic": self.critic.state_dict(),
                "target": self.target.state_dict(),
                "actor_step": self.actor_step.state_dict(),
                "critic_step": self.critic_step.state_dict(),
                "normalizers": {g: n.state_dict() for g, n in self.normalizers.items()},
                "seen": {g: [torch.cat(rows)] if rows else [] for g, rows in self._seen.items()},
                "generator": self.generator.get_state(),
                "updates": self.updates,
                "unfinished": self.tally.unfinished,
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.warm_start(state)
        self.actor_step.load_state_dict(state["actor_step"])
        self.critic_step.load_state_dict(state["critic_step"])
        self.generator.set_state(state["generator"])
        self.updates = state["updates"]
        for group, rows in self._seen.items():
            rows[:] = [x.to(self.device) for x in state["seen"][group]]
        self.tally.unfinished = state["unfinished"].to(self.device)

    def warm_start(self, state: dict) -> None:
        """Take weights, temperature and statistics of another run; the rest begins anew.

        Raises:
            ValueError: its networks have other sizes, only one of the two has statistics, or it
                is a run of another algorithm.
        """
        take_weights(self, state, "actor", "average", "critic", "target", "normalizers")

    def _noise(self, rows: int) -> Tensor:
        shape = (rows, self.spec.action_size)
        return torch.randn(shape, generator=self.generator, device=self.device)

    def _normalize(self, group: str, obs: Obs) -> Tensor:
        return self.normalizers[group](obs[group]) if self.normalizers else obs[group]

    def _critic_objective(
        self, critic, obs, action, reward, discount, next_obs, next_critic_obs, noise
    ):
        """L_Q of a minibatch; mean and edge mass of the target."""
        atoms = self.target.atoms
        with torch.no_grad():
            next_action, log_prob = self.actor.distribution(next_obs).sample_with_log_prob(noise)
            logits = self.target(next_critic_obs, next_action)
            alpha = self.actor.log_temperature.exp()
            target = target_distribution(reward, discount, logits, log_prob, alpha, atoms)
            edge_mass = (target[:, 0] + target[:, -1]).mean()
            stats = torch.stack([(target * atoms).sum(1).mean(), edge_mass])
        return critic_loss(critic(obs, action), target), stats

    def _actor_objective(self, actor, obs, critic_obs, noise):
        """L_pi + L_alpha of a minibatch; entropy and alpha."""
        action, log_prob = actor.distribution(obs).sample_with_log_prob(noise)
        alpha = actor.log_temperature.detach().exp()
        loss = actor_loss(log_prob, self.critic.value(critic_obs, action), alpha)
        entropy = -log_prob.detach().mean()
        of_alpha = actor.log_temperature * (entropy - actor.target_entropy)
        # The gradient of L_alpha, without its value.
        return loss + of_alpha - of_alpha.detach(), torch.stack([entropy, alpha])


def train(
    config: FastSACConfig,
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
        ValueError: the task's actions are discrete, or unbounded and `action_bound` is None; or
            there are several processes.
    """
    distributed.refuse_group("fast_sac")
    run = Run() if run is None else run
    learner = FastSAC(config, env.spec, env.device)
    replay = learner.make_replay()
    if initial := run.initial(env.spec, "fast_sac"):
        learner.warm_start(initial)
    falls = config.final_learning_rate is not None
    run.start(METRICS, config, env, "fast_sac", replay.nbytes_after(config.total_steps), falls)
    step = run.resume(learner=learner, env=env, replay=replay)
    obs, num_envs = env.observe(), env.spec.num_envs
    block = math.ceil(LOG_EVERY / num_envs) * num_envs  # what is learned goes by it, not by rows
    while step < config.total_steps and not run.stopping(step):
        began, update_s, stats, first = time.perf_counter(), 0.0, [], step
        start = step - step % block
        learning_rate = learner.set_learning_rate(start)
        end = min(run.row_end(step, LOG_EVERY), start + block, config.total_steps)
        while step < end:
            action = learner.act(obs)
            result = env.step(action)
            replay.add(obs, action, result)
            learner.see(obs, result)
            learner.tally.add(result)
            obs, step = result.obs, step + num_envs
            for fault in result.info.faults:
                run.report_fault(step, fault)
            stepped = time.perf_counter()
            due = (step - num_envs, step, config.warmup_steps, config.updates_per_step)
            for _ in range(updates_due(*due)):
                learner.begin_statistics()
                sizes = config.batch_size, learner.generator, config.return_steps, config.gamma
                stats.append(learner.update(replay.sample(*sizes)))
            update_s += time.perf_counter() - stepped
        if step == start + block or step >= config.total_steps:
            learner.update_statistics()
        metrics = {**learner.tally.flush(), "replay/size": len(replay)}
        if stats:
            try:
                metrics |= learner.figures(stats) | {"loss/learning_rate": learning_rate}
            except Diverged as error:
                raise diverged(step, error) from None
            metrics["time/updates_per_s"] = len(stats) / update_s
        wall_s = time.perf_counter() - began
        metrics["time/collect_s"], metrics["time/update_s"] = wall_s - update_s, update_s
        metrics["time/env_steps_per_s"] = (step - first) / wall_s
        run.log(step, metrics)
        if run.due("eval", step) and evaluate is not None:
            run.log(step, evaluate(Policy.from_section(learner.policy_section(), learner.device)))
        if run.due("checkpoint", step):
            state = learner.policy_section(), learner.state_dict(), env.state_dict()
            run.save(step, *state, replay.state_dict())
    run.finish()
    return run
