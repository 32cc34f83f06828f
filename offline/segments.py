"""What planners learn from: pieces of recorded episodes of several tasks.

Everything is normalised per column over all tasks together: statistics of one task would tell the
networks which task it is, and are not to be had in a test.

`rows` (R, d + A + 1) has a row [obs | action | reward] per observation; the row that holds an
episode's last observation has no action. A segment is H rows in a row with an action each; a
transition is a row and the observation after it.

Reading order: `Scale` -> `Segments`.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offline.episodes import Episodes

STD_OFFSET = 1e-3
"""Added to standard deviations, so that a column that is almost constant stays small."""


class Scale(NamedTuple):
    """Statistics of the columns [obs | action | reward], float32 each."""

    mean: Tensor
    """(d + A + 1,)"""
    std: Tensor
    """(d + A + 1,), the offset included"""
    low: Tensor
    """(d + A,) least value of each column that a plan holds, normalised"""
    high: Tensor
    """(d + A,)"""

    def apply(self, x: Tensor, first: int = 0) -> Tensor:
        """Normalise the columns (..., n) that begin at column `first`."""
        columns = slice(first, first + x.shape[-1])
        return (x - self.mean[columns]) / self.std[columns]

    def undo(self, x: Tensor, first: int = 0) -> Tensor:
        """The inverse of `apply`."""
        columns = slice(first, first + x.shape[-1])
        return x * self.std[columns] + self.mean[columns]


class Segments:
    """Episodes of M tasks as one normalised tensor.

    Args:
        tasks: the episodes of each task.
        horizon: H, steps of a segment.
        device: where everything lies and is drawn.

    Raises:
        ValueError: no task, tasks of other widths, a number that is not finite, no episode of H
            steps, or a task without a transition.
    """

    def __init__(
        self, tasks: Sequence[Episodes], horizon: int, device: torch.device | str = "cpu"
    ) -> None:
        if not tasks:
            raise ValueError("there is no task to learn from")
        first = tasks[0]
        self.obs_size, self.action_size, self.horizon = d, a, h = (
            first.obs_size,
            first.action_size,
            horizon,
        )
        for i, episodes in enumerate(tasks):
            if (episodes.obs_size, episodes.action_size) != (d, a):
                raise ValueError(
                    f"task {i} has observations and actions of {episodes.obs_size} and "
                    f"{episodes.action_size} numbers, task 0 of {d} and {a}"
                )
            _check_finite(i, episodes)
        rows, steps, starts, task, episode = [], [], [], [], []
        base = 0
        for i, episodes in enumerate(tasks):
            table = np.zeros((len(episodes.obs), d + a + 1), np.float32)
            at = episodes.step_rows()
            table[:, :d] = episodes.obs
            table[at, d : d + a] = episodes.action
            table[at, d + a] = episodes.reward
            rows.append(table)
            known = np.ones(episodes.num_steps, bool)
            last = episodes.step_starts + episodes.lengths - 1
            known[last] = episodes.final_known
            if not known.any():
                raise ValueError(f"task {i} has no transition: the successor of each is unknown")
            number = np.repeat(np.arange(episodes.num_episodes), episodes.lengths)
            to_go = np.repeat(episodes.step_starts + episodes.lengths, episodes.lengths)
            to_go -= np.arange(episodes.num_steps)
            steps.append(at[known] + base)
            episode.append(number[known] + (episode[-1].max() + 1 if episode else 0))
            task.append(np.full(known.sum(), i))
            fits = at[to_go >= h] + base
            starts.append(np.stack([fits, np.full(len(fits), i)]))
            base += len(table)
        whole, steps = np.concatenate(rows), np.concatenate(steps)
        start = np.concatenate(starts, 1)
        if start.shape[1] == 0:
            longest = max(int(e.lengths.max()) for e in tasks)
            raise ValueError(f"no episode has {h} steps; the longest has {longest}: lower horizon")
        acted = whole[np.concatenate([e.step_rows() + b for e, b in _bases(tasks)])]
        mean, std = acted.mean(0, dtype=np.float64), acted.std(0, dtype=np.float64) + STD_OFFSET
        whole = ((whole - mean) / std).astype(np.float32)
        acted = (acted[:, : d + a] - mean[: d + a]) / std[: d + a]

        def tensor(x, dtype=torch.int64):
            return torch.as_tensor(np.asarray(x), dtype=dtype).to(device)

        self.scale = Scale(
            *(tensor(x, torch.float32) for x in (mean, std, acted.min(0), acted.max(0)))
        )
        self.rows = tensor(whole, torch.float32)
        self._pairs = self.rows.as_strided((len(whole) - 1, 2 * d + a + 1), (d + a + 1, 1))
        self.num_tasks = len(tasks)
        self._starts, self._start_task = tensor(start[0]), tensor(start[1])
        self._steps = tensor(steps)
        task, episode = np.concatenate(task), np.concatenate(episode)
        self._step_episode = tensor(episode)
        self._task_count = tensor(np.bincount(task, minlength=len(tasks)))
        self._task_first = self._task_count.cumsum(0) - self._task_count
        self._episode_count = tensor(np.bincount(episode))
        self._episode_first = self._episode_count.cumsum(0) - self._episode_count

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.rows.device

    def __len__(self) -> int:
        """Segments there are."""
        return len(self._starts)

    def report(self) -> dict:
        """What a run's record says of the data, so that it goes on with the same alone."""
        digest = hashlib.sha256(self.rows.cpu().numpy().tobytes()).hexdigest()
        return {"tasks": self.num_tasks, "segments": len(self), "rows_sha256": digest}

    def draw_segments(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Uniform segments (B, H, d + A), normalised, and the task of each (B,)."""
        which = torch.randint(len(self._starts), (count,), generator=generator, device=self.device)
        at = self._starts[which][:, None] + torch.arange(self.horizon, device=self.device)
        return self.rows[at][:, :, :-1], self._start_task[which]

    def draw_tasks(self, count: int, generator: torch.Generator) -> Tensor:
        """Uniform tasks (B,)."""
        return torch.randint(self.num_tasks, (count,), generator=generator, device=self.device)

    def draw_transitions(self, task: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Uniform transitions of each task, (B, n, 2 d + A + 1) as [obs|action|reward|next_obs]."""
        u = torch.rand(len(task), count, generator=generator, device=self.device)
        return self._gather(self._task_first[task], self._task_count[task], u)

    def draw_contexts(self, task: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Like `draw_transitions`, but half of the contexts come from one episode each.

        A context from everywhere hides which policy acted, one from an episode looks like what a
        test begins with.
        """
        of_task = self._task_first[task], self._task_count[task]
        u = torch.rand(len(task), count + 2, generator=generator, device=self.device)
        some = of_task[0] + (u[:, 0] * of_task[1]).long().clamp(max=of_task[1] - 1)
        episode = self._step_episode[some]
        whole = u[:, 1] < 0.5
        first = torch.where(whole, of_task[0], self._episode_first[episode])
        number = torch.where(whole, of_task[1], self._episode_count[episode])
        return self._gather(first, number, u[:, 2:])

    def _gather(self, first: Tensor, number: Tensor, u: Tensor) -> Tensor:
        """Transitions at the places u (B, n) in 0..1 of ranges of `_steps`."""
        at = (u * number[:, None]).long().clamp(max=number[:, None] - 1) + first[:, None]
        return self._pairs[self._steps[at]]


def _bases(tasks: Sequence[Episodes]):
    """Each task with the row that its first observation has among all."""
    base = 0
    for episodes in tasks:
        yield episodes, base
        base += len(episodes.obs)


def _check_finite(task: int, episodes: Episodes) -> None:
    """Name the first number that is none, where its reader can find it."""
    for name in ("obs", "action", "reward"):
        values = getattr(episodes, name)
        bad = ~np.isfinite(values.reshape(len(values), -1)).all(1)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(f"task {task}: {name} row {row} is not finite; remove its episode")
