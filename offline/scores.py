"""Normalised scores, always with the simulator they come from.

score = 100 (R - ref_min) / (ref_max - ref_min), R the undiscounted return of an episode (Fu et al.,
2020, section 5; D4RL's own function leaves out the 100). The references are returns in D4RL's
simulator: gym's and D4RL's own tasks through mujoco-py, in most families. A policy that is played
anywhere else gets a number on the same scale that must not be held against published tables. None
of our tasks is D4RL's simulator, so `Score.comparable` is False for every policy we play;
it is True for the returns that a D4RL file itself holds.

Reading order: `Reference`, `find_reference` -> `Score` -> `played_in`.
"""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ctrl_rl import registry
from offline.datasets import d4rl_table

SIMULATORS = {
    "gym": "gym's {} v2 through mujoco-py",
    "antmaze": "D4RL's antmaze through mujoco-py",
    "maze2d": "D4RL's maze2d through mujoco-py",
    "adroit": "D4RL's {} through mujoco-py",
    "kitchen": "D4RL's kitchen through dm_control",
    "bullet": "pybullet",
    "minigrid": "gym-minigrid",
    "flow": "Flow on SUMO",
    "carla": "CARLA",
}
"""D4RL's family -> what its reference returns were played in; {} is the first part of the id."""

BODIES = {"HalfCheetah": "halfcheetah", "Hopper": "hopper", "Walker2d": "walker2d", "Ant": "ant"}
"""Our tasks' bodies -> first part of D4RL's ids."""


PACKAGES = {
    "mujoco": ("gymnasium", "mujoco"),
    "warp": ("gymnasium", "mujoco-warp"),
    "torch": ("torch",),
}
"""Simulator of ours -> packages whose versions decide what it computes."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Returns that count as 0 and as 100."""

    minimum: float
    maximum: float
    source: str
    """Where the two numbers come from."""
    simulator: str
    """What they were played in."""

    def normalize(self, episode_return):
        """Score(s) of a return or an array of returns."""
        return 100.0 * (episode_return - self.minimum) / (self.maximum - self.minimum)


def find_reference(metadata: Mapping[str, Any]) -> Reference | None:
    """The reference for a data set, or None where there is none.

    Minari's data sets carry their own (`ref_min_score`, `ref_max_score`). Those replayed from D4RL
    without any (adroit, kitchen) get D4RL's, as do data sets collected on a body that D4RL has too,
    with the task's own rewards and ends.

    Args:
        metadata: of `Episodes`; read are dataset, dataset_id, task, task_config, ref_min_score,
            ref_max_score.
    """
    low, high = metadata.get("ref_min_score"), metadata.get("ref_max_score")
    name = str(metadata.get("dataset_id") or metadata.get("dataset") or "")
    if low is not None and high is not None and high > low:
        played = str(metadata.get("simulator") or metadata.get("env") or "its own environment")
        return Reference(minimum=low, maximum=high, source=name, simulator=played)
    table = d4rl_table()
    if name not in table:
        parts = name.split("/")
        first = BODIES.get(str(metadata.get("task", "")).partition("-")[0])
        if metadata.get("task_config"):
            first = None  # other rewards or ends: other returns
        if len(parts) == 3 and parts[0] == "D4RL":
            first = parts[1]
            if first not in ("pen", "door", "hammer", "relocate", "kitchen"):
                return None  # made anew: other observations, other returns
        same = [n for n in table if first is not None and n.partition("-")[0] == first]
        if not same:
            return None
        name = same[0]
    entry = table[name]
    if entry.ref_min is None or entry.ref_max is None:
        return None
    first = name.partition("-")[0]
    return Reference(
        minimum=entry.ref_min,
        maximum=entry.ref_max,
        source=f"D4RL {first}-*" if entry.family in ("gym", "adroit") else f"D4RL {name}",
        simulator=SIMULATORS[entry.family].format(first),
    )


@dataclass(frozen=True, kw_only=True)
class Score:
    """A mean return on a reference's scale."""

    episode_return: float
    reference: Reference | None
    played_in: str
    """What the return was played in."""

    @property
    def normalized(self) -> float | None:
        """Score [-]; None without a reference."""
        return None if self.reference is None else self.reference.normalize(self.episode_return)

    @property
    def comparable(self) -> bool:
        """Whether it may stand beside published scores: it was played in the same simulator."""
        return self.reference is not None and self.played_in == self.reference.simulator

    def __str__(self) -> str:
        """`score 47.3 of 100 (return 1519; references D4RL hopper-*, played in ...)`."""
        if self.reference is None or self.normalized is None:
            return f"return {self.episode_return:.5g} in {self.played_in}; no reference scores"
        where = f"references {self.reference.source}, played in {self.reference.simulator}"
        text = f"score {self.normalized:.1f} of 100 (return {self.episode_return:.5g}; {where}"
        if self.comparable:
            return text + ")"
        return text + f"; this return in {self.played_in}: not comparable with published scores)"


def dataset_score(metadata: Mapping[str, Any], returns: np.ndarray) -> Score:
    """Score of the behaviour that a data set holds.

    Args:
        metadata: of `Episodes`.
        returns: (E,) of its episodes, `Episodes.finished_returns`.
    """
    reference = find_reference(metadata)
    own = metadata.get("simulator") or metadata.get("env")
    if own is None and str(metadata.get("dataset")) in d4rl_table() and reference is not None:
        own = reference.simulator
    return Score(
        episode_return=float(np.mean(returns)),
        reference=reference,
        played_in=str(own or "a simulator that the file does not name"),
    )


def played_in(task: str, backend: str | None = None) -> str:
    """Our task with the versions of what simulates it: "Hopper-v5 (gymnasium 1.4.0, ...)".

    Args:
        task: id; its bodies of gymnasium come as files of that package.
        backend: simulator; None for the task's first.
    """
    if backend is None:
        backend = registry.load("tasks", task).backends[0]
    versions = []
    for package in PACKAGES.get(str(backend), ()):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{task} ({', '.join(versions)})" if versions else task
