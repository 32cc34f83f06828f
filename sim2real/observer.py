"""Raw sensor readings and a command in, the policy's observation out.

What a term's kind means on a robot stands here, and nowhere else on the robot's side; training
builds the same observation in `robots.observation`. Needs numpy and `ctrl_rl.spec`.

Reading order: `Reading` -> `Observer` -> the sensors' geometry.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from ctrl_rl.spec import EnvSpec, ObsTerm
from sim2real.card import CardError, match_joints, robot_of


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the sensors say at one moment; arrays (N, ...), or without N for one robot."""

    time: float
    """When it was measured, on the clock of `time.monotonic` [s]."""
    joint_pos: np.ndarray
    """(N, J) [rad], in the robot's joint order."""
    joint_vel: np.ndarray
    """(N, J) [rad/s]"""
    gyro: np.ndarray | None = None
    """Angular velocity (N, 3) in the IMU's frame [rad/s]."""
    quat: np.ndarray | None = None
    """Orientation (N, 4) of the IMU in the world, wxyz, unit length."""
    gravity: np.ndarray | None = None
    """Direction of gravity (N, 3) in the IMU's frame, for robots without an orientation filter."""
    signals: dict[str, np.ndarray] = field(default_factory=dict)
    """Any other measured value (N, size), by the name of its "signal" term."""


NEVER = -(1 << 40)
"""A step before every other."""


class Observer:
    """Builds `obs["actor"]` from readings, as the card's terms say.

    Each term's raw value passes clip -> scale -> float32 -> history, as in training (which adds
    noise before and delay after: a robot has its own).

    Args:
        spec: from the card.
        joint_names: the robot's joint order; empty for a task without a robot.
        num_robots: N.

    Raises:
        CardError: joints or labels that do not match.
    """

    def __init__(
        self, spec: EnvSpec, joint_names: tuple[str, ...] = (), num_robots: int = 1
    ) -> None:
        self.spec, self.num_robots = spec, num_robots
        self.terms = spec.obs["actor"]
        self._default_pos = default_pos(spec, joint_names)
        self._index = [_index(term, spec, joint_names) for term in self.terms]
        self._imu_to_base = imu_to_base(spec)

        sizes = [t.size for t in self.terms]
        clips = [t.clip or (-math.inf, math.inf) for t in self.terms]
        self._ends = np.cumsum(sizes)
        self._low = np.repeat([c[0] for c in clips], sizes)
        self._high = np.repeat([c[1] for c in clips], sizes)
        self._scale = np.concatenate([np.broadcast_to(t.scale, t.size) for t in self.terms])
        self._stacked = any(t.history > 1 for t in self.terms)
        depth = max(t.history for t in self.terms)
        self._frames = np.zeros((num_robots, depth, sum(sizes)), np.float32)
        self._repeats = np.repeat([t.history_fill == "repeat" for t in self.terms], sizes)
        self._low_command = np.array([c.low for c in spec.command])
        self._high_command = np.array([c.high for c in spec.command])

        self.steps = np.zeros(num_robots, np.int64)
        """Observations built since the reset (N,)."""
        self.clock_start = np.zeros(num_robots)
        """Where the clock of "phase" terms stands at the reset (N,) [turns]."""
        self._last_walk = np.full(num_robots, NEVER)
        """Step of the latest observation whose command was not zero (N,)."""

    def reset(self, rows=slice(None)) -> None:
        """Begin anew for some robots: clock and history."""
        self.steps[rows] = 0
        self.clock_start[rows] = 0.0
        self._last_walk[rows] = NEVER

    def clamp(self, command) -> np.ndarray:
        """The command (N, C) inside the ranges that training saw.

        What is no number stays so, and with it the target: `Guard` stops the robot.

        Raises:
            ValueError: not (C,), (1, C) or (N, C).
        """
        command = np.atleast_2d(np.asarray(command, np.float64))
        rows, width = {1, self.num_robots}, len(self._low_command)
        if command.ndim != 2 or command.shape[1] != width or len(command) not in rows:
            names = ", ".join(c.name for c in self.spec.command) or "nothing"
            robots = "robot takes" if self.num_robots == 1 else "robots take"
            raise ValueError(
                f"a command of shape {command.shape} where {self.num_robots} {robots} {names}"
            )
        return np.clip(command, self._low_command, self._high_command)

    def build(self, reading: Reading, command: np.ndarray, prev_action: np.ndarray) -> np.ndarray:
        """The observation (N, d) float32; call once per policy step.

        Args:
            reading: sensors now.
            command: (N, C) in the order of `spec.command`; it is clamped.
            prev_action: (N, A), zero after a reset.

        Raises:
            ValueError: the reading lacks a sensor that a term needs, or has another size.
        """
        command = self.clamp(command)
        raw = [
            self._raw(term, index, reading, command, prev_action)
            for term, index in zip(self.terms, self._index, strict=True)
        ]
        x = np.clip(np.concatenate(raw, 1), self._low, self._high)
        frame = (x * self._scale).astype(np.float32)
        if self._stacked:
            frame = self._stack(frame)
        self.steps += 1
        return frame

    def _raw(self, term: ObsTerm, index, reading: Reading, command, prev_action) -> np.ndarray:
        """Raw value (N, size) of one term; the kinds are `ctrl_rl.spec.KINDS`."""
        n = self.num_robots
        match term.kind:
            case "base_ang_vel_b":
                return _sensor(reading.gyro, "gyro", term, n, 3) @ self._imu_to_base.T
            case "projected_gravity_b":
                return projected_gravity(reading, self._imu_to_base, n)
            case "joint_pos_rel":
                pos = _sensor(reading.joint_pos, "joint_pos", term, n, len(self._default_pos))
                return (pos - self._default_pos)[:, index]
            case "joint_vel":
                vel = _sensor(reading.joint_vel, "joint_vel", term, n, len(self._default_pos))
                return vel[:, index]
            case "prev_action":
                return np.reshape(prev_action, (n, term.size))
            case "command":
                return np.broadcast_to(command[:, index], (n, term.size))
            case "phase":
                turns = self.clock_start + self.steps * (self.spec.step_dt * term.rate_hz)
                self._last_walk = np.where(np.any(command != 0.0, 1), self.steps, self._last_walk)
                run_on = round(term.run_on_s / self.spec.step_dt)
                walks = self.steps - self._last_walk <= run_on
                clock = np.stack([np.sin(math.tau * turns), np.cos(math.tau * turns)], 1)
                return clock * walks[:, None]
            case "signal":
                return _sensor(reading.signals.get(term.name), "signal", term, n, term.size)
        raise CardError(f"observation term {term.name!r}: no sensor gives kind {term.kind!r}")

    def _stack(self, frame: np.ndarray) -> np.ndarray:
        """Push one frame and read each term's history, oldest first."""
        frames = self._frames
        frames[:, :-1] = frames[:, 1:]
        fresh = self.steps == 0
        frames[fresh, :-1] = (frame[fresh] * self._repeats)[:, None]
        frames[:, -1] = frame
        blocks, start = [], 0
        for term, end in zip(self.terms, self._ends, strict=True):
            block = frames[:, frames.shape[1] - term.history :, start:end]
            blocks.append(block.reshape(self.num_robots, -1))
            start = end
        return np.concatenate(blocks, 1)


