"""Environments with known answers, small enough to work out by hand.

    ConstantReward   V = 1 / (1 - gamma) for every state, although episodes are cut after 8 steps
    AgeReward        V(age) = age / (1 - gamma) + gamma / (1 - gamma)^2, cut after 8 steps
    LastStepReward   1 on the eighth step, which terminates: V(age) = gamma^(7 - age)
    FollowSignal     one step; the best action is half the observation
    PointMass        discrete-time LQR: `LQR_STATE_COST`, `LQR_ACTION_COST`, `LQR_DYNAMICS`

With the exact value function every advantage of the first three must be 0. The constant reward
alone lets pass a learner that bootstraps a cut episode from the wrong state; the age does not.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from robots.env import TaskEnv
from robots.sim import Rows
from robots.sim.ode_backend import OdeSim


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Length of an episode; nothing is random unless a probe says so."""

    max_episode_steps: int = 8
    """[steps] of 1 s"""

    def evaluation(self) -> "ProbeConfig":
        """The same."""
        return self

    def nominal(self) -> "ProbeConfig":
        """The same."""
        return self


class Probe(TaskEnv):
    """The observation is the age of the episode [steps]; the action does nothing."""

    id = "Probe-v0"
    Config = ProbeConfig
    backends = ("torch",)
    step_dt = 1.0  # [s]
    action = (ActionDim(name="action", low=-1.0, high=1.0),)
    terms = (ObsTerm(name="age", kind="signal", size=1, unit="steps"),)

    def make_sim(self, backend, device, threads):
        return OdeSim(
            lambda qpos, qvel, ctrl: ctrl, self.num_envs, (1, 1), self.step_dt, device=device
        )

    def make_spec(self) -> EnvSpec:
        return EnvSpec(
            task=self.id,
            num_envs=self.num_envs,
            obs={"actor": self.terms},
            action=self.action,
            physics_dt=self.step_dt,
            step_dt=self.step_dt,
            max_episode_steps=self.config.max_episode_steps,
        )

    def observe_terms(self, rows: Rows) -> dict[str, Tensor]:
        return {"age": self.step_count[rows, None].to(self.sim.dtype)}

    def apply_action(self, action: Tensor) -> None:
        pass


class ConstantReward(Probe):
    id = "Probe-Constant-v0"

    @staticmethod
    def value(age: Tensor, gamma: float) -> Tensor:
        return torch.full_like(age, 1 / (1 - gamma))

    def reward_terms(self, action):
        return {"one": torch.ones(self.num_envs, dtype=self.sim.dtype)}


class AgeReward(Probe):
    """The reward of a step is the age at which the action was taken: 0, 1, ..., 7."""

    id = "Probe-Age-v0"

    @staticmethod
    def value(age: Tensor, gamma: float) -> Tensor:
        return age / (1 - gamma) + gamma / (1 - gamma) ** 2

    def reward_terms(self, action):
        return {"age": (self.step_count - 1).to(self.sim.dtype)}


class LastStepReward(Probe):
    id = "Probe-LastStep-v0"

    @staticmethod
    def value(age: Tensor, gamma: float) -> Tensor:
        return gamma ** (7 - age)

    def reward_terms(self, action):
        return {"last": (self.step_count == 8).to(self.sim.dtype)}

    def terminations(self):
        return {"end": self.step_count == 8}


class FollowSignal(Probe):
    """One step: observation s uniform in [-1, 1], reward -(action - s / 2)^2."""

    id = "Probe-FollowSignal-v0"
    terms = (ObsTerm(name="signal", kind="signal", size=1),)

    def observe_terms(self, rows):
        return {"signal": self.sim.qpos[rows]}

    def begin(self, rows):
        self.sim.qpos[rows] = self.uniform("signal", rows, 1, -1.0, 1.0)

    def reward_terms(self, action):
        return {"miss": -(action[:, 0] - self.sim.qpos[:, 0] / 2).square()}

    def terminations(self):
        return {"end": self.step_count > 0}


LQR_DT = 0.1  # [s]
LQR_DYNAMICS = np.array([[1.0, LQR_DT], [0.0, 1.0]]), np.array([[LQR_DT**2 / 2], [LQR_DT]])
LQR_STATE_COST = np.diag([1.0, 0.1])
LQR_ACTION_COST = np.array([[0.1]])


class PointMass(Probe):
    """Unit mass on a line; cost x'Qx + u'Ru of the state before the step."""

    id = "Probe-PointMass-v0"
    step_dt = LQR_DT
    action = (ActionDim(name="force", unit="N"),)  # unbounded
    terms = (
        ObsTerm(name="pos", kind="signal", size=1, unit="m"),
        ObsTerm(name="vel", kind="signal", size=1, unit="m/s"),
    )

    def observe_terms(self, rows):
        return {"pos": self.sim.qpos[rows], "vel": self.sim.qvel[rows]}

    def begin(self, rows):
        start = self.uniform("start", rows, 2, -1.0, 1.0)
        self.sim.qpos[rows], self.sim.qvel[rows] = start[:, :1], start[:, 1:]

    def apply_action(self, action):
        self.before = self.sim.qpos[:, 0].clone(), self.sim.qvel[:, 0].clone()
        self.sim.ctrl[:] = action

    def reward_terms(self, action):
        pos, vel = self.before
        return {
            "state": -(1.0 * pos.square() + 0.1 * vel.square()),
            "action": -0.1 * self.sim.ctrl[:, 0].square(),
        }
