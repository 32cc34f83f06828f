"""`Hopper-v5`, `HalfCheetah-v5`, `Walker2d-v5`, `Ant-v5`, `Humanoid-v5`: gymnasium's tasks.

The model files are those that gymnasium installs; observation, reward, termination and reset noise
are its v5 defaults. From the same states and actions the state rows are equal to the bit and the
observation is gymnasium's cast to float32; the reward differs by rounding alone (below 1e-6),
since gymnasium squares the action in float32.

As there, derived quantities (the torso position of the ant, the centre of mass of the humanoid,
`cinert`, `cvel`, `cfrc_ext`) are those of `mj_step`, one physics step behind the state. Actions go
to the motors unclipped, which clamp them; the control cost sees them as they came.

Reading order: the configurations -> `Body`, what the five share -> one class per body.
"""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from robots.env import TaskEnv
from robots.sim import Rows, make_mujoco_sim

PPO = {
    "num_envs": 8,
    "num_steps": 512,
    "num_epochs": 10,
    "num_minibatches": 64,
    "learning_rate": 3e-4,
    "target_kl": None,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
    "activation": "tanh",
}
"""Defaults of stable-baselines3's PPO, whose 2048 steps of one environment are 512 of each of 8
here, in minibatches of 64; observations are normalised as in its zoo (ppo.yml, mujoco-defaults)."""

SAC = {"num_envs": 1, "warmup_steps": 10_000}
"""Defaults of the paper and of stable-baselines3's zoo (sac.yml): 256-256, batch 256, 3e-4."""

TD3 = {"num_envs": 1, "warmup_steps": 10_000}
"""Those of the authors' code after the paper: 256-256, batch 256, 3e-4, as the defaults here."""

FAST_SAC = {
    "num_envs": 64,
    "total_steps": 300_000,
    "updates_per_step": 1 / 8,
    "batch_size": 512,
    "value_bound": 500.0,
    "hidden": (64, 64),
    "critic_hidden": (128, 128),
}
"""Small networks, which two cores can pay; the value bound suits HalfCheetah alone."""

DDPG = {
    "num_envs": 1,
    "batch_size": 256,
    "buffer_size": 100_000,
    "actor_learning_rate": 3e-4,
    "critic_learning_rate": 3e-4,
    "polyak": 0.005,
    "hidden": (128, 128),
}
"""Of DDPG and ARO-DDPG alike: the latter's defaults, from its authors' code for cheetah run."""


@dataclass(frozen=True, kw_only=True)
class BodyConfig:
    """What the five have in common; weights are per step."""

    forward_weight: float = 1.0
    """Reward per forward velocity [1/(m/s)]."""
    control_weight: float
    """Cost per squared action."""
    reset_noise: float
    """Half-width, or standard deviation, of the noise on the initial state [m, rad, ...]."""
    max_episode_steps: int = 1000
    """Time limit of an episode [steps]."""

    def evaluation(self):
        """The variant that `evaluate` plays."""
        return self

    def nominal(self):
        """Without randomisation and noise: the same, the start is part of the task."""
        return self


@dataclass(frozen=True, kw_only=True)
class HealthyConfig(BodyConfig):
    """For a body that may fall."""

    healthy_reward: float
    """For each step in the healthy range [reward]."""
    healthy_z: tuple[float, float]
    """Height of the torso, outside of which the episode terminates [m]."""


@dataclass(frozen=True, kw_only=True)
class HopperConfig(HealthyConfig):
    """gymnasium's defaults."""

    control_weight: float = 1e-3
    healthy_reward: float = 1.0
    healthy_z: tuple[float, float] = (0.7, math.inf)
    healthy_angle: tuple[float, float] = (-0.2, 0.2)
    """Pitch of the torso [rad]."""
    healthy_state: float = 100.0
    """Largest magnitude of every other element of the state."""
    reset_noise: float = 5e-3


