"""Recorded behaviour: the one container that every file format is read into and written from.

Numpy arrays, all episodes one after another. An episode of n steps has n + 1 observations: the one
after its last step is part of it. So a step's successor is the next row, always, and no pair can
span two episodes.

Reading order: `Episodes` -> `concatenate`, `digest`.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """E episodes with T steps in total.

    Raises:
        ValueError: shapes or types that do not belong together, naming the field.
    """

    obs: np.ndarray
    """(T + E, d) float32: episode e has lengths[e] + 1 rows, in order."""
    action: np.ndarray
    """(T, A) float32"""
    reward: np.ndarray
    """(T,) float32 or float64, as the file has it."""
    lengths: np.ndarray
    """(E,) int64, steps of each episode, at least 1."""
    terminated: np.ndarray
    """(E,) bool: the episode ended by its own rules."""
    truncated: np.ndarray
    """(E,) bool: it was cut, say by a time limit. With neither flag the recording just stops; where
    both are set, it terminated on its last allowed step."""
    final_known: np.ndarray
    """(E,) bool: the source holds the observation after the last step. Where it does not, that row
    repeats the one before and must never be used as a successor."""
    infos: dict[str, np.ndarray] = field(default_factory=dict)
    """Name -> (T, ...), one row per step; only what was asked for."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Where it comes from; plain JSON values."""

    def __post_init__(self) -> None:
        for name, dimensions in (("obs", 2), ("action", 2), ("reward", 1), ("lengths", 1)):
            if getattr(self, name).ndim != dimensions:
                raise ValueError(f"{name} must have {dimensions} dimensions")
        if len(self.lengths) == 0 or self.lengths.min() < 1:
            empty = np.flatnonzero(self.lengths < 1)
            which = f"episode {empty[0]} has no step" if len(empty) else "there is no episode"
            raise ValueError(which)
        steps, episodes = int(self.lengths.sum()), len(self.lengths)
        expected = {"obs": steps + episodes, "action": steps, "reward": steps}
        expected |= {"terminated": episodes, "truncated": episodes, "final_known": episodes}
        for name, rows in expected.items():
            if len(getattr(self, name)) != rows:
                raise ValueError(f"{name} has {len(getattr(self, name))} rows, not {rows}")
        for name, values in self.infos.items():
            if len(values) != steps:
                raise ValueError(f"infos/{name} has {len(values)} rows, not {steps}")
        types = {"obs": ("float32",), "action": ("float32",), "reward": ("float32", "float64")}
        types |= {"lengths": ("int64",)}
        types |= dict.fromkeys(("terminated", "truncated", "final_known"), ("bool",))
        for name, allowed in types.items():
            if getattr(self, name).dtype.name not in allowed:
                raise ValueError(f"{name} must be {' or '.join(allowed)}")

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.reward)

    @property
    def obs_size(self) -> int:
        """d."""
        return self.obs.shape[1]

    @property
    def action_size(self) -> int:
        """A."""
        return self.action.shape[1]

    @property
    def step_starts(self) -> np.ndarray:
        """(E,) int64: where each episode begins in `action`, `reward` and `infos`."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def obs_starts(self) -> np.ndarray:
        """(E,) int64: where each episode begins in `obs`."""
        return self.step_starts + np.arange(self.num_episodes)

    def step_rows(self) -> np.ndarray:
        """(T,) int64: the row of `obs` that each action answered to; its successor is one on."""
        return np.arange(self.num_steps) + np.repeat(np.arange(self.num_episodes), self.lengths)

    def returns(self) -> np.ndarray:
        """(E,) float64: sum of rewards of each episode."""
        return np.add.reduceat(self.reward.astype(np.float64), self.step_starts)

    def finished_returns(self) -> np.ndarray:
        """Those of episodes that ended by themselves or by a cut; of all where none did.

        The return of a recording that just stops says nothing about who acted.
        """
        returns, ended = self.returns(), self.terminated | self.truncated
        return returns[ended] if ended.any() else returns

    def select(self, which: Sequence[int] | np.ndarray) -> "Episodes":
        """These episodes, in this order; arrays are copied.

        Raises:
            ValueError: none is chosen.
        """
        which = np.asarray(which, dtype=np.int64)
        if len(which) == 0:
            raise ValueError("there is no episode")

        def gather(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            ahead = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            return np.repeat(starts, lengths) + ahead

        lengths = self.lengths[which]
        steps = gather(self.step_starts[which], lengths)
        return Episodes(
            obs=self.obs[gather(self.obs_starts[which], lengths + 1)],
            action=self.action[steps],
            reward=self.reward[steps],
            lengths=lengths,
            terminated=self.terminated[which],
            truncated=self.truncated[which],
            final_known=self.final_known[which],
            infos={name: values[steps] for name, values in self.infos.items()},
            metadata=dict(self.metadata),
        )


def concatenate(parts: Sequence[Episodes]) -> Episodes:
    """All episodes of all parts, in order, with the metadata of the first.

    Raises:
        ValueError: no part, or parts of other widths or other infos.
    """
    if not parts:
        raise ValueError("there is no episode")
    first = parts[0]
    for i, part in enumerate(parts):
        if (part.obs_size, part.action_size) != (first.obs_size, first.action_size):
            raise ValueError(
                f"part {i} has observations and actions of {part.obs_size} and "
                f"{part.action_size} numbers, part 0 of {first.obs_size} and {first.action_size}"
            )
        if part.infos.keys() != first.infos.keys():
            raise ValueError(f"part {i} has other infos than part 0")
    arrays = [f.name for f in dataclasses.fields(Episodes) if f.name not in ("infos", "metadata")]
    return Episodes(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays},
        infos={k: np.concatenate([part.infos[k] for part in parts]) for k in first.infos},
        metadata=dict(first.metadata),
    )


def digest(episodes: Episodes) -> str:
    """Checksum of the data itself: the same in whatever format and compression it lies."""
    total = hashlib.sha256()
    for name in ("obs", "action", "reward", "lengths", "terminated", "truncated", "final_known"):
        values = np.ascontiguousarray(getattr(episodes, name))
        total.update(f"{name} {values.dtype.str} {values.shape}".encode())
        total.update(values.data)
    return total.hexdigest()
