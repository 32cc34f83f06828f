"""Replay: what N environments went through, as off-policy algorithms learn from it.

A ring of slots; each step of the N environments fills one. An observation is stored once: that of
a slot is the successor of the slot before. Only where a row ended is the true successor another
one, and it is kept beside the ring. So a transition takes about half the memory of (obs, next_obs)
pairs; `ReplayBuffer.nbytes` is the exact number.

A step that ended in a fault is no transition: its successor was never seen, and its action may be
what broke the world. It is never drawn, and no n-step window passes over it.

Reading order: `Batch` -> `ReplayBuffer` -> `updates_due`.
"""

from collections.abc import Mapping
from math import floor
from typing import NamedTuple

import torch
from torch import Tensor

from ctrl_rl.env import Obs, Step


class Batch(NamedTuple):
    """B windows of up to n steps. The target of Q(obs, action) is reward + discount V(next_obs)."""

    obs: Obs
    """group -> (B, d), raw"""
    action: Tensor
    """(B, A)"""
    reward: Tensor
    """(B,) sum of gamma^k r_k over the m <= n steps of the window"""
    next_obs: Obs
    """group -> (B, d), raw: what truly followed the window's last step"""
    discount: Tensor
    """(B,) gamma^m; 0 where the window's last step terminated"""


