"""`Point-Robot-v0`: a family of tasks; a point in the plane goes to a goal it cannot see.

A task of the family is a goal in [-1, 1]^2. The reward is minus the distance to it, and the
observation is the position alone: which goal it is, only the rewards tell. After Meta-DT's
environment (Wang et al., NeurIPS 2024), which draws its goals at random; here `GOALS` are a fixed
list that covers the square evenly.

Row i of N plays the (i mod n)-th of the n tasks in `PointRobotConfig.index`, so that one
environment holds many tasks at once.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from robots.env import MODELS, TaskEnv
from robots.sim import Rows
from robots.sim.ode_backend import OdeSim

NUM_TASKS = 50
REACH = 0.1  # [m], how far a step moves along each axis at most
STEP_DT = 1.0  # [s]; the source has no time


def radical_inverse(n: int, base: int) -> float:
    """n's digits mirrored at the point: 6 = 110 in base 2 gives 0.011 = 3/8."""
    value, scale = 0.0, 1.0
    while n:
        n, digit = divmod(n, base)
        scale /= base
        value += digit * scale
    return value


GOALS = tuple(
    (2 * radical_inverse(i + 1, 2) - 1, 2 * radical_inverse(i + 1, 3) - 1) for i in range(NUM_TASKS)
)
"""Goal of each task [m]: the points of Halton (Numerische Mathematik 2, 1960) in bases 2 and 3."""
HELD_OUT = tuple(range(4, NUM_TASKS, 10))
"""Tasks for tests alone."""
TRAIN = tuple(i for i in range(NUM_TASKS) if i not in HELD_OUT)
"""Tasks that learners may see."""


@dataclass(frozen=True, kw_only=True)
class PointRobotConfig:
    """Which tasks of the family are played, and where they start."""

    index: tuple[int, ...] = TRAIN
    """Numbers of the tasks, 0 to 49; row i plays the (i mod n)-th of the n."""
    start_noise: float = 0.01
    """Half-width of the uniform start around the origin [m]; 0 as in the source, where every
    episode begins alike."""
    max_episode_steps: int = 20
    """[steps]"""

    def __post_init__(self) -> None:
        check_index(self.index, NUM_TASKS)

    def evaluation(self) -> "PointRobotConfig":
        """The variant that `evaluate` plays: the same."""
        return self

    def nominal(self) -> "PointRobotConfig":
        """Without randomisation and noise: the same, the start is part of the task."""
        return self


def check_index(index: tuple[int, ...], num_tasks: int) -> None:
    """Refuse numbers that name no task of a family.

    Raises:
        ValueError: no number, or one out of range.
    """
    if not index:
        raise ValueError("index must name at least one task")
    for i in index:
        if not 0 <= i < num_tasks:
            raise ValueError(f"index must be in 0..{num_tasks - 1}, not {i}")


class PointRobot(TaskEnv):
    """Go to a goal that only the rewards tell; a family of 50 goals."""

    id = "Point-Robot-v0"
    Config = PointRobotConfig
    backends = ("torch",)
    parameters, train, held_out = GOALS, TRAIN, HELD_OUT
    presets = {
        "ppo": {
            "num_envs": 64,
            "total_steps": 60_000,
            "num_steps": 20,
            "num_minibatches": 4,
            "num_epochs": 5,
            "gamma": 0.9,
            "learning_rate": 3e-3,
            "hidden": (32, 32),
        }
    }
    metric_units = {"distance": "m"}

    def make_sim(self, backend, device, threads):
        """qpos is (x, y, goal x, goal y [m]); a step moves by the action, whatever went before."""

        def acceleration(qpos: Tensor, qvel: Tensor, ctrl: Tensor) -> Tensor:
            wanted = torch.zeros_like(qvel)
            wanted[:, :2] = ctrl.clamp(-REACH, REACH) / STEP_DT
            return (wanted - qvel) / STEP_DT

        return OdeSim(
            acceleration, self.num_envs, (4, 2), STEP_DT, "semi_implicit_euler", device=device
        )

    def picture_file(self) -> Path:
        """Point and goal."""
        return MODELS / "point_robot.xml"

    def make_spec(self) -> EnvSpec:
        """The position; two moves."""
        pos = ObsTerm(name="pos", kind="signal", size=2, unit="m", frame="w", labels=("x", "y"))
        return EnvSpec(
            task=self.id,
            num_envs=self.num_envs,
            obs={"actor": (pos,)},
            action=tuple(
                ActionDim(name=name, low=-REACH, high=REACH, unit="m") for name in ("x", "y")
            ),
            physics_dt=STEP_DT,
            step_dt=STEP_DT,
            max_episode_steps=self.config.max_episode_steps,
            history=("v0: first version",),
        )

    def observe_terms(self, rows: Rows) -> dict[str, Tensor]:
        """Raw values."""
        return {"pos": self.sim.qpos[rows, :2]}

    def apply_action(self, action: Tensor) -> None:
        """The move, which the simulator bounds [m]."""
        self.sim.ctrl.copy_(action)

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """Minus the distance after the move [m]."""
        self._distance = (self.sim.qpos[:, :2] - self.sim.qpos[:, 2:]).norm(dim=1)
        return {"distance": -self._distance}

    def metrics(self) -> dict[str, Tensor]:
        """Distance from the goal [m]."""
        return {"distance": self._distance}

    def prepare(self) -> None:
        """The task of each row, which a copied world takes along."""
        index = torch.tensor(self.config.index, device=self.device)
        self.task = self.remember("task", index[self.index % len(index)])
        self._goals = torch.tensor(GOALS, dtype=self.sim.dtype, device=self.device)

    def begin(self, rows: Rows) -> None:
        """Near the origin."""
        noise = self.config.start_noise
        self.sim.qpos[rows, :2] = self.uniform("start", rows, 2, -noise, noise)
        self.sim.qpos[rows, 2:] = self._goals[self.task[rows]]
