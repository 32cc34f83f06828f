import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from recorded import episodes, random_data, spec

from ctrl_rl.policy import Policy
from offline import edac, training
from offline.commands.train import read_plan
from offline.edac import EDAC, EDACConfig
from offline.networks import StackedQ
from offline.transitions import Transitions

LOW, HIGH = (-1.0, 0.0), (1.0, 10.0)


def test_target_by_hand():
    # 1 + 0.9 * (min(3, 2, 4) - 0.5 * (-2)) = 3.7, and 5 at a terminal step.
    next_q = torch.tensor([[[3.0, 7.0], [2.0, 8.0], [4.0, 9.0]]])
    y = edac.soft_target(
        torch.tensor([[1.0, 5.0]]), torch.tensor([[0.0, 1.0]]), next_q,
        torch.tensor([[-2.0, 1.0]]), torch.tensor([0.5]), 0.9,
    )  # fmt: skip
    torch.testing.assert_close(y, torch.tensor([[3.7, 5.0]]))


def test_similarity_by_hand():
    """Three critics; samples: all along x (6 pairs of 1, halved: 3); x, y, -x: -2/2 = -1."""
    gradient = torch.tensor([[[[2.0, 0], [1, 0]], [[5, 0], [0, 3]], [[1, 0], [-2, 0]]]])
    torch.testing.assert_close(edac.similarity(gradient), torch.tensor([1.0]))
    # negative control: a slow loop over pairs of random gradients
    gradient = torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(0))
    unit = gradient / gradient.norm(dim=3, keepdim=True)
    pairs = [(unit[:, i] * unit[:, j]).sum(2) for i in range(4) for j in range(4) if i != j]
    expected = torch.stack(pairs).sum(0).mean(1) / 3
    torch.testing.assert_close(edac.similarity(gradient), expected)


