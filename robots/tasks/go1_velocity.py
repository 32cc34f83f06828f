"""`Go1-Velocity-Flat-v0`: a Unitree Go1 follows velocity commands on a flat floor.

The policy sees what the robot can measure: gyroscope, projected gravity, command, joint positions
and velocities, its previous action and the phase of a trot clock. It sets joint position targets
around the default pose at 50 Hz; position control runs in the actuators at the physics rate.

A command is a forward, a sideways and a turning velocity in the body frame. All zero means: stand.
The clock runs on for one turn, in which the robot brakes; then its (sin, cos) reads (0, 0) and all
feet belong on the floor.

Everything is a function of the state row and the task's own memory, so nothing lags behind.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import mujoco
import torch
from torch import Tensor

from ctrl_rl.spec import PRIVILEGED, ActionDim, CommandDim, EnvSpec, Mirror, ObsTerm
from robots import go1
from robots.env import TaskEnv
from robots.observation import nominal_terms
from robots.sim import Rows, make_mujoco_sim

FOOT_RADIUS = 0.023  # [m]
CONTACT_HEIGHT = 0.003  # [m], a foot lower than this counts as down
TRUNK_HALF = (0.16, 0.075, 0.05)  # [m], half sizes of the trunk's box
STEP_DT = 0.02  # [s], one policy call
NEVER = -(1 << 40)  # a step before every other

ACTOR_TERMS = (
    ObsTerm(
        name="base_ang_vel",
        kind="base_ang_vel_b",
        size=3,
        unit="rad/s",
        frame="b",
        scale=(0.25,),
        noise=0.2,
    ),
    ObsTerm(name="projected_gravity", kind="projected_gravity_b", size=3, frame="b", noise=0.05),
    ObsTerm(
        name="command",
        kind="command",
        size=3,
        frame="b",
        labels=("lin_vel_x", "lin_vel_y", "ang_vel_z"),
        scale=(2.0, 2.0, 1.0),
    ),
    ObsTerm(
        name="joint_pos",
        kind="joint_pos_rel",
        size=12,
        unit="rad",
        frame="joint",
        labels=go1.JOINTS,
        noise=0.01,
    ),
    ObsTerm(
        name="joint_vel",
        kind="joint_vel",
        size=12,
        unit="rad/s",
        frame="joint",
        labels=go1.JOINTS,
        scale=(0.05,),
        noise=1.0,
    ),
    ObsTerm(name="prev_action", kind="prev_action", size=12, labels=go1.JOINTS, scale=(0.5,)),
)
"""What the robot can measure; noise is the half-width on the raw value."""

PRIVILEGED_TERMS = (
    ObsTerm(kind=PRIVILEGED, name="base_lin_vel", size=3, unit="m/s", frame="b", scale=(2.0,)),
    ObsTerm(kind=PRIVILEGED, name="foot_contact", size=4, labels=go1.LEGS),
    ObsTerm(
        kind=PRIVILEGED,
        name="foot_height",
        size=4,
        unit="m",
        frame="w",
        labels=go1.LEGS,
        scale=(10.0,),
    ),
    ObsTerm(kind=PRIVILEGED, name="base_height", size=1, unit="m", frame="w", scale=(10.0,)),
    ObsTerm(kind=PRIVILEGED, name="friction", size=1, constant=True),
    ObsTerm(kind=PRIVILEGED, name="trunk_mass", size=1, unit="kg", constant=True),
    ObsTerm(
        kind=PRIVILEGED, name="trunk_com", size=3, unit="m", frame="b", scale=(20.0,), constant=True
    ),
    ObsTerm(
        kind=PRIVILEGED,
        name="motor_strength",
        size=12,
        labels=go1.JOINTS,
        scale=(5.0,),
        constant=True,
    ),
    ObsTerm(kind=PRIVILEGED, name="action_delay", size=1, unit="s", scale=(50.0,), constant=True),
)
"""What only a simulator knows, for the critic."""

POLAR, AXIAL = ("0", "-1", "2"), ("-0", "1", "-2")
"""A vector in the body frame, and an axis of rotation, when left and right change places."""

MIRROR = Mirror(
    terms={
        "base_ang_vel": AXIAL,
        "projected_gravity": POLAR,
        "command": ("lin_vel_x", "-lin_vel_y", "-ang_vel_z"),
        "joint_pos": go1.MIRRORED_JOINTS,
        "joint_vel": go1.MIRRORED_JOINTS,
        "prev_action": go1.MIRRORED_JOINTS,
        "phase": ("-sin", "-cos"),  # the other diagonal swings: half a turn of the clock
        "base_lin_vel": POLAR,
        "foot_contact": go1.MIRRORED_LEGS,
        "foot_height": go1.MIRRORED_LEGS,
        "base_height": ("0",),
        "friction": ("0",),
        "trunk_mass": ("0",),
        "trunk_com": POLAR,
        "motor_strength": tuple(name.removeprefix("-") for name in go1.MIRRORED_JOINTS),
        "action_delay": ("0",),
    },
    action=go1.MIRRORED_JOINTS,
)
"""Left and right change places."""


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Weight of each term per step; a weight of 0 switches a term off."""

    track_lin_vel: float = 0.03
    """exp(-|error|^2 / tracking_variance) of the horizontal velocity."""
    track_ang_vel: float = 0.015
    """The same of the turning velocity."""
    gait: float = 0.03
    """1 when every foot follows the clock's height, 0 for standing through it."""
    stand: float = 0.03
    """1 with all feet down and joints at rest while the command is zero."""
    lin_vel_z: float = -0.02
    """Squared vertical velocity of the base [(m/s)^2]."""
    ang_vel_xy: float = -0.001
    """Squared rolling and pitching velocity of the base [(rad/s)^2]."""
    tilt: float = -0.02
    """Squared horizontal part of projected gravity."""
    height: float = -0.4
    """Squared distance of the base from `base_height` [m^2]."""
    action_rate: float = -0.0002
    """Squared change of the action."""
    torque: float = -2e-6
    """Squared joint torques [(N·m)^2]."""
    hip: float = -0.002
    """Squared deviation of the hip joints from the default pose [rad^2]."""
    leg: float = -0.002
    """The same of thigh and calf joints [rad^2]."""
    termination: float = -1.0
    """Once, on a fall."""


