"""What offline learners draw minibatches from: one tensor, every transition in it once.

`rows` (R, W) float32 has a row [obs | action | reward | terminated] per observation, so W =
d + A + 2. The successor of row i begins where row i ends: a view of width W + d with stride W holds
(s, a, r, terminated, s') side by side, and a minibatch is one `index_select` on it. Nothing is
stored twice. Rows that hold an episode's last observation are no transitions; `index` names those
that are.

Where an episode terminated, nothing follows and its last step is always a transition: its
`next_obs` is masked by `terminated`. Where it was cut by a time-out, the value goes on. D4RL's own
view (`qlearning_dataset` without `terminate_on_end`, Fu et al., 2020) drops such a step;
`timeouts="keep"` keeps it if the file holds what followed. Every dropped step is counted in
`report`.

Reading order: `Batch` -> `Transitions`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offline.episodes import Episodes

REWARDS = ("raw", "locomotion", "antmaze")
"""Reward presets; see `reward_transform`."""

TIMEOUTS = ("drop", "keep")

STD_OFFSET = 1e-3
"""Added to the standard deviation of an observation (code of TD3+BC, Fujimoto and Gu, 2021)."""

SPARSE = 0.5
"""Least share of zero rewards, all others positive, at which a shift is advised."""


class Batch(NamedTuple):
    """B transitions for each of S seeds; views of one tensor."""

    obs: Tensor
    """(S, B, d), normalised if the transitions are"""
    action: Tensor
    """(S, B, A), as in the file"""
    reward: Tensor
    """(S, B), after the reward preset"""
    next_obs: Tensor
    """(S, B, d); means nothing where `terminated` is 1"""
    terminated: Tensor
    """(S, B) float32: 1 where the value after the step is zero, else 0"""


class Standardization(NamedTuple):
    """The map (s - mean) / (std + 1e-3) of observations; it travels with the policy."""

    mean: Tensor
    """(d,) float32"""
    std: Tensor
    """(d,) float32, without the 1e-3"""
    count: int
    """Observations it was computed from."""

    def __call__(self, obs: Tensor) -> Tensor:
        """(..., d) as in the file -> (..., d) as learners see it."""
        return (obs - self.mean) / (self.std + STD_OFFSET)

    def undo(self, obs: Tensor) -> Tensor:
        """(..., d) as learners see it -> as in the file."""
        return obs * (self.std + STD_OFFSET) + self.mean

    def section(self) -> dict:
        """As `ctrl_rl.policy` reads it in a policy section under "normalizer"."""
        return {
            "mean": self.mean.double().cpu(),
            "var": (self.std.double().cpu() + STD_OFFSET).square(),
            "count": torch.tensor(float(self.count), dtype=torch.float64),
            "clip": float("inf"),
            "epsilon": 0.0,
        }


class Transitions:
    """Usable transitions of recorded episodes; see the module and `from_episodes`."""

    rows: Tensor
    """(R, W) float32, R = steps + episodes"""
    index: Tensor
    """(n,) int64: the rows that are transitions, in order of the file"""
    obs_size: int
    """d"""
    action_size: int
    """A"""
    starts: Tensor
    """(E,) int64: the row of each episode's first observation"""
    lengths: Tensor
    """(E,) int64: steps of each episode; it has one more row"""
    normalizer: Standardization | None
    """What was done to the observations; None: nothing."""
    reward_scale: float
    reward_shift: float
    """r' = scale * r + shift is what learners see; `raw_reward` undoes it."""
    report: dict
    """What was kept, dropped and changed: plain JSON values, for the run's record."""

    def __init__(
        self,
        rows: Tensor,
        index: Tensor,
        obs_size: int,
        action_size: int,
        starts: Tensor,
        lengths: Tensor,
        *,
        normalizer: Standardization | None = None,
        reward_scale: float = 1.0,
        reward_shift: float = 0.0,
        report: dict | None = None,
    ) -> None:
        self.rows, self.index = rows, index
        self.obs_size, self.action_size = obs_size, action_size
        self.starts, self.lengths = starts, lengths
        self.normalizer = normalizer
        self.reward_scale, self.reward_shift = reward_scale, reward_shift
        self.report = report or {}
        width = rows.shape[1]
        self._pairs = rows.as_strided((len(rows) - 1, width + obs_size), (width, 1))
        self._widths = (obs_size, action_size, 1, 1, obs_size)

    @classmethod
    def from_episodes(
        cls,
        episodes: Episodes,
        reward: str = "raw",
        timeouts: str = "drop",
        normalize_obs: bool = False,
        device: torch.device | str = "cpu",
    ) -> "Transitions":
        """Lay out recorded episodes for learning; they are copied.

        Args:
            episodes: what was recorded.
            reward: "raw", "locomotion" or "antmaze"; see `reward_transform`.
            timeouts: the last step of an episode that was cut: "drop", or "keep" where the
                observation after it is known.
            normalize_obs: standardise observations by the mean and standard deviation of those
                that transitions start from.
            device: where everything lies and is drawn.

        Raises:
            ValueError: an unknown choice, or no usable transition.
        """
        if timeouts not in TIMEOUTS:
            raise ValueError(f"timeouts must be one of {', '.join(TIMEOUTS)}, not {timeouts!r}")
        scale, shift = reward_transform(episodes, reward)
        d, a = episodes.obs_size, episodes.action_size
        step_rows = episodes.step_rows()
        last = episodes.obs_starts + episodes.lengths - 1  # row of each episode's last step

        rows = np.zeros((len(episodes.obs), d + a + 2), np.float32)
        rows[:, :d] = episodes.obs
        rows[step_rows, d : d + a] = episodes.action
        rows[step_rows, d + a] = scale * episodes.reward.astype(np.float64) + shift
        rows[last, d + a + 1] = episodes.terminated

        cut = episodes.truncated & ~episodes.terminated
        at_timeout = cut if timeouts == "drop" else np.zeros_like(cut)
        unknown = ~episodes.terminated & ~at_timeout & ~episodes.final_known
        usable = np.zeros(len(rows), bool)
        usable[step_rows] = True
        usable[last[at_timeout | unknown]] = False
        index = np.flatnonzero(usable)
        if len(index) == 0:
            raise ValueError("no step is a usable transition: the successor of each is unknown")

        normalizer = None
        if normalize_obs:
            mean, std = _mean_and_std(rows, index, d)
            normalizer = Standardization(torch.from_numpy(mean), torch.from_numpy(std), len(index))
            rows[:, :d] -= mean
            rows[:, :d] /= std + np.float32(STD_OFFSET)
            normalizer = normalizer._replace(
                mean=normalizer.mean.to(device), std=normalizer.std.to(device)
            )

        used = rows[index, d + a]
        report = {
            "steps": episodes.num_steps,
            "episodes": episodes.num_episodes,
            "transitions": len(index),
            "terminated": int(episodes.terminated.sum()),
            "timeouts": timeouts,
            "dropped_at_timeouts": int(at_timeout.sum()),
            "dropped_unknown_successor": int(unknown.sum()),
            "obs_normalized": normalize_obs,
            "reward": {
                "preset": reward,
                "scale": scale,
                "shift": shift,
                "min": float(used.min()),
                "max": float(used.max()),
                "mean": float(used.mean(dtype=np.float64)),
            },
            "warnings": _warnings(episodes, reward),
        }
        return cls(
            torch.from_numpy(rows).to(device),
            torch.from_numpy(index).to(device),
            d,
            a,
            torch.from_numpy(episodes.obs_starts).to(device),
            torch.from_numpy(episodes.lengths).to(device),
            normalizer=normalizer,
            reward_scale=scale,
            reward_shift=shift,
            report=report,
        )

    def __len__(self) -> int:
        """Transitions n."""
        return len(self.index)

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.rows.device

    @property
    def nbytes(self) -> int:
        """Memory of all tensors [bytes]."""
        return sum(x.nbytes for x in (self.rows, self.index, self.starts, self.lengths))

    def draw(self, batch_size: int, generators: Sequence[torch.Generator]) -> Tensor:
        """Rows (S, B) of transitions, uniform and with replacement; for `batch`.

        Args:
            batch_size: B.
            generators: one per seed, which alone decides what this seed sees.
        """
        n = len(self.index)
        draws = [
            torch.randint(n, (batch_size,), generator=g, device=g.device).to(self.device)
            for g in generators
        ]
        return self.index[torch.stack(draws)]

    def batch(self, index: Tensor) -> Batch:
        """The transitions at rows `index` (S, B)."""
        found = self._pairs.index_select(0, index.reshape(-1))
        parts = found.view(*index.shape, -1).split(self._widths, -1)
        obs, action, reward, terminated, next_obs = parts
        return Batch(obs, action, reward.squeeze(-1), next_obs, terminated.squeeze(-1))

    def raw_reward(self, reward: Tensor) -> Tensor:
        """Rewards as learners see them -> as the file has them."""
        return (reward - self.reward_shift) / self.reward_scale


