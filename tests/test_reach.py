"""`Reach-v0`: its closed form against MuJoCo, its goals, its reward."""

import math

import mujoco
import numpy as np
import pytest
import torch

import ctrl_rl
from ctrl_rl import sac
from ctrl_rl.runs import Run
from robots.env import MODELS
from robots.tasks import reach
from sim2real.export import export_run
from sim2real.observer import Observer, Reading


@pytest.fixture
def model():
    return mujoco.MjModel.from_xml_path(str(MODELS / "reach.xml"))


def test_the_closed_form_is_mujocos(model):
    """Acceleration and tip in 50 random states, with torques beyond the limit."""
    data, rng = mujoco.MjData(model), np.random.default_rng(0)
    for _ in range(50):
        data.qpos[:] = rng.uniform(-3, 3, 4)
        data.qvel[:] = [*rng.uniform(-9, 9, 2), 0, 0]
        data.ctrl[:] = rng.uniform(-3, 3, 2)
        mujoco.mj_forward(model, data)
        state = [torch.from_numpy(x.copy())[None] for x in (data.qpos, data.qvel, data.ctrl)]
        found = reach.acceleration(*state)[0].numpy()
        np.testing.assert_allclose(found, data.qacc, rtol=0, atol=1e-9)
        tip = reach.tip_pos(state[0])[0].numpy()
        np.testing.assert_allclose(tip, data.site("tip").xpos[:2], rtol=0, atol=1e-12)


def test_the_picture_shows_the_goal_where_it_is(model):
    env, data = ctrl_rl.make("Reach-v0", 2), mujoco.MjData(model)
    for _ in range(60):  # into the second episode
        goal = env.step(torch.zeros(2, 2)).obs["goal"]
        data.qpos[:] = env.sim.qpos[1]
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(data.body("goal").xpos[:2], goal[1], rtol=0, atol=1e-6)
    env.hold_command(torch.tensor([0.2, -0.1]))
    env.step(torch.zeros(2, 2))
    env.step(torch.zeros(2, 2))
    assert env.sim.qpos[1, 2:].tolist() == pytest.approx([0.2, -0.1])


def test_goals_fill_the_ring_evenly_and_change_with_the_episode():
    env = ctrl_rl.make("Reach-v0", 20_000)
    first = env.observe()["goal"]
    radius = first.norm(dim=1)
    assert 0.1 <= radius.min() and radius.max() <= 0.5701
    # half of the area lies within sqrt((0.1^2 + 0.57^2) / 2) = 0.4092 m
    assert (radius < 0.4092).float().mean().item() == pytest.approx(0.5, abs=0.02)
    for _ in range(49):
        step = env.step(torch.zeros(20_000, 2))
        assert torch.equal(step.next_obs["goal"], first)
    step = env.step(torch.zeros(20_000, 2))
    assert step.truncated.all() and not step.terminated.any()
    assert torch.equal(step.next_obs["goal"], first)
    assert not (step.obs["goal"] == first).any()


def test_the_reward_by_hand():
    env = ctrl_rl.make("Reach-v0", 3)
    achieved = torch.tensor([[0.3, 0.1], [0.3, 0.1], [0.3, 0.1]])
    goal = torch.tensor([[0.3, 0.1], [0.3, 0.129], [0.322, 0.122]])  # 0, 2.9, 3.11 cm away
    reward, terminated = env.reward_for(achieved, goal)
    assert reward.tolist() == [0.0, 0.0, -1.0] and reward.dtype == torch.float32
    assert not terminated.any()


def test_success_is_being_there_in_the_last_step():
    env = ctrl_rl.make("Reach-v0", 3)
    env.sim.qpos[:, :2] = torch.tensor([0.0, math.pi / 2])  # the tip at (0.3, 0.3)
    env.command[:] = torch.tensor([[0.3, 0.3], [0.3, 0.31], [0.0, 0.3]])
    total = {"success": 0.0, "there": 0.0}
    for _ in range(50):
        step = env.step(torch.zeros(3, 2))
        for name in total:
            total[name] = total[name] + step.info.metrics[name] / 50
    assert total["success"].tolist() == pytest.approx([1, 1, 0])
    assert total["there"].tolist() == pytest.approx([1, 1, 0])
    # the next episode starts at rest elsewhere, away from its goal
    step = env.step(torch.zeros(3, 2))
    assert step.info.metrics["success"].tolist() == [0, 0, 0]


def test_the_operators_goal_is_the_goal():
    env = ctrl_rl.make("Reach-v0", 2)
    env.hold_command(torch.tensor([0.2, -0.1]))
    for _ in range(2):
        step = env.step(torch.zeros(2, 2))
    for group, place in (("goal", slice(0, 2)), ("actor", slice(-2, None))):
        assert step.obs[group][:, place].flatten().tolist() == pytest.approx([0.2, -0.1] * 2)
    tip = step.next_obs["achieved"]
    away = (tip - torch.tensor([0.2, -0.1])).norm(dim=1)
    assert step.info.metrics["distance"].tolist() == pytest.approx(away.tolist(), abs=1e-6)


def test_a_robot_gives_the_goal_as_a_command(tmp_path, monkeypatch):
    """Trained, exported, and fed by the runtime with sensors and command alone."""
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
    env = ctrl_rl.make("Reach-v0", 4)
    config = sac.SACConfig(
        total_steps=400, warmup_steps=200, hidden=(16,), batch_size=32, compile="off", hindsight=4
    )
    sac.train(config, env, Run(tmp_path / "r", console=False))
    path, _ = export_run(tmp_path / "r")
    trained, file = ctrl_rl.load_policy(tmp_path / "r"), ctrl_rl.load_policy(path)
    observer = Observer(file.spec, num_robots=4)
    step = env.step(torch.zeros(4, 2))
    signals = env.observe_terms(slice(None))
    none = np.zeros((4, 0))
    reading = Reading(
        time=0.0,
        joint_pos=none,
        joint_vel=none,
        signals={k: v.numpy() for k, v in signals.items() if k != "goal"},
    )
    obs = torch.from_numpy(observer.build(reading, env.command.numpy(), np.zeros((4, 2))))
    torch.testing.assert_close(obs, step.obs["actor"], rtol=0, atol=1e-6)
    torch.testing.assert_close(file(obs), trained(step.obs), rtol=0, atol=1e-5)
    result = ctrl_rl.evaluate(file, env, 8)
    assert 0 <= result.metrics["success"].mean <= 1
    assert result.metrics["distance"].unit == "m"
