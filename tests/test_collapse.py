"""The collapse monitor against kernels worked out by hand, and on critics that do and do not."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from ctrl_rl.compiled import Diverged, MinibatchStep
from ctrl_rl.networks import EnsembleMLP
from offline.adamo import AdamOConfig, make
from offline.collapse import (
    METRICS,
    CollapseMonitor,
    Probe,
    features,
    kernel,
    legal_bound,
    preconditioner,
    spectral_radius,
)

GAMMA = 0.99


def linear(params, obs, action):
    """Q = w . (s, a), of one network."""
    return torch.cat([obs, action], -1) @ params["w"]


def probe(obs, action, next_obs, next_action, discount=GAMMA):
    return Probe(obs, action, next_obs, next_action, torch.full(obs.shape[:-1], discount))


# Formulas -----------------------------------------------------------------------------------


def test_legal_bound():
    reward, never = torch.tensor([1.0, -2.0, 0.5]), torch.zeros(3)
    assert legal_bound(reward, never, 0.9) == pytest.approx(20)  # |-2| / (1 - 0.9)
    assert legal_bound(reward, torch.tensor([0.0, 1, 0]), 0.9) == pytest.approx(10)
    assert legal_bound(reward, torch.tensor([1.0, 1, 1]), 0.9) == 2  # every step is the last
    assert legal_bound(torch.tensor([0.0, 1.0]), torch.tensor([False, True]), 0.99) == 1  # a goal
    assert legal_bound(torch.tensor([1.0, 30.0]), torch.tensor([0.0, 1.0]), 0.9) == 30
    for bad in (torch.tensor([]), torch.tensor([math.nan])):
        with pytest.raises(ValueError, match="finite rewards"):
            legal_bound(bad, torch.zeros(len(bad)), 0.9)
    with pytest.raises(ValueError, match="not 1.0"):
        legal_bound(reward, never, 1.0)


def test_spectral_radius_of_known_eigenvalues():
    radius = lambda sigma, rate: spectral_radius(torch.tensor(sigma), rate, 0.9).item()  # noqa: E731
    assert radius(-1.0, 0.01) == pytest.approx(0.9889, abs=5e-5)
    assert radius(0.05, 0.01) == pytest.approx(1.0005, abs=5e-5)
    assert radius(-1.0, 37.0) == pytest.approx(0.9**0.5)  # a complex pair, below the limit of 38
    assert radius(-1.0, 38.5) == pytest.approx(1.2, abs=0.05)
    assert radius(-0.2 + 2j, 0.01) == pytest.approx(1.0016, abs=5e-5)  # negative, and yet it grows


def test_spectral_radius_is_that_of_the_matrix():
    draw = np.random.default_rng(0)
    for _ in range(20):
        sigma, rate, b = complex(*draw.normal(size=2)), draw.uniform(0, 40), draw.uniform(0, 0.99)
        rows = [[1 + rate * (1 - b) * sigma, rate * b * sigma], [1 - b, b]]
        expected = np.abs(np.linalg.eigvals(np.array(rows))).max()
        found = spectral_radius(torch.tensor(sigma, dtype=torch.complex128), rate, b).item()
        assert found == pytest.approx(expected, rel=1e-9)


# Kernels ------------------------------------------------------------------------------------


def test_kernel_of_a_linear_critic_by_hand():
    params = {"w": torch.tensor([0.5, -1.0])}
    obs, action = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [3.0]])
    z = features(linear, params, obs, action)
    assert z[0].tolist() == [[1, 0], [2, 3]]  # the input itself
    diagonal = [torch.tensor([1.0, 10.0])]
    # (1 0; 2 3) diag(1, 10) (1 0; 2 3)' = (1 2; 2 4 + 90)
    assert kernel(z, z, diagonal, 1).tolist() == [[[1, 2], [2, 94]]]


def test_figures_of_a_linear_critic_by_hand():
    """x1 = (1, 0), x2 = (0, 2), both followed by (2, 0): K(X, X) = diag(1, 4).

    K(X', X) = (2 0; 2 0); the second transition terminated. S = (2 / 2) (0.99 * 2 - 1, 0; 0, -4)
    has eigenvalues 0.98 and -4, and Frobenius norm sqrt(0.98^2 + 16).
    """
    batch = Probe(
        obs=torch.tensor([[1.0], [0.0]]),
        action=torch.tensor([[0.0], [2.0]]),
        next_obs=torch.tensor([[2.0], [2.0]]),
        next_action=torch.tensor([[0.0], [0.0]]),
        discount=torch.tensor([0.99, 0.0]),
    )
    params = {"w": torch.tensor([3.0, -5.0])}
    monitor = CollapseMonitor(20.0, 0.01)
    found = monitor.check(0, linear, params, batch)
    assert found["collapse/q_max"] == [10]  # |2 * -5|
    assert found["collapse/q_share"] == [0.5]
    assert found["collapse/eigenvalue"] == pytest.approx([0.98])
    normalized = 0.98 / math.hypot(0.98, 4)
    assert found["collapse/eigenvalue_normalized"] == pytest.approx([normalized])
    # mu^2 - (1.9 + 0.001 * 0.98) mu + 0.9 = 0
    assert found["collapse/radius"] == pytest.approx([1.0090668])
    assert "collapse/growth" not in found

    params["w"] = torch.tensor([3.0, -6.0])
    diagonal = {"w": torch.tensor([100.0, 1.0])}
    found = monitor.check(50, linear, params, batch, diagonal)
    assert found["collapse/growth"] == pytest.approx([math.log(12 / 10) / 50])
    assert found["collapse/eigenvalue"] == pytest.approx([98])
    assert found["collapse/eigenvalue_normalized"] == pytest.approx([normalized])
    assert set(found) == set(METRICS)
    half = CollapseMonitor(20.0, 0.01, curvature=1.0).check(0, linear, params, batch)
    assert half["collapse/eigenvalue"] == pytest.approx([0.49])


def test_networks_side_by_side_are_looked_at_apart():
    draw = torch.Generator().manual_seed(0)
    stack = EnsembleMLP(4, (3, 8, 1), "tanh", generator=draw)  # two seeds with two members
    obs, action = torch.randn(2, 5, 2, generator=draw), torch.randn(2, 5, 1, generator=draw)
    next_obs, next_action = torch.randn(2, 5, 2, generator=draw), torch.randn(2, 5, 1)
    batch = probe(obs, action, next_obs, next_action)

    def q_of_all(params, obs, action):
        x = torch.cat([obs, action], -1)[:, None].expand(-1, 2, -1, -1).flatten(0, 1)
        x = torch.tanh(torch.baddbmm(params["layers.0.bias"], x, params["layers.0.weight"]))
        x = torch.baddbmm(params["layers.1.bias"], x, params["layers.1.weight"])
        return x.view(2, 2, -1)

    params = dict(stack.named_parameters())
    together = CollapseMonitor(1e9, 0.01, (0, 1)).check(0, q_of_all, params, batch)

    def q_of_one(params, obs, action):
        x = torch.cat([obs, action], -1)
        x = torch.tanh(x @ params["layers.0.weight"][0] + params["layers.0.bias"][0, 0])
        return (x @ params["layers.1.weight"][0] + params["layers.1.bias"][0, 0])[:, 0]

    for seed in range(2):
        alone = []
        for row in (2 * seed, 2 * seed + 1):
            own = {name: p[row : row + 1] for name, p in params.items()}
            batch_of_seed = Probe(*(x[seed] for x in batch))
            alone.append(CollapseMonitor(1e9, 0.01).check(0, q_of_one, own, batch_of_seed))
        for key in together:
            worst = max(found[key][0] for found in alone)
            assert together[key][seed] == pytest.approx(worst, rel=1e-4, abs=1e-7)
    with pytest.raises(ValueError, match="4 networks side by side"):
        CollapseMonitor(1.0, 0.01, (0, 1, 2)).check(0, q_of_all, params, batch)


def test_adams_diagonal_from_every_layout():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss(module, x):
        return module(x).square().mean(), module(x).detach().mean()[None]

    x = torch.randn(8, 2)
    modules = [network() for _ in range(3)]
    step = MinibatchStep(modules[0], loss, 1e-2, None, epsilon=1e-8)
    optimizers = [
        step.optimizer,
        torch.optim.Adam(modules[1].parameters(), 1e-2),
        make(modules[2], 1e-2, AdamOConfig(strength=0.0)),
    ]
    found = []
    for i, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
        assert preconditioner(optimizer, dict(module.named_parameters())) is None
        if i == 0:
            step(x)
        else:
            loss(module, x)[0].backward()
            optimizer.step()
        found.append(preconditioner(optimizer, dict(module.named_parameters())))
    for name, p in modules[1].named_parameters():
        # after one step vhat = g^2
        torch.testing.assert_close(found[1][name], 1 / (p.grad.abs() + 1e-8), rtol=1e-4, atol=0)
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=0)
        torch.testing.assert_close(found[2][name], found[1][name])
    with pytest.raises(ValueError, match=r"does not hold the critic's 0\.weight"):
        preconditioner(optimizers[1], dict(modules[2].named_parameters()))
    sgd = torch.optim.SGD(modules[1].parameters(), 1e-2, momentum=0.9)
    sgd.step()
    with pytest.raises(ValueError, match="SGD keeps no second moment"):
        for p in modules[1].parameters():
            sgd.state[p]["step"] = 1.0
        preconditioner(sgd, dict(modules[1].named_parameters()))


# What it says -------------------------------------------------------------------------------


def run(successor, steps, every, stop=False):
    """Adam on Q = w x at x = 1, followed by x = `successor`, rewards 1: Q is at most 100.

    With 2 for 1 the target grows faster than Q; with 1 for 1 Q creeps to 100.
    """
    w = nn.Parameter(torch.tensor([0.0]))
    adam = torch.optim.Adam([w], 1e-2)
    bound = legal_bound(torch.ones(1), torch.zeros(1), GAMMA)
    monitor = CollapseMonitor(bound, 1e-2, (7,), stop)
    one, next_one, no_action = torch.ones(1, 1), torch.full((1, 1), successor), torch.ones(1, 0)
    batch = probe(one, no_action, next_one, no_action)
    figures = []
    for step in range(steps + 1):
        if step % every == 0:
            diagonal = preconditioner(adam, {"w": w})
            figures.append(monitor.check(step, linear, {"w": w}, batch, diagonal))
        with torch.no_grad():
            y = 1 + GAMMA * linear({"w": w}, next_one, no_action)
        adam.zero_grad()
        (linear({"w": w}, one, no_action) - y).square().mean().backward()
        adam.step()
    return figures


def test_a_runaway_is_flagged_before_the_bound_is_left():
    with pytest.warns(RuntimeWarning) as warned:
        figures = run(2.0, 2000, 100)
    (text,) = [str(w.message) for w in warned]  # once, though it stays so
    assert text.startswith("the critic of seed 7 is collapsing at update 400: TD errors feed")
    assert text.endswith("grows towards its bound 100")
    assert figures[4]["collapse/q_share"][0] < 0.2
    assert figures[-1]["collapse/q_share"][0] > 0.5
    with pytest.raises(Diverged, match=r"at update 400: TD errors feed .*; try offline\.adamo"):
        run(2.0, 2000, 100, stop=True)


def test_a_healthy_critic_is_not_flagged():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures = run(1.0, 4000, 500)
    shares = [found["collapse/q_share"][0] for found in figures]
    assert shares == sorted(shares)
    assert shares[-1] > 0.3  # it did grow
    assert figures[-1]["collapse/eigenvalue"][0] < 0


def states(w, successor=2.0, **settings):
    """Checks of Q = w x with these weights, 100 updates apart."""
    one = torch.ones(1, 1)
    batch = probe(one, one[:, :0], successor * one, one[:, :0])
    monitor = CollapseMonitor(100.0, 1e-2, **settings)
    found = [
        monitor.check(100 * i, linear, {"w": torch.tensor([x])}, batch) for i, x in enumerate(w)
    ]
    return monitor, found


def test_growth_must_last_and_lead_out_of_the_bound():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states([1.0, 1.1, 1.2, 1.1, 1.2, 1.3])  # not three times in succession
        states([1.0, 1.1, 1.2, 1.3], successor=1.0)  # no feedback
        states([1.0, 1.1, 1.2, 1.3], horizon=1000)  # ln(50 / 1.3) / 0.0008 = 4561 updates away
    for settings in ({}, {"horizon": 6000}):
        with pytest.warns(RuntimeWarning, match="at 3 checks in succession"):
            states([1.0, 1.1, 1.2, 1.3], **settings)
    with pytest.warns(RuntimeWarning, match="at 2 checks in succession"):
        states([1.0, 1.1, 1.2], patience=2)


def test_a_value_that_nobody_can_earn_is_flagged_at_once():
    for w in (51.0, -51.0, math.inf, math.nan):
        with pytest.warns(RuntimeWarning, match="no policy can earn more than 100"):
            _, (found,) = states([w])
    assert "collapse/radius" in found  # a linear critic's gradients do not depend on it
    with pytest.raises(Diverged, match="102, and no policy can earn more than 100"):
        states([51.0], stop=True)


def test_a_state_that_an_episode_ended_in_is_not_judged():
    """No target asks for its value, so nothing is learned there."""
    one = torch.ones(2, 1)
    ended = Probe(one, one[:, :0], 1e6 * one, one[:, :0], torch.zeros(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = CollapseMonitor(100.0, 1e-2).check(0, linear, {"w": torch.tensor([3.0])}, ended)
    assert found["collapse/q_max"] == [3]


def test_state_round_trip():
    monitor, _ = states([1.0, 1.1, 1.2])
    other, _ = states([])
    other.load_state_dict(monitor.state_dict())
    one = torch.ones(1, 1)
    batch = probe(one, one[:, :0], 2 * one, one[:, :0])
    with pytest.warns(RuntimeWarning, match="at 3 checks in succession"):
        found = other.check(300, linear, {"w": torch.tensor([1.3])}, batch)
    assert found["collapse/growth"] == pytest.approx([math.log(1.3 / 1.2) / 100])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said already
        other.check(400, linear, {"w": torch.tensor([1.4])}, batch)


def test_a_bound_of_nothing_is_refused():
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            CollapseMonitor(bound, 1e-3)
