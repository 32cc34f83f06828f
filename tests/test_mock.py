import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from deployment import make_obs, make_policy, make_spec

from sim2real.card import CardError
from sim2real.export import export
from sim2real.mock import MockRobot, main
from sim2real.runtime import JointCommand
from sim2real.safety import Guard


class Clock:
    """Time that passes when told."""

    def __init__(self):
        self.now = 5.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mock") / "policy.onnx"
    policy = make_policy(make_spec())
    export(policy, path, obs=make_obs(policy.spec))
    return path


def test_joints_follow_their_targets():
    clock = Clock()
    robot = MockRobot(make_spec(), clock=clock)
    guard = Guard(make_spec(), robot.joint_names)
    target = np.array([0.4, -0.2, 0.6])
    command = JointCommand(pos=target[None], kp=guard.kp[None], kd=guard.kd[None])
    robot.write(command)
    clock.now += 1.0
    reading = robot.read()
    np.testing.assert_allclose(reading.joint_pos, target, atol=1e-3)
    np.testing.assert_allclose(reading.joint_vel, 0, atol=1e-2)
    assert reading.time == pytest.approx(clock.now, abs=2e-3)
    assert robot.written == 1


def test_effort_and_position_limits_hold():
    clock = Clock()
    robot = MockRobot(make_spec(), clock=clock)
    gains = np.full((1, 3), 1e4), np.full((1, 3), 1.0)
    robot.write(JointCommand(pos=np.full((1, 3), 100.0), kp=gains[0], kd=gains[1]))
    clock.now += 0.001
    # effort 20 N·m on an inertia of kp / 60^2 for one millisecond
    inertia = np.array([10.0, 20.0, 30.0]) / 3600
    np.testing.assert_allclose(robot.read().joint_vel, 20 / inertia * 0.001, rtol=1e-6)
    clock.now += 1.0
    np.testing.assert_array_equal(robot.read().joint_pos, [2.0, 2.0, 2.0])


def test_readings_come_late_and_repeat_as_asked():
    clock = Clock()
    robot = MockRobot(make_spec(), jitter_s=0.01, dropout=0.5, clock=clock)
    ages, repeated, last = [], 0, None
    for _ in range(200):
        clock.now += 0.02
        reading = robot.read()
        repeated += reading is last
        last = reading
        ages.append(clock.now - reading.time)
    assert 70 < repeated < 130
    assert 0.005 < np.percentile(ages, 40) < 0.012
    assert max(ages) > 0.04


def test_a_command_that_is_not_finite_is_refused():
    robot = MockRobot(make_spec())
    bad = np.full((1, 3), np.nan)
    with pytest.raises(ValueError, match="not finite"):
        robot.write(JointCommand(pos=bad, kp=bad, kd=bad))


def test_a_task_without_a_robot_has_no_mock():
    with pytest.raises(CardError, match="no robot"):
        MockRobot(make_spec(robot=None))


def test_command_shows_loop_time_and_jitter(policy_file, capsys):
    status = main([str(policy_file), "--seconds", "0.3", "--soft-start-s", "0.1"])
    out = capsys.readouterr().out
    assert status == 0 or re.search(r"missed deadline|ms old", out)  # a busy machine
    assert "Toy-v0, robot toy: 3 joints, 50 Hz, command walk 0.5 m/s, turn 0.25 rad/s" in out
    for word in ("period", "jitter", "loop time", "safety"):
        assert f"\n{word}" in out
    counts = re.search(r"steps +(\d+), skipped (\d+)", out)
    steps, skipped = map(int, counts.groups())
    assert steps + skipped == 20


def test_a_dead_sensor_stops_the_robot(policy_file, capsys):
    assert main([str(policy_file), "--seconds", "0.4", "--dropout", "1"]) == 1
    assert "old (at most 60 ms)" in capsys.readouterr().out


def test_ctrl_c_prints_the_report(policy_file, capsys, monkeypatch):
    def interrupted(robot):
        if robot.written == 3:
            raise KeyboardInterrupt
        return read(robot)

    read = MockRobot.read
    monkeypatch.setattr(MockRobot, "read", interrupted)
    assert main([str(policy_file), "--seconds", "inf"]) == 0
    assert "steps           3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--command", "1"], "--command needs 2 value(s): walk, turn"),
        (["--command", "nan", "0"], "--command must be numbers, not nan 0"),
        (["--command", "0", "inf"], "--command must be numbers, not 0.0 inf"),
        (["--seconds", "0.1", "--soft-start-s", "-1"], "soft_start_s"),
    ],
)
def test_a_users_error_is_one_line(policy_file, capsys, arguments, says):
    assert main([str(policy_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_no_file(capsys):
    assert main(["absent.onnx"]) == 2
    assert "absent.onnx: no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_with_numpy_and_onnxruntime_alone(policy_file, repository, tmp_path):
    """The documented installation on a robot's computer: no torch, no MuJoCo, no tyro."""
    place = tmp_path / "robot"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    run = lambda *words: subprocess.run(  # noqa: E731
        [str(python), *words],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    wheels = tmp_path / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels)]
    subprocess.run([*build, str(repository)], check=True, timeout=600)
    (wheel,) = wheels.glob("ctrl_rl-*.whl")
    for words in (("numpy", "onnxruntime"), ("--no-deps", str(wheel))):
        found = run("-m", "pip", "install", "-q", *words)
        assert found.returncode == 0, found.stderr
    for module in ("torch", "mujoco", "tyro"):
        assert run("-c", f"import {module}").returncode == 1
    found = run("-m", "sim2real.mock", str(policy_file), "--seconds", "1")
    assert found.returncode == 0, found.stderr
    assert "jitter" in found.stdout
    where = run("-c", "import sim2real; print(sim2real.__file__)").stdout.strip()
    assert Path(where).is_relative_to(place)
