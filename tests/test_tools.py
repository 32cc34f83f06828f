"""The scripts behind make: the demo goes on where it was, the wheel check and the lock hold."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def demo(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, TOOLS / "demo.py", "--task", "Pendulum-v0", "--run", "runs/d"]
    return subprocess.run(
        [*command, *flags], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )


def test_demo_is_interrupted_goes_on_and_then_says_what_is_done():
    short = ("--total-steps", "8192", "--video-s", "0")
    stopped = demo(*short, "--stop-after", "4096")
    assert stopped.returncode == 130
    assert "train: interrupted; the same command goes on here" in stopped.stderr
    assert not Path("runs/d/policy.onnx").exists()

    whole = demo(*short)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "[1/4] train: ctrl-rl train --resume runs/d" in whole.stdout
    for name in ("report.html", "policy.onnx"):
        path = Path("runs/d", name).resolve()
        assert path.exists()
        assert str(path) in whole.stdout

    again = demo(*short)
    assert again.returncode == 0
    assert again.stdout.count("done before") == 4


def test_ctrl_c_lets_the_training_of_the_demo_end_with_a_checkpoint():
    flags = ["--total-steps", "10000000", "--algo.num-steps", "2048", "--video-s", "0"]
    words = [sys.executable, str(TOOLS / "demo.py"), "--task", "Pendulum-v0", "--run", "runs/d"]
    process = subprocess.Popen(
        [*words, *flags],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = Path("runs/d/metrics.csv")
    deadline = time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert metrics.exists()
    time.sleep(0.5)  # amid an iteration, which is longer than a quarter of a second
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "train: interrupted; the same command goes on here" in stderr
    assert Path("runs/d/checkpoints/last.pt").exists()


def test_demo_stops_at_the_step_that_fails():
    failed = demo("--total-steps", "nonsense")
    assert failed.returncode == 2
    assert "[1/4] train: failed with exit status 2" in failed.stderr
    assert "[2/4]" not in failed.stdout


def test_wheel_check_finds_what_is_missing_and_what_is_too_much():
    faults = load("check_wheel").faults
    tracked = ["ctrl_rl/ppo.py", "robots/models/go1.xml", "tests/test_ppo.py", "README.md"]
    wheel = ["ctrl_rl/ppo.py", "robots/models/go1.xml", "ctrl_rl-0.1.0.dist-info/METADATA"]
    assert faults(wheel, tracked) == []
    assert faults(wheel[:1], tracked) == ["robots/models/go1.xml is missing in the wheel"]
    assert faults([*wheel, "tests/test_ppo.py"], tracked) == [
        "tests/test_ppo.py does not belong into the wheel"
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [("torch==2.13.0+cpu", "torch==2.13.0"), ("numpy==2.4.6", "numpy==2.4.6")],
)
def test_lock_has_public_versions(line, expected):
    assert load("lock").public(line) == expected
