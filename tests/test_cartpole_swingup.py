"""`CartPole-SwingUp-v0`: the equation of motion against MuJoCo, reward, ends and figures."""

import math

import mujoco
import numpy as np
import pytest
import torch

import ctrl_rl
from robots.env import MODELS
from robots.sim.ode_backend import OdeSim
from robots.tasks.cartpole_swingup import (
    GRAVITY,
    HALF_LENGTH,
    OFF_TRACK,
    POLE_MASS,
    TRACK,
    CartPoleSwingUpConfig,
    acceleration,
)

WHOLE = CartPoleSwingUpConfig().evaluation()

SAME_IN_MUJOCO = f"""
<mujoco>
  <option gravity="0 0 -{GRAVITY}" timestep="0.02" integrator="RK4">
    <flag contact="disable"/>
  </option>
  <worldbody>
    <body>
      <inertial pos="0 0 0" mass="1" diaginertia="1 1 1"/>
      <joint name="slide" type="slide" axis="1 0 0"/>
      <body>
        <inertial pos="0 0 0.5" mass="0.1" diaginertia="{0.1 / 12} {0.1 / 12} 1e-5"/>
        <joint type="hinge" axis="0 1 0"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="slide" ctrlrange="-10 10" ctrllimited="true"/></actuator>
</mujoco>
"""


def placed(angle: float, cart_pos: float = 0.0, rows: int = 1):
    """Environments with the cart at rest [m] and the pole at `angle` [rad]."""
    env = ctrl_rl.make("CartPole-SwingUp-v0", rows, config=WHOLE)
    env.sim.qpos[:] = torch.tensor([cart_pos, angle])
    env.sim.qvel[:] = 0.0
    return env


def test_the_motion_is_mujocos():
    model = mujoco.MjModel.from_xml_string(SAME_IN_MUJOCO)
    data = mujoco.MjData(model)
    ours = OdeSim(acceleration, 1, (2, 1), 0.02)
    data.qpos[:] = 0.3, 2.0
    ours.qpos[:] = torch.tensor([0.3, 2.0], dtype=torch.float64)
    rng = np.random.default_rng(0)
    for _ in range(100):
        force = rng.uniform(-20, 20)  # [N], half of it beyond the limit
        data.ctrl[:] = ours.ctrl[:] = force
        mujoco.mj_step(model, data)
        ours.step(1)
        np.testing.assert_allclose(ours.qpos[0], data.qpos, rtol=0, atol=1e-9)
        np.testing.assert_allclose(ours.qvel[0], data.qvel, rtol=0, atol=1e-8)


def test_without_force_energy_stays():
    sim = OdeSim(acceleration, 32, (2, 1), 0.02)
    sim.qpos[:, 1] = torch.linspace(0.05, 3.0, 32)

    def energy():
        speed, turn = sim.qvel.unbind(1)
        cos = torch.cos(sim.qpos[:, 1])
        middle = speed.square() + 2 * HALF_LENGTH * speed * turn * cos
        rotation = 4 / 3 * HALF_LENGTH**2 * turn.square()
        kinetic = 0.5 * speed.square() + 0.5 * POLE_MASS * (middle + rotation)
        return kinetic + POLE_MASS * GRAVITY * HALF_LENGTH * cos

    before, full_range = energy(), 2 * POLE_MASS * GRAVITY * HALF_LENGTH
    for _ in range(500):
        sim.step(1)
        assert ((energy() - before).abs() < 1e-5 * full_range).all()
    assert sim.qvel[:, 1].abs().max() > 0.1  # it did move


def test_the_picture_shows_the_angle_that_is_observed():
    env = placed(angle=0.5, cart_pos=0.2)
    model = mujoco.MjModel.from_xml_path(str(MODELS / "cartpole.xml"))
    data = mujoco.MjData(model)
    data.qpos[:] = env.sim.qpos[0]
    mujoco.mj_forward(model, data)
    pole = data.body("pole").xmat.reshape(3, 3)[:, 2]
    _, cos, sin, _, _ = env._make_obs(slice(None))["actor"][0]
    assert pole[0] == pytest.approx(sin.item(), abs=1e-6)
    assert pole[2] == pytest.approx(cos.item(), abs=1e-6)
    assert data.body("cart").xpos[0] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("angle", "cart_pos", "action", "terms"),
    [
        (0.0, 0.0, 0.0, (0.5, 0.2, 0.2, 0.1)),  # all there is
        (math.pi, 0.0, 0.0, (0.0, 0.0, 0.0, 0.0)),
        (0.0, 1.0, 0.0, (0.5, 0.2 / math.e, 0.2, 0.1)),
        (0.0, 0.0, 1.0, (0.5, 0.2, 0.2, 0.0)),  # 10 N for 20 ms barely move it
        (0.0, 0.0, 2.0, (0.5, 0.2, 0.2, 0.0)),  # beyond the limit costs no more
        (math.pi / 2, 0.0, 0.0, (0.25, 0.1, 0.1, 0.05)),
    ],
)
def test_reward_terms(angle, cart_pos, action, terms):
    step = placed(angle, cart_pos).step(torch.tensor([[action]]))
    found = [value.item() for value in step.info.reward_terms.values()]
    assert found == pytest.approx((*terms, 0.0), abs=3e-3)
    assert 0 <= step.reward.item() <= 1


def test_leaving_the_track_terminates_also_on_the_last_step():
    env = placed(angle=math.pi, cart_pos=TRACK - 0.01, rows=2)
    env.sim.qvel[0, 0] = 1.0  # [m/s]: 0.02 m further after a step
    env.step_count[:] = 499
    step = env.step(torch.zeros(2, 1))
    assert step.terminated.tolist() == [True, False]
    assert step.truncated.tolist() == [False, True]
    assert step.reward.tolist() == pytest.approx([OFF_TRACK, 0.0], abs=1e-3)
    assert step.next_obs["actor"][0, 0] == pytest.approx(TRACK + 0.01, abs=1e-3)


def test_the_figure_is_one_only_if_upright_in_every_step_of_the_last_5_seconds():
    env = placed(angle=0.0, rows=3)
    shares = torch.zeros(3, dtype=torch.float64)
    for t in range(500):
        env.sim.qpos[:], env.sim.qvel[:] = 0.0, 0.0  # held by hand
        if t < 250:
            env.sim.qpos[0, 1] = math.pi  # hanging in the first half does not count
        if t == 400:
            env.sim.qpos[1, 1] = math.radians(16.0)
        if t == 400:
            env.sim.qpos[2, 0] = TRACK + 0.1  # episode over after 400 upright steps
        step = env.step(torch.zeros(3, 1))
        share = step.info.metrics["upright_second_half"]
        shares[:2] += share[:2]
        shares[2] += share[2] if t <= 400 else 0.0
    means = shares / torch.tensor([500, 500, 401])
    assert means.tolist() == pytest.approx([1.0, 498 / 500, 302 / 401])


def test_it_starts_hanging_and_training_starts_at_all_ages():
    env = ctrl_rl.make("CartPole-SwingUp-v0", 1000)
    assert (env.observe()["actor"][:, 1] < -0.98).all()
    assert env.sim.qpos[:, 0].abs().max() <= 0.5 and env.sim.qpos[:, 0].std() > 0.2
    assert env.step_count.float().mean() == pytest.approx(250, abs=25)
    assert (env.step_count >= 0).all() and (env.step_count < 500).all()
    whole = ctrl_rl.make("CartPole-SwingUp-v0", 1000, config=WHOLE)
    assert not whole.step_count.any()
