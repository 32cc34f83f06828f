"""`Reach-v0`: a two-link arm brings its tip to a goal, and only being there is paid.

The arm moves in a horizontal plane, so that gravity does nothing; two motors turn it against
viscous friction. Its equation of motion is that of Murray, Li, Sastry, "A mathematical
introduction to robotic manipulation", 1994, section 4.2.2, with uniform rods for links; the
classical Runge-Kutta method integrates 0.04 s at a time. The arm is made up here.

A new goal is drawn for each episode, uniform over the area that the tip reaches. The reward is 0
while the tip is within 3 cm of it and -1 elsewhere: a sparse one, which says nothing about the way.
`reward_for` gives it for any goal, so that hindsight relabelling can learn from every episode.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ctrl_rl.spec import ActionDim, CommandDim, EnvSpec, ObsTerm
from robots.env import MODELS, TaskEnv
from robots.sim import Rows
from robots.sim.ode_backend import OdeSim

LINK = 0.3  # [m], each link
MASS = 1.0  # [kg], each link, spread evenly
FRICTION = 0.5  # [N·m·s/rad], viscous, each joint
MAX_TORQUE = 2.0  # [N·m], each motor
NEAREST = 0.1  # [m], goals keep away from the shoulder, where the arm would be folded flat
FARTHEST = 0.57  # [m], and from the stretched arm
TOLERANCE = 0.03  # [m], nearer than this is there
STEP_DT = 0.04  # [s]


@dataclass(frozen=True, kw_only=True)
class ReachConfig:
    """Start and goal are random, and nothing else."""

    max_episode_steps: int = 50
    """Time limit of an episode [steps of 0.04 s]."""

    def evaluation(self) -> "ReachConfig":
        """The variant `evaluate` plays: the same."""
        return self

    def nominal(self) -> "ReachConfig":
        """Without randomisation and noise: the same, start and goal are the task."""
        return self


def acceleration(qpos: Tensor, qvel: Tensor, ctrl: Tensor) -> Tensor:
    """(N, 4): of shoulder and elbow [rad/s^2]; the goal, which stands behind them, rests."""
    elbow, (v1, v2) = qpos[:, 1], qvel[:, :2].unbind(1)
    torque = ctrl.clamp(-MAX_TORQUE, MAX_TORQUE) - FRICTION * qvel[:, :2]
    rod = MASS * LINK**2 / 3  # inertia of a rod about its end
    coupling = MASS * LINK**2 / 2
    beta = coupling * torch.cos(elbow)
    m11, m12, m22 = 2 * rod + MASS * LINK**2 + 2 * beta, rod + beta, rod
    twist = coupling * torch.sin(elbow)
    t1 = torque[:, 0] + twist * v2 * (2 * v1 + v2)
    t2 = torque[:, 1] - twist * v1.square()
    determinant = m11 * m22 - m12.square()
    a1, a2 = (m22 * t1 - m12 * t2) / determinant, (m11 * t2 - m12 * t1) / determinant
    rest = torch.zeros_like(a1)
    return torch.stack([a1, a2, rest, rest], 1)


def tip_pos(qpos: Tensor) -> Tensor:
    """(N, 2) position of the tip from the shoulder [m]."""
    first, second = qpos[:, 0], qpos[:, 0] + qpos[:, 1]
    x, y = torch.cos(first) + torch.cos(second), torch.sin(first) + torch.sin(second)
    return LINK * torch.stack([x, y], 1)


class Reach(TaskEnv):
    """Bring the tip of a two-link arm to a goal; only being there is paid."""

    id = "Reach-v0"
    Config = ReachConfig
    backends = ("torch",)
    presets = {
        "sac": {
            "num_envs": 16,
            "total_steps": 60_000,
            "warmup_steps": 2_000,
            "updates_per_step": 0.25,
            "learning_rate": 1e-3,
            "gamma": 0.95,
            "hidden": (64, 64),
            "hindsight": 4,
        }
    }
    metric_units = {"distance": "m"}

    def make_sim(self, backend, device, threads):
        """Closed form; qpos is (shoulder, elbow [rad], goal x, goal y [m])."""
        return OdeSim(acceleration, self.num_envs, (4, 2), STEP_DT, device=device)

    def picture_file(self) -> Path:
        """Arm and goal."""
        return MODELS / "reach.xml"

    def make_spec(self) -> EnvSpec:
        """Angles, speeds, tip and goal; two torques."""
        joints, plane = ("shoulder", "elbow"), ("x", "y")
        goal = ObsTerm(
            name="goal",
            kind="command",
            size=2,
            unit="m",
            frame="w",
            labels=("goal_x", "goal_y"),
        )
        tip = ObsTerm(name="tip_pos", kind="signal", size=2, unit="m", frame="w", labels=plane)
        angles = tuple(f"{f}_{joint}" for joint in joints for f in ("cos", "sin"))
        return EnvSpec(
            task=self.id,
            num_envs=self.num_envs,
            obs={
                "actor": (
                    ObsTerm(name="joint_angle", kind="signal", size=4, labels=angles),
                    ObsTerm(
                        name="joint_speed",
                        kind="signal",
                        size=2,
                        unit="rad/s",
                        frame="joint",
                        labels=joints,
                        scale=(0.2,),
                    ),
                    tip,
                    goal,
                ),
                "achieved": (tip,),
                "goal": (goal,),
            },
            action=tuple(
                ActionDim(name=joint, low=-1.0, high=1.0, scale=MAX_TORQUE) for joint in joints
            ),
            physics_dt=STEP_DT,
            step_dt=STEP_DT,
            max_episode_steps=self.config.max_episode_steps,
            command=tuple(
                CommandDim(name=label, unit="m", low=-FARTHEST, high=FARTHEST)
                for label in goal.labels
            ),
            history=("v0: first version",),
        )

    def observe_terms(self, rows: Rows) -> dict[str, Tensor]:
        """Raw values."""
        angle = self.sim.qpos[rows, :2]
        return {
            "joint_angle": torch.stack([torch.cos(angle), torch.sin(angle)], 2).flatten(1),
            "joint_speed": self.sim.qvel[rows, :2],
            "tip_pos": tip_pos(self.sim.qpos[rows]),
            "goal": self.command[rows],
        }

    def apply_action(self, action: Tensor) -> None:
        """Torques [N·m]."""
        self.sim.ctrl[:] = MAX_TORQUE * action
        self.sim.qpos[:, 2:] = self.command  # an operator may have moved it

    def reward_for(self, achieved: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """0 within the tolerance and -1 elsewhere; being there ends nothing."""
        away = (achieved - goal).norm(dim=1) > TOLERANCE
        return -away.float(), torch.zeros_like(away)

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """The one above, of the numbers that the observation holds."""
        tip = tip_pos(self.sim.qpos).float()
        reward, _ = self.reward_for(tip, self.command.float())
        self._there = reward == 0
        return {"away": reward.to(self.sim.dtype)}

    def metrics(self) -> dict[str, Tensor]:
        """`success` is its last step's: that counts for all steps, so that the mean is a share."""
        last = self.step_count == self.spec.max_episode_steps
        distance = (tip_pos(self.sim.qpos) - self.command).norm(dim=1)
        return {
            "success": (self._there & last).to(self.sim.dtype) * self.spec.max_episode_steps,
            "there": self._there.to(self.sim.dtype),
            "distance": distance,
        }

    def prepare(self) -> None:
        """The goal is a command: an operator may give it."""
        self.command = self.remember("command", torch.zeros_like(self.sim.qpos[:, 2:]))

    def begin(self, rows: Rows) -> None:
        """Any angles, at rest; a goal anywhere in the ring that the tip reaches."""
        draw = self.uniform("reset", rows, 4)
        self.sim.qpos[rows, :2] = 2 * math.pi * (draw[:, :2] - 0.5)
        radius = (NEAREST**2 + (FARTHEST**2 - NEAREST**2) * draw[:, 2]).sqrt()
        angle = 2 * math.pi * draw[:, 3]
        goal = radius[:, None] * torch.stack([torch.cos(angle), torch.sin(angle)], 1)
        self.command[rows] = goal
        self.sim.qpos[rows, 2:] = goal
