"""`Pendulum-v0` against gymnasium's Pendulum-v1."""

import gymnasium
import numpy as np
import pytest
import torch

import ctrl_rl
from robots.tasks.pendulum import MAX_SPEED, PendulumConfig


@pytest.fixture
def pair():
    """Four pendulums of ours and four of gymnasium's in the same random states."""
    ours = ctrl_rl.make("Pendulum-v0", 4, config=PendulumConfig(max_episode_steps=1000))
    theirs = [gymnasium.make("Pendulum-v1", max_episode_steps=1000).unwrapped for _ in range(4)]
    for row, env in enumerate(theirs):
        env.reset(seed=row)
        ours.sim.qpos[row, 0], ours.sim.qvel[row, 0] = env.state.tolist()
    return ours, theirs


def test_200_steps_equal_gymnasiums_with_saturated_speed_and_torque(pair):
    ours, theirs = pair
    rng, fastest = np.random.default_rng(0), 0.0
    for t in range(200):
        # full torque for a while in rows 0 and 1, so that the speed reaches its limit
        action = rng.uniform(-3, 3, 4).astype(np.float32)
        if t < 100:
            action[:2] = 2.5 * np.sign([env.state[1] for env in theirs[:2]])
        step = ours.step(torch.from_numpy(action)[:, None])
        fastest = max(fastest, ours.sim.qvel.abs().max().item())
        for row, env in enumerate(theirs):
            obs, reward, *_ = env.step(action[row : row + 1])
            state = [ours.sim.qpos[row, 0], ours.sim.qvel[row, 0]]
            np.testing.assert_allclose(state, env.state, rtol=0, atol=1e-6)
            np.testing.assert_allclose(step.obs["actor"][row], obs, rtol=0, atol=1e-6)
            np.testing.assert_allclose(step.reward[row], reward, rtol=1e-6, atol=1e-6)
    assert fastest == pytest.approx(MAX_SPEED, abs=1e-9)  # else the limit was not tried


def test_spaces_and_start_equal_gymnasiums():
    theirs = gymnasium.make("Pendulum-v1")
    ours = ctrl_rl.make("Pendulum-v0", 4096)
    (torque,) = ours.spec.action
    assert torque.low == theirs.action_space.low.item()
    assert torque.high == theirs.action_space.high.item()
    assert ours.spec.max_episode_steps == theirs.spec.max_episode_steps
    start = torch.cat([ours.sim.qpos, ours.sim.qvel], 1).numpy()
    high = np.array([np.pi, 1.0])  # gymnasium's default, uniform on both sides of zero
    assert (np.abs(start) <= high).all()
    np.testing.assert_allclose(start.std(0), high / np.sqrt(3), rtol=0.03)


def test_an_episode_is_truncated_after_200_steps_and_never_terminated():
    env = ctrl_rl.make("Pendulum-v0", 2)
    flags = [env.step(torch.zeros(2, 1)) for _ in range(200)]
    assert not any(step.terminated.any() for step in flags)
    assert [step.truncated.tolist() for step in flags] == [[False, False]] * 199 + [[True, True]]
