import math

import numpy as np
import pytest
import torch
from recorded import episodes, random_data, spec

from offline import cql, training
from offline.cql import CQL, CQLConfig
from offline.transitions import Transitions


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (0.0, 2.0)])
def test_random_actions_come_from_the_whole_range(bounds):
    """O-23: mean at the centre, extremes at the bounds, log density -3 log 2 for both."""
    low, high = torch.full((3,), bounds[0]), torch.full((3,), bounds[1])
    random = torch.rand(10_000, 3, generator=torch.Generator().manual_seed(0))
    action, log_density = cql.uniform_actions(random, low, high)
    assert float(action.mean()) == pytest.approx(sum(bounds) / 2, abs=0.02)
    assert float(action.min()) == pytest.approx(bounds[0], abs=1e-3)
    assert float(action.max()) == pytest.approx(bounds[1], abs=1e-3)
    assert float(log_density) == pytest.approx(-2.0794, abs=1e-4)


def test_random_actions_of_an_update_come_from_the_whole_range(monkeypatch):
    low, high = (-1.0, 0.0), (1.0, 10.0)
    data = random_data(low=low, high=high)
    made = CQL(CQLConfig(hidden=(8,), compile="off"), data, spec(3, low, high))
    seen, values_of = [], cql.values_of

    def look(critic, obs, drawn):
        seen.append(drawn)
        return values_of(critic, obs, drawn)

    monkeypatch.setattr(cql, "values_of", look)
    made.update(data.batch(data.draw(256, [torch.Generator().manual_seed(0)])))
    assert seen[0].shape == (1, 256, 30, 2)
    anywhere = seen[0][0, :, :10].reshape(-1, 2)
    torch.testing.assert_close(anywhere.amin(0), torch.tensor(low), rtol=0, atol=0.02)
    torch.testing.assert_close(anywhere.amax(0), torch.tensor(high), rtol=0, atol=0.02)
    assert abs(float(anywhere[:, 1].mean()) - 5) < 0.2


def test_gap_by_hand():
    # log(e^(1 - log 0.5) + e^(2 - log 0.25)) - 3 = log(2 e + 4 e^2) - 3; the other critic is 0:
    # log(2 + 4) - 0.
    q_drawn = torch.tensor([[[[1.0, 2.0]], [[0.0, 0.0]]]])
    log_density = torch.tensor([[[math.log(0.5), math.log(0.25)]]])
    q_data = torch.tensor([[[3.0], [0.0]]])
    expected = [math.log(2 * math.e + 4 * math.e**2) - 3, math.log(6)]
    torch.testing.assert_close(cql.gaps(q_drawn, log_density, q_data), torch.tensor([expected]))


def test_actor_and_temperature_loss_by_hand():
    # alpha 0.5: mean(0.5 * 2 - min(1, 3), 0.5 * -4 - min(5, 4)) = mean(0, -6) = -3.
    log_prob = torch.tensor([[2.0, -4.0]])
    q = torch.tensor([[[1.0, 5.0], [3.0, 4.0]]])
    found = cql.actor_loss(log_prob, q, torch.tensor([0.5]))
    torch.testing.assert_close(found, torch.tensor([-3.0]))
    # log alpha 2, entropy 1, target -1: 2 * (1 + 1) = 4.
    found = cql.temperature_loss(torch.tensor([2.0]), log_prob, -1.0)
    torch.testing.assert_close(found, torch.tensor([4.0]))


def test_an_update_is_the_papers_equations():
    """Every drawn action is valued in s, by its own density; the target is of s'."""
    data, low, high = random_data(), torch.full((2,), -1.0), torch.full((2,), 1.0)
    config = CQLConfig(batch_size=4, hidden=(8,), compile="off", num_actions=3, gamma=0.8,
                       conservatism=2.0)  # fmt: skip
    made, twin = (CQL(config, data, spec(3, (-1.0, -1.0), (1.0, 1.0)), (0,)) for _ in range(2))
    with torch.no_grad():  # a policy that depends on the state, and a target that differs
        for each in (made, twin):
            each.actor.net.layers[1].weight.mul_(50)
            for p in each.target.parameters():
                p.mul_(1.1)
    batch = data.batch(data.draw(4, [torch.Generator().manual_seed(3)]))
    found = dict(zip(cql.STATS, made.update(batch)[:, 0].tolist(), strict=True))

    random, noise = cql.uniform(twin.noise, 4, 3, 2)[0], cql.normal(twin.noise, 8, 4, 2)[0]
    actor, critic = twin.actor, twin.critic

    def drawn(obs, z):  # one action of each state, by the textbook's formula
        mean, log_std = actor.net(obs[None])[0, 0].chunk(2, -1)
        std = log_std.clamp(-20, 2).exp()
        u = mean + std * z
        density = torch.distributions.Normal(mean, std).log_prob(u) - (1 - u.tanh() ** 2).log()
        return u.tanh(), density.sum(-1)

    with torch.no_grad():
        obs, next_obs = batch.obs[0], batch.next_obs[0]
        kinds = [(2 * random[:, i] - 1, torch.full((4,), -2 * math.log(2))) for i in range(3)]
        kinds += [drawn(obs, noise[i]) for i in range(3)]
        kinds += [drawn(next_obs, noise[i]) for i in range(3, 6)]
        q = critic(batch.obs, batch.action)[0]
        values = torch.stack([critic(obs[None], a[None])[0] - d for a, d in kinds], -1)
        gap = (values.logsumexp(-1) - q).mean(1)
        next_q = twin.target(next_obs[None], drawn(next_obs, noise[6])[0][None])[0].amin(0)
        y = batch.reward[0] + 0.8 * (1 - batch.terminated[0]) * next_q
        loss = ((q - y) ** 2).mean(1).sum() + 2.0 * gap.sum()
        entropy = -drawn(obs, noise[7])[1].mean()
    assert found["value/gap"] == pytest.approx(float(gap.mean()), rel=1e-4)
    assert found["loss/critic"] == pytest.approx(float(loss), rel=1e-4)
    assert found["policy/entropy"] == pytest.approx(float(entropy), rel=1e-4)
    assert found["policy/temperature"] == pytest.approx(1.0)
    assert bool((low < high).all())


