"""Off-policy evaluation: what a policy will earn, from what others did, without playing it.

With ratios rho_t = pi(a_t|s_t) / b(a_t|s_t) of the policy and of the recorded behaviour, and their
products w_t = rho_0 ... rho_t (w_-1 = 1), of episodes i = 1..E:

    ordinary               mean_i w_end G,                     G = sum_t gamma^t r_t
    weighted               sum_i w_end G / sum_i w_end
    per decision           mean_i sum_t gamma^t w_t r_t
    weighted per decision  sum_t gamma^t sum_i w_t r_t / sum_i w_t
    doubly robust          mean_i sum_t gamma^t (w_t (r_t - Q(s_t, a_t)) + w_(t-1) V(s_t))
    weighted doubly robust the same with w_t / sum_i w_t in place of w_t / E

The first two are those of Precup, Sutton and Singh ("Eligibility traces for off-policy policy
evaluation", ICML 2000), with the next two; the doubly robust one is that of Jiang and Li ("Doubly
robust off-policy value evaluation for reinforcement learning", ICML 2016, arXiv:1511.03722), in the
form of Thomas and Brunskill ("Data-efficient off-policy policy evaluation for reinforcement
learning", ICML 2016, arXiv:1604.00923), who gave the weighted one. An episode that has ended keeps
its w with reward 0. The ones that do not weigh are right on average whatever b is, and vary much;
weighing trades that for a bias that vanishes with E.

Q and V of the last two may be wrong without making them wrong; the better they are, the less they
vary. Fitted Q evaluation (Le, Voloshin and Yue, "Batch policy learning under constraints", ICML
2019, arXiv:1903.08738) learns them for a policy that acts without noise,

    y = r + gamma [not terminated] Qbar(s', pi(s')),      L = mean (Q(s, a) - y)^2
    Qbar <- (1 - polyak) Qbar + polyak Q

and is an estimate of its own, mean Q(s_0, pi(s_0)) over the first states of episodes; it needs no b
and no ratios, and trusts its network instead.

All values are discounted. Where an episode was cut, sums end there unless `final_value` says what
followed.

Reading order: `Steps` -> the estimators -> `FQEConfig` -> `FQE` -> `fitted_q`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ctrl_rl.networks import action_bounds
from ctrl_rl.spec import EnvSpec
from offline.networks import StackedQ, stream
from offline.settings import check_settings, minibatch_step
from offline.transitions import Batch, Transitions


class Steps(NamedTuple):
    """E episodes side by side, of at most H steps; float64, zero behind an episode's end."""

    reward: Tensor
    """(E, H)"""
    weight: Tensor
    """(E, H), w_t; behind the end that of the last step"""
    known: Tensor
    """(E, H), 1 for a step"""


def lay_out(reward: Tensor, log_ratio: Tensor, lengths: Tensor) -> Steps:
    """Episodes side by side from steps one after another.

    Args:
        reward: (T,)
        log_ratio: (T,), log pi(a|s) - log b(a|s).
        lengths: (E,), steps of each episode, at least 1.

    Raises:
        ValueError: lengths that do not add up, or a ratio that is no number. A ratio of 0 is one:
            log_ratio -inf.
    """
    if int(lengths.sum()) != len(reward) or len(log_ratio) != len(reward):
        raise ValueError(
            f"{len(reward)} rewards and {len(log_ratio)} ratios for {int(lengths.sum())} steps"
        )
    wrong = log_ratio.isnan() | (log_ratio == torch.inf)
    if bool(wrong.any()):
        step = int(wrong.nonzero()[0])
        raise ValueError(
            f"step {step}: the ratio of probabilities is {float(log_ratio[step].exp())}"
        )
    known = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    padded = torch.zeros(known.shape, dtype=torch.float64, device=lengths.device)
    return Steps(
        padded.masked_scatter(known, reward.double()),
        padded.masked_scatter(known, log_ratio.double()).cumsum(1).exp(),
        known.double(),
    )


# Estimators ---------------------------------------------------------------------------------


def discounts(steps: Steps, gamma: float) -> Tensor:
    """gamma^t (H,)."""
    ages = torch.arange(steps.reward.shape[1], device=steps.reward.device)
    return torch.full_like(ages, gamma, dtype=torch.float64) ** ages


