"""`Pendulum-v0`: swing a torque-limited pendulum up and hold it.

Dynamics, reward and start of gymnasium's Pendulum-v1: semi-implicit Euler at 0.05 s, 200 steps,
never a termination. Angle 0 is upright.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from robots.env import MODELS, TaskEnv
from robots.sim import Rows
from robots.sim.ode_backend import OdeSim

GRAVITY = 10.0  # [m/s^2], gymnasium's default
MASS, LENGTH = 1.0, 1.0  # [kg], [m]: a uniform rod
MAX_SPEED = 8.0  # [rad/s], the speed saturates here
MAX_TORQUE = 2.0  # [N·m]
STEP_DT = 0.05  # [s]


@dataclass(frozen=True, kw_only=True)
class PendulumConfig:
    """Only the start is random."""

    max_episode_steps: int = 200
    """Time limit of an episode [steps of 0.05 s]."""

    def evaluation(self) -> "PendulumConfig":
        """The variant `evaluate` plays."""
        return self

    def nominal(self) -> "PendulumConfig":
        """Without randomisation and noise: the same."""
        return self


def acceleration(qpos: Tensor, qvel: Tensor, ctrl: Tensor) -> Tensor:
    """Angular acceleration [rad/s^2] of a rod hinged at its end; torque and speed saturate."""
    torque = ctrl.clamp(-MAX_TORQUE, MAX_TORQUE)
    free = 1.5 * GRAVITY / LENGTH * torch.sin(qpos) + 3 / (MASS * LENGTH**2) * torque
    speed = (qvel + STEP_DT * free).clamp(-MAX_SPEED, MAX_SPEED)
    return (speed - qvel) / STEP_DT


OFF_POLICY = {"learning_rate": 1e-3, "hidden": (64, 64)}
"""Of SAC and TD3."""

DDPG = {
    "num_envs": 1,
    "total_steps": 20_000,
    "warmup_steps": 1_000,
    "update_every": 1,
    "batch_size": 256,
    "buffer_size": 20_000,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "polyak": 0.005,
    "hidden": (64, 64),
}
"""Of DDPG and ARO-DDPG."""


class Pendulum(TaskEnv):
    """Swing a torque-limited pendulum up and hold it."""

    id = "Pendulum-v0"
    Config = PendulumConfig
    backends = ("torch",)
    presets = {
        "ppo": {},
        "sac": {"num_envs": 1, "total_steps": 20_000, "warmup_steps": 1_000, **OFF_POLICY},
        "td3": {"num_envs": 1, "total_steps": 20_000, "warmup_steps": 1_000, **OFF_POLICY},
        "fast_sac": {
            "num_envs": 64,
            "total_steps": 100_000,
            "batch_size": 256,
            "value_bound": 500.0,
            "hidden": (64, 64),
            "critic_hidden": (64, 64),
        },
        "multi_critic_ppo": {
            "reward_groups": {"upright": ("angle", "speed"), "effort": ("torque",)},
            "group_weights": {"effort": 0.1},
        },
        "ddpg": DDPG,
        "aro_ddpg": DDPG,
    }

    def make_sim(self, backend, device, threads):
        """Closed form, gymnasium's integrator."""
        return OdeSim(
            acceleration, self.num_envs, (1, 1), STEP_DT, "semi_implicit_euler", device=device
        )

    def picture_file(self) -> Path:
        """A rod."""
        return MODELS / "pendulum.xml"

    def make_spec(self) -> EnvSpec:
        """cos, sin, speed; one torque."""
        angle = ObsTerm(name="angle", kind="signal", size=2, labels=("cos", "sin"))
        speed = ObsTerm(name="speed", kind="signal", size=1, unit="rad/s", frame="joint")
        return EnvSpec(
            task=self.id,
            num_envs=self.num_envs,
            obs={"actor": (angle, speed)},
            action=(ActionDim(name="torque", low=-MAX_TORQUE, high=MAX_TORQUE, unit="N·m"),),
            physics_dt=STEP_DT,
            step_dt=STEP_DT,
            max_episode_steps=self.config.max_episode_steps,
        )

    def observe_terms(self, rows: Rows) -> dict[str, Tensor]:
        """Raw values."""
        angle = self.sim.qpos[rows]
        return {
            "angle": torch.cat([torch.cos(angle), torch.sin(angle)], 1),
            "speed": self.sim.qvel[rows],
        }

    def apply_action(self, action: Tensor) -> None:
        """Torque [N·m]; gymnasium's reward is about the state before it acts."""
        self.before = self.sim.qpos[:, 0].clone(), self.sim.qvel[:, 0].clone()
        self.sim.ctrl[:] = action

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """Minus the squares of angle from upright, speed and torque."""
        angle, speed = self.before
        angle = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        torque = self.sim.ctrl[:, 0].clamp(-MAX_TORQUE, MAX_TORQUE)
        return {
            "angle": -angle.square(),
            "speed": -0.1 * speed.square(),
            "torque": -0.001 * torque.square(),
        }

    def begin(self, rows: Rows) -> None:
        """Any angle, speed up to 1 rad/s."""
        draw = self.uniform("reset", rows, 2, -1.0, 1.0)
        self.sim.qpos[rows] = math.pi * draw[:, :1]
        self.sim.qvel[rows] = draw[:, 1:]
