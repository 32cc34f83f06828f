import math

import numpy as np
import pytest
import torch
from recorded import episodes, random_data, spec

from ctrl_rl.policy import Policy
from offline import awac, training
from offline.awac import AWAC, AWACConfig
from offline.transitions import Transitions

LOW, HIGH = (-1.0, 0.0), (1.0, 10.0)


def test_drawn_actions_have_the_policys_spread_in_units_and_stay_within_bounds():
    data = random_data(low=LOW, high=HIGH)
    made = AWAC(AWACConfig(hidden=(8,), compile="off"), data, spec(3, LOW, HIGH), (0, 1))
    with torch.no_grad():
        assert made.actor.log_std is not None
        made.actor.log_std[1, 0] = torch.tensor([math.log(0.1), -9.0])  # the latter is held at -5
    obs = torch.zeros(2, 4000, 3)
    noise = torch.randn(2, 4000, 2, generator=torch.Generator().manual_seed(0))
    drawn = awac.drawn(made.actor, obs, noise)
    assert bool((drawn >= torch.tensor(LOW)).all() and (drawn <= torch.tensor(HIGH)).all())
    expected = torch.tensor([0.1, 5 * math.exp(-5)])
    torch.testing.assert_close(drawn[1].std(0), expected, rtol=0.05, atol=0)


def test_an_update_is_the_papers_equations_in_its_order():
    """The critics first; the advantage then is that of the new ones, over an action of pi's own."""
    data = random_data(low=LOW, high=HIGH)
    config = AWACConfig(batch_size=16, hidden=(8,), compile="off", gamma=0.8, polyak=0.25,
                        inverse_temperature=2.0, learning_rate=0.02)  # fmt: skip
    made = AWAC(config, data, spec(3, LOW, HIGH), (4,))
    with torch.no_grad():
        for p in made.target.parameters():
            p.mul_(1.1)
    batch = data.batch(data.draw(16, [torch.Generator().manual_seed(0)]))
    assert bool(batch.terminated.any())
    noise = torch.randn(2, 16, 2, generator=awac.stream(4, "noise"))[:, None]
    with torch.no_grad():
        next_action = awac.drawn(made.actor, batch.next_obs, noise[0])
        next_q = made.target(batch.next_obs, next_action)[0].amin(0)
        y = batch.reward[0] + 0.8 * (1 - batch.terminated[0]) * next_q
        q = made.critic(batch.obs, batch.action)[0]
        log_prob = made.actor.log_prob(batch.obs, batch.action)[0]
        own = awac.drawn(made.actor, batch.obs, noise[1])
        before = [p.clone() for p in made.target.parameters()]
    found = dict(zip(awac.STATS, made.update(batch)[:, 0].tolist(), strict=True))
    assert found["loss/critic"] == pytest.approx(float(((q - y) ** 2).mean(1).sum()), rel=1e-4)
    with torch.no_grad():
        new = made.critic(batch.obs, batch.action)[0].amin(0)
        assert float((new - q.amin(0)).abs().mean()) > 0.02
        weight = (2 * (new - made.critic(batch.obs, own)[0].amin(0))).exp().clamp(max=100)
    assert found["policy/weight"] == pytest.approx(float(weight.mean()), rel=1e-4)
    assert found["loss/actor"] == pytest.approx(float(-(weight * log_prob).mean()), rel=1e-4)
    moved = zip(before, made.critic.parameters(), made.target.parameters(), strict=True)
    for old, source, target in moved:
        torch.testing.assert_close(target, 0.75 * old + 0.25 * source)


@pytest.mark.parametrize(("inverse_temperature", "expected"), [(10.0, 0.4), (0.0, 0.0)])
def test_the_weight_moves_the_policy_and_without_it_this_is_cloning(inverse_temperature, expected):
    """Rewards 0 to 1 for actions -0.5 to 0.5: weights e^(b a) move the mean to
    1/2 coth(b/2) - 1/b, whatever the policy's own value: 0.4 at b = 10."""
    action = np.linspace(-0.5, 0.5, 101)[:, None]
    data = Transitions.from_episodes(
        episodes(np.zeros((202, 1)), action, action[:, 0] + 0.5, np.ones(101), np.ones(101))
    )
    config = AWACConfig(
        total_steps=500, batch_size=64, hidden=(16,), learning_rate=1e-2, polyak=0.1,
        inverse_temperature=inverse_temperature, compile="off",
    )  # fmt: skip
    made = AWAC(config, data, spec(1))
    training.fit(made, data)
    action = float(Policy.from_section(made.policy_section(0))(torch.zeros(1, 1)))
    assert action == pytest.approx(expected, abs=0.06)
