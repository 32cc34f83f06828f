"""gymnasium's bodies here equal gymnasium's own environments."""

import gymnasium
import numpy as np
import pytest
import torch

import ctrl_rl

IDS = ["Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5"]


@pytest.mark.parametrize("task", IDS)
def test_parity_over_200_steps_and_through_resets(task):
    n = 4
    env = ctrl_rl.make(task, n, seed=3, threads=2)
    peers = [gymnasium.make(task).unwrapped for _ in range(n)]
    q, v = env.sim.qpos.numpy(), env.sim.qvel.numpy()

    def start(i):
        peers[i].reset(seed=0)
        peers[i].set_state(q[i].copy(), v[i].copy())
        np.testing.assert_array_equal(env.observe()["actor"][i], peers[i]._get_obs().astype("f4"))

    for i in range(n):
        start(i)
    rng = np.random.default_rng(0)
    low, high = peers[0].action_space.low, peers[0].action_space.high
    ends = 0
    for k in range(200):
        if k == 5:  # a kick, faster than what hopper and walker show of a velocity
            v[0, 0] = peers[0].data.qvel[0] = 25.0
        # some actions beyond the limits: motors clamp them, the control cost does not
        action = rng.uniform(1.5 * low, 1.5 * high, (n, len(low))).astype("f4")
        step = env.step(torch.from_numpy(action))
        reward = torch.stack(tuple(step.info.reward_terms.values())).sum(0)
        for i, peer in enumerate(peers):
            obs, peer_reward, terminated, _, _ = peer.step(action[i])
            np.testing.assert_array_equal(step.next_obs["actor"][i], obs.astype("f4"))
            assert reward[i].item() == pytest.approx(float(peer_reward), rel=0, abs=1e-6)
            assert bool(step.terminated[i]) == terminated
            if terminated:
                ends += 1
                start(i)
            else:
                np.testing.assert_array_equal(q[i], peer.data.qpos)
                np.testing.assert_array_equal(v[i], peer.data.qvel)
    assert ends == 0 if task == "HalfCheetah-v5" else ends > 0 or task == "Ant-v5"


@pytest.mark.parametrize("task", ["HalfCheetah-v5", "Ant-v5"])
def test_a_world_that_leaves_the_numbers_is_cut_and_no_other_notices(task):
    env, twin = (ctrl_rl.make(task, 4, seed=3, threads=2) for _ in range(2))
    action = torch.full((4, len(env.spec.action)), 0.3)
    for _ in range(3):
        env.step(action)
        twin.step(action)
    healthy, others = env.observe()["actor"][2].clone(), torch.tensor([0, 1, 3])
    env.sim.qvel[2, 3] = float("nan")
    step, twin_step = env.step(action), twin.step(action)
    assert [fault.row for fault in step.info.faults] == [2]
    assert "BADQVEL" in step.info.faults[0].cause
    assert step.reward[2] == 0.0
    assert step.truncated.tolist() == [False, False, True, False] and not step.terminated.any()
    assert torch.equal(step.next_obs["actor"][2], healthy)
    assert not torch.equal(step.obs["actor"][2], healthy)
    for _ in range(5):
        assert torch.equal(step.obs["actor"][others], twin_step.obs["actor"][others])
        assert torch.equal(step.reward[others], twin_step.reward[others])
        step, twin_step = env.step(action), twin.step(action)
        assert not step.info.faults


def test_ant_and_humanoid_feel_the_ground():
    for task in ("Ant-v5", "Humanoid-v5"):
        env = ctrl_rl.make(task, 2, threads=1)
        for _ in range(20):
            step = env.step(torch.zeros(2, len(env.spec.action)))
        start = sum(t.width for t in env.spec.obs["actor"] if t.name != "contact_forces")
        assert step.next_obs["actor"][:, start:].abs().amax(1).gt(0.01).all()
        assert (step.info.reward_terms["contact"] < 0).all()


@pytest.mark.parametrize(
    ("task", "column", "inside", "outside"),
    [
        ("Hopper-v5", 1, (0.71, 5.0), (0.69,)),
        ("Hopper-v5", 2, (-0.19, 0.19), (-0.21, 0.21)),
        ("Hopper-v5", 4, (-99.0, 99.0), (-101.0, 101.0)),
        ("Walker2d-v5", 1, (0.81, 1.99), (0.79, 2.01)),
        ("Walker2d-v5", 2, (-0.99, 0.99), (-1.01, 1.01)),
        ("Ant-v5", 2, (0.2, 1.0), (0.199, 1.001)),
        ("Humanoid-v5", 2, (1.01, 1.99), (1.0, 2.0)),
    ],
)
def test_healthy_range(task, column, inside, outside):
    env = ctrl_rl.make(task, 1, threads=1)
    for values, healthy in ((inside, True), (outside, False)):
        for value in values:
            env.reset()
            env.sim.qpos[0, column] = value
            assert env.is_healthy().item() is healthy
