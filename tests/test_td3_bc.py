import numpy as np
import pytest
import torch
from recorded import episodes, spec

from ctrl_rl.policy import Policy
from offline import td3_bc, training
from offline.td3_bc import TD3BC, TD3BCConfig
from offline.transitions import Transitions


def test_target_by_hand():
    # Seed 0: 1 + 0.9 * min(3, 2) = 2.8, and 5 at a terminal step; seed 1: 0 + 0.9 * (-4) = -3.6.
    reward = torch.tensor([[1.0, 5.0], [0.0, 1.0]])
    terminated = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    next_q = torch.tensor([[[3.0, 7.0], [2.0, 8.0]], [[-4.0, 7.0], [6.0, 7.0]]])
    y = td3_bc.clipped_target(reward, terminated, next_q, 0.9)
    torch.testing.assert_close(y, torch.tensor([[2.8, 5.0], [-3.6, 1.0]]))


def test_critic_loss_by_hand():
    # Seed 0: mean(1, 4) + mean(0, 9) = 2.5 + 4.5; seed 1 is exact.
    q = torch.tensor([[[1.0, 2.0], [2.0, 3.0]], [[2.0, 0.0], [2.0, 0.0]]])
    y = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    torch.testing.assert_close(td3_bc.critic_loss(q, y), torch.tensor([7.0, 0.0]))


def test_distance_is_that_of_scaled_actions():
    # Half ranges 1 and 5: ((0.5/1)^2 + (5/5)^2) / 2 = 0.625.
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 10.0])
    found = td3_bc.cloning_loss(
        torch.tensor([[[0.5, 10.0]]]), torch.tensor([[[0.0, 5.0]]]), low, high
    )
    torch.testing.assert_close(found, torch.tensor([0.625]))


def test_actor_loss_by_hand_and_its_weight_is_a_constant():
    # mean Q = 1, mean |Q| = 3: -2.5 * 1 / 3 + 0.1.
    q = torch.tensor([[4.0, -2.0]], requires_grad=True)
    loss = td3_bc.actor_loss(q, torch.tensor([0.1]), 2.5)
    torch.testing.assert_close(loss, torch.tensor([-2.5 / 3 + 0.1]))
    (slope,) = torch.autograd.grad(loss.sum(), q)
    torch.testing.assert_close(slope, torch.full((1, 2), -2.5 / 3 / 2))


def test_target_noise_is_that_of_each_range_sample_and_dimension():
    """O-17: bounds +-0.4 with noise 0.2 and clip 0.5: deviation 0.08, at most 0.2."""
    low, high = torch.tensor([-0.4, 0.0]), torch.tensor([0.4, 10.0])
    noise = torch.randn(1, 20_000, 2, generator=torch.Generator().manual_seed(0))
    middle = ((low + high) / 2).expand(1, 20_000, 2)
    moved = td3_bc.smoothed(middle, noise, TD3BCConfig(), low, high) - middle
    assert float(moved[..., 0].abs().max()) == pytest.approx(0.2)
    assert float(moved[..., 0].std()) == pytest.approx(0.08, rel=0.02)
    assert float(moved[..., 1].abs().max()) == pytest.approx(2.5)
    assert abs(float(torch.corrcoef(moved[0].T)[0, 1])) < 0.03
    at_bound = td3_bc.smoothed(high.expand(1, 20_000, 2), noise, TD3BCConfig(), low, high)
    assert bool((at_bound <= high).all())


# Known answers ------------------------------------------------------------------------------


def one_step(rng=0, n=512) -> Transitions:
    """Reward 1 - (a - 0.6)^2 for actions drawn uniformly around -0.2, within -0.6..0.2."""
    draw = np.random.default_rng(rng)
    action = draw.uniform(-0.6, 0.2, (n, 1))
    reward = 1 - (action[:, 0] - 0.6) ** 2
    return Transitions.from_episodes(
        episodes(np.zeros((2 * n, 1)), action, reward, np.ones(n), np.ones(n))
    )


def trained(data, alpha, seeds=(0, 1)):
    config = TD3BCConfig(
        total_steps=250, batch_size=64, hidden=(16,), alpha=alpha, learning_rate=1e-2, polyak=0.1,
        compile="off",
    )  # fmt: skip
    learner = TD3BC(config, data, spec(data.obs_size))
    training.fit(learner, data)
    policy = Policy.from_section(learner.policy_section(0))
    return learner, float(policy(torch.zeros(1, 1)))


def test_without_value_it_is_behaviour_cloning_and_with_value_it_climbs():
    data = one_step()
    _, cloned = trained(data, 0.0)
    _, climbed = trained(data, 2.5)
    assert cloned == pytest.approx(-0.2, abs=0.05)
    assert climbed > cloned + 0.1


def cut_episodes(terminated: bool) -> Transitions:
    """Reward 1 at each step; episodes of 5 that terminate, or are cut by a time limit."""
    n, age = 40, np.tile(np.arange(6.0), 40)[:, None] / 5
    action = np.random.default_rng(0).uniform(-1, 1, (5 * n, 1))
    ends = np.full(n, terminated)
    found = episodes(age * terminated, action, np.ones(5 * n), np.full(n, 5), ends, ~ends)
    return Transitions.from_episodes(found, timeouts="keep")


def test_values_end_at_termination_and_go_on_at_a_time_limit():
    """V = 1 / (1 - gamma) = 5 if episodes are cut; 1 + g + ... to the end if they terminate."""
    for terminated, expected in ((False, 5.0), (True, 1 + 0.8 + 0.64 + 0.512 + 0.4096)):
        config = TD3BCConfig(
            total_steps=400, batch_size=64, hidden=(16,), gamma=0.8, learning_rate=1e-2,
            polyak=0.1, compile="off",
        )  # fmt: skip
        data = cut_episodes(terminated)
        learner = TD3BC(config, data, spec(1))
        training.fit(learner, data)
        q = learner.critic(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)).mean().item()
        assert q == pytest.approx(expected, rel=0.05)
