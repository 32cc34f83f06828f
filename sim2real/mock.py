"""A mock robot: try a policy file and the control loop on any computer, without a robot.

    python -m sim2real.mock policy.onnx --seconds 5

Each joint is an inertia under position control, so targets are followed like on a bench with the
robot hung up; the body stays upright and sways a little. Readings come late, repeat or stop on
request. Needs numpy, onnxruntime and this package (`pip install --no-deps ctrl-rl`).
"""

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

from ctrl_rl.spec import EnvSpec
from sim2real.card import CardError, robot_of
from sim2real.observer import Reading, default_pos
from sim2real.runtime import Controller, JointCommand, load, run
from sim2real.safety import Guard, Limits

NATURAL_FREQUENCY = 60.0  # [rad/s] of a joint under its own gain; sets its inertia
DYNAMICS_DT = 0.001  # [s]


class MockRobot:
    """Implements `sim2real.runtime.Hardware` without a machine.

    Args:
        spec: from the policy's card; joints, gains and limits come from it.
        jitter_s: the newest reading is up to this old [s], uniformly.
        dropout: chance that a reading repeats the one before [-].
        seed: of the noise.
        clock: monotonic time [s].

    Raises:
        CardError: a task without a robot.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        jitter_s: float = 0.0,
        dropout: float = 0.0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        joints = robot_of(spec).joints
        self.joint_names = tuple(j.name for j in joints)
        self.pos = default_pos(spec, self.joint_names)
        """(J,) [rad]"""
        self.vel = np.zeros(len(joints))
        """(J,) [rad/s]"""
        self.written = 0
        """Commands received."""
        self._inertia = np.array([j.kp for j in joints]) / NATURAL_FREQUENCY**2
        self._effort = np.array([j.effort_limit for j in joints])
        self._low = np.array([j.pos_low for j in joints])
        self._high = np.array([j.pos_high for j in joints])
        self._signals = {
            t.name: np.zeros((1, t.size)) for t in spec.obs["actor"] if t.kind == "signal"
        }
        self._kp = np.zeros(len(joints))
        self._kd = np.array([j.kd for j in joints])
        self._target = self.pos.copy()
        self._jitter_s, self._dropout = jitter_s, dropout
        self._random = np.random.default_rng(seed)
        self._clock = clock
        self._time = clock()
        self._last: Reading | None = None

    def read(self) -> Reading:
        """The newest reading, late or repeated as asked for."""
        if self._last is not None and self._random.random() < self._dropout:
            return self._last
        self._advance()
        sway = 0.02 * np.sin(self._time * np.array([3.0, 2.0, 1.0]))
        self._last = Reading(
            time=self._time - self._jitter_s * self._random.random(),
            joint_pos=self.pos.copy(),
            joint_vel=self.vel.copy(),
            gyro=sway,
            quat=np.array([1.0, 0.0, 0.0, 0.0]),
            signals=self._signals,
        )
        return self._last

    def write(self, command: JointCommand) -> None:
        """Take new targets and gains. Raises ValueError on anything but finite (1, J) arrays."""
        self._advance()
        self._target, self._kp, self._kd = command.pos[0], command.kp[0], command.kd[0]
        if not np.isfinite([self._target, self._kp, self._kd]).all():
            raise ValueError("a command to the motors is not finite")
        self.written += 1

    def close(self) -> None:
        """Switch the position control off."""
        self._kp = np.zeros_like(self._kp)

    def _advance(self) -> None:
        """Bring the joints to the present in steps of `DYNAMICS_DT` (semi-implicit Euler)."""
        steps = min(int((self._clock() - self._time) / DYNAMICS_DT), 1000)
        for _ in range(steps):
            torque = self._kp * (self._target - self.pos) - self._kd * self.vel
            self.vel += np.clip(torque, -self._effort, self._effort) / self._inertia * DYNAMICS_DT
            self.pos += self.vel * DYNAMICS_DT
            beyond = (self.pos < self._low) | (self.pos > self._high)
            self.vel[beyond] = 0.0
            np.clip(self.pos, self._low, self._high, out=self.pos)
        self._time += steps * DYNAMICS_DT


def main(arguments: list[str] | None = None) -> int:
    """Run a policy file on the mock robot; 0 if the guard never stopped it, 1 if it did."""
    parser = argparse.ArgumentParser(
        prog="python -m sim2real.mock", description="Run a policy file on a mock robot."
    )
    parser.add_argument("policy", help="policy.onnx, as `ctrl-rl export` writes it")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="after the soft start [s]; inf until Ctrl-C"
    )
    parser.add_argument(
        "--command",
        type=float,
        nargs="*",
        help="what the operator asks for, in the order of the card; half of the range if absent",
    )
    parser.add_argument("--jitter-ms", type=float, default=1.0, help="age of readings, up to [ms]")
    parser.add_argument("--dropout", type=float, default=0.01, help="share of repeated readings")
    parser.add_argument("--soft-start-s", type=float, default=1.0, help="soft start [s]")
    asked = parser.parse_args(arguments)
    try:
        network, card = load(asked.policy)
        robot = MockRobot(card.spec, jitter_s=asked.jitter_ms / 1e3, dropout=asked.dropout)
        controller = Controller(network, card, robot.joint_names)
        limits = Limits(soft_start_s=asked.soft_start_s)
        guard = Guard(card.spec, robot.joint_names, limits)
        dims = card.spec.command
        if asked.command is not None and len(asked.command) != len(dims):
            names = ", ".join(d.name for d in dims) or "none"
            raise CardError(f"--command needs {len(dims)} value(s): {names}")
        given = asked.command or ()
        if not np.isfinite(given).all():
            raise CardError(f"--command must be numbers, not {' '.join(map(str, given))}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = np.array(asked.command or [0.5 * d.high for d in dims])
    spec = card.spec
    print(
        f"{spec.task}, robot {robot_of(spec).name}: {len(robot.joint_names)} joints, "
        f"{1 / spec.step_dt:g} Hz, command "
        + ", ".join(f"{d.name} {c:g} {d.unit}" for d, c in zip(dims, command, strict=True))
    )
    report = run(robot, controller, guard, lambda t: command, asked.seconds + limits.soft_start_s)
    robot.close()
    print(report)
    return 1 if report.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
