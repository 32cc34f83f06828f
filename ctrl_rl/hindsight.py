"""Hindsight: learn from what was reached as if it had been the goal.

Andrychowicz et al., "Hindsight experience replay", 2017, arXiv:1707.01495, strategy "future" with
k goals: of k + 1 transitions that are drawn, k get in the place of their goal what was achieved
after this or a later step of the same episode, uniform over those steps.

A task with goals has the observation groups "goal" and "achieved", of one size and in one unit.
Its goal stands among the terms of "actor", and of "critic" where there is one, and nothing else
that they hold depends on it; `env.reward_for(achieved, goal)` gives reward and end of a step.
`check_env` holds all of this but that nothing else depends on the goal.

The goal of a minibatch is drawn when the minibatch is, so that nothing is stored twice, and the
replay buffer holds what truly happened.

Reading order: `Hindsight` -> `with_goal`.
"""

import torch
from torch import Tensor

from ctrl_rl.buffers import Batch, ReplayBuffer
from ctrl_rl.env import GoalEnv, VecEnv
from ctrl_rl.spec import EnvSpec


class Hindsight:
    """Draws from a replay buffer as `ReplayBuffer.sample` does, with goals of hindsight.

    Args:
        replay: holds the groups "goal" and "achieved", too.
        env: the environment it is filled by, a task with goals.
        num_goals: k; k / (k + 1) of a minibatch are relabelled.

    Raises:
        ValueError: the task has no goals.
    """

    def __init__(self, replay: ReplayBuffer, env: VecEnv, num_goals: int) -> None:
        goal_groups(env.spec)
        self.replay, self.num_goals, self.spec = replay, num_goals, env.spec
        self._largest_reward = torch.zeros((), device=replay.device)
        self.env: GoalEnv = env  # pyright: ignore[reportAttributeAccessIssue]

    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, gamma: float = 0.99
    ) -> Batch:
        """B transitions: one step each, as rewards of n steps were earned by another policy."""
        replay = self.replay
        index = replay.draw(batch_size, generator)
        batch = replay.gather(index, gamma=gamma)
        count = round(batch_size * self.num_goals / (self.num_goals + 1))
        rows = slice(0, count)  # rows were drawn at random: the first are as good as any
        _, inside = replay.window(index[rows], self.spec.max_episode_steps)
        ahead = torch.rand(count, generator=generator, device=replay.device) * inside.sum(1)
        later = (index[rows] + ahead.long() * replay.num_envs) % replay.reward.numel()
        goal = replay.gather(later).next_obs["achieved"]
        reward, terminated = self.env.reward_for(batch.next_obs["achieved"][rows], goal)
        self._largest_reward = torch.maximum(self._largest_reward, reward.abs().max())
        batch.reward[rows] = reward
        batch.discount[rows] = torch.where(terminated, 0.0, gamma)
        for obs in (batch.obs, batch.next_obs):
            for group, value in obs.items():
                if group != "achieved":
                    value[rows] = with_goal(self.spec, group, value[rows], goal)
        return batch

    def largest_reward(self) -> float:
        """Largest |reward| of a relabelled transition since the last call."""
        found = float(self._largest_reward)
        self._largest_reward.zero_()
        return found


def goal_groups(spec: EnvSpec) -> tuple[str, ...]:
    """What a replay buffer must hold besides the groups that a learner reads.

    Raises:
        ValueError: the task has no goals.
    """
    if "goal" not in spec.obs:
        raise ValueError(
            f"hindsight needs a task with goals; {spec.task} has no observation groups "
            "'goal' and 'achieved'"
        )
    return "goal", "achieved"


def with_goal(spec: EnvSpec, group: str, obs: Tensor, goal: Tensor) -> Tensor:
    """`obs` (B, d) of a group as it would be with another goal (B, G), a copy."""
    obs, start = obs.clone(), 0
    parts = dict(
        zip(
            [term.name for term in spec.obs["goal"]],
            goal.split([term.size for term in spec.obs["goal"]], 1),
            strict=True,
        )
    )
    for term in spec.obs[group]:
        if term.name in parts:
            value = parts[term.name]
            if term.clip is not None:
                value = value.clamp(*term.clip)
            obs[:, start : start + term.size] = value * value.new_tensor(term.scale)
        start += term.width
    return obs
