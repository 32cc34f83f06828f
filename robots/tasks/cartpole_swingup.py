"""`CartPole-SwingUp-v0`: swing a hanging pole up with a cart on a short track, and hold it there.

Cart, pole, force and track are those of Barto, Sutton, Anderson, "Neuronlike adaptive elements
that can solve difficult learning control problems", IEEE SMC 13(5), 1983; the equation of motion
is the frictionless one of Florian, "Correct equations for the dynamics of the cart-pole system",
2007. Here the force is continuous, the pole starts hanging, and the classical Runge-Kutta method
integrates 0.02 s at a time: without force the energy drifts by less than 1e-5 of its range in
an episode.

Angle 0 is upright, positive towards +x. An episode lasts 10 s; it terminates only when the cart
leaves the track, after which there is no more reward to earn.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from robots.env import MODELS, TaskEnv
from robots.sim import Rows
from robots.sim.ode_backend import OdeSim

GRAVITY = 9.8  # [m/s^2], Barto et al. 1983, appendix
CART_MASS = 1.0  # [kg], the same
POLE_MASS = 0.1  # [kg], the same
HALF_LENGTH = 0.5  # [m], the same: a uniform pole of 1 m
MAX_FORCE = 10.0  # [N], the same
TRACK = 2.4  # [m], the same: the track ends at +-TRACK
STEP_DT = 0.02  # [s], the same
UPRIGHT = math.radians(15.0)  # [rad], within it the metrics count the pole as upright
OFF_TRACK = -20.0  # reward for leaving the track: as much as 20 steps upright earn


@dataclass(frozen=True, kw_only=True)
class CartPoleSwingUpConfig:
    """Only the start is random."""

    max_episode_steps: int = 500
    """Time limit of an episode [steps of 0.02 s]."""
    staggered_start: bool = True
    """First episodes end at different steps, so that a rollout sees all ages."""

    def evaluation(self) -> "CartPoleSwingUpConfig":
        """The variant `evaluate` plays: whole episodes only."""
        return dataclasses.replace(self, staggered_start=False)

    def nominal(self) -> "CartPoleSwingUpConfig":
        """Without noise: the same, the random start is the task."""
        return self.evaluation()


def acceleration(qpos: Tensor, qvel: Tensor, ctrl: Tensor) -> Tensor:
    """(N, 2) accelerations of cart [m/s^2] and pole [rad/s^2]; the force saturates.

    Florian 2007, equations 23 and 24 without friction.
    """
    sin, cos, speed = torch.sin(qpos[:, 1]), torch.cos(qpos[:, 1]), qvel[:, 1]
    force = ctrl[:, 0].clamp(-MAX_FORCE, MAX_FORCE)
    mass = CART_MASS + POLE_MASS
    push = (force + POLE_MASS * HALF_LENGTH * speed.square() * sin) / mass
    inertia = HALF_LENGTH * (4 / 3 - POLE_MASS * cos.square() / mass)
    pole = (GRAVITY * sin - cos * push) / inertia
    cart = push - POLE_MASS * HALF_LENGTH * pole * cos / mass
    return torch.stack([cart, pole], 1)


class CartPoleSwingUp(TaskEnv):
    """Swing a hanging pole up with a cart on a short track, and hold it."""

    id = "CartPole-SwingUp-v0"
    Config = CartPoleSwingUpConfig
    backends = ("torch",)
    presets = {
        "ppo": {
            "num_envs": 256,
            "total_steps": 1_500_000,
            "eval_episodes": 64,
            "num_steps": 32,
            "gamma": 0.98,
            "target_kl": None,  # an adapted rate grew until the policy of some seeds collapsed
            "activation": "tanh",
        }
    }

    def make_sim(self, backend, device, threads):
        """Closed form; qpos is (cart position [m], pole angle [rad])."""
        return OdeSim(acceleration, self.num_envs, (2, 1), STEP_DT, device=device)

    def picture_file(self) -> Path:
        """Cart and pole on their track."""
        return MODELS / "cartpole.xml"

    def make_spec(self) -> EnvSpec:
        """Position, cos, sin, both speeds; one force."""
        return EnvSpec(
            task=self.id,
            num_envs=self.num_envs,
            obs={
                "actor": (
                    ObsTerm(name="cart_pos", kind="signal", size=1, unit="m", frame="w"),
                    ObsTerm(name="pole_angle", kind="signal", size=2, labels=("cos", "sin")),
                    ObsTerm(name="cart_vel", kind="signal", size=1, unit="m/s", frame="w"),
                    ObsTerm(name="pole_vel", kind="signal", size=1, unit="rad/s", frame="joint"),
                )
            },
            action=(ActionDim(name="force", low=-1.0, high=1.0, scale=MAX_FORCE),),
            physics_dt=STEP_DT,
            step_dt=STEP_DT,
            max_episode_steps=self.config.max_episode_steps,
            history=("v0: first version",),
        )

    def observe_terms(self, rows: Rows) -> dict[str, Tensor]:
        """Raw values."""
        qpos, qvel = self.sim.qpos[rows], self.sim.qvel[rows]
        angle = qpos[:, 1:]
        return {
            "cart_pos": qpos[:, :1],
            "pole_angle": torch.cat([torch.cos(angle), torch.sin(angle)], 1),
            "cart_vel": qvel[:, :1],
            "pole_vel": qvel[:, 1:],
        }

    def apply_action(self, action: Tensor) -> None:
        """Force [N]."""
        self.sim.ctrl[:] = MAX_FORCE * action

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """At most 1: half for the angle; where upright, the rest for centre, speed and force.

        Every term but one carries the factor `up`, 0 hanging and 1 upright, so that nothing is
        earned by resting at the bottom. Leaving the track must cost: one race off it swings the
        pole up for a moment, which beats hanging, and from there PPO finds nothing better.
        """
        x, angle = self.sim.qpos.unbind(1)
        up = (1 + torch.cos(angle)) / 2
        force = action[:, 0].to(self.sim.dtype).clamp(-1, 1)
        return {
            "upright": 0.5 * up,
            "centred": 0.2 * up * torch.exp(-x.square()),
            "slow": 0.2 * up * torch.exp(-(self.sim.qvel[:, 1] / 5).square()),
            "effort": 0.1 * up * (1 - force.square()),
            "off_track": OFF_TRACK * self._off_track(),
        }

    def terminations(self) -> dict[str, Tensor]:
        """The cart left the track."""
        return {"off_track": self._off_track()}

    def _off_track(self) -> Tensor:
        return self.sim.qpos[:, 0].abs() > TRACK

    def metrics(self) -> dict[str, Tensor]:
        """Shares of an episode, as means over its steps.

        `upright_second_half` counts each upright step of the second half twice: its mean over an
        episode is 1 only if the episode ran its 10 s and the pole was upright in all of the
        last 5.
        """
        upright = (torch.cos(self.sim.qpos[:, 1]) > math.cos(UPRIGHT)).to(self.sim.dtype)
        late = 2 * self.step_count > self.spec.max_episode_steps
        return {"upright": upright, "upright_second_half": 2 * upright * late}

    def begin(self, rows: Rows) -> None:
        """Hanging within 0.2 rad, at most 0.5 m off the centre, speeds up to 0.1 m/s, rad/s."""
        draw = self.uniform("reset", rows, 4, -1.0, 1.0)
        self.sim.qpos[rows, 0] = 0.5 * draw[:, 0]
        self.sim.qpos[rows, 1] = math.pi + 0.2 * draw[:, 1]
        self.sim.qvel[rows] = 0.1 * draw[:, 2:]
