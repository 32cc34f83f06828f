"""The guard: the last thing between a policy and the motors; every command passes through it.

A command that leaves `Guard.check` is one of two kinds:

- targets that lie inside the joints' position limits, move at most so far since the command
  before, ask for a torque (predicted from kp, kd and the measured state) inside the effort limit,
  and never push a joint further that is already too fast;
- the stop: pure damping (or a hold of the last pose), whose torque is inside the effort limit too.

What cannot be made safe by moving a target stops the robot: tilt, a stale or broken reading, a
missed deadline, a loop that is too slow, a command or target that is no number, limits that
contradict each other. A stop latches until `reset`; after a reset the robot is first brought softly
from its present pose.

The guard runs in the policy's process. If that process hangs nothing is sent any more, so the
motors' own watchdog must damp them; and it does not replace an emergency switch.

Needs numpy and `ctrl_rl.spec` alone. Serves N robots at once (leading axis), as the runtime does.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from ctrl_rl.spec import EnvSpec
from sim2real.card import CardError, match_joints, robot_of
from sim2real.observer import Reading, default_pos, imu_to_base, projected_gravity
from sim2real.runtime import JointCommand

WINDOW = 50  # [commands] over which `Limits.max_behind_steps` is measured
QUAT_TOLERANCE = 0.1  # [-] of an orientation's length from 1; a sensor's rounding is far below


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a command may ask; joint limits themselves stand in the policy's card."""

    pos_margin: float = 0.02
    """Targets keep this far from the joints' position limits [rad]."""
    target_speed: float = 2.0
    """Fastest motion of a target, as a multiple of the joint's velocity limit [-]."""
    effort_share: float = 1.0
    """Share of the effort limit that a command may ask for [-]."""
    velocity_share: float = 1.0
    """Above this share of the velocity limit a command may only brake [-]."""
    max_tilt: float = math.radians(60)
    """Angle between the base's up axis and the vertical [rad]; infinite for a fixed base."""
    max_age_steps: float = 3.0
    """Oldest reading that may be acted on [policy steps]."""
    max_gap_steps: float = 3.0
    """Longest time between two commands [policy steps]."""
    max_behind_steps: float = 10.0
    """How far the last 50 commands may have fallen behind the clock [policy steps]."""
    soft_start_s: float = 2.0
    """Time in which targets move from the pose found to the pose wanted [s]."""
    stop: str = "damp"
    """"damp": no position control, only damping; "hold": keep the last safe targets."""

    def __post_init__(self) -> None:
        positive = ("target_speed", "effort_share", "velocity_share", "max_tilt")
        for name in (*positive, "max_age_steps", "max_gap_steps", "max_behind_steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("pos_margin", "soft_start_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.effort_share > 1:
            raise ValueError(f"effort_share must be at most 1, not {self.effort_share}")
        if self.stop not in ("damp", "hold"):
            raise ValueError(f"stop must be 'damp' or 'hold', not {self.stop!r}")


class Guard:
    """Turns wanted targets into safe commands and stops what it cannot make safe.

    Args:
        spec: from the policy's card.
        joint_names: the robot's joint order.
        limits: None for the defaults.
        num_robots: N.

    Raises:
        CardError: joints that do not match, or a joint whose limits leave no room.
    """

    def __init__(
        self,
        spec: EnvSpec,
        joint_names: tuple[str, ...],
        limits: Limits | None = None,
        num_robots: int = 1,
    ) -> None:
        self.limits = limits = Limits() if limits is None else limits
        self.joint_names, self.num_robots = joint_names, num_robots
        self.command_names = tuple(c.name for c in spec.command)
        match_joints(spec, joint_names)
        self.default_pos = default_pos(spec, joint_names)
        joints = {j.name: j for j in robot_of(spec).joints}
        column = lambda key: np.array([getattr(joints[n], key) for n in joint_names])  # noqa: E731
        self.kp, self.kd = column("kp"), column("kd")
        """Gains (J,) [N·m/rad], [N·m·s/rad]."""
        self.low = column("pos_low") + limits.pos_margin
        self.high = column("pos_high") - limits.pos_margin
        self.effort = column("effort_limit") * limits.effort_share
        self.velocity = column("velocity_limit") * limits.velocity_share
        self.max_step = column("velocity_limit") * limits.target_speed * spec.step_dt
        """Farthest that a target may move per command (J,) [rad]."""
        steady = np.where(np.isfinite(self.velocity), self.effort / self.velocity, self.kd)
        self.stop_kd = np.minimum(self.kd, steady)
        """Damping that stays inside the effort limit up to the velocity limit (J,)."""
        bad = ~((self.low < self.high) & (self.kp > 0) & (self.kd >= 0) & (self.effort > 0))
        if bad.any():
            raise CardError(
                f"no safe command exists for {self._names(bad)}: position limits closer than "
                f"twice the margin, or a gain or effort limit that is not positive"
            )
        self.step_dt = spec.step_dt
        self._imu_to_base = imu_to_base(spec)
        self._min_upright = math.cos(min(limits.max_tilt, math.pi))
        self._tilts = math.isfinite(limits.max_tilt)

        n, j = num_robots, len(joint_names)
        self.stopped = np.zeros(n, bool)
        """Robots whose stop is latched (N,)."""
        self.causes: list[str | None] = [None] * n
        """Why each robot was stopped, in one line."""
        self.starting = np.ones(n, bool)
        """Robots that are still being brought softly to the wanted pose (N,)."""
        self.altered = np.zeros(n, bool)
        """Robots whose last command is not the one wanted (N,)."""
        self._fresh = np.ones(n, bool)
        self._target = np.zeros((n, j))
        self._start_pos = np.zeros((n, j))
        self._start_time = np.zeros(n)
        self._times: deque[float] = deque(maxlen=WINDOW)
        """When the last commands were asked for, newest last [s]."""
        self._count = np.zeros(n, np.int64)
        """Commands of each robot since it began (N,)."""

    def reset(self, rows=slice(None)) -> None:
        """Release a stop; the next command begins a soft start from the pose found then."""
        self.stopped[rows] = False
        self._fresh[rows] = True
        self.starting[rows] = True
        for i in np.arange(self.num_robots)[rows]:
            self.causes[i] = None

    def stop(self, cause: str, rows=slice(None)) -> None:
        """Emergency stop: latches until `reset`."""
        mask = np.zeros(self.num_robots, bool)
        mask[rows] = True
        self._latch(mask, lambda i: cause)

    def check(
        self, wanted: np.ndarray, reading: Reading, now: float, asked: np.ndarray | None = None
    ) -> JointCommand:
        """The command to send.

        Args:
            wanted: joint targets (N, J) [rad] in the robot's order.
            reading: what they were computed from.
            now: time on the clock of `reading.time` [s]; call once per policy step.
            asked: what the operator asked for (N, C), from which they were computed, too.
        """
        n, j = self._target.shape
        wanted = np.reshape(np.asarray(wanted, np.float64), (n, j))
        pos = np.reshape(np.asarray(reading.joint_pos, np.float64), (n, j))
        vel = np.reshape(np.asarray(reading.joint_vel, np.float64), (n, j))
        self._find_faults(wanted, pos, vel, reading, now, asked)
        self._begin_fresh(pos, now)

        usable = np.isfinite(pos) & np.isfinite(vel)
        pos, vel = np.where(usable, pos, 0.0), np.where(usable, vel, 0.0)
        wanted = np.where(np.isfinite(wanted), wanted, self._target)
        target = self._soften(wanted, now)
        low, high = self._bounds(pos, vel)
        impossible = low > high
        self._latch(
            np.any(impossible, axis=1),
            lambda i: (
                f"no safe target for {self._names(impossible[i])}: the joint is too far or "
                f"too fast for its limits"
            ),
        )
        target = np.clip(target, low, high)
        running = ~self.stopped
        self._target[running] = target[running]
        self.altered = self.stopped | (np.abs(target - wanted) > 1e-9).any(1)
        kp, kd = np.tile(self.kp, (n, 1)), np.tile(self.kd, (n, 1))
        if self.stopped.any():
            holds = usable & (low <= self._target) & (self._target <= high)
            self._stop_gains(kp, kd, vel, usable, holds)
        return JointCommand(pos=self._target.copy(), kp=kp, kd=kd)

    def damping(self) -> JointCommand:
        """A stop command that needs no reading: safe up to the velocity limit."""
        n = self.num_robots
        return JointCommand(
            pos=self._target.copy(),
            kp=np.zeros_like(self._target),
            kd=np.tile(self.stop_kd, (n, 1)),
        )

    # Inside -----------------------------------------------------------------------------------

    def _find_faults(self, wanted, pos, vel, reading: Reading, now: float, asked) -> None:
        """Latch the stop where reading, command, target or timing cannot be trusted."""
        limits, everyone = self.limits, np.ones(self.num_robots, bool)
        bad_pos, bad_vel, bad_target = ~np.isfinite(pos), ~np.isfinite(vel), ~np.isfinite(wanted)
        self._latch(bad_pos.any(1), lambda i: f"position of {self._names(bad_pos[i])} is no number")
        self._latch(bad_vel.any(1), lambda i: f"velocity of {self._names(bad_vel[i])} is no number")
        age, longest = now - reading.time, limits.max_age_steps * self.step_dt
        if not -self.step_dt <= age <= longest:
            text = f"the reading is {1e3 * age:.0f} ms old (at most {1e3 * longest:.0f} ms)"
            self._latch(everyone, lambda i: text)
        self._find_lateness(now)
        if reading.gyro is not None:
            gyro = np.reshape(reading.gyro, (self.num_robots, 3))
            bad_gyro = np.any(~np.isfinite(gyro), axis=1)
            self._latch(bad_gyro, lambda i: "the gyro's angular velocity is no number")
        if self._tilts:
            self._find_tilt(reading, everyone)
        if asked is not None:
            bad_asked = ~np.isfinite(np.reshape(asked, (self.num_robots, len(self.command_names))))
            self._latch(
                np.any(bad_asked, axis=1),
                lambda i: f"command {_pick(self.command_names, bad_asked[i])} is no number",
            )
        # Last, for a target is no number where what it came from is none: that cause says more.
        self._latch(
            bad_target.any(1), lambda i: f"target of {self._names(bad_target[i])} is no number"
        )

    def _find_lateness(self, now: float) -> None:
        """Latch the stop where commands come too late, once or on the whole."""
        times, limits = np.array(self._times), self.limits
        if len(times):
            gap, longest = now - times[-1], limits.max_gap_steps * self.step_dt
            if not 0 <= gap <= longest:
                late = (
                    f"missed deadline: {1e3 * gap:.0f} ms since the last command "
                    f"(at most {1e3 * longest:.0f} ms)"
                )
                self._latch(~self._fresh, lambda i: late)
            count = np.clip(self._count, 1, len(times))
            behind = (now - times[-count]) / self.step_dt - count
            self._latch(
                ~(behind <= limits.max_behind_steps + 1e-6) & ~self._fresh,  # a clock's rounding
                lambda i: (
                    f"missed deadlines: the last {count[i]} commands took {behind[i]:.0f} policy "
                    f"steps too long (at most {limits.max_behind_steps:g})"
                ),
            )
        self._times.append(now)
        self._count = np.where(self._fresh, 1, self._count + 1)

    def _find_tilt(self, reading: Reading, everyone) -> None:
        """Latch the stop where the base is tilted or its orientation cannot be trusted."""
        if reading.quat is None and reading.gravity is None:
            self._latch(everyone, lambda i: "the reading has no orientation")
            return
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            upright = -projected_gravity(reading, self._imu_to_base, self.num_robots)[:, 2]
            self._latch(
                ~(upright >= self._min_upright), lambda i: self._tilt_cause(float(upright[i]))
            )
            if reading.quat is not None:
                length = np.linalg.norm(np.reshape(reading.quat, (self.num_robots, 4)), axis=1)
                self._latch(
                    ~(np.abs(length - 1) <= QUAT_TOLERANCE),
                    lambda i: f"the orientation is a quaternion of length {length[i]:.3g}, not 1",
                )

    def _tilt_cause(self, upright: float) -> str:
        if math.isnan(upright):
            return "the orientation is no number"
        degrees = math.degrees(math.acos(min(1.0, max(-1.0, upright))))
        return f"tilt of {degrees:.0f} degrees (at most {math.degrees(self.limits.max_tilt):.0f})"

    def _begin_fresh(self, pos, now: float) -> None:
        """A robot's first command starts from the pose it is in."""
        if not self._fresh.any():
            return
        rows = self._fresh
        found = np.where(np.isfinite(pos), pos, self.default_pos)
        self._start_pos[rows] = self._target[rows] = np.clip(found, self.low, self.high)[rows]
        self._start_time[rows] = now
        self._fresh = np.zeros_like(rows)

    def _soften(self, wanted, now: float) -> np.ndarray:
        """Blend from the pose found to the one wanted; starts and ends at rest."""
        if not self.starting.any():
            return wanted
        duration = self.limits.soft_start_s
        s = np.ones(self.num_robots)
        if duration > 0:
            s = np.clip((now - self._start_time) / duration, 0.0, 1.0)
        self.starting = (s < 1) & ~self.stopped
        blend = (s * s * (3 - 2 * s))[:, None]
        return np.where(blend < 1, self._start_pos + blend * (wanted - self._start_pos), wanted)

    def _bounds(self, pos, vel) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest safe target of each joint (N, J) [rad].

        From kp (target - pos) - kd vel within [-effort, effort], or within [-effort, 0] at or
        above the velocity limit (it may only brake), and likewise below.
        """
        strongest = np.where(vel >= self.velocity, 0.0, self.effort)
        weakest = np.where(vel <= -self.velocity, 0.0, -self.effort)
        low = pos + (weakest + self.kd * vel) / self.kp
        high = pos + (strongest + self.kd * vel) / self.kp
        low = np.maximum(low, np.maximum(self.low, self._target - self.max_step))
        high = np.minimum(high, np.minimum(self.high, self._target + self.max_step))
        return low, high

    def _stop_gains(self, kp, kd, vel, usable, holds) -> None:
        """Gains of the stopped robots, in place; `holds` (N, J): the last target is still safe."""
        with np.errstate(divide="ignore"):
            damp = np.where(usable, np.minimum(self.kd, self.effort / np.abs(vel)), self.stop_kd)
        damped = self.stopped[:, None]
        if self.limits.stop == "hold":
            damped = damped & ~holds
        np.copyto(kp, 0.0, where=damped)
        np.copyto(kd, damp, where=damped)

    def _latch(self, mask: np.ndarray, cause) -> None:
        """Stop the robots in `mask`; the first cause of each stays."""
        new = mask & ~self.stopped
        if new.any():
            for i in np.flatnonzero(new):
                self.causes[i] = cause(i)
            self.stopped = self.stopped | new
            self.starting = self.starting & ~new

    def _names(self, mask: np.ndarray) -> str:
        return _pick(self.joint_names, mask)


def _pick(names: tuple[str, ...], mask: np.ndarray) -> str:
    return ", ".join(n for n, bad in zip(names, mask, strict=True) if bad)