@dataclass(frozen=True, kw_only=True)
class Go1VelocityConfig:
    """Task settings; every range is uniform."""

    episode_length_s: float = 20.0
    """Time after which an episode is cut off [s]."""
    command_lin_vel_x: tuple[float, float] = (-1.0, 1.0)
    """Forward velocity [m/s]."""
    command_lin_vel_y: tuple[float, float] = (-0.5, 0.5)
    """Sideways velocity, left positive [m/s]."""
    command_ang_vel_z: tuple[float, float] = (-1.0, 1.0)
    """Turning velocity, counter-clockwise positive [rad/s]."""
    command_interval_s: tuple[float, float] = (2.0, 4.0)
    """Time between new commands [s]."""
    command_zero_share: float = 0.15
    """Share of commands that say stand."""
    action_scale: float = 0.4
    """Joint target per action unit [rad]."""
    gait_rate_hz: float = 2.0
    """Trot clock [Hz]."""
    swing_height: float = 0.08
    """Foot clearance at mid-swing [m]."""
    base_height: float = 0.28
    """Height of the base above the floor that the reward wants [m]."""
    tracking_variance: float = 0.15
    """Width of the tracking rewards [(m/s)^2, (rad/s)^2]."""
    rewards: Rewards = Rewards()
    friction: tuple[float, float] = (0.5, 1.25)
    """Sliding friction of the feet, per world."""
    trunk_mass_offset: tuple[float, float] = (-1.0, 1.0)
    """Added to the trunk [kg], per world."""
    trunk_com_offset: float = 0.03
    """Half-width of the shift of the trunk's centre of mass per axis [m], per world."""
    motor_strength: tuple[float, float] = (0.9, 1.1)
    """Factor on gains and effort limit of each motor, per world."""
    action_delay_s: tuple[float, float] = (0.0, 0.02)
    """Delay of the joint targets [s], per world."""
    push_velocity: float = 0.5
    """Half-width of the horizontal velocity that a push adds per axis [m/s]."""
    push_interval_s: tuple[float, float] = (3.0, 6.0)
    """Time between pushes [s]."""
    noise: bool = True
    """Observation noise."""
    staggered_start: bool = True
    """The first episode of each environment starts at a random step, so that ends spread out."""

    def evaluation(self) -> "Go1VelocityConfig":
        """Randomised like training; a new command every 5 s, full episodes."""
        return dataclasses.replace(self, staggered_start=False, command_interval_s=(5.0, 5.0))

    def nominal(self) -> "Go1VelocityConfig":
        """The robot of the model file: no randomisation, noise, delay or pushes."""
        return dataclasses.replace(
            self.evaluation(),
            friction=(1.0, 1.0),
            trunk_mass_offset=(0.0, 0.0),
            trunk_com_offset=0.0,
            motor_strength=(1.0, 1.0),
            action_delay_s=(0.0, 0.0),
            push_velocity=0.0,
            noise=False,
        )