@dataclass(frozen=True, kw_only=True)
class HalfCheetahConfig(BodyConfig):
    """gymnasium's defaults."""

    control_weight: float = 0.1
    reset_noise: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Walker2dConfig(HealthyConfig):
    """gymnasium's defaults."""

    control_weight: float = 1e-3
    healthy_reward: float = 1.0
    healthy_z: tuple[float, float] = (0.8, 2.0)
    healthy_angle: tuple[float, float] = (-1.0, 1.0)
    """Pitch of the torso [rad]."""
    reset_noise: float = 5e-3


@dataclass(frozen=True, kw_only=True)
class AntConfig(HealthyConfig):
    """gymnasium's defaults."""

    control_weight: float = 0.5
    contact_weight: float = 5e-4
    """Cost per squared contact force, each clipped to -1..1 N [1/N^2]."""
    healthy_reward: float = 1.0
    healthy_z: tuple[float, float] = (0.2, 1.0)
    reset_noise: float = 0.1


@dataclass(frozen=True, kw_only=True)
class HumanoidConfig(HealthyConfig):
    """gymnasium's defaults."""

    forward_weight: float = 1.25
    control_weight: float = 0.1
    contact_weight: float = 5e-7
    """Cost per squared contact force [1/N^2]."""
    contact_cost_limit: float = 10.0
    """Largest cost of the contact forces per step [reward]."""
    healthy_reward: float = 5.0
    healthy_z: tuple[float, float] = (1.0, 2.0)
    reset_noise: float = 0.01


class Body(TaskEnv):
    """Forward velocity less control cost; subclasses add what their body has more."""

    model_file: str
    """In gymnasium's folder of MuJoCo models."""
    decimation: int
    velocity_clip: tuple[float, float] | None = None
    """Bounds of the velocities in the observation [m/s, rad/s]."""
    hidden_positions: int = 1
    """Leading elements of qpos that the observation leaves out: x, or x and y."""
    contact_forces: bool = False
    normal_velocities: bool = False
    """Initial velocities are normal; else uniform."""
    presets = {"ppo": PPO, "sac": SAC, "td3": TD3, "ddpg": DDPG, "aro_ddpg": DDPG}

    def make_sim(self, backend, device, threads):
        """gymnasium's model file, unchanged."""
        self.model = load_gymnasium_model(self.model_file)
        return make_mujoco_sim(
            self.model,
            self.num_envs,
            backend,
            device,
            threads,
            contact_forces=self.contact_forces,
        )

    def picture_file(self) -> Path:
        """gymnasium's model file has its own sky, light and floor."""
        return gymnasium_model_path(self.model_file)

    def make_spec(self) -> EnvSpec:
        """State terms, then `more_terms`; one action per motor, named after its joint."""
        m = self.model
        clip = self.velocity_clip
        state = (
            ObsTerm(name="qpos", kind="signal", size=m.nq - self.hidden_positions, unit="m, rad"),
            ObsTerm(name="qvel", kind="signal", size=m.nv, unit="m/s, rad/s", clip=clip),
        )
        action = tuple(
            ActionDim(name=m.joint(joint).name, low=float(low), high=float(high))
            for joint, (low, high) in zip(m.actuator_trnid[:, 0], m.actuator_ctrlrange, strict=True)
        )
        return EnvSpec(
            task=self.id,
            num_envs=self.num_envs,
            obs={"actor": state + self.more_terms()},
            action=action,
            physics_dt=m.opt.timestep,
            step_dt=m.opt.timestep * self.decimation,
            max_episode_steps=self.config.max_episode_steps,
        )

    def more_terms(self) -> tuple[ObsTerm, ...]:
        """Observation terms beyond the state."""
        return ()

    def observe_terms(self, rows: Rows) -> dict[str, Tensor]:
        """Raw values."""
        return {
            "qpos": self.sim.qpos[rows, self.hidden_positions :],
            "qvel": self.sim.qvel[rows],
        }

    def forward_position(self) -> Tensor:
        """(N,) what the forward velocity is the rate of [m]."""
        return self.sim.qpos[:, 0]

    def apply_action(self, action: Tensor) -> None:
        """Motor inputs; where the body was is what the velocity is measured from."""
        self._before = self.forward_position().clone()
        self.sim.ctrl.copy_(action)

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """Progress and control cost."""
        self._velocity = (self.forward_position() - self._before) / self.spec.step_dt
        return {
            "forward": self.config.forward_weight * self._velocity,
            "control": -self.config.control_weight * self.sim.ctrl.square().sum(1),
        }

    def metrics(self) -> dict[str, Tensor]:
        """Forward velocity [m/s]."""
        return {"forward_velocity": self._velocity}

    def begin(self, rows: Rows) -> None:
        """The model's initial pose with noise on every element."""
        noise, sim = self.config.reset_noise, self.sim
        nq, nv = sim.qpos.shape[1], sim.qvel.shape[1]
        sim.qpos[rows] += self.uniform("qpos", rows, nq, -noise, noise)
        if self.normal_velocities:
            sim.qvel[rows] = noise * self.normal("qvel", rows, nv)
        else:
            sim.qvel[rows] = self.uniform("qvel", rows, nv, -noise, noise)


