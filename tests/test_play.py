"""`play` without a screen: scripted keys, and what is shown."""

import dataclasses
import math
import sys
import time

import numpy as np
import pytest
import torch

import ctrl_rl
from ctrl_rl import cli
from ctrl_rl.commands.play import Operator, play
from ctrl_rl.spec import CommandDim
from robots.tasks.go1_velocity import Go1VelocityConfig

DIMS = (
    CommandDim(name="forward", unit="m/s", low=-0.5, high=1.0),
    CommandDim(name="left", unit="m/s", low=-0.5, high=0.5),
    CommandDim(name="turn", unit="rad/s", low=-1.0, high=1.0),
)


class Script:
    """A viewer that presses keys at given steps and remembers what it was shown."""

    def __init__(self, keys: dict[int, list[str]], until: int) -> None:
        self.script, self.until, self.shown = keys, until, []

    def running(self):
        return len(self.shown) < self.until

    def keys(self):
        return self.script.get(len(self.shown), [])

    def show(self, qpos, lines):
        self.shown.append((np.array(qpos), dict(lines)))

    def close(self):
        pass


class Recorder:
    """A policy that holds still and remembers observations and resets."""

    group, device = "actor", torch.device("cpu")

    def __init__(self, env):
        self.spec, self.seen, self.resets = env.spec, [], 0

    def __call__(self, obs):
        self.seen.append(obs["actor"][0].clone())
        return torch.zeros(1, self.spec.action_size)

    def reset(self, rows=None):
        self.resets += 1


def test_keys_move_the_command_within_its_range():
    operator = Operator(DIMS)
    for key in ("up", "up", "left", "e", "x"):
        operator.press(key)
    # a tenth of the larger bound per press: 0.1 m/s, 0.05 m/s, 0.1 rad/s
    assert operator.values == [0.2, 0.05, -0.1]
    for _ in range(20):
        operator.press("down")
    assert operator.values[0] == -0.5
    operator.press("space")
    assert operator.values == [0.0, 0.0, 0.0] and not operator.wants_reset
    operator.press("r")
    assert operator.wants_reset
    assert operator.help() == {
        "up": "forward +", "down": "forward -", "left": "left +", "right": "left -",
        "q": "turn +", "e": "turn -", "space": "stop", "r": "reset",
    }  # fmt: skip


def test_the_command_reaches_the_observation_and_survives_a_reset():
    config = ctrl_rl.registry.load("tasks", "Go1-Velocity-Flat-v0").Config().nominal()
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 1, threads=1, config=config)
    policy, viewer = Recorder(env), Script({2: ["up"] * 3 + ["q"], 6: ["r"], 9: ["space"]}, 12)
    episode = int(env.episode[0])
    assert play(policy, env, viewer, Operator(env.spec.command), speed=math.inf) == 12
    start = 0
    for term in env.spec.obs["actor"]:
        if term.kind == "command":
            break
        start += term.width
    commands = torch.stack([obs[start : start + 3] for obs in policy.seen]) / torch.tensor(
        term.scale if len(term.scale) > 1 else term.scale * 3
    )
    wanted = torch.tensor([0.3, 0.0, 0.1])
    # pressed before step 2, so the observation after that step holds it
    assert torch.equal(commands[1:3], torch.zeros(2, 3))
    assert torch.allclose(commands[3:10], wanted.expand(7, 3), atol=1e-6)
    assert torch.equal(commands[10:], torch.zeros(2, 3))
    assert viewer.shown[4][1]["lin_vel_x"] == "+0.30 m/s"
    assert policy.resets == 2 and float(viewer.shown[6][1]["time"].split()[0]) == 0.1
    assert (
        int(env.episode[0]) == episode + 2
    )  # one reset by play itself, one by the key, each with the policy's
    assert len({shown[0].tobytes() for shown in viewer.shown}) == 12
    env.close()