def importance_sampling(steps: Steps, gamma: float, weighted: bool = False) -> float:
    """The ordinary estimate, or the weighted one."""
    returns = (discounts(steps, gamma) * steps.reward).sum(1)
    weight = steps.weight[:, -1]
    return float((weight * returns).sum() / _total(weight, weighted))


def per_decision(steps: Steps, gamma: float, weighted: bool = False) -> float:
    """The per-decision estimate, or the weighted one."""
    share = steps.weight / _total(steps.weight, weighted)
    return float((discounts(steps, gamma) * share * steps.reward).sum())


def doubly_robust(
    steps: Steps,
    q: Tensor,
    v: Tensor,
    gamma: float,
    final_value: Tensor | None = None,
    weighted: bool = False,
) -> float:
    """The doubly robust estimate, or the weighted one.

    Args:
        steps: as `lay_out` gives them.
        q: (T,), Q(s_t, a_t) of the recorded actions, steps one after another.
        v: (T,), V(s_t) of the policy.
        gamma: discount per step.
        final_value: (E,), V of the observation after the last step, 0 where the episode terminated;
            None for 0.
        weighted: divide by the sum of weights instead of E.
    """
    share = steps.weight / _total(steps.weight, weighted)
    first = torch.full_like(share[:, :1], 1 / len(share))
    before = torch.cat([first, share[:, :-1]], 1)
    known = steps.known.bool()
    zeros = torch.zeros_like(steps.reward)
    q, v = (zeros.masked_scatter(known, x.double()) for x in (q, v))
    value = (discounts(steps, gamma) * (share * (steps.reward - q) + before * v)).sum()
    if final_value is not None:
        length = steps.known.sum(1).long()
        at_end = share.gather(1, length[:, None] - 1)[:, 0]
        value = value + (gamma ** length.double() * at_end * final_value.double()).sum()
    return float(value)


def _total(weight: Tensor, weighted: bool) -> Tensor | float:
    """What a sum of weighted terms is divided by.

    Raises:
        ValueError: the policy does nothing that the data has: all weights are 0.
    """
    if not weighted:
        return float(len(weight))
    total = weight.sum(0)
    if not bool((total > 0).all()):
        raise ValueError("all ratios of an age are 0: the policy does nothing that was recorded")
    return total


# Fitted Q evaluation ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FQEConfig:
    """Settings of fitted Q evaluation."""

    total_steps: int = 50_000
    """Length of training [updates]."""
    batch_size: int = 256
    """Transitions per update and seed."""
    learning_rate: float = 3e-4
    """Adam's step size."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.005
    """Share of Q that its target takes on."""
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers."""
    activation: str = "relu"
    """"elu", "relu" or "tanh"."""
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        check_settings(self)


def fqe_target(reward: Tensor, terminated: Tensor, next_q: Tensor, gamma: float) -> Tensor:
    """y (S, B) from Qbar(s', pi(s')) (S, B)."""
    return reward + gamma * (1 - terminated) * next_q


class Progress(NamedTuple):
    """Where fitted Q evaluation stood, means over seeds."""

    updates: int
    value: float
    """The estimate."""
    residual: float
    """Root of L, mean over the tenth of all updates before."""


STILL = 0.1
"""Largest change over the second half of what has settled, as a share of the estimates; ours."""

LEAST = 0.1
"""Share of the data's own value that estimates count as at least: the policy's may be 0; ours."""


def settled(course: Sequence[Progress], recorded: float) -> bool:
    """Whether estimate and residual of the half and of the end are the same.

    But for `STILL` of the largest of both estimates and `LEAST` of `recorded`, the data's own
    value; not of all of it, as estimates start at 0: small ones may have hardly begun.
    """
    if len(course) < 2:
        return False
    half, end = course
    room = STILL * max(abs(half.value), abs(end.value), LEAST * abs(recorded))
    return abs(end.value - half.value) <= room and abs(end.residual - half.residual) <= room


