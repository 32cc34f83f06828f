"""`ctrl_rl.preset` is what the command line trains with."""

import pytest

import ctrl_rl
from ctrl_rl.commands.train import read_plan
from ctrl_rl.registry import NotFound


@pytest.mark.parametrize("task", ["Go1-Velocity-Flat-v0", "Pendulum-v0", "HalfCheetah-v5"])
def test_preset_is_the_command_lines_configuration(task):
    assert ctrl_rl.preset(task) == read_plan([task]).algo_config


def test_preset_takes_changes_and_refuses_unknown_names():
    assert ctrl_rl.preset("Pendulum-v0", total_steps=7, gamma=0.5).gamma == 0.5
    with pytest.raises(TypeError, match="gama"):
        ctrl_rl.preset("Pendulum-v0", gama=0.5)
    with pytest.raises(NotFound, match="did you mean 'Pendulum-v0'"):
        ctrl_rl.preset("Pendulun-v0")


def test_a_run_from_python_is_resumed_by_the_command_line(tmp_path, capsys):
    from ctrl_rl.cli import main

    env = ctrl_rl.make("Pendulum-v0", num_envs=8)
    config = ctrl_rl.preset("Pendulum-v0", total_steps=4096)
    ctrl_rl.ppo.train(config, env, ctrl_rl.Run(tmp_path / "run", console=False))
    env.close()
    words = ["train", "--resume", str(tmp_path / "run"), "--total-steps", "8192", "--video-s", "0"]
    assert main(words) == 0, capsys.readouterr().err
