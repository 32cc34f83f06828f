"""`ctrl_rl.preset` is what the command line trains with; `ctrl_rl.make` builds what fits."""

import pytest
import torch

import ctrl_rl
from ctrl_rl import making
from ctrl_rl.cli import main
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


@pytest.mark.parametrize("task", ["Pendulum-v0", "HalfCheetah-v5"])
def test_more_environments_than_memory_holds_are_refused(task, tmp_path, capsys):
    # 99,999,999,999 x 8 bytes of the episode's number alone are 745 GiB.
    said = f"99,999,999,999 environments of {task} need more than .* GiB of memory; cpu has"
    with pytest.raises(ValueError, match=said):
        ctrl_rl.make(task, 99_999_999_999)
    words = [task, "--num-envs", "99999999999", "--run-dir", str(tmp_path / "r")]
    assert main(["train", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "environments of" in line and not (tmp_path / "r").exists()


def test_the_estimate_of_memory_counts_every_tensor(monkeypatch):
    env = ctrl_rl.make("Pendulum-v0", 2)
    state = {"a": torch.ones(3, 2), "b": {"c": torch.ones(5).double()}, "d": "text", "e": 7}
    assert making._num_bytes(state) == 24 + 40
    # As many as fit are built, one more is not.
    one = making._num_bytes(ctrl_rl.make("Pendulum-v0").state_dict())
    assert 8 * (2 + 2 + 1) <= one == making._num_bytes(env.state_dict()) / 2
    pages = {"SC_PAGE_SIZE": one, "SC_PHYS_PAGES": 12}
    monkeypatch.setattr(making.os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(making, "MANY", 10)
    assert ctrl_rl.make("Pendulum-v0", 12).spec.num_envs == 12
    with pytest.raises(ValueError, match="13 environments of Pendulum-v0"):
        ctrl_rl.make("Pendulum-v0", 13)


def test_a_run_from_python_is_resumed_by_the_command_line(tmp_path, capsys):
    env = ctrl_rl.make("Pendulum-v0", num_envs=8)
    config = ctrl_rl.preset("Pendulum-v0", total_steps=4096)
    ctrl_rl.ppo.train(config, env, ctrl_rl.Run(tmp_path / "run", console=False))
    env.close()
    words = ["train", "--resume", str(tmp_path / "run"), "--total-steps", "8192", "--video-s", "0"]
    assert main(words) == 0, capsys.readouterr().err