@pytest.mark.parametrize("activation", ["relu", "elu", "tanh"])
def test_the_gradient_by_the_action_is_autograds_and_can_be_derived_again(activation):
    draws = [torch.Generator().manual_seed(i) for i in range(2)]
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    critic = StackedQ(3, 4, low, high, (8, 7), activation, draws)
    obs = torch.randn(2, 5, 4, generator=draws[0])
    action = (torch.rand(2, 5, 2, generator=draws[0]) * (high - low) + low).requires_grad_()
    found = edac.action_gradient(critic, obs, action, activation)
    assert found.shape == (2, 3, 5, 2)
    q = critic(obs, action)
    for j in range(3):
        (own,) = torch.autograd.grad(q[:, j].sum(), action, create_graph=True)
        torch.testing.assert_close(found[:, j], own * (high - low) / 2)  # of scaled actions
        if j == 1:
            mine, autograds = (
                torch.autograd.grad(
                    (x.square()).sum(), critic.net.layers[1].weight, retain_graph=True
                )
                for x in (found[:, j], own * (high - low) / 2)
            )
            torch.testing.assert_close(mine[0], autograds[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("diversity", [0.0, 2.0])
def test_an_update_is_the_papers_equations_in_its_order(diversity):
    """Policy and alpha first: the target is that of the new ones."""
    data = random_data(low=LOW, high=HIGH)
    config = EDACConfig(batch_size=16, hidden=(8,), compile="off", gamma=0.8, polyak=0.25,
                        critics=4, diversity=diversity, learning_rate=0.02)  # fmt: skip
    made = EDAC(config, data, spec(3, LOW, HIGH), (4,))
    with torch.no_grad():
        for p in made.target.parameters():
            p.mul_(1.1)
        made.actor.log_temperature.fill_(-1.0)
    batch = data.batch(data.draw(16, [torch.Generator().manual_seed(0)]))
    assert bool(batch.terminated.any())
    noise = torch.randn(2, 16, 2, generator=edac.stream(4, "noise"))[:, None]
    with torch.no_grad():
        action, log_prob = made.actor.draw(batch.obs, noise[0])
        alpha = math.exp(-1)
        l_pi = (alpha * log_prob - made.critic(batch.obs, action).amin(1)).mean()
        l_alpha = (-1.0 * (-log_prob - (-2.0))).mean()
        q = made.critic(batch.obs, batch.action)[0]
        alike = edac.similarity(
            edac.action_gradient(made.critic, batch.obs, batch.action, "relu"))[0]  # fmt: skip
        old = deepcopy(made.target)
    found = dict(zip(edac.STATS, made.update(batch)[:, 0].tolist(), strict=True))
    assert found["loss/actor"] == pytest.approx(float(l_pi + l_alpha), rel=1e-4)
    with torch.no_grad():  # the policy has moved by now, the target is that of before
        there, log_there = made.actor.draw(batch.next_obs, noise[1])
        alpha = made.actor.log_temperature.exp()
        assert abs(float(alpha) - math.exp(-1)) > 1e-3
        next_v = old(batch.next_obs, there)[0].amin(0) - alpha * log_there[0]
        y = batch.reward[0] + 0.8 * (1 - batch.terminated[0]) * next_v
    loss = ((q - y) ** 2).mean(1).sum() + diversity * alike
    assert found["loss/critic"] == pytest.approx(float(loss), rel=1e-4)
    assert found["value/spread"] == pytest.approx(float(q.std(0).mean()), rel=1e-4)
    assert found["value/similarity"] == pytest.approx(float(alike) if diversity else 0.0, rel=1e-4)
    assert found["policy/entropy"] == pytest.approx(-float(log_prob.mean()), rel=1e-4)
    nets = (old, made.critic, made.target)
    for was, source, now in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(now, 0.75 * was + 0.25 * source)


def test_log_density_is_that_of_scaled_actions():
    """Half ranges 1 and 5 differ by log 5 from the density in units."""
    data = random_data(low=LOW, high=HIGH)
    made = EDAC(EDACConfig(hidden=(8,), compile="off"), data, spec(3, LOW, HIGH))
    noise = torch.zeros(1, 1, 2)
    action, log_prob = made.actor.draw(torch.zeros(1, 1, 3), noise)
    # At obs 0 with zero biases mean = log_std = 0: log N(0) + 0 twice, slope 1 at u = 0.
    torch.testing.assert_close(log_prob, torch.full((1, 1), -math.log(2 * math.pi)))
    torch.testing.assert_close(action, torch.tensor([[[0.0, 5.0]]]))
    assert made.actor.target_entropy == -2.0


def edges() -> Transitions:
    """One step; rewards a for actions within -0.5..0: beyond, nothing is known."""
    draw = np.random.default_rng(0)
    action = draw.uniform(-0.5, 0.0, (256, 2))
    reward = action[:, 0]
    return Transitions.from_episodes(
        episodes(np.zeros((512, 1)), action, reward, np.ones(256), np.ones(256))
    )


def learned(**changes):
    small = {"total_steps": 400, "batch_size": 64, "hidden": (16, 16), "compile": "off"}
    config = EDACConfig(**small | {"learning_rate": 5e-3, "critics": 6} | changes)
    data = edges()
    made = EDAC(config, data, spec(1, (-1.0, -1.0), (1.0, 1.0)))
    run = training.fit(made, data)
    far = torch.tensor([[[0.9, 0.9], [0.9, -0.9]]])
    spread = made.critic(torch.zeros(1, 2, 1), far).detach().std(1).mean()
    return made, run.rows[-1], float(spread)


def test_diversity_keeps_the_critics_apart_and_spreads_them_outside_the_data():
    _, with_it, wide = learned(diversity=5.0)
    made, without, narrow = learned(diversity=0.0)
    assert with_it["value/similarity"] < 2.0 and without["value/similarity"] == 0.0
    gradient = edac.action_gradient(
        made.critic, torch.zeros(1, 64, 1), torch.rand(1, 64, 2) / 2 - 0.5, "relu"
    )
    assert float(edac.similarity(gradient).detach()) > 4.0  # of at most 5: they agree
    assert wide > 1.5 * narrow
    policy = Policy.from_section(made.policy_section(0))
    assert bool((policy(torch.zeros(3, 1)).abs() <= 1).all())


def test_settings_of_each_data_set(our_names):
    for name, expected in {
        "hopper-medium-v2": (50, 1.0, 3_000_000),
        "walker2d-medium-expert-v2": (10, 5.0, 3_000_000),
        "halfcheetah-medium-replay-v2": (10, 1.0, 3_000_000),
        "our-own": (10, 1.0, 1_000_000),
    }.items():
        c = read_plan(["--algo", "edac", "--dataset", name]).algo_config
        assert (c.critics, c.diversity, c.total_steps) == expected
