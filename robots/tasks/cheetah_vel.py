"""`Cheetah-Vel-v0`: a family of tasks; gymnasium's runner keeps a speed it is not told.

A task of the family is a forward velocity. The reward falls with the distance from it, and the
observation is the body's state alone: which velocity it is, only the rewards tell. Definition of
Meta-DT's environment (Wang et al., NeurIPS 2024), on the body of `HalfCheetah-v5` here.

Row i of N plays the (i mod n)-th of the n tasks in `CheetahVelConfig.index`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from robots.tasks.gymnasium_bodies import FAST_SAC, HalfCheetah
from robots.tasks.point_robot import check_index

NUM_TASKS = 40
VELOCITIES = tuple(0.075 + i * (3.0 - 0.075) / (NUM_TASKS - 1) for i in range(NUM_TASKS))
"""Wanted forward velocity of each task [m/s], evenly spaced."""
HELD_OUT = tuple(range(3, NUM_TASKS, 8))
"""Tasks for tests alone."""
TRAIN = tuple(i for i in range(NUM_TASKS) if i not in HELD_OUT)
"""Tasks that learners may see."""


@dataclass(frozen=True, kw_only=True)
class CheetahVelConfig:
    """Which tasks of the family are played; the source's numbers otherwise."""

    index: tuple[int, ...] = TRAIN
    """Numbers of the tasks, 0 to 39; row i plays the (i mod n)-th of the n."""
    control_weight: float = 0.05
    """Cost per squared action."""
    reset_noise: float = 0.1
    """Half-width of the noise on the initial positions, deviation of that on the velocities."""
    max_episode_steps: int = 200
    """[steps] of 0.05 s"""

    def __post_init__(self) -> None:
        check_index(self.index, NUM_TASKS)

    def evaluation(self) -> "CheetahVelConfig":
        """The variant that `evaluate` plays: the same."""
        return self

    def nominal(self) -> "CheetahVelConfig":
        """Without randomisation and noise: the same, the start is part of the task."""
        return self


class CheetahVel(HalfCheetah):
    """Keep a speed that only the rewards tell; a family of 40 velocities."""

    id = "Cheetah-Vel-v0"
    Config = CheetahVelConfig
    parameters, train, held_out = VELOCITIES, TRAIN, HELD_OUT
    presets = {"sac": HalfCheetah.presets["sac"], "fast_sac": {**FAST_SAC, "total_steps": 60_000}}
    metric_units = {"forward_velocity": "m/s", "velocity_error": "m/s"}

    def prepare(self) -> None:
        """The task of each row, which a copied world takes along."""
        index = torch.tensor(self.config.index, device=self.device)
        self.task = self.remember("task", index[self.index % len(index)])
        self._wanted = torch.tensor(VELOCITIES, dtype=self.sim.dtype, device=self.device)

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """Minus the distance from the wanted velocity, and the control cost."""
        self._velocity = (self.forward_position() - self._before) / self.spec.step_dt
        self._error = (self._velocity - self._wanted[self.task]).abs()
        return {
            "velocity": -self._error,
            "control": -self.config.control_weight * self.sim.ctrl.square().sum(1),
        }

    def metrics(self) -> dict[str, Tensor]:
        """Forward velocity, and its distance from the wanted one [m/s]."""
        return {"forward_velocity": self._velocity, "velocity_error": self._error}