def rotation_matrix(quat) -> np.ndarray:
    """Rotation matrix (3, 3) of a quaternion wxyz, from the rotated frame to the outer one."""
    w, x, y, z = np.asarray(quat, np.float64) / np.linalg.norm(quat)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def default_pos(spec: EnvSpec, joint_names: tuple[str, ...]) -> np.ndarray:
    """Default position of each joint (J,) [rad] in the robot's order; (0,) without a robot.

    Raises:
        CardError: joints that do not match.
    """
    if spec.robot is None:
        return np.zeros(0)
    match_joints(spec, joint_names)
    default = {j.name: j.default_pos for j in spec.robot.joints}
    return np.array([default[name] for name in joint_names])


def imu_to_base(spec: EnvSpec) -> np.ndarray:
    """Rotation (3, 3) from the IMU's frame to the base's."""
    return np.eye(3) if spec.robot is None else rotation_matrix(spec.robot.imu_quat)


def projected_gravity(reading: Reading, imu_to_base: np.ndarray, num_robots: int) -> np.ndarray:
    """Unit vector of gravity in the base frame (N, 3); upright is (0, 0, -1).

    From the orientation where there is one (minus the third row of its rotation matrix), else
    from the measured direction. Raises ValueError where the reading has neither.
    """
    if reading.quat is not None:
        quat = np.reshape(reading.quat, (num_robots, 4))
        w, x, y, z = (quat / np.sqrt(np.sum(quat * quat, 1, keepdims=True))).T
        gravity = -np.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], 1)
    elif reading.gravity is not None:
        gravity = np.reshape(reading.gravity, (num_robots, 3))
        gravity = gravity / np.sqrt(np.sum(gravity * gravity, 1, keepdims=True))
    else:
        raise ValueError("the reading has neither quat nor gravity")
    return gravity @ imu_to_base.T


def _sensor(value, sensor: str, term: ObsTerm, num_robots: int, size: int) -> np.ndarray:
    """The measured value as (N, size). Raises ValueError if it is absent or of another size."""
    if value is None:
        raise ValueError(f"observation term {term.name!r} needs {sensor}, the reading has none")
    value = np.asarray(value, np.float64)
    if value.size != num_robots * size:
        raise ValueError(
            f"observation term {term.name!r}: {sensor} has shape {value.shape}, "
            f"expected ({num_robots}, {size})"
        )
    return value.reshape(num_robots, size)


def _index(term: ObsTerm, spec: EnvSpec, joint_names: tuple[str, ...]) -> np.ndarray | None:
    """Where a term's elements stand in the robot's joints or in the command, by name."""
    match term.kind:
        case "joint_pos_rel" | "joint_vel":
            known, default = list(joint_names), [j.name for j in robot_of(spec).joints]
        case "command":
            known = default = [c.name for c in spec.command]
        case _:
            return None
    labels = term.labels or tuple(default)
    unknown = [name for name in labels if name not in known]
    if unknown or len(labels) != term.size:
        raise CardError(
            f"observation term {term.name!r} names {', '.join(unknown) or len(labels)}, "
            f"which is not among {', '.join(known) or 'nothing'}"
        )
    return np.array([known.index(name) for name in labels])
