import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import AgeReward, ConstantReward, LastStepReward
from torch import Tensor

from ctrl_rl.returns import episode_sums, gae

GAMMA, LAMBDA = 0.98, 0.95


def column(*values) -> Tensor:
    """(T, 1)"""
    return torch.tensor(values)[:, None]


def slow_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """The definition, one step at a time from the end."""
    advantage, following = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        bootstrap = torch.where(terminated[t], 0.0, next_value[t])
        delta = reward[t] + gamma * bootstrap - value[t]
        keep = (~(terminated[t] | truncated[t])).to(reward.dtype)
        following = delta + gamma * gae_lambda * keep * following
        advantage[t] = following
    return advantage


def test_time_limit_bootstraps_from_the_final_observation():
    # One step: r = 1, V(s) = 5, V(final) = 10. Target 1 + 0.9 * 10 = 10, advantage 5.
    no, yes = column(False), column(True)
    args = column(1.0), column(5.0), column(10.0)
    assert gae(*args, no, yes, 0.9, 0.8).item() == pytest.approx(5.0)
    # Terminated instead: target 1, advantage -4.
    assert gae(*args, yes, no, 0.9, 0.8).item() == pytest.approx(-4.0)


def test_hand_arithmetic_of_four_steps():
    # r = 1, V = 1 2 3 4, last value 6, a time limit at index 1 with V(final) = 5.
    # A_3 = 1 + .9 * 6 - 4 = 2.4;        A_2 = (1 + .9 * 4 - 3) + .72 * 2.4 = 3.328
    # A_1 = 1 + .9 * 5 - 2 = 3.5, cut;   A_0 = (1 + .9 * 2 - 1) + .72 * 3.5 = 4.32
    reward, value = column(1.0, 1, 1, 1), column(1.0, 2, 3, 4)
    next_value, never = column(2.0, 5, 4, 6), column(False, False, False, False)
    limit = column(False, True, False, False)
    advantage = gae(reward, value, next_value, never, limit, 0.9, 0.8)
    torch.testing.assert_close(advantage, column(4.32, 3.5, 3.328, 2.4))
    # As a termination: A_1 = 1 - 2 = -1, A_0 = 1.8 + .72 * -1 = 1.08.
    advantage = gae(reward, value, next_value, limit, never, 0.9, 0.8)
    torch.testing.assert_close(advantage, column(1.08, -1.0, 3.328, 2.4))


def test_the_value_after_a_termination_is_never_read():
    nan, yes, no = column(float("nan")), column(True), column(False)
    assert gae(column(1.0), column(5.0), nan, yes, no, 0.9, 0.8).item() == pytest.approx(-4.0)


def play(probe, steps=24):
    """Rewards, flags and exact values of a probe: (T, 1) each, ages and next ages."""
    env = probe(num_envs=1)
    ages, next_ages, reward, terminated, truncated = [], [], [], [], []
    for _ in range(steps):
        ages.append(env.observe()["actor"][0].double())
        step = env.step(torch.zeros(1, 1))
        next_ages.append(step.next_obs["actor"][0].double())
        reward.append(step.reward.double())
        terminated.append(step.terminated)
        truncated.append(step.truncated)
    stack = [torch.stack(x) for x in (ages, next_ages, reward, terminated, truncated)]
    return probe.value(stack[0], GAMMA), probe.value(stack[1], GAMMA), *stack[2:]


def largest(advantage: Tensor) -> float:
    return advantage.abs().max().item()