class FQE:
    """Q of one policy, S times side by side from weights and minibatches of their own.

    Args:
        config: settings.
        data: what is learned from.
        spec: contract of the environment: the actions' bounds.
        action: (R, A), the policy's action in each row of `data.rows`.
        seeds: decide initial weights and minibatches.
    """

    def __init__(
        self,
        config: FQEConfig,
        data: Transitions,
        spec: EnvSpec,
        action: Tensor,
        seeds: Sequence[int] = (0,),
    ) -> None:
        self.config, self.data, self.action, self.seeds = config, data, action, tuple(seeds)
        self.course: list[Progress] = []
        start = [stream(seed, "weights") for seed in seeds]
        shape = (data.obs_size, *action_bounds(spec, "fqe"), config.hidden, config.activation)
        self.critic = StackedQ(1, *shape, start).to(data.device)
        self.target = deepcopy(self.critic).requires_grad_(False)
        self.draws = [stream(seed, "minibatches", data.device) for seed in seeds]
        self.critic_step = minibatch_step(config, self.critic, self._objective)
        self._targets: list[Tensor] = [*self.target.parameters()]
        self._sources: list[Tensor] = [*self.critic.parameters()]

    def update(self) -> Tensor:
        """One step on a minibatch: mean Q, the gradient's norm and the loss, each (S,)."""
        index = self.data.draw(self.config.batch_size, self.draws)
        batch: Batch = self.data.batch(index)
        stats = self.critic_step(*batch, self.action[index + 1])
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore
                self._targets, self._sources, self.config.polyak
            )
        return stats

    @torch.no_grad()
    def q(self, rows: Tensor, action: Tensor) -> Tensor:
        """Q (S, n) of actions (n, A) in rows (n,) of the data, in the learner's rewards."""
        obs = self.data.rows[rows, : self.data.obs_size]
        shape = (len(self.seeds), -1, -1)
        return self.critic(obs.expand(shape), action.expand(shape))[:, 0]

    def value(self) -> Tensor:
        """The estimate (S,): mean Q(s_0, pi(s_0)) over the first states of the data's episodes.

        Of rewards as learners see them, see `Transitions`.
        """
        first = self.data.starts
        return self.q(first, self.action[first]).mean(1)

    def _objective(self, critic, obs, action, reward, next_obs, terminated, next_action):
        """L of a minibatch and mean Q."""
        with torch.no_grad():
            next_q = self.target(next_obs, next_action)[:, 0]
            y = fqe_target(reward, terminated, next_q, self.config.gamma)
        q = critic(obs, action)[:, 0]
        return (q - y).square().mean(1), q.detach().mean(1)[None]


def recorded_value(data: Transitions, gamma: float) -> float:
    """Mean discounted return of the episodes as they are recorded, rewards as in the file."""
    column = data.obs_size + data.action_size
    rows = torch.arange(len(data.rows), device=data.device)
    episode = torch.searchsorted(data.starts, rows, right=True) - 1
    age = rows - data.starts[episode]
    reward = data.raw_reward(data.rows[:, column].double()) * (age < data.lengths[episode])
    return float((gamma ** age.double() * reward).sum() / len(data.starts))


@torch.no_grad()
def actions_of(
    policy: Callable[[Tensor], Tensor], data: Transitions, at_once: int = 1 << 16
) -> Tensor:
    """The policy's action (R, A) in each row of the data.

    Args:
        policy: reads observations as the file has them, as `ctrl_rl.load_policy` gives it; without
            memory.
        data: with observations normalised or not.
        at_once: rows that are asked together.
    """
    found = []
    for rows in data.rows[:, : data.obs_size].split(at_once):
        if data.normalizer is not None:
            rows = data.normalizer.undo(rows)
        found.append(policy(rows).to(data.device))
    return torch.cat(found)


def fitted_q(
    config: FQEConfig,
    data: Transitions,
    spec: EnvSpec,
    policy: Callable[[Tensor], Tensor],
    seeds: Sequence[int] = (0,),
) -> FQE:
    """Learn Q of a policy to `total_steps` updates; its `course` tells of the half and the end.

    Raises:
        ValueError: the loss is no number; smaller steps or rewards may help.
    """
    made = FQE(config, data, spec, actions_of(policy, data), seeds)
    total = config.total_steps
    losses = deque(maxlen=max(total // 10, 1))
    for step in range(total):
        stats = made.update()
        losses.append(stats[-1])
        if step + 1 in (total // 2, total):
            residual = float(torch.stack([*losses]).mean().sqrt())
            made.course.append(Progress(step + 1, float(made.value().mean()), residual))
        if (step + 1) % 1000 == 0 or step + 1 == config.total_steps:
            if not bool(stats.isfinite().all()):
                raise ValueError(f"fitted Q evaluation diverged before update {step + 1}")
    return made