def test_play_keeps_time_and_stops_after_the_seconds_asked():
    env = ctrl_rl.make("Pendulum-v0", 1)
    viewer, before = Script({}, 100), time.monotonic()
    assert play(Recorder(env), env, viewer, Operator(()), seconds=0.5, speed=2.0) == 10
    assert 0.2 <= time.monotonic() - before < 2.0
    assert viewer.shown[-1][1]["time"] == "0.5 s"


def test_a_policy_that_asks_for_its_rewards_hears_them_before_the_reset():
    class Receives(Recorder):
        told = []

        def receive(self, reward):
            assert reward.shape == (1,)
            self.told.append(float(reward))

        def reset(self, rows=None):
            self.told.append("reset")

    task = ctrl_rl.registry.load("tasks", "Pendulum-v0")
    env = ctrl_rl.make("Pendulum-v0", 1, config=task.Config(max_episode_steps=3))
    viewer = Script({}, 4)
    play(Receives(env), env, viewer, Operator(()), speed=math.inf)
    told = Receives.told
    assert told[0] == told[4] == "reset" and len(told) == 6
    returns = [float(lines["return"]) for _, lines in viewer.shown]
    assert returns[2] == round(sum(told[1:4]), 1) < 0 and returns[3] == round(told[5], 1)


def test_a_slow_viewer_makes_slow_motion_not_a_backlog():
    env = ctrl_rl.make("Pendulum-v0", 1)
    viewer = Script({}, 5)
    viewer.show = lambda *shown: (Script.show(viewer, *shown), time.sleep(0.05))
    assert play(Recorder(env), env, viewer, Operator(()), speed=1000.0) == 5


def test_the_browser_view_names_its_extra_and_the_window_its_display(monkeypatch, capsys):
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
    words = "train Pendulum-v0 --num-envs 4 --total-steps 64 --algo.num-steps 16 --video-s 0"
    assert cli.main([*words.split(), "--eval-episodes", "1", "--run-dir", "r"]) == 0
    monkeypatch.setitem(sys.modules, "mjviser", None)
    monkeypatch.setattr("robots.render.display_present", lambda: False)
    capsys.readouterr()
    assert cli.main(["play", "r", "--web"]) == 2
    assert "pip install 'ctrl-rl[web]'" in capsys.readouterr().err
    assert cli.main(["play", "r"]) == 2
    assert "no display" in capsys.readouterr().err
    assert cli.main(["play", "r", "--speed", "0"]) == 2


def test_a_held_command_is_finite_and_within_the_range_of_training():
    config = dataclasses.replace(Go1VelocityConfig().nominal(), command_lin_vel_x=(-0.5, 1.0))
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 1, config=config, threads=1)
    env.hold_command(torch.tensor([-99.0, 0.25, 99.0]))
    env.step(torch.zeros(1, 12))
    assert env.command[0].tolist() == [-0.5, 0.25, 1.0]
    with pytest.raises(ValueError, match="a command must be finite"):
        env.hold_command(torch.tensor([0.0, float("nan"), 0.0]))
    with pytest.raises(ValueError, match="takes 3 commands"):
        env.hold_command(torch.zeros(2))


def test_a_held_command_outlives_a_new_one_and_a_new_episode():
    config = dataclasses.replace(
        Go1VelocityConfig().nominal(),
        command_interval_s=(0.04, 0.04),
        episode_length_s=0.2,
        command_zero_share=0.5,
    )
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 2, config=config, threads=1)
    terms = env.spec.obs["actor"]
    start = sum(t.width for t in terms[: [t.name for t in terms].index("command")])
    for held in (torch.tensor([0.5, -0.25, 0.125]), torch.zeros(3)):
        env.hold_command(held)
        for _ in range(11):  # into a new episode, for a clock that ran runs on for a while
            env.step(torch.zeros(2, 12))
        for _ in range(30):  # new commands, of which a tenth say stand, and new episodes
            obs = env.step(torch.zeros(2, 12)).obs["actor"]
            seen = obs[:, start : start + 3] / torch.tensor([2.0, 2.0, 1.0])
            assert torch.equal(seen, held.expand(2, 3))
            assert torch.equal(obs[:, -2:].any(1), held.any().expand(2))  # the clock runs or rests