def reward_transform(episodes: Episodes, preset: str) -> tuple[float, float]:
    """Scale and shift of a reward preset: learners see scale * r + shift.

    "locomotion": scale 1000 / (largest - smallest episode return), the treatment of the gym tasks
    in the code of IQL (Kostrikov et al., 2021) and, after it, of most later work; a recording that
    just stops does not count where others ended. "antmaze": shift
    -1, so that every step costs until the goal ends the episode (CQL, Kumar et al., 2020, and IQL).
    "raw": nothing.

    Raises:
        ValueError: an unknown preset; "locomotion" where all returns are equal.
    """
    if preset == "raw":
        return 1.0, 0.0
    if preset == "antmaze":
        return 1.0, -1.0
    if preset != "locomotion":
        raise ValueError(f"reward must be one of {', '.join(REWARDS)}, not {preset!r}")
    returns = episodes.finished_returns()
    span = float(returns.max() - returns.min())
    if not span > 0:
        raise ValueError(
            'reward preset "locomotion" divides by the range of episode returns, and all '
            f"{len(returns)} are {returns[0]:.6g}"
        )
    return 1000.0 / span, 0.0


def is_sparse(reward: np.ndarray) -> bool:
    """No reward is negative and most are zero, but not all."""
    return bool(reward.min() >= 0 < reward.max() and np.mean(reward == 0) >= SPARSE)


def _warnings(episodes: Episodes, preset: str) -> list[str]:
    """What is likely to give useless values."""
    if preset != "antmaze" and is_sparse(episodes.reward):  # the others scale without a shift
        return [
            "all rewards are 0 or positive and most are 0: without a shift (reward preset "
            '"antmaze") values learned from them say little'
        ]
    return []


def _mean_and_std(rows: np.ndarray, index: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (d,) of the first d columns over rows `index`, in float64."""
    sums, squares = np.zeros(d), np.zeros(d)
    shift = rows[index[0], :d].astype(np.float64)  # so that a large offset cancels
    for part in np.array_split(index, len(index) // 65536 + 1):
        x = rows[part, :d] - shift
        sums += x.sum(0)
        squares += np.square(x).sum(0)
    mean = sums / len(index)
    var = np.maximum(squares / len(index) - mean**2, 0.0)
    return (mean + shift).astype(np.float32), np.sqrt(var).astype(np.float32)
