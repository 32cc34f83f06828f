"""Proximal policy optimisation with memory (GRU or LSTM), one file.

Papers: Schulman et al., "Proximal policy optimization algorithms", 2017, arXiv:1707.06347; a
recurrent policy gradient through whole sequences: Wierstra et al., "Recurrent policy gradients",
Logic Journal of the IGPL 18(5), 2010.

    head_t, h_t = f(s_t, h_(t-1)),   h before the first observation of an episode = 0

Losses and advantages are those of `ctrl_rl.ppo`, pi(a_t | s_t, h_(t-1)) in place of pi(a_t | s_t).

What is particular:

1. Actor and critic each have a memory of their own. The actor's advances in the roll-out, the
   critic's when an iteration's values are computed, with the same weights.
2. A row whose episode ended has a zero state before it reads the next observation, in the
   roll-out as in the update: there each roll-out is cut into pieces, one per episode and row, and
   a piece starts from zero or, at the first step, from the state that the roll-out started from.
3. The value of what follows a piece is read from its true next observation with the state the
   piece ended in, so that a time limit is bootstrapped with the memory of its own episode.
4. Gradients go through all steps of a piece within the roll-out and stop at its start. The state
   that a piece continues from is the one of the time, made by the weights before the last update.
5. A minibatch holds whole rows, all T steps of N / num_minibatches environments.

The deviations of `ctrl_rl.ppo` from its paper hold here too, but there is no compiled update.

Tensors: roll-out (T, N, ...), time first; state (C, N, H), see `ctrl_rl.memory.RecurrentNet`;
minibatch (S, ...) in the order of `ctrl_rl.memory.Pieces`. `docs/algorithms/recurrent_ppo.md`
explains every logged key.

Reading order: `RecurrentPPOConfig` -> loss -> `Networks` -> `RecurrentPPO` -> `train`.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor, nn

from ctrl_rl import distributed, ppo
from ctrl_rl.checkpoints import take_weights
from ctrl_rl.compiled import Diverged, MinibatchStep, diverged
from ctrl_rl.env import Obs, VecEnv
from ctrl_rl.memory import CELLS, Pieces, RecurrentNet, forget
from ctrl_rl.networks import PolicyHead
from ctrl_rl.normalize import Normalizer
from ctrl_rl.policy import Policy
from ctrl_rl.ppo import STATS, adapt, clipped_objective, kl_estimate, standardized
from ctrl_rl.returns import gae
from ctrl_rl.rollout import Rollout, collect, episode_figures
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec

METRICS: dict[str, str] = dict(ppo.METRICS)
"""Every key that is logged, the same as PPO's; an unknown key is an error."""


@dataclass(frozen=True, kw_only=True)
class RecurrentPPOConfig:
    """Settings of recurrent PPO; a task's `presets` hold the values that suit it."""

    total_steps: int = 1_000_000
    """Length of training [env steps]."""
    seed: int = 0
    """Decides initial weights, action noise and the order of rows."""
    cell: str = "lstm"
    """"lstm" or "gru"; on a CPU torch trains the first several times as fast."""
    memory_size: int = 64
    """Width H of the recurrent layers of actor and critic."""
    num_steps: int = 64
    """Steps T per environment and iteration; gradients reach back no further."""
    num_epochs: int = 5
    """Passes over an iteration's samples."""
    num_minibatches: int = 4
    """Minibatches per pass; must divide the number of environments."""
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
    hidden: tuple[int, ...] = (64,)
    """Widths of the layers between the recurrent one and the output, of actor and critic."""
    activation: str = "elu"
    """Of the same layers: "elu", "relu" or "tanh"."""
    initial_std: float = 1.0
    """Standard deviation of a continuous action at the start [action units]."""
    normalize_obs: bool = True
    """Normalise observations by running statistics."""

    def __post_init__(self) -> None:
        shared = {f.name for f in fields(ppo.PPOConfig)} & {f.name for f in fields(self)}
        ppo.PPOConfig(**{name: getattr(self, name) for name in shared})  # refuses what PPO refuses
        if self.cell not in CELLS:
            raise ValueError(f"cell must be one of {', '.join(CELLS)}, not {self.cell!r}")
        if self.memory_size < 1:
            raise ValueError(f"memory_size must be at least 1, not {self.memory_size!r}")


# Loss ---------------------------------------------------------------------------------------


