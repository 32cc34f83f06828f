import math

import numpy as np
import pytest
import torch
from recorded import episodes, random_data, spec

from ctrl_rl.policy import Policy
from offline import iql, training
from offline.iql import IQL, IQLConfig
from offline.networks import dropout_masks
from offline.transitions import Batch, Transitions


def test_value_loss_by_hand():
    # expectile 0.7: (0.7 * 4 + 0.3 * 1) / 2 = 1.55; at 0.5 half the mean square, 1.25.
    advantage = torch.tensor([[2.0, -1.0]])
    torch.testing.assert_close(iql.expectile_loss(advantage, 0.7), torch.tensor([1.55]))
    torch.testing.assert_close(iql.expectile_loss(advantage, 0.5), torch.tensor([1.25]))


def test_critic_loss_by_hand():
    # mean(1, 4) + mean(0, 9) = 7.
    q, y = torch.tensor([[[1.0, 2.0], [2.0, 3.0]]]), torch.tensor([[2.0, 0.0]])
    torch.testing.assert_close(iql.critic_loss(q, y), torch.tensor([7.0]))


def test_weights_by_hand_never_exceed_their_bound_or_overflow():
    found = iql.weights_of(torch.tensor([[0.0, 0.5, -1.0, 2.0, 1e6]]), 3.0)
    expected = [1.0, math.exp(1.5), math.exp(-3.0), 100.0, 100.0]
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_actor_loss_by_hand():
    weight, log_prob = torch.tensor([[1.0, 2.0]]), torch.tensor([[-3.0, 0.5]])
    torch.testing.assert_close(iql.actor_loss(weight, log_prob), torch.tensor([1.0]))


@pytest.mark.parametrize("deterministic", [False, True])
def test_log_density_is_that_of_scaled_actions(deterministic):
    low, high = (-1.0, 0.0), (1.0, 10.0)
    data = random_data(low=low, high=high)
    config = IQLConfig(hidden=(8,), compile="off", deterministic=deterministic)
    actor = IQL(config, data, spec(3, low, high), (0, 1)).actor
    obs = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    mean = actor.mean(obs)
    action = mean + torch.tensor([0.5, 5.0])
    if deterministic:  # errors 0.5 and 1, scaled
        torch.testing.assert_close(actor.log_prob(obs, action), torch.full((2, 5), -1.25))
        assert not actor.noise_std(0).any()
        return
    with torch.no_grad():
        actor.log_std[1, 0] = torch.tensor([math.log(0.5), -9.0])  # the latter is held at -5
    normal = torch.distributions.Normal
    first = normal(0, 1.0).log_prob(torch.tensor([0.5, 1.0])).sum()
    second = normal(torch.zeros(2), torch.tensor([0.5, math.exp(-5)])).log_prob(
        torch.tensor([0.5, 1.0])).sum()  # fmt: skip
    expected = torch.stack([first, second])[:, None].expand(2, 5)
    torch.testing.assert_close(actor.log_prob(obs, action), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actor.noise_std(1), torch.tensor([0.5, 5 * math.exp(-5)]))


def test_an_update_is_the_papers_equations():
    """The advantage is of before V's step, V(s') of after it; checked on one batch."""
    data = random_data()
    config = IQLConfig(batch_size=16, hidden=(8,), compile="off", expectile=0.9, gamma=0.8,
                       inverse_temperature=2.0, polyak=0.25)  # fmt: skip
    made = IQL(config, data, spec(3, (-1.0, -1.0), (1.0, 1.0)), (0,))
    with torch.no_grad():  # so that target and critic differ
        for p in made.target.parameters():
            p.mul_(1.1)
    batch = data.batch(data.draw(16, [torch.Generator().manual_seed(0)]))
    assert bool(batch.terminated.any())
    with torch.no_grad():
        v = made.value(batch.obs)[0, 0, :, 0]
        advantage = made.target(batch.obs, batch.action)[0].amin(0) - v
        q = made.critic(batch.obs, batch.action)[0]
        log_prob = made.actor.log_prob(batch.obs, batch.action)[0]
        before = [p.clone() for p in made.target.parameters()]
    found = dict(zip(iql.STATS, made.update(batch)[:, 0].tolist(), strict=True))
    with torch.no_grad():
        next_v = made.value(batch.next_obs)[0, 0, :, 0]
    y = batch.reward[0] + 0.8 * (1 - batch.terminated[0]) * next_v
    weight = (2 * advantage).exp().clamp(max=100)
    side = torch.where(advantage < 0, 0.1, 0.9)
    assert found["loss/value"] == pytest.approx(float((side * advantage**2).mean()), rel=1e-4)
    assert found["loss/critic"] == pytest.approx(float(((q - y) ** 2).mean(1).sum()), rel=1e-4)
    assert found["loss/actor"] == pytest.approx(float(-(weight * log_prob).mean()), rel=1e-4)
    assert found["value/v"] == pytest.approx(float(v.mean()), rel=1e-4)
    assert found["value/q"] == pytest.approx(float(q.mean()), rel=1e-4)
    assert found["policy/weight"] == pytest.approx(float(weight.mean()), rel=1e-4)
    moved = zip(before, made.critic.parameters(), made.target.parameters(), strict=True)
    for old, source, target in moved:
        torch.testing.assert_close(target, 0.75 * old + 0.25 * source)