class FallingBody(Body):
    """Rewarded for each healthy step; the first other one terminates the episode."""

    def is_healthy(self) -> Tensor:
        """(N,) bool."""
        raise NotImplementedError

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """Progress, control cost, and a reward for being healthy."""
        self._healthy = self.is_healthy()
        healthy = self.config.healthy_reward * self._healthy.to(self.sim.dtype)
        return {**super().reward_terms(action), "healthy": healthy}

    def terminations(self) -> dict[str, Tensor]:
        """The first step outside the healthy range."""
        return {"unhealthy": ~self._healthy}


class HalfCheetah(Body):
    """Six motors, planar; never terminates."""

    id = "HalfCheetah-v5"
    Config = HalfCheetahConfig
    presets = {**Body.presets, "fast_sac": FAST_SAC}
    model_file, decimation = "half_cheetah.xml", 5
    normal_velocities = True


class Hopper(FallingBody):
    """Three motors, planar; terminates when it leans, sinks, or moves beyond all measure."""

    id = "Hopper-v5"
    Config = HopperConfig
    model_file, decimation = "hopper.xml", 4
    velocity_clip = (-10.0, 10.0)

    def is_healthy(self) -> Tensor:
        """Height, pitch, and every element of the state but x and height within limits."""
        c, qpos, qvel = self.config, self.sim.qpos, self.sim.qvel
        limited = (torch.cat([qpos[:, 2:], qvel], 1).abs() < c.healthy_state).all(1)
        return _inside(qpos[:, 1], c.healthy_z) & _inside(qpos[:, 2], c.healthy_angle) & limited


class Walker2d(FallingBody):
    """Six motors, planar; terminates when it leans or sinks."""

    id = "Walker2d-v5"
    Config = Walker2dConfig
    model_file, decimation = "walker2d_v5.xml", 4
    velocity_clip = (-10.0, 10.0)

    def is_healthy(self) -> Tensor:
        """Height and pitch within limits."""
        c, qpos = self.config, self.sim.qpos
        return _inside(qpos[:, 1], c.healthy_z) & _inside(qpos[:, 2], c.healthy_angle)


class Ant(FallingBody):
    """Eight motors, four legs; terminates when the torso sinks, jumps or is not finite."""

    id = "Ant-v5"
    Config = AntConfig
    model_file, decimation = "ant.xml", 5
    hidden_positions = 2
    contact_forces = True
    normal_velocities = True

    def prepare(self) -> None:
        """Torso position and contact forces."""
        self._torso = self.sim.field("xpos")[:, 1, 0]
        self._forces = self.sim.field("cfrc_ext")

    def more_terms(self) -> tuple[ObsTerm, ...]:
        """Clipped contact force and torque of every body; some never touch anything."""
        size = 6 * (self.model.nbody - 1)
        forces = ObsTerm(
            name="contact_forces",
            kind="signal",
            size=size,
            unit="N·m, N",
            clip=(-1.0, 1.0),
            constant=True,
        )
        return (forces,)

    def observe_terms(self, rows: Rows) -> dict[str, Tensor]:
        """Raw values."""
        return {**super().observe_terms(rows), "contact_forces": self._forces[rows, 1:].flatten(1)}

    def refresh(self, rows: Rows) -> None:
        """Of the fields read here a reset changes one, which needs no pass through kinematics."""
        self._torso[rows] = self.sim.qpos[rows, 0]

    def forward_position(self) -> Tensor:
        """x of the torso [m], as kinematics computed it in the last physics step."""
        return self._torso

    def is_healthy(self) -> Tensor:
        """Height within closed limits; a state that is not finite fails the comparison too."""
        z, (low, high) = self.sim.qpos[:, 2], self.config.healthy_z
        return (z >= low) & (z <= high)

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """Those of every body, less the cost of contacts."""
        forces = self._forces.clamp(-1.0, 1.0)
        cost = self.config.contact_weight * forces.square().sum((1, 2))
        return {**super().reward_terms(action), "contact": -cost}


