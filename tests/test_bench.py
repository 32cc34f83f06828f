"""`ctrl-rl bench`: figures that fit together, nothing written."""

import json
import subprocess

import pytest

from ctrl_rl.cli import main
from ctrl_rl.commands.bench import Bench


def test_bench_times_environment_and_training(cli, tmp_path):
    words = ["bench", "Pendulum-v0", "--num-envs", "16", "--seconds", "0.5", "--json"]
    done = subprocess.run([cli, *words], stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    alone, training = found["metrics"]["alone"], found["metrics"]["training"]
    assert alone["mean"] > training["mean"] > 0
    assert training["n"] > 1
    assert found["config"]["num_envs"] == 16
    assert not list(tmp_path.iterdir())


def test_bench_refuses_what_it_cannot_time(capfd):
    assert main(["bench", "Pendulun-v0"]) == 2
    assert "did you mean 'Pendulum-v0'?" in capfd.readouterr().err
    with pytest.raises(ValueError, match="seconds must be positive"):
        Bench(task="Pendulum-v0", seconds=0)
