import numpy as np
import pytest
import torch
from recorded import episodes, random_data, spec

from ctrl_rl.policy import Policy
from offline import rebrac, training
from offline.commands.train import read_plan
from offline.rebrac import PairedTransitions, ReBRAC, ReBRACConfig
from offline.transitions import Transitions

LOW, HIGH = (-1.0, 0.0), (1.0, 10.0)


def test_target_by_hand():
    # 1 + 0.9 * (min(3, 2) - 0.5) = 2.35, and 5 at a terminal step.
    next_q = torch.tensor([[[3.0, 7.0], [2.0, 8.0]]])
    y = rebrac.penalized_target(
        torch.tensor([[1.0, 5.0]]), torch.tensor([[0.0, 1.0]]), next_q, torch.tensor([[0.5, 9.0]]),
        0.9,
    )  # fmt: skip
    torch.testing.assert_close(y, torch.tensor([[2.35, 5.0]]))


def test_distance_is_the_sum_over_scaled_dimensions():
    # Half ranges 1 and 5: 0.5^2 + 1^2.
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    found = rebrac.distance(torch.tensor([[[0.5, 10.0]]]), torch.tensor([[[0.0, 5.0]]]), low, high)
    torch.testing.assert_close(found, torch.tensor([[1.25]]))


def test_actor_loss_by_hand_and_its_scale_is_a_constant():
    # min: 4, -2; mean 1, mean of sizes 3: 0.1 * 2 - 1/3.
    q = torch.tensor([[[4.0, -1.0], [5.0, -2.0]]], requires_grad=True)
    loss = rebrac.actor_loss(q, torch.tensor([[1.0, 3.0]]), 0.1)
    torch.testing.assert_close(loss, torch.tensor([0.2 - 1 / 3]))
    (slope,) = torch.autograd.grad(loss.sum(), q)
    torch.testing.assert_close(slope, torch.tensor([[[-1 / 6, 0.0], [0.0, -1 / 6]]]))


def paired(timeouts="keep"):
    """Episodes of 3, 2 and 1 steps: cut, terminated, terminated."""
    action = np.arange(6.0)[:, None] / 10
    found = episodes(
        np.arange(9.0)[:, None], action, np.arange(6.0), [3, 2, 1], [False, True, True],
        [True, False, False],
    )  # fmt: skip
    return PairedTransitions(Transitions.from_episodes(found, timeouts=timeouts))


@pytest.mark.parametrize("timeouts", ["keep", "drop"])
def test_each_transition_has_the_action_that_followed_it(timeouts):
    data = paired(timeouts)
    assert data.index.tolist() == [0, 1, 4, 5, 7]
    assert data.report["dropped_unknown_action"] == (1 if timeouts == "keep" else 0)
    assert data.report["transitions"] == 5
    batch = data.batch(data.index[None])
    goes_on = batch.terminated[0] == 0
    assert goes_on.tolist() == [True, True, True, False, False]
    torch.testing.assert_close(batch.obs[0, :, 0], torch.tensor([0.0, 1, 4, 5, 7]))
    torch.testing.assert_close(batch.next_obs[0, goes_on, 0], torch.tensor([1.0, 2, 5]))
    torch.testing.assert_close(batch.action[0, :, 0], torch.tensor([0.0, 0.1, 0.3, 0.4, 0.5]))
    torch.testing.assert_close(batch.next_action[0, goes_on, 0], torch.tensor([0.1, 0.2, 0.4]))
    torch.testing.assert_close(batch.reward[0], torch.tensor([0.0, 1, 3, 4, 5]))
    draws = [torch.Generator().manual_seed(0)]
    assert set(data.draw(200, draws).flatten().tolist()) == {0, 1, 4, 5, 7}


def test_data_without_a_next_action_is_refused():
    found = episodes(np.zeros((4, 1)), np.zeros((2, 1)), np.zeros(2), [1, 1], [False, False])
    with pytest.raises(ValueError, match="next action"):
        PairedTransitions(Transitions.from_episodes(found, timeouts="keep"))