class Humanoid(FallingBody):
    """Seventeen motors; terminates when the torso sinks or jumps."""

    id = "Humanoid-v5"
    Config = HumanoidConfig
    model_file, decimation = "humanoid.xml", 5
    hidden_positions = 2
    contact_forces = True

    def prepare(self) -> None:
        """Derived quantities, and each body's share of the mass."""
        sim = self.sim
        self._centres = sim.field("xipos")[:, :, 0]
        self._inertia, self._spatial_velocity = sim.field("cinert"), sim.field("cvel")
        self._motor_force, self._forces = sim.field("qfrc_actuator"), sim.field("cfrc_ext")
        mass = sim.model_field("body_mass").to(self.device, sim.dtype)
        self._mass_share = mass / mass.sum()

    def more_terms(self) -> tuple[ObsTerm, ...]:
        """What gymnasium adds to the state, world body and root joint left out."""
        bodies, signal = self.model.nbody - 1, {"kind": "signal", "constant": True}
        return (
            ObsTerm(name="inertia", size=10 * bodies, unit="kg·m^2, kg·m, kg", **signal),
            ObsTerm(name="spatial_velocity", size=6 * bodies, unit="rad/s, m/s", **signal),
            ObsTerm(name="motor_force", size=self.model.nv - 6, unit="N·m", **signal),
            ObsTerm(name="contact_forces", size=6 * bodies, unit="N·m, N", **signal),
        )

    def observe_terms(self, rows: Rows) -> dict[str, Tensor]:
        """Raw values."""
        return {
            **super().observe_terms(rows),
            "inertia": self._inertia[rows, 1:].flatten(1),
            "spatial_velocity": self._spatial_velocity[rows, 1:].flatten(1),
            "motor_force": self._motor_force[rows, 6:],
            "contact_forces": self._forces[rows, 1:].flatten(1),
        }

    def forward_position(self) -> Tensor:
        """x of the centre of mass [m], as kinematics computed it in the last physics step."""
        return (self._centres * self._mass_share).sum(
            1
        )  # a product @ depends on N in its last bits

    def is_healthy(self) -> Tensor:
        """Height within limits."""
        return _inside(self.sim.qpos[:, 2], self.config.healthy_z)

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """Those of every body, less the bounded cost of contacts."""
        c = self.config
        cost = c.contact_weight * self._forces.square().sum((1, 2))
        return {
            **super().reward_terms(action),
            "contact": -cost.clamp(max=c.contact_cost_limit),
        }


def gymnasium_model_path(file: str) -> Path:
    """A model file of the installed gymnasium. Raises ValueError if there is none."""
    package = importlib.util.find_spec("gymnasium")
    if package is None or not package.submodule_search_locations:
        raise ValueError("this task needs gymnasium's model files: pip install gymnasium")
    return Path(package.submodule_search_locations[0]) / "envs" / "mujoco" / "assets" / file


def load_gymnasium_model(file: str):
    """Compile a model file of the installed gymnasium. Raises ValueError if there is none."""
    import mujoco

    from robots.sim import mujoco_warnings

    mujoco_warnings.install()
    return mujoco.MjModel.from_xml_path(str(gymnasium_model_path(file)))


def _inside(x: Tensor, limits: tuple[float, float]) -> Tensor:
    """Elementwise `low < x < high`."""
    return (limits[0] < x) & (x < limits[1])
