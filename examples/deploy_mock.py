"""Run a policy file the way a robot does: numpy and onnxruntime, no torch, no simulator.

The loop below is the whole program of a robot's computer; only `MockRobot` is to be replaced by
the machine's own `read` and `write`.
"""

import argparse
from pathlib import Path

import numpy as np

from sim2real.mock import MockRobot
from sim2real.runtime import Controller, load, run
from sim2real.safety import Guard, Limits

POLICY = Path(__file__).parent / "policies" / "go1-velocity-flat.onnx"


def main() -> None:
    """Walk forward, then turn, then stand; print what the loop measured."""
    parser = argparse.ArgumentParser(description="Run a policy file on a mock robot.")
    parser.add_argument("policy", nargs="?", type=Path, default=POLICY, help="policy.onnx")
    parser.add_argument("--seconds", type=float, default=6.0, help="after the soft start [s]")
    args = parser.parse_args()

    network, card = load(args.policy)
    robot = MockRobot(card.spec)
    controller = Controller(network, card, robot.joint_names)
    limits = Limits(soft_start_s=1.0)
    guard = Guard(card.spec, robot.joint_names, limits)

    def command(t: float) -> np.ndarray:
        """What the operator asks for at time t [s]: forward [m/s], left [m/s], turn [rad/s]."""
        share = t / (limits.soft_start_s + args.seconds)
        return np.array([0.5, 0.0, 0.0] if share < 0.5 else [0.0, 0.0, 0.5 * (share < 0.8)])

    report = run(robot, controller, guard, command, limits.soft_start_s + args.seconds)
    robot.close()
    print(report)


if __name__ == "__main__":
    main()