def test_the_policys_step_size_falls_along_half_a_cosine():
    data = random_data()
    config = IQLConfig(total_steps=100, batch_size=8, hidden=(8,), compile="off")
    made = IQL(config, data, spec(3, (-1.0, -1.0), (1.0, 1.0)))
    batch = data.batch(data.draw(8, [torch.Generator().manual_seed(0)]))
    rates = []
    for _ in range(100):
        made.update(batch)
        rates.append(float(made.actor_step.learning_rate))
    assert rates[0] == pytest.approx(3e-4) and rates[50] == pytest.approx(1.5e-4)
    assert rates[-1] == pytest.approx(3e-4 / 2 * (1 + math.cos(0.99 * math.pi)), rel=1e-4)
    assert float(made.value_step.learning_rate) == pytest.approx(3e-4)


def test_dropout_cuts_the_policys_hidden_units_by_its_seeds_own_draws():
    data = random_data()
    config = IQLConfig(batch_size=16, hidden=(8, 6), compile="off", dropout=0.25)
    of_spec = spec(3, (-1.0, -1.0), (1.0, 1.0))
    made, alone = IQL(config, data, of_spec, (4, 5)), IQL(config, data, of_spec, (5,))
    states = [g.get_state() for g in made.noise]
    masks = dropout_masks(made.noise, 0.25, 16, (8, 6))
    assert [m.shape for m in masks] == [(2, 16, 8), (2, 16, 6)]
    for generator, state in zip(made.noise, states, strict=True):
        generator.set_state(state)
    batch = data.batch(data.draw(16, [torch.Generator().manual_seed(s) for s in (0, 1)]))
    with torch.no_grad():
        x = batch.obs
        for layer, mask in zip(made.actor.mean.net.layers[:-1], masks, strict=True):
            x = torch.relu(torch.baddbmm(layer.bias, x, layer.weight)) * mask
        last = made.actor.mean.net.layers[-1]
        mean = torch.tanh(torch.baddbmm(last.bias, x, last.weight))
        advantage = made.target(batch.obs, batch.action).amin(1) - made.value(batch.obs)[:, 0, :, 0]
        log_prob = torch.distributions.Normal(mean, 1.0).log_prob(batch.action).sum(2)
        expected = -(iql.weights_of(advantage, 3.0) * log_prob).mean(1)
    found = made.update(batch)[iql.STATS.index("loss/actor")]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    lone = alone.update(Batch(*(x[1:] for x in batch)))[iql.STATS.index("loss/actor")]
    torch.testing.assert_close(lone, expected[1:], rtol=1e-4, atol=1e-4)


def test_masks_of_dropout_keep_the_mean():
    generators = [torch.Generator().manual_seed(s) for s in (0, 1)]
    mask = dropout_masks(generators, 0.25, 20_000, (3,))[0]
    torch.testing.assert_close(mask.unique(), torch.tensor([0, 4 / 3]))
    torch.testing.assert_close(mask.mean((1, 2)), torch.ones(2), atol=0.01, rtol=0)
    assert not torch.equal(mask[0], mask[1])
    assert dropout_masks(generators, 0.0, 4, (3,)) == []


def test_a_run_with_dropout_goes_on_as_if_it_had_never_stopped():
    data = random_data()
    config = IQLConfig(batch_size=16, hidden=(8,), compile="off", dropout=0.5)
    make = lambda: IQL(config, data, spec(3, (-1.0, -1.0), (1.0, 1.0)), (0, 1))  # noqa: E731
    batch = data.batch(data.draw(16, [torch.Generator().manual_seed(s) for s in (0, 1)]))
    first, second = make(), make()
    first.update(batch)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first.update(batch), second.update(batch), rtol=0, atol=0)


def bandit() -> Transitions:
    """One step; rewards 0 to 1 for actions -0.5 to 0.5."""
    action = np.linspace(-0.5, 0.5, 101)[:, None]
    return Transitions.from_episodes(
        episodes(np.zeros((202, 1)), action, action[:, 0] + 0.5, np.ones(101), np.ones(101))
    )


def learned(**changes) -> tuple[float, float]:
    """V and the policy's action."""
    config = IQLConfig(**{"total_steps": 500, "batch_size": 64, "hidden": (16,), "polyak": 0.1,
                       "learning_rate": 1e-2, "compile": "off"} | changes)  # fmt: skip
    made = IQL(config, bandit(), spec(1))
    training.fit(made, bandit())
    policy = Policy.from_section(made.policy_section(0))
    return made.value(torch.zeros(1, 1, 1)).item(), float(policy(torch.zeros(1, 1)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_expectile_and_inverse_temperature_do_what_they_say(deterministic):
    """V is the expectile of a uniform reward, sqrt(t) / (sqrt(t) + sqrt(1 - t)): 0.75 at 0.9.

    The policy's mean is that of actions a weighted by exp(b a): -0.5 to 0.5 at b = 5 gives
    1/2 coth(5/2) - 1/5 = 0.3068; at 0 it is 0.
    """
    value, action = learned(expectile=0.9, inverse_temperature=5.0, deterministic=deterministic)
    assert value == pytest.approx(0.75, abs=0.03)
    assert action == pytest.approx(0.3068, abs=0.05)
    value, action = learned(expectile=0.5, inverse_temperature=0.0, deterministic=deterministic)
    assert value == pytest.approx(0.5, abs=0.03)
    assert action == pytest.approx(0.0, abs=0.05)