def test_an_update_is_the_papers_equations():
    data = PairedTransitions(random_data(low=LOW, high=HIGH))
    config = ReBRACConfig(batch_size=16, hidden=(8,), compile="off", gamma=0.8, polyak=0.25,
                          critic_penalty=0.3, actor_penalty=0.2, learning_rate=0.02)  # fmt: skip
    made = ReBRAC(config, data, spec(3, LOW, HIGH), (4,))
    with torch.no_grad():
        for p in (*made.target_critic.parameters(), *made.target_actor.parameters()):
            p.mul_(1.1)
    batch = data.batch(data.draw(64, [torch.Generator().manual_seed(0)]))
    assert bool(batch.terminated.any())
    noise = torch.randn(1, 64, 2, generator=rebrac.stream(4, "noise"))
    half = torch.tensor([1.0, 5.0])
    with torch.no_grad():
        there = made.target_actor(batch.next_obs) + half * (0.2 * noise).clamp(-0.5, 0.5)
        there = there.clamp(torch.tensor(LOW), torch.tensor(HIGH))
        far = ((there - batch.next_action) / half).square().sum(2)[0]
        next_q = made.target_critic(batch.next_obs, there)[0].amin(0) - 0.3 * far
        y = batch.reward[0] + 0.8 * (1 - batch.terminated[0]) * next_q
        q = made.critic(batch.obs, batch.action)[0]
        chosen = made.actor(batch.obs)
        before = [p.clone() for p in made.target_critic.parameters()]
        goes_on = batch.terminated[0] == 0
    found = dict(zip(rebrac.STATS, made.update(batch)[:, 0].tolist(), strict=True))
    assert found["loss/critic"] == pytest.approx(float(((q - y) ** 2).mean(1).sum()), rel=1e-4)
    assert found["value/penalty"] == pytest.approx(float(far[goes_on].mean()), rel=1e-4)
    with torch.no_grad():  # the policy by the new critics
        least = made.critic(batch.obs, chosen)[0].amin(0)
        distance = ((chosen - batch.action) / half).square().sum(2).mean()
    expected = 0.2 * distance - least.mean() / least.abs().mean()
    assert found["loss/actor"] == pytest.approx(float(expected), rel=1e-4)
    moved = zip(before, made.critic.parameters(), made.target_critic.parameters(), strict=True)
    for old, source, target in moved:
        torch.testing.assert_close(target, 0.75 * old + 0.25 * source)
    again = made.update(batch)[:, 0].tolist()
    assert again[-3:] == [found[k] for k in rebrac.STATS[-3:]]  # every second update only


def test_the_critics_penalty_lowers_values_where_the_policy_leaves_the_data():
    """Two steps, reward 1 each. In the second state the data plays -0.5 and 0.5, so that a policy
    held near it by `actor_penalty` stands between, 0.25 from each: Q falls by gamma 0.25."""
    n = 64
    obs = np.tile([[0.0], [1.0], [1.0]], (n, 1))
    action = np.stack([np.zeros(n), np.tile([-0.5, 0.5], n // 2)], 1).reshape(-1, 1)
    found = episodes(obs, action, np.ones(2 * n), np.full(n, 2), np.ones(n))
    data = PairedTransitions(Transitions.from_episodes(found))
    values = []
    for penalty in (0.0, 1.0):
        config = ReBRACConfig(
            total_steps=400, batch_size=64, hidden=(16,), learning_rate=1e-2, polyak=0.1,
            gamma=0.5, actor_penalty=100.0, critic_penalty=penalty, target_noise=0.0,
            layer_norm=False, compile="off",
        )  # fmt: skip
        made = ReBRAC(config, data, spec(1))
        training.fit(made, data)
        policy = Policy.from_section(made.policy_section(0))
        assert float(policy(torch.ones(1, 1))) == pytest.approx(0.0, abs=0.1)
        x = torch.zeros(1, 1, 1)
        values.append(float(made.critic(x, x).detach().mean()))
    assert values[0] == pytest.approx(1.5, abs=0.05)
    assert values[0] - values[1] == pytest.approx(0.125, abs=0.03)


def test_penalties_are_those_of_each_data_set(our_names):
    assert len(rebrac.PRESETS) == 18 + 12 + 1
    for name, expected in {
        "hopper-medium-replay-v2": (0.05, 0.5, 1024, 1e-3),
        "halfcheetah-medium-expert-v2": (0.01, 0.1, 1024, 1e-3),
        "pen-human-v1": (0.1, 0.5, 256, 3e-4),
        "maze2d-large-v1": (0.003, 0.001, 256, 3e-4),
        "something-else": (0.01, 0.01, 1024, 1e-3),
    }.items():
        c = read_plan(["--algo", "rebrac", "--dataset", name]).algo_config
        assert (c.actor_penalty, c.critic_penalty, c.batch_size, c.learning_rate) == expected
