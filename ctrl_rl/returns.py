"""Advantages from rewards and values: pure functions over (T, N) tensors, time first."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def gae(
    reward: Float[Tensor, "T N"],
    value: Float[Tensor, "T N"],
    next_value: Float[Tensor, "T N"],
    terminated: Bool[Tensor, "T N"],
    truncated: Bool[Tensor, "T N"],
    gamma: float,
    gae_lambda: float,
) -> Float[Tensor, "T N"]:
    """Generalised advantage estimate (Schulman et al., ICLR 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma V(next_obs_t) [not terminated_t] - V(obs_t)
    A_t     = delta_t + gamma lambda [not ended_t] A_{t+1},   ended = terminated | truncated

    A time limit cuts the sum but not the bootstrap, because the state goes on; a termination
    cuts both. The recursion is linear, so it runs as a scan of log2(T) steps.

    Args:
        reward: r_t.
        value: V(obs_t).
        next_value: V of the true successor `next_obs_t`, also in rows that ended; read only where
            not terminated.
        terminated: the episode ended by its own rules at step t.
        truncated: the episode was cut after step t.
        gamma: discount per step, 0..1.
        gae_lambda: 0 for one-step, 1 for Monte Carlo.

    Returns:
        A_t. The value target is A_t + V(obs_t).
    """
    advantage = reward + gamma * torch.where(terminated, 0.0, next_value) - value
    factor = gamma * gae_lambda * (~(terminated | truncated)).to(reward.dtype)
    factor[-1] = 0.0
    # After the pass with span s, advantage_t holds the sum over t .. t + 2 s - 1, and factor_t is
    # the weight of what follows it.
    span = 1
    while span < reward.shape[0]:
        ahead = torch.addcmul(advantage[:-span], factor[:-span], advantage[span:])
        advantage = torch.cat([ahead, advantage[-span:]])
        factor = torch.cat([factor[:-span] * factor[span:], factor[-span:]])
        span *= 2
    return advantage


def episode_sums(
    unfinished: Float[Tensor, "2 N"], reward: Float[Tensor, "T N"], ended: Bool[Tensor, "T N"]
) -> tuple[Float[Tensor, "2 E"], Float[Tensor, "2 N"]]:
    """Return and length of the episodes in a roll-out that begins and stops amid episodes.

    Args:
        unfinished: sum of rewards and number of steps so far of the episodes that go on, float64.
        reward: r_t.
        ended: an episode ended at step t.

    Returns:
        Return and length of the E episodes that ended, by row, then time; and the next
        `unfinished`.
    """
    per_step = torch.stack([reward.double(), torch.ones_like(reward, dtype=torch.float64)])
    total = (unfinished[:, None] + per_step.cumsum(1)).transpose(1, 2)  # (2, N, T)
    unfinished = total[:, :, -1].clone()
    row, t = ended.T.nonzero(as_tuple=True)
    at_end = total[:, row, t]
    again = row[1:] == row[:-1]  # not the row's first end: what came before belongs to others
    sums = at_end.clone()
    sums[:, 1:] -= at_end[:, :-1] * again
    last = torch.ones_like(row, dtype=torch.bool)
    last[:-1] = ~again
    unfinished[:, row[last]] -= at_end[:, last]
    return sums, unfinished