def narrow() -> Transitions:
    """One step, reward 1 whatever the action; actions within -0.1..0.1."""
    action = np.random.default_rng(0).uniform(-0.1, 0.1, (256, 1))
    return Transitions.from_episodes(
        episodes(np.zeros((512, 1)), action, np.ones(256), np.ones(256), np.ones(256))
    )


def test_conservatism_values_the_datas_actions_above_others():
    """And without it nothing does: the negative control."""
    found = {}
    for conservatism in (0.0, 1.0):
        config = CQLConfig(
            total_steps=200, batch_size=64, hidden=(16,), conservatism=conservatism,
            learning_rate=1e-2, num_actions=4, compile="off",
        )  # fmt: skip
        made = CQL(config, narrow(), spec(1))
        training.fit(made, narrow())
        at = torch.tensor([[[0.0], [0.9], [-0.9]]])
        inside, *outside = made.critic(torch.zeros(1, 3, 1), at)[0].mean(0).tolist()
        found[conservatism] = inside - max(outside)
    assert abs(found[0.0]) < 0.3
    assert found[1.0] > 1.0


def test_the_factor_by_hand():
    # lambda 2, conservatism 3, gaps 5 and 1 for a target of 4: 2 * 3 * (4 - 5), 2 * 3 * (4 - 1).
    found = cql.factor_loss(torch.tensor([2.0, 2.0]), 3.0, torch.tensor([5.0, 1.0]), 4.0)
    assert found.tolist() == [-6.0, 18.0]


def test_the_factor_weighs_the_gap_and_follows_it():
    """A gap above its target raises lambda, one below lowers it; without a target it stays 1."""
    data, start = narrow(), math.log(0.5)
    batch = data.batch(data.draw(64, [torch.Generator().manual_seed(0)]))
    losses = {}
    for target, moves in ((-1e3, 1.0), (1e3, -1.0), (None, 0.0)):
        config = CQLConfig(hidden=(16,), conservatism=3.0, num_actions=4, target_gap=target,
                           learning_rate=1e-3, compile="off")  # fmt: skip
        made = CQL(config, data, spec(1))
        made.factor.log.data.fill_(start)
        found = dict(zip(cql.STATS, made.update(batch)[:, 0].tolist(), strict=True))
        assert found["value/conservatism"] == pytest.approx(1.5)
        losses[target] = found["loss/critic"]
        assert made.factor.log.item() == pytest.approx(start + 1e-3 * moves, abs=1e-5)
    assert len({round(loss, 5) for loss in losses.values()}) == 1  # this update had the old lambda


def test_the_gap_falls_to_its_target_and_hardly_further():
    """In one state nothing raises it again; a constant factor lets it fall on and on."""
    gaps = {}
    for target in (-1.0, 1.0, None):
        config = CQLConfig(
            total_steps=1500, batch_size=64, hidden=(16,), conservatism=0.1, target_gap=target,
            learning_rate=1e-2, num_actions=4, compile="off",
        )  # fmt: skip
        run = training.fit(CQL(config, narrow(), spec(1)), narrow())
        gaps[target] = run.rows[-1]["value/gap"]
        weights = [row["value/conservatism"] for row in run.rows]
        if target is None:
            assert weights == pytest.approx([0.1] * len(weights))
        else:
            assert weights[-1] < 0.2 * max(weights)
    assert -4.0 < gaps[-1.0] < -1.0 and -1.0 < gaps[1.0] < 1.0
    assert gaps[None] < -5.0