def recurrent_ppo_loss(networks: "Networks", batch: tuple[Tensor, ...], config: RecurrentPPOConfig):
    """L of a minibatch, as `ctrl_rl.ppo.ppo_loss`.

    Args:
        networks: actor and critic.
        batch: in the order of `Pieces`, normalised actor observation (S, d), critic observation
            (S, e), action (S, A) or (S,), old_log_prob, advantage, value_target (S,); then
            `batch_sizes` and the states of actor and critic before each piece (C, P, H).
        config: coefficients.

    Returns:
        L, and the figures named by `STATS` as one tensor.
    """
    actor_obs, critic_obs, action, old_log_prob, advantage, value_target, *rest = batch
    batch_sizes, actor_start, critic_start = rest
    distribution = networks.policy(networks.actor.replay(actor_obs, batch_sizes, actor_start)[0])
    value = networks.critic.replay(critic_obs, batch_sizes, critic_start)[0][:, 0]
    log_ratio = distribution.log_prob(action) - old_log_prob
    ratio = log_ratio.exp()
    entropy = distribution.entropy().mean()
    policy_loss = clipped_objective(ratio, advantage, config.clip_range)
    value_loss = (value - value_target).square().mean()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    with torch.no_grad():
        clip_fraction = ((ratio - 1).abs() > config.clip_range).float().mean()
        stats = (policy_loss, value_loss, kl_estimate(log_ratio), clip_fraction, entropy)
        return loss, torch.stack(stats)


class Networks(nn.Module):
    """Actor and critic, which share no layer and no memory, and the policy head."""

    def __init__(
        self, config: RecurrentPPOConfig, spec: EnvSpec, generator: torch.Generator
    ) -> None:
        super().__init__()

        def network(group: str, out: int, last_gain: float) -> RecurrentNet:
            sizes = (spec.obs_size(group), *config.hidden, out)
            return RecurrentNet(
                config.cell, config.memory_size, sizes, config.activation, last_gain, generator
            )

        self.actor = network("actor", spec.action_size, 0.01)
        self.critic = network(spec.critic_group, 1, 1.0)
        self.policy = PolicyHead(spec, config.initial_std)


# The learner --------------------------------------------------------------------------------