class ReplayBuffer:
    """The newest `capacity` transitions of an unbroken stream of steps of N environments.

    Args:
        capacity: transitions kept; rounded down to a multiple of N.
        num_envs: N.
        obs_sizes: group -> columns; other groups of an observation are not stored.
        action_size: columns of an action.
        device: where everything lies and is sampled.

    Raises:
        ValueError: `capacity` is below N.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        obs_sizes: Mapping[str, int],
        action_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity < num_envs:
            raise ValueError(
                f"a replay buffer of {capacity} transitions cannot hold one step of {num_envs} "
                "environments"
            )
        self.num_envs, self.num_slots = num_envs, capacity // num_envs
        self.obs_sizes, self.device = dict(obs_sizes), torch.device(device)
        frames = self.num_slots + 1  # one more, for what follows the newest step

        def grid(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(frames, num_envs, *size, dtype=dtype, device=self.device)

        self.obs = grid(sum(self.obs_sizes.values()))
        """(S + 1, N, D): all groups side by side"""
        self.action = grid(action_size)
        """(S + 1, N, A)"""
        self.reward = grid()
        """(S + 1, N)"""
        self.terminated = grid(dtype=torch.bool)
        self.ended = grid(dtype=torch.bool)
        self.faulty = grid(dtype=torch.bool)
        self._successor = grid(dtype=torch.int64)  # of a row that ended: where in `_kept`
        self._kept = torch.zeros(num_envs, self.obs.shape[-1], device=self.device)  # a ring, too
        self._kept_start = self._kept_count = 0
        self._kept_per_slot, self._faults_per_slot = [0] * frames, [0] * frames
        self._slot = self._filled = self._faults = 0
        self._newest: Obs | None = None

    def __len__(self) -> int:
        """Transitions that can be drawn."""
        return self._filled * self.num_envs - self._faults

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, whether filled or not [bytes]."""
        return sum(x.nbytes for x in (*self._grids().values(), self._kept))

    def nbytes_after(self, steps: int) -> int:
        """About what a save writes after `steps` env steps [bytes]."""
        return self.nbytes * min(steps // self.num_envs + 1, len(self.obs)) // len(self.obs)

    def add(self, obs: Obs, action: Tensor, step: Step) -> None:
        """Take in one step of the N environments.

        Args:
            obs: what the action answered to: the `obs` of the step added before, if there is one.
            action: (N, A), as it was sent.
            step: what the environment gave.

        Raises:
            ValueError: `obs` does not follow on the step added before.
        """
        slot, following = self._slot, (self._slot + 1) % len(self.obs)
        if self._filled == 0:
            self.obs[slot] = self._joined(obs)
        elif obs is not self._newest and not torch.equal(self._joined(obs), self.obs[slot]):
            raise ValueError(
                "the observation is not the one that the step before led to: a replay buffer "
                "holds one unbroken stream of steps"
            )
        self._forget(following)
        self.action[slot], self.reward[slot] = action, step.reward
        self.terminated[slot] = step.terminated
        self.ended[slot] = step.terminated | step.truncated
        self.faulty[slot] = False
        if step.info.faults:
            rows = [fault.row for fault in step.info.faults]
            self.faulty[slot, rows] = True
            self.action[slot, rows] = 0.0  # the number that was refused may be a NaN
            self._faults_per_slot[slot] = len(rows)
            self._faults += len(rows)
        if step.next_obs is not step.obs:
            rows = (self.ended[slot] & ~self.faulty[slot]).nonzero()[:, 0]
            self._keep(slot, rows, self._joined(step.next_obs)[rows])
        self.obs[following] = self._joined(step.obs)
        self._slot, self._newest = following, step.obs
        self._filled = min(self._filled + 1, self.num_slots)

    def draw(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor:
        """Positions (B,) of transitions, uniform and with replacement; for `gather`.

        Raises:
            ValueError: there is none.
        """
        if len(self) == 0:
            raise ValueError("the replay buffer holds no transition yet")
        oldest = (self._slot - self._filled) * self.num_envs

        def positions() -> Tensor:
            high = self._filled * self.num_envs
            x = torch.randint(high, (batch_size,), generator=generator, device=self.device)
            return (x + oldest) % self.reward.numel()

        index = positions()
        while self._faults and (bad := self.faulty.view(-1)[index]).any():
            index = torch.where(bad, positions(), index)
        return index

    def window(self, index: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
        """Positions (B, n) of the steps from `index` (B,) on, and 1 (B, n) where they belong to it.

        See `gather`, which says where a window is cut.
        """
        envs = self.num_envs
        ahead = torch.arange(num_steps, device=self.device)
        window = (index[:, None] + ahead * envs) % self.reward.numel()
        ended = self.ended.view(-1)[window]
        left = (self._slot - index.div(envs, rounding_mode="floor")) % len(self.obs)
        goes_on = ~ended[:, :-1] & ~self.faulty.view(-1)[window[:, 1:]]
        goes_on &= ahead[1:] < left[:, None]
        return window, torch.cat([torch.ones_like(ended[:, :1]), goes_on], 1).cumprod(1)

    def gather(self, index: Tensor, num_steps: int = 1, gamma: float = 0.99) -> Batch:
        """The windows that begin at positions `index` (B,).

        A window has `num_steps` steps. It is cut after a step that ended an episode, before a
        fault, and at the newest data; m counts the steps it has.
        """
        envs, size = self.num_envs, self.reward.numel()
        window, inside = self.window(index, num_steps)
        count = inside.sum(1)
        last = window.gather(1, count[:, None] - 1)[:, 0]
        powers = gamma ** torch.arange(num_steps + 1, device=self.device)
        reward = (self.reward.view(-1)[window] * powers[:-1] * inside).sum(1)
        both = torch.cat([index, (last + envs) % size])
        obs, next_obs = self.obs.view(size, -1).index_select(0, both).chunk(2)
        kept = self._kept.index_select(0, self._successor.view(-1)[last])
        next_obs = torch.where(self.ended.view(-1)[last, None], kept, next_obs)
        return Batch(
            self._split(obs),
            self.action.view(size, -1).index_select(0, index),
            reward,
            self._split(next_obs),
            torch.where(self.terminated.view(-1)[last], 0.0, powers[count]),
        )

    def following(self, index: Tensor) -> Obs:
        """What was acted on next, group -> (B, d): where an episode ended, a new one's first.

        For objectives that go on after a termination. Elsewhere it is the `next_obs` of one step.
        """
        at = (index + self.num_envs) % self.reward.numel()
        return self._split(self.obs.view(self.reward.numel(), -1)[at])

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator | None = None,
        num_steps: int = 1,
        gamma: float = 0.99,
    ) -> Batch:
        """`gather` at what `draw` gives."""
        return self.gather(self.draw(batch_size, generator), num_steps, gamma)

    def state_dict(self) -> dict:
        """Everything that decides what is drawn; only slots that are filled, not copied."""
        used = self._filled + 1
        return {
            "grids": {name: x[:used] for name, x in self._grids().items()},
            "kept": self._kept,
            "kept_start": self._kept_start,
            "kept_count": self._kept_count,
            "kept_per_slot": self._kept_per_slot[:used],
            "faults_per_slot": self._faults_per_slot[:used],
            "slot": self._slot,
            "filled": self._filled,
            "num_slots": self.num_slots,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken.

        Raises:
            ValueError: it was taken of a buffer of another size.
        """
        fits = state["num_slots"] == self.num_slots
        for name, x in self._grids().items():
            fits = fits and state["grids"][name].shape[1:] == x.shape[1:]
        if not fits:
            raise ValueError("the saved replay is that of a buffer of another size")
        used = state["filled"] + 1
        for name, x in self._grids().items():
            x[:used] = state["grids"][name].to(self.device)
        self._kept = state["kept"].to(self.device, copy=True)
        self._kept_start, self._kept_count = state["kept_start"], state["kept_count"]
        rest = [0] * (len(self.obs) - used)
        self._kept_per_slot = [*state["kept_per_slot"], *rest]
        self._faults_per_slot = [*state["faults_per_slot"], *rest]
        self._slot, self._filled = state["slot"], state["filled"]
        self._faults, self._newest = sum(self._faults_per_slot), None

    # Inside -----------------------------------------------------------------------------------

    def _grids(self) -> dict[str, Tensor]:
        names = ("obs", "action", "reward", "terminated", "ended", "faulty", "_successor")
        return {name: getattr(self, name) for name in names}

    def _joined(self, obs: Obs) -> Tensor:
        """The groups side by side, (N, D)."""
        return torch.cat([obs[group] for group in self.obs_sizes], 1)

    def _split(self, x: Tensor) -> Obs:
        parts = x.split(list(self.obs_sizes.values()), 1)
        return dict(zip(self.obs_sizes, parts, strict=True))

    def _forget(self, slot: int) -> None:
        """Free what the oldest step kept, whose slot is overwritten."""
        self._kept_start = (self._kept_start + self._kept_per_slot[slot]) % len(self._kept)
        self._kept_count -= self._kept_per_slot[slot]
        self._faults -= self._faults_per_slot[slot]
        self._kept_per_slot[slot] = self._faults_per_slot[slot] = 0

    def _keep(self, slot: int, rows: Tensor, obs: Tensor) -> None:
        """Store the true successors (E, D) of rows that ended."""
        size, count = len(self._kept), self._kept_count + len(rows)
        if count > size:  # a larger ring, which begins at 0
            order = (torch.arange(self._kept_count, device=self.device) + self._kept_start) % size
            kept = self._kept.new_zeros(max(2 * size, count), self._kept.shape[1])
            kept[: self._kept_count] = self._kept[order]
            self._successor.sub_(self._kept_start).remainder_(size)
            self._kept, self._kept_start, size = kept, 0, len(kept)
        at = torch.arange(self._kept_count, count, device=self.device)
        at = (at + self._kept_start) % size
        self._kept[at] = obs
        self._successor[slot, rows] = at
        self._kept_per_slot[slot] = len(rows)
        self._kept_count = count


WARMUP = "0 or more and below total_steps, or nothing would be learnt"
"""What every off-policy learner wants of its `warmup_steps`."""


def updates_due(before: int, after: int, warmup_steps: int, updates_per_step: float) -> int:
    """Gradient steps to take between two counts of env steps, whatever the number of environments.

    Over a run they add up to floor(updates_per_step * (steps beyond `warmup_steps`)).
    """
    due = [floor(updates_per_step * max(step - warmup_steps, 0)) for step in (before, after)]
    return due[1] - due[0]