class Go1Velocity(TaskEnv):
    """A Unitree Go1 follows velocity commands on a flat floor."""

    id = "Go1-Velocity-Flat-v0"
    Config = Go1VelocityConfig
    presets = {
        "ppo": {
            "num_envs": 512,
            "total_steps": 2_200_000,
            "eval_every": 1_000_000,
            "num_steps": 16,
            "num_epochs": 5,
            "num_minibatches": 4,
            "learning_rate": 1e-3,
            "target_kl": 0.02,
            "gamma": 0.97,
            "entropy_coef": 0.005,
            "hidden": (128, 128),
            "initial_std": 0.6,
            "normalize_obs": False,
        },
        "fast_sac": {
            "num_envs": 512,
            "total_steps": 2_500_000,
            "eval_every": 1_000_000,
            "updates_per_step": 1 / 128,
            "buffer_size": 500_000,
            "batch_size": 1024,
            "return_steps": 1,
            "gamma": 0.97,
            "final_learning_rate": 1e-4,
            "polyak": 0.1,
            "value_bound": 3.0,
            "initial_temperature": 1e-3,
            "target_entropy": -18.0,
            "initial_std": 0.15,
            "action_bound": 1.5,
            "critic_hidden": (128, 128),
            "normalize_obs": False,
        },
    }

    metric_units = {
        "error_lin_vel_x": "m/s",
        "error_lin_vel_y": "m/s",
        "error_ang_vel_z": "rad/s",
    }
    trunk_geoms = ("trunk",)
    """Geoms that a fall brings to the floor."""
    foot_geoms = tuple(f"{leg}_foot" for leg in go1.LEGS)

    @classmethod
    def plain_models(cls) -> dict[str, mujoco.MjModel]:
        """The single robot that a policy is verified on: training settings, and finer physics."""
        return {
            "training": go1.make_model(),
            "fine": go1.make_model(0.001, "elliptic", iterations=100, all_contacts=True),
        }

    def make_sim(self, backend, device, threads):
        """Training settings of the model."""
        return make_mujoco_sim(go1.make_model(), self.num_envs, backend, device, threads)

    def picture_file(self) -> Path:
        """The robot's model."""
        return go1.MODEL_PATH

    def make_spec(self) -> EnvSpec:
        """Actor: measurable terms. Critic: the same without noise, and the privileged ones."""
        c = self.config
        self.robot = go1.make_robot(self.sim.model)
        phase = ObsTerm(
            name="phase",
            kind="phase",
            size=2,
            labels=("sin", "cos"),
            rate_hz=c.gait_rate_hz,
            run_on_s=1.0 / c.gait_rate_hz,
        )
        self.run_on_steps = round(phase.run_on_s / STEP_DT)
        actor = (*ACTOR_TERMS, phase)
        clean = nominal_terms(actor)
        command = {
            "lin_vel_x": ("m/s", c.command_lin_vel_x),
            "lin_vel_y": ("m/s", c.command_lin_vel_y),
            "ang_vel_z": ("rad/s", c.command_ang_vel_z),
        }
        return EnvSpec(
            task=self.id,
            num_envs=self.num_envs,
            obs={"actor": actor if c.noise else clean, "critic": clean + PRIVILEGED_TERMS},
            action=tuple(
                ActionDim(name=j.name, scale=c.action_scale, offset=j.default_pos)
                for j in self.robot.joints
            ),
            physics_dt=self.sim.physics_dt,
            step_dt=STEP_DT,
            max_episode_steps=round(c.episode_length_s / STEP_DT),
            command=tuple(
                CommandDim(name=name, unit=unit, low=low, high=high)
                for name, (unit, (low, high)) in command.items()
            ),
            robot=self.robot,
            mirror=MIRROR,
        )

    # Observation terms ------------------------------------------------------------------------

    def observe_terms(self, rows: Rows) -> dict[str, Tensor]:
        """Raw values in the order of the spec."""
        x, self._now = self._now or self._state(rows), None
        command, step_count = self.command[rows], self.step_count[rows]
        self.last_walk[rows] = torch.where(command.any(1), step_count, self.last_walk[rows])
        return {
            "base_ang_vel": x["ang_vel_b"],
            "projected_gravity": x["gravity_b"],
            "command": command,
            "joint_pos": x["joint_pos"],
            "joint_vel": x["joint_vel"],
            "prev_action": self.prev_action[rows],
            "phase": x["clock"] * self._walks(rows)[:, None],
            "base_lin_vel": x["lin_vel_b"],
            "foot_contact": (x["foot_height"] < CONTACT_HEIGHT).to(self.sim.dtype),
            "foot_height": x["foot_height"],
            "base_height": x["height"][:, None] - self.config.base_height,
            "friction": self.friction[rows],
            "trunk_mass": self.mass_offset[rows],
            "trunk_com": self.com_offset[rows],
            "motor_strength": self.strength_offset[rows],
            "action_delay": self.delay[rows],
        }

    def _state(self, rows: Rows) -> dict[str, Tensor]:
        """What terms, rewards and terminations read; vectors in the body frame.

        Written with few and wide operations: at some hundred worlds each costs the same.
        """
        q, v = self.sim.qpos[rows], self.sim.qvel[rows]
        # R^T u for the quaternion (w, r): u + 2 (w (u x r) + r x (r x u)).
        u = torch.stack([v[:, :3], self.gravity.expand(len(v), 3)], 1)
        w, r = q[:, None, 3:4], q[:, None, 4:7]
        cross = torch.linalg.cross(u, r)
        body = torch.add(u, torch.addcmul(torch.linalg.cross(cross, r), w, cross), alpha=2)
        lin_vel, gravity = body.unbind(1)
        knee, foot = go1.leg_heights(q[:, 7:], gravity, q[:, 2])
        return {
            "lin_vel_b": lin_vel,
            "ang_vel_b": v[:, 3:6],
            "gravity_b": gravity,
            "height": q[:, 2],
            "joint_pos": q[:, 7:] - self.default_joint_pos,
            "joint_vel": v[:, 6:],
            "knee_height": knee,
            "foot_height": foot - FOOT_RADIUS,
            "clock": self._clock(rows),
        }

    def _walks(self, rows: Rows) -> Tensor:
        """(n,), 1 while the clock runs: the command says walk, or did within its last turn."""
        recently = self.step_count[rows] - self.last_walk[rows] <= self.run_on_steps
        return recently.to(self.sim.dtype)

    def _clock(self, rows: Rows) -> Tensor:
        """(sin, cos) of the trot clock, as if it ran always (n, 2)."""
        # An int64 tensor times a float is float32, which loses 2e-5 within an episode.
        turns_per_step = self.spec.step_dt * self.config.gait_rate_hz
        start, steps = self.phase_start[rows].double(), self.step_count[rows, None].double()
        angle = torch.add(start, steps, alpha=turns_per_step) * (2 * math.pi)
        return torch.cat([torch.sin(angle), torch.cos(angle)], 1).to(self.sim.dtype)

    # Rewards and terminations -----------------------------------------------------------------

    def apply_action(self, action: Tensor) -> None:
        """Joint targets [rad]; the position actuators clamp to the joint range."""
        self.sim.ctrl[:] = self.default_joint_pos + self.config.action_scale * action

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """Weighted terms (N,)."""
        c = self.config
        x = self._now = self._state(slice(None))  # the observation reads it too
        walks = self._walks(slice(None))
        lin_vel, ang_vel, gravity = x["lin_vel_b"], x["ang_vel_b"], x["gravity_b"]
        self._error = torch.cat([lin_vel[:, :2], ang_vel[:, 2:]], 1) - self.command
        error = self._error.square()
        # FR and RL swing while sin > 0, FL and RR while sin < 0.
        swing = (x["clock"][:, :1] * self.swing_signs).clamp_(min=0).mul_(c.swing_height)
        gait_error = (x["foot_height"] - swing).abs_().mean(1) / (c.swing_height / math.pi)
        lifted = x["foot_height"].clamp(min=0).sum(1)
        rest = torch.exp(-x["joint_vel"].square().sum(1) / 10.0 - 20.0 * lifted)
        self._fallen = self._falls(x)
        fallen = torch.stack(tuple(self._fallen.values())).any(0)
        hip, thigh, calf = x["joint_pos"].square().unflatten(1, (4, 3)).sum(1).unbind(1)
        target = self.sim.ctrl - self.default_joint_pos
        torque = self.kp * (target - x["joint_pos"]) - self.kd * x["joint_vel"]
        torque = torch.clamp(torque, -self.effort_limit, self.effort_limit)
        terms = {
            "track_lin_vel": torch.exp((error[:, 0] + error[:, 1]) / -c.tracking_variance),
            "track_ang_vel": torch.exp(error[:, 2] / -c.tracking_variance),
            "gait": walks * (1 - gait_error),
            "stand": (1 - walks) * rest,
            "lin_vel_z": lin_vel[:, 2].square(),
            "ang_vel_xy": ang_vel[:, :2].square().sum(1),
            "tilt": gravity[:, :2].square().sum(1),
            "height": (x["height"] - c.base_height).square(),
            "action_rate": (action - self.prev_action).square_().sum(1),
            "torque": torque.square_().sum(1),
            "hip": hip,
            "leg": thigh + calf,
            "termination": fallen.to(self.sim.dtype),
        }
        weighted = torch.stack([terms[name] for name in self.weights]) * self.weight_column
        return dict(zip(self.weights, weighted.unbind(), strict=True))

    def terminations(self) -> dict[str, Tensor]:
        """Falls, as found with the rewards."""
        return self._fallen

    def _falls(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        gravity = x["gravity_b"]
        lowest_corner = x["height"] - (gravity.abs() * self.trunk_half).sum(1)
        return {
            "trunk_down": lowest_corner < CONTACT_HEIGHT,
            "tilt": gravity[:, 2] > -0.5,  # 60 degrees
            "knee_down": (x["knee_height"] < 0.02).any(1),
        }

    def metrics(self) -> dict[str, Tensor]:
        """Absolute tracking errors, transients included."""
        return dict(zip(self.metric_units, self._error.abs().unbind(1), strict=True))

    # Reset and randomisation --------------------------------------------------------------------

    def prepare(self) -> None:
        """Memory, and what is randomised once per world: baseline from the model times factor."""
        c, sim, n = self.config, self.sim, self.num_envs

        def new(size: int) -> Tensor:
            return torch.zeros(n, size, dtype=sim.dtype, device=self.device)

        self.command = self.remember("command", new(3))
        self.prev_action = self.remember("prev_action", new(12))
        self.phase_start = self.remember("phase_start", new(1))
        self.last_walk = self.remember("last_walk", torch.full_like(self.episode, NEVER))
        self.next_command = self.remember("next_command", torch.zeros_like(self.episode))
        self.next_push = self.remember("next_push", torch.zeros_like(self.episode))

        def constant(values) -> Tensor:
            return torch.tensor(list(values), dtype=sim.dtype, device=self.device)

        joints = self.robot.joints
        self.default_joint_pos = constant(j.default_pos for j in joints)
        self.kp = constant(j.kp for j in joints)
        self.kd = constant(j.kd for j in joints)
        self.effort_limit = constant(j.effort_limit for j in joints)
        model = sim.model
        self.trunk_half = constant(TRUNK_HALF)
        self.gravity = constant((0.0, 0.0, -1.0))
        self.swing_signs = constant((1.0, -1.0, -1.0, 1.0))
        self.weights = dataclasses.asdict(c.rewards)
        self.weight_column = constant(self.weights.values())[:, None]
        ranges = (c.command_lin_vel_x, c.command_lin_vel_y, c.command_ang_vel_z)
        self.command_low = constant(low for low, _ in ranges)
        self.command_span = constant(high - low for low, high in ranges)
        self.start_pos = constant((0.0, 0.0, 0.29, 1.0, 0.0, 0.0, 0.0))
        self._now: dict[str, Tensor] | None = None

        feet = [model.geom(f"{leg}_foot").id for leg in go1.LEGS]
        trunk = model.body("trunk").id
        self.friction = self.world_uniform("friction", 1, *c.friction)
        self.mass_offset = self.world_uniform("trunk_mass", 1, *c.trunk_mass_offset)
        com = c.trunk_com_offset
        self.com_offset = self.world_uniform("trunk_com", 3, -com, com)
        strength = self.world_uniform("motor_strength", 12, *c.motor_strength)
        self.strength_offset = strength - 1
        self.delay = self.world_uniform("action_delay", 1, *c.action_delay_s)
        for name in ("friction", "mass_offset", "com_offset", "strength_offset", "delay"):
            self.remember(name, getattr(self, name))
        sim.expand("geom_friction")[:, feet, 0] = self.friction
        mass = sim.model_field("body_mass")[trunk]
        sim.expand("body_mass")[:, trunk] = mass + self.mass_offset[:, 0]
        sim.expand("body_ipos")[:, trunk] = sim.model_field("body_ipos")[trunk] + self.com_offset
        for name, column in (("gainprm", 0), ("biasprm", 1), ("biasprm", 2)):
            baseline = sim.model_field(f"actuator_{name}")[:, column]
            sim.expand(f"actuator_{name}")[:, :, column] = baseline * strength
        sim.expand("actuator_forcerange")[:] = (
            sim.model_field("actuator_forcerange") * strength[:, :, None]
        )
        sim.expand("actuator_delay")[:] = self.delay
        sim.commit()

    def begin(self, rows: Rows) -> None:
        """Near the default pose, with some velocity; a new command and clock."""
        sim = self.sim
        draw = self.uniform("reset", rows, 24)  # one draw: its cost does not depend on the size
        around = 2 * draw[:, :17] - 1
        sim.qpos[rows, :7] = self.start_pos
        sim.qpos[rows, 7:] = self.default_joint_pos + 0.1 * around[:, :12]
        sim.qvel[rows, 0:2] = 0.3 * around[:, 12:14]
        sim.qvel[rows, 3:6] = 0.3 * around[:, 14:17]
        sim.ctrl[rows] = self.default_joint_pos
        sim.fill_delay(rows)
        self.prev_action[rows] = 0
        self.last_walk[rows] = NEVER
        self.phase_start[rows] = draw[:, 17:18]
        self._new_command(rows, draw[:, 18:23])
        self.next_push[rows] = self._after(rows, draw[:, 23], self.config.push_interval_s)

    def advance(self, action: Tensor) -> None:
        """New commands and pushes where their time has come."""
        self.prev_action[:] = action
        due = (self.step_count >= self.next_command).nonzero().flatten()
        if len(due):
            self._new_command(due, self.uniform("command", due, 5))
        if self.config.push_velocity:
            due = (self.step_count >= self.next_push).nonzero().flatten()
            if len(due):
                draw = self.uniform("push", due, 3)
                self.sim.qvel[due, :2] += self.config.push_velocity * (2 * draw[:, :2] - 1)
                self._now = None
                self.next_push[due] = self._after(due, draw[:, 2], self.config.push_interval_s)

    def _new_command(self, rows: Rows, draw: Tensor) -> None:
        """From uniforms (n, 5): three velocities, whether to stand, when the next one comes."""
        c = self.config
        walks = (draw[:, 3:4] >= c.command_zero_share).to(self.sim.dtype)
        self.command[rows] = (self.command_low + self.command_span * draw[:, :3]) * walks
        self.next_command[rows] = self._after(rows, draw[:, 4], c.command_interval_s)

    def _after(self, rows: Rows, draw: Tensor, interval_s: tuple[float, float]) -> Tensor:
        """Step number (n,) that lies a uniform time ahead."""
        low, high = (time / self.spec.step_dt for time in interval_s)
        return self.step_count[rows] + (low + (high - low) * draw).round().long()
