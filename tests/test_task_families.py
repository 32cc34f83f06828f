"""`Point-Robot-v0` and `Cheetah-Vel-v0`: their tasks, their rewards, and what they do not show."""

import mujoco
import numpy as np
import pytest
import torch

import ctrl_rl
from ctrl_rl import registry
from robots.env import MODELS
from robots.tasks.cheetah_vel import VELOCITIES, CheetahVelConfig
from robots.tasks.point_robot import GOALS, PointRobotConfig


@pytest.mark.parametrize(("task", "number", "held_out"), [("Point-Robot-v0", 50, 5),
                                                          ("Cheetah-Vel-v0", 40, 5)])  # fmt: skip
def test_the_tasks_are_split_in_two(task, number, held_out):
    family = registry.load("tasks", task)
    assert len(set(family.parameters)) == number and len(family.held_out) == held_out
    assert sorted((*family.train, *family.held_out)) == list(range(number))
    assert family.Config().index == family.train


def test_goals_by_hand_and_even():
    # In bases 2 and 3: 1 = 1, 1; 6 = 110, 20 -> 3/8, 2/9, on -1..1
    assert GOALS[0] == pytest.approx((2 * 1 / 2 - 1, 2 * 1 / 3 - 1))
    assert GOALS[5] == pytest.approx((2 * 3 / 8 - 1, 2 * 2 / 9 - 1))
    quadrants = torch.tensor(GOALS).sign().add(1).div(2) @ torch.tensor([1.0, 2.0])
    counts = quadrants.long().bincount(minlength=4)
    assert counts.min() >= 10 and torch.tensor(GOALS).abs().max() < 1


def test_velocities_are_those_of_the_source():
    np.testing.assert_allclose(VELOCITIES, np.linspace(0.075, 3.0, 40), rtol=1e-12)


def test_point_robot_by_hand():
    config = PointRobotConfig(index=(7, 30), start_noise=0.0)
    env = ctrl_rl.make("Point-Robot-v0", 4, config=config)
    assert env.spec.obs_size() == 2 and env.observe()["actor"].abs().max() == 0
    goal = torch.tensor([GOALS[7], GOALS[30], GOALS[7], GOALS[30]], dtype=torch.float64)
    pos = torch.zeros(4, 2, dtype=torch.float64)
    for t in range(20):
        action = torch.full((4, 2), 0.05) * (-1) ** t
        action[1] = torch.tensor([3.0, -0.02])  # bounded to 0.1 a step
        step = env.step(action)
        pos = pos + action.double().clamp(-0.1, 0.1)
        torch.testing.assert_close(step.next_obs["actor"].double(), pos, rtol=0, atol=1e-6)
        wanted = -(pos - goal).norm(dim=1).float()
        torch.testing.assert_close(step.reward, wanted, rtol=0, atol=1e-6)
        assert step.truncated.all().item() is (t == 19) and not step.terminated.any()
    assert step.obs["actor"].abs().max() == 0
    step = env.step(torch.zeros(4, 2))  # the next episode has the same goals, and no momentum
    assert step.next_obs["actor"].abs().max() == 0
    torch.testing.assert_close(step.reward, -goal.norm(dim=1).float(), rtol=0, atol=1e-6)


def test_starts_lie_within_the_noise_on_all_sides():
    start = ctrl_rl.make("Point-Robot-v0", 4096).observe()["actor"]
    assert start.abs().max() <= 0.01 and start.abs().amax(0).min() > 0.0098
    assert start.mean(0).abs().max() < 5e-4


def test_the_picture_shows_point_and_goal():
    model = mujoco.MjModel.from_xml_path(str(MODELS / "point_robot.xml"))
    env, data = ctrl_rl.make("Point-Robot-v0", 2), mujoco.MjData(model)
    step = env.step(torch.full((2, 2), 0.07))
    data.qpos[:] = env.sim.qpos[1]
    mujoco.mj_kinematics(model, data)
    np.testing.assert_allclose(data.body("point").xpos[:2], step.obs["actor"][1], atol=1e-6)
    np.testing.assert_allclose(data.body("goal").xpos[:2], GOALS[1], atol=1e-6)


def test_cheetah_vel_by_hand():
    """The state of HalfCheetah-v5; 200 steps; no goal in the observation."""
    config = CheetahVelConfig(index=(0, 39))
    env = ctrl_rl.make("Cheetah-Vel-v0", 2, seed=3, threads=1, config=config)
    plain = ctrl_rl.make("HalfCheetah-v5", 2, seed=3, threads=1)
    generator = torch.Generator().manual_seed(0)
    for t in range(200):
        action = 2.4 * torch.rand(2, 6, generator=generator) - 1.2
        step, peer = env.step(action), plain.step(action)
        velocity = peer.info.metrics["forward_velocity"]
        wanted = -(
            velocity - torch.tensor([0.075, 3.0])
        ).abs() - 0.05 * action.double().square().sum(1)
        torch.testing.assert_close(step.reward, wanted.float(), rtol=0, atol=1e-5)
        assert torch.equal(step.next_obs["actor"], peer.next_obs["actor"])
        assert step.truncated.all().item() is (t == 199) and not step.terminated.any()


def test_rows_play_the_named_tasks_in_turn_whatever_their_first_number():
    for first in (0, 3):
        env = ctrl_rl.make(
            "Point-Robot-v0", 5, config=PointRobotConfig(index=(8, 1, 4)), first_index=first
        )
        assert env.task.tolist() == [(8, 1, 4)[(first + i) % 3] for i in range(5)]
    env.set_rows(torch.tensor([0]), env.get_rows(torch.tensor([1])))
    env.reset()
    assert env.sim.qpos[0, 2:].tolist() == pytest.approx(GOALS[env.task[1]])  # a copied world


@pytest.mark.parametrize("index", [(), (50,), (3, -1)])
def test_an_index_without_a_task_is_refused(index):
    with pytest.raises(ValueError, match="index must"):
        PointRobotConfig(index=index)


def test_the_index_is_a_flag():
    from ctrl_rl.commands.train import read_plan

    plan = read_plan(["Point-Robot-v0", "--task.index", "7"])
    assert plan.task_config.index == (7,)