@pytest.mark.parametrize(
    ("probe", "cut", "bonus", "mask", "mask_bonus"),
    [(ConstantReward, 49, 0, 0, 92), (AgeReward, 2793, 49, 738, 4429)],
)
def test_exact_values_leave_no_advantage(probe, cut, bonus, mask, mask_bonus):
    """Ours gives 0; four forms in use elsewhere give the stated errors on the same episodes.

    Limit 8 steps, 24 steps. The constant reward alone would pass two of them.
    """
    value, next_value, reward, terminated, truncated = play(probe)
    assert truncated.sum() == 3
    assert not terminated.any()
    none = torch.zeros_like(truncated)
    ours = gae(reward, value, next_value, terminated, truncated, GAMMA, LAMBDA)
    assert largest(ours) < 1e-9

    # What a learner sees that takes the next row's observation for the successor.
    next_row = torch.cat([value[1:], next_value[-1:]])
    next_row[-1] = probe.value(torch.zeros(1, dtype=torch.float64), GAMMA)  # after the auto-reset
    time_out = reward + GAMMA * value * truncated

    def error(reward, terminated):
        return largest(gae(reward, value, next_row, terminated, none, GAMMA, LAMBDA))

    assert error(reward, truncated) == pytest.approx(cut, abs=0.5)
    assert error(time_out, truncated) == pytest.approx(bonus, abs=0.5)
    assert error(reward, terminated) == pytest.approx(mask, abs=0.5)
    assert error(time_out, terminated) == pytest.approx(mask_bonus, abs=0.5)


def test_a_termination_ends_the_value():
    value, next_value, reward, terminated, truncated = play(LastStepReward)
    assert terminated.sum() == 3
    assert not truncated.any()
    advantage = gae(reward, value, next_value, terminated, truncated, GAMMA, LAMBDA)
    assert largest(advantage) < 1e-9
    # Taken for a time limit, the value of the state after the end leaks in.
    wrong = gae(reward, value, next_value, truncated, terminated, GAMMA, LAMBDA)
    assert largest(wrong) > 0.9


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 40),
    envs=st.integers(1, 5),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_scan_equals_the_definition(steps, envs, gamma, gae_lambda, seed):
    draw = torch.Generator().manual_seed(seed)
    reward, value, next_value = torch.randn(3, steps, envs, generator=draw, dtype=torch.float64)
    terminated, limit = torch.rand(2, steps, envs, generator=draw) < 0.15
    args = reward, value, next_value, terminated, limit & ~terminated, gamma, gae_lambda
    torch.testing.assert_close(gae(*args), slow_gae(*args), rtol=1e-9, atol=1e-9)


def test_lambda_zero_is_one_step_and_lambda_one_is_monte_carlo():
    reward, value = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(0)).double()
    next_value = torch.cat([value[1:], torch.full((1, 2), 3.0).double()])
    none = torch.zeros(6, 2, dtype=torch.bool)
    one_step = gae(reward, value, next_value, none, none, 0.9, 0.0)
    torch.testing.assert_close(one_step, reward + 0.9 * next_value - value)
    weights = 0.9 ** torch.arange(6.0, dtype=torch.float64)[:, None]
    total = (weights * reward).sum(0) + 0.9**6 * next_value[-1]
    monte_carlo = gae(reward, value, next_value, none, none, 0.9, 1.0)
    torch.testing.assert_close(monte_carlo[0], total - value[0])


def test_inputs_are_left_alone():
    args = [torch.randn(5, 2) for _ in range(3)] + [torch.rand(5, 2) < 0.5 for _ in range(2)]
    before = [x.clone() for x in args]
    gae(*args, 0.9, 0.8)
    for a, b in zip(args, before, strict=True):
        assert torch.equal(a, b)


def test_episodes_are_summed_across_rollouts():
    # Row 0: an episode that began earlier with return 10 in 4 steps ends at step 1, the next one
    # at step 2; row 1 goes on.
    unfinished = torch.tensor([[10.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    reward = torch.tensor([[1.0, 7.0], [2.0, 7.0], [4.0, 7.0], [8.0, 7.0]])
    ended = torch.tensor([[False, False], [True, False], [True, False], [False, False]])
    episodes, unfinished = episode_sums(unfinished, reward, ended)
    assert episodes.tolist() == [[13.0, 4.0], [6.0, 1.0]]
    assert unfinished.tolist() == [[8.0, 28.0], [1.0, 4.0]]
    # The next roll-out ends both at once.
    episodes, unfinished = episode_sums(unfinished, reward[:1], torch.tensor([[True, True]]))
    assert episodes.tolist() == [[9.0, 35.0], [2.0, 5.0]]
    assert unfinished.abs().max() == 0
    episodes, _ = episode_sums(unfinished, reward, torch.zeros_like(ended))
    assert episodes.shape == (2, 0)