class RecurrentPPO:
    """Networks, their states, optimiser, observation statistics and random generator.

    Args:
        config: settings.
        spec: the environment's contract.
        device: torch device of networks and data.

    Raises:
        ValueError: `num_minibatches` does not divide the environments.
    """

    def __init__(
        self, config: RecurrentPPOConfig, spec: EnvSpec, device: torch.device | str
    ) -> None:
        self.config, self.spec, self.device = config, spec, torch.device(device)
        if spec.num_envs % config.num_minibatches:
            raise ValueError(
                f"num_minibatches {config.num_minibatches} does not divide the {spec.num_envs} "
                "environments: a minibatch of a recurrent policy holds whole environments"
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
        self.step = MinibatchStep(
            self.networks,
            lambda networks, *batch: recurrent_ppo_loss(networks, batch, config),
            config.learning_rate,
            config.max_grad_norm,
            None if config.target_kl is None else partial(adapt, config.target_kl),
        )
        n = spec.num_envs
        self.state = self.networks.actor.start(n, self.device)
        """Of the actor, before the next observation (C, N, H)."""
        self.actor_start = self.state
        """Of the actor, before the first observation of the roll-out that `update` is to get."""
        self.critic_start = self.networks.critic.start(n, self.device)
        """The same of the critic."""
        self.unfinished = torch.zeros(2, n, dtype=torch.float64, device=self.device)
        """Return and length so far of the episodes that the next roll-out continues."""

    def draw_noise(self) -> Tensor:
        """Standard normal (T, N, A), what `act` needs for an iteration."""
        shape = (self.config.num_steps, self.spec.num_envs, self.spec.action_size)
        return torch.randn(shape, generator=self.generator, device=self.device)

    @torch.no_grad()
    def act(self, obs: Obs, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The actor's output (N, A) and an action drawn from it, in the env's units.

        The state takes the observation in.
        """
        head, self.state = self.networks.actor(self._normalize("actor", obs["actor"]), self.state)
        return head, self.networks.policy(head).sample(noise)

    def forget(self, ended: Tensor) -> None:
        """Before the first observation of new episodes: zero the state of rows that ended (N,)."""
        self.state = forget(self.state, ended)

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Learn from a roll-out, then let the observation statistics take it in.

        Raises:
            Diverged: loss or gradient is not finite; the weights stay those of the step before.
        """
        config = self.config
        with torch.no_grad():
            value, next_value, critic_state = self._values(rollout)
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
            columns = [
                self._normalize("actor", rollout.obs["actor"]),
                self._normalize(self.groups[1], rollout.obs[self.groups[1]]),
                rollout.action,
                self.networks.policy(rollout.head).log_prob(rollout.action),
                standardized(advantage),
                value_target,
            ]
        stats = []
        rows_per_batch = self.spec.num_envs // config.num_minibatches
        for _ in range(config.num_epochs):
            order = torch.randperm(self.spec.num_envs, generator=self.generator, device=self.device)
            for rows in order.split(rows_per_batch):
                pieces = Pieces.of(rollout.ended[:, rows])
                batch = [x[pieces.t, rows[pieces.row]] for x in columns]
                starts = [pieces.start(x[:, rows]) for x in (self.actor_start, self.critic_start)]
                stats.append(self.step(*batch, pieces.batch_sizes, *starts))
        self.actor_start, self.critic_start = self.state, critic_state
        self._update_normalizers(rollout)
        mean = torch.stack(stats).mean(0).tolist()
        metrics: dict[str, float] = dict(zip((*STATS, "loss/grad_norm"), mean[:-1], strict=True))
        metrics["loss/learning_rate"] = self.step.learning_rate.item()
        if not self.networks.policy.discrete:
            metrics["policy/std"] = self.networks.policy.log_std.exp().mean().item()
        variance = value_target.var(correction=0)
        if variance > 0:
            unexplained = (value_target - value).var(correction=0) / variance
            metrics["value/explained_variance"] = 1 - unexplained.item()
        episodes, self.unfinished = episode_figures(
            self.unfinished, rollout.reward, rollout.terminated, rollout.ended
        )
        return metrics | episodes

    def policy_section(self) -> dict:
        """The policy alone, as `ctrl_rl.policy.Policy.from_section` reads it."""
        kind = "categorical" if self.networks.policy.discrete else "gaussian"
        section = {
            "format": 1,
            "kind": f"{kind}_{self.config.cell}",
            "spec": self.spec.to_json(),
            "group": "actor",
            "memory_size": self.config.memory_size,
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
        """Everything that decides the future of training between two iterations, as a copy."""
        return deepcopy(
            {
                "networks": self.networks.state_dict(),
                "step": self.step.state_dict(),
                "normalizers": {g: n.state_dict() for g, n in self.normalizers.items()},
                "generator": self.generator.get_state(),
                "actor_state": self.actor_start,
                "critic_state": self.critic_start,
                "unfinished": self.unfinished,
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.warm_start(state)
        self.step.load_state_dict(state["step"])
        self.generator.set_state(state["generator"])
        self.state = self.actor_start = state["actor_state"].to(self.device)
        self.critic_start = state["critic_state"].to(self.device)
        self.unfinished = state["unfinished"].to(self.device)

    def warm_start(self, state: dict) -> None:
        """Take weights and observation statistics of another run; the rest begins anew.

        Raises:
            ValueError: its networks have other sizes, or only one of the two has statistics.
        """
        take_weights(self, state, "networks", "normalizers")

    def _normalize(self, group: str, obs: Tensor) -> Tensor:
        return self.normalizers[group](obs) if self.config.normalize_obs else obs

    def _values(self, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """V(obs) and V(next_obs), (T, N) each, and the critic's state after the roll-out."""
        group, ended = self.groups[1], rollout.ended
        pieces, critic = Pieces.of(ended), self.networks.critic
        obs = self._normalize(group, rollout.obs[group])[pieces.t, pieces.row]
        found, after = critic.replay(obs, pieces.batch_sizes, pieces.start(self.critic_start))
        value = torch.empty_like(rollout.reward)
        value[pieces.t, pieces.row] = found[:, 0]
        next_value = torch.roll(value, -1, 0)  # within a piece; what follows one is its own
        cut = ended[pieces.last, pieces.owner]
        following = rollout.last_obs[group][pieces.owner]
        place = (ended.flatten().cumsum(0) - 1).view_as(ended)[pieces.last, pieces.owner]
        following[cut] = rollout.ended_next_obs[group][place[cut]]
        beyond, _ = critic(self._normalize(group, following), after)
        next_value[pieces.last, pieces.owner] = beyond[:, 0]
        state = torch.zeros_like(self.critic_start)
        state[:, pieces.owner[~cut]] = after[:, ~cut]
        return value, next_value, state

    def _update_normalizers(self, rollout: Rollout) -> None:
        """Every observation of the iteration once; the last one belongs to the next iteration."""
        for group, normalizer in self.normalizers.items():
            reached = rollout.ended_next_obs[group][~rollout.ended_faulty]
            normalizer.update(torch.cat([rollout.obs[group].flatten(0, 1), reached]))


def train(
    config: RecurrentPPOConfig,
    env: VecEnv,
    run: Run | None = None,
    evaluate: Callable[[Policy], dict[str, float]] | None = None,
) -> Run:
    """Train from the environment's current state, or go on where `run` stopped.

    Arguments, result and errors are those of `ctrl_rl.ppo.train`.
    """
    distributed.refuse_group("recurrent_ppo")
    run = Run() if run is None else run
    learner = RecurrentPPO(config, env.spec, env.device)
    if initial := run.initial(env.spec, "recurrent_ppo"):
        learner.warm_start(initial)
    run.start(METRICS, config, env, "recurrent_ppo")
    step = run.resume(learner=learner, env=env)
    while step < config.total_steps and not run.stopping(step):
        began = time.perf_counter()
        rollout, metrics = collect(learner.act, env, learner.draw_noise(), learner.forget)
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
