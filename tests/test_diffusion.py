"""Segments, the noise schedule, the losses and both guides, against hand arithmetic."""

import math

import numpy as np
import pytest
import torch

from offline.diffusion import (
    Models,
    PlanConfig,
    add_noise,
    clean_plan,
    cosine_schedule,
    diffusion_loss,
    draw_plans,
    guide_gradient,
    models_loss,
    plan_consistency,
    plan_return,
)
from offline.episodes import Episodes
from offline.segments import Segments
from offline.unet import TemporalUNet

nothing = torch.zeros_like


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def episodes(lengths, seed=0, known=None, scale=1.0):
    """Random episodes whose first observation column counts the steps of the task."""
    rng, t, e = np.random.default_rng(seed), sum(lengths), len(lengths)
    obs = scale * rng.normal(size=(t + e, 2)).astype("f4")
    obs[:, 0] = np.arange(t + e)
    return Episodes(
        obs=obs,
        action=rng.normal(size=(t, 1)).astype("f4"),
        reward=rng.normal(size=t).astype("f4"),
        lengths=np.array(lengths),
        terminated=np.zeros(e, bool),
        truncated=np.ones(e, bool),
        final_known=np.ones(e, bool) if known is None else np.array(known),
    )


# Segments -----------------------------------------------------------------------------------


def test_segments_lie_within_an_episode_and_know_their_task():
    first, second = episodes([3, 5]), episodes([4], seed=1)
    data = Segments([first, second], 3)
    assert len(data) == 1 + 3 + 2  # of 3, 5 and 4 steps
    plan, task = data.draw_segments(500, seeded())
    raw = data.scale.undo(plan)
    starts = {(int(t), round(float(x))) for t, x in zip(task, raw[:, 0, 0], strict=True)}
    assert starts == {(0, 0), (0, 4), (0, 5), (0, 6), (1, 0), (1, 1)}
    for t, segment in zip(task[:50], raw, strict=False):
        source = (first, second)[t]
        row = round(float(segment[0, 0]))
        assert segment[:, 0].round().tolist() == [row, row + 1, row + 2]
        step = row - int(np.searchsorted(source.obs_starts, row, "right") - 1)
        np.testing.assert_allclose(segment[:, 2], source.action[step : step + 3, 0], atol=1e-5)
        np.testing.assert_allclose(segment[:, 1], source.obs[row : row + 3, 1], atol=1e-5)


def test_one_normalisation_for_all_tasks():
    tasks = [episodes([6], seed=0), episodes([9], seed=1, scale=20.0)]
    data = Segments(tasks, 2)
    acted = np.concatenate([e.obs[e.step_rows()] for e in tasks])
    np.testing.assert_allclose(data.scale.mean[:2], acted.mean(0), rtol=1e-5)
    np.testing.assert_allclose(data.scale.std[:2], acted.std(0) + 1e-3, rtol=1e-5)
    reward = np.concatenate([e.reward for e in tasks])
    assert data.scale.mean[3].item() == pytest.approx(reward.mean(), abs=1e-6)
    assert data.scale.low[0].item() == pytest.approx(
        -acted[:, 0].mean() / data.scale.std[0].item(), rel=1e-4
    )
    x = torch.randn(5, 4)
    torch.testing.assert_close(data.scale.undo(data.scale.apply(x)), x)
    torch.testing.assert_close(data.scale.apply(x)[:, 2:3], data.scale.apply(x[:, 2:3], first=2))


def test_transitions_lead_to_the_next_row_and_never_to_an_unknown_one():
    source = episodes([3, 4], known=[False, True])
    data = Segments([episodes([5], seed=1), source], 2)
    found = data.draw_transitions(torch.tensor([1, 0, 1]), 400, seeded())
    assert found.shape == (3, 400, 6)
    before = data.scale.undo(found[0, :, :4])
    after = data.scale.undo(found[0, :, 4:])
    torch.testing.assert_close(after[:, 0], before[:, 0] + 1, rtol=0, atol=1e-4)
    # episode 0 has rows 0..3, its last step (row 2) leads to a row that is not known
    assert set(before[:, 0].round().int().tolist()) == {0, 1, 4, 5, 6, 7}
    row = before[:, 0].round().int() == 5
    torch.testing.assert_close(before[row][0, 3].item(), float(source.reward[4]), rtol=0, atol=1e-5)


def test_half_of_the_contexts_come_from_one_episode():
    data = Segments([episodes([4] * 10), episodes([4] * 10, seed=1)], 2)
    task = torch.arange(2).repeat(500)
    found = data.draw_contexts(task, 6, seeded())
    rows = data.scale.undo(found[..., :1])[..., 0].round().long()
    single = ((rows // 5) == (rows[:, :1] // 5)).all(1)
    assert single.float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert len((rows[single] // 5)[:, 0].unique()) == 10


@pytest.mark.parametrize(
    ("tasks", "horizon", "message"),
    [
        ([], 2, "no task"),
        ([episodes([3]), episodes([3])], 4, "no episode has 4 steps; the longest has 3"),
        ([episodes([1], known=[False])], 1, "task 0 has no transition"),
    ],
)
def test_data_without_segments_is_refused(tasks, horizon, message):
    with pytest.raises(ValueError, match=message):
        Segments(tasks, horizon)


def test_data_with_nan_is_refused_with_its_place():
    bad = episodes([3, 3])
    bad.reward[4] = np.nan
    with pytest.raises(ValueError, match="task 1: reward row 4 is not finite"):
        Segments([episodes([3]), bad], 2)


# The schedule and the loss ------------------------------------------------------------------


def test_the_cosine_schedule_by_hand():
    schedule = cosine_schedule(4)
    f = [math.cos((k / 4 + 0.008) / 1.008 * math.pi / 2) ** 2 for k in range(5)]
    for k in (1, 2, 3):  # before beta is bounded, alpha_bar is f_k / f_0
        assert schedule.alpha_bar[k].item() == pytest.approx(f[k] / f[0], rel=1e-5)
    assert schedule.alpha_bar[0] == 1
    assert schedule.alpha_bar[4].item() == pytest.approx(0.001 * f[3] / f[0], rel=1e-4)
    assert (schedule.of_clean[1], schedule.variance[1]) == (1, 0)
    assert schedule.of_noisy[1].item() == pytest.approx(0, abs=1e-6)


def test_a_step_back_gives_the_marginal_of_the_step_before():
    """With the true plan for tau_hat: mean sqrt(a_{k-1}) tau, variance 1 - a_{k-1}."""
    s = cosine_schedule(10)
    for k in range(1, 11):
        mean = s.of_clean[k] + s.of_noisy[k] * s.alpha_bar[k].sqrt()
        assert mean.item() == pytest.approx(s.alpha_bar[k - 1].sqrt().item(), abs=1e-5)
        variance = s.of_noisy[k] ** 2 * (1 - s.alpha_bar[k]) + s.variance[k]
        assert variance.item() == pytest.approx(1 - s.alpha_bar[k - 1].item(), abs=1e-5)


def test_noise_is_added_and_taken_away_and_the_first_observation_is_kept():
    schedule, plan, noise = cosine_schedule(8), torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    k = torch.tensor([1, 5, 8])
    noisy = add_noise(plan, noise, k, schedule, obs_size=2)
    assert torch.equal(noisy[:, 0, :2], plan[:, 0, :2])
    share = schedule.alpha_bar[5]
    wanted = share.sqrt() * plan[1, 2, 3] + (1 - share).sqrt() * noise[1, 2, 3]
    assert noisy[1, 2, 3].item() == pytest.approx(wanted.item(), rel=1e-6)
    assert noisy[1, 0, 2] != plan[1, 0, 2]  # the first action is not known
    back = clean_plan(noise, noisy, k, schedule, "eps")
    torch.testing.assert_close(back[:, 1:], plan[:, 1:], rtol=0, atol=2e-4)
    assert clean_plan(noise, noisy, k, schedule, "x0") is noise


def test_the_diffusion_loss_by_hand():
    # H = 2, d = 1, A = 1; errors: first obs 7 (given), first action 2, then 3 and 1
    output = torch.tensor([[[7.0, 2.0], [3.0, -1.0]]])
    # (0 * 49 + 10 * 4 + 9 + 1) / 4 = 12.5
    assert diffusion_loss(output, torch.zeros(1, 2, 2), 1, 10.0).item() == pytest.approx(12.5)
    # mean over B: a second plan without an error halves it
    two = torch.cat([output, torch.zeros(1, 2, 2)])
    assert diffusion_loss(two, torch.zeros(2, 2, 2), 1, 10.0).item() == pytest.approx(6.25)


# Models and guides --------------------------------------------------------------------------


class ByHand(Models):
    """R = 2 s + a + z, P = s + a/2 - z, for one column of each."""

    def __init__(self):
        super().__init__(1, 1, 1, (4,), seeded())

    def reward(self, obs, action, z):
        return (2 * obs + action + z)[..., 0]

    def next_obs(self, obs, action, z):
        return obs + action / 2 - z


def test_the_models_loss_by_hand():
    # s 1, a 2, z 0.5: R = 4.5, P = 1.5; with r = 4 and s' = 3: errors 0.5 and -1.5
    # s 0, a 0, z 0.5: R = 0.5, P = -0.5; with r = 0.5 and s' = 0.5: errors 0 and -1
    x = torch.tensor([[[1.0, 2.0, 4.0, 3.0], [0.0, 0.0, 0.5, 0.5]]])
    reward, dynamics = models_loss(ByHand(), x, torch.tensor([[0.5]]))
    assert reward.item() == pytest.approx(0.125) and dynamics.item() == pytest.approx(1.625)


def test_both_aims_by_hand():
    plan = torch.tensor([[[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]]])
    z = torch.tensor([[0.5]])
    # rewards 4.5, 6.5, 1.5: 4.5 + 0.5 * 6.5 + 0.25 * 1.5 = 8.125
    assert plan_return(ByHand(), plan, z, 1, 0.5).item() == pytest.approx(8.125)
    # P: 1.5 where the plan has 3, 2.5 where it has 0: -(2.25 + 6.25)
    assert plan_consistency(ByHand(), plan, z, 1).item() == pytest.approx(-8.5)


def test_the_gradient_by_hand():
    plan = torch.tensor([[[1.0, 2.0], [3.0, 0.0]]])
    z = torch.tensor([[0.5]])
    config = PlanConfig(return_scale=1.0, dynamics_scale=0.0)
    found = guide_gradient(ByHand(), plan, z, 1, 0.5, config)
    assert found.tolist() == [[[0.0, 1.0], [1.0, 0.5]]]  # gamma^t (2, 1), first obs held
    config = PlanConfig(return_scale=0.0, dynamics_scale=3.0)
    # error e = 3 - 1.5; d(-e^2)/da_0 = 2 e / 2 = 1.5, /ds_1 = -2 e = -3, times 3
    found = guide_gradient(ByHand(), plan, z, 1, 0.5, config)
    assert found.tolist() == [[[0.0, 4.5], [-9.0, 0.0]]]


@pytest.fixture
def random_models():
    models = Models(2, 1, 3, (32,), seeded())
    models.of_change.layers[-1].weight.data.mul_(30)  # far from standing still
    return models


@pytest.mark.parametrize(("aim", "other"), [("return", "dynamics"), ("dynamics", "return")])
def test_one_guided_step_raises_the_return_and_lowers_the_dynamics_error(random_models, aim, other):
    """The signs of both guides, apart and together, inside a step of drawing."""
    z, first = torch.randn(64, 3, generator=seeded(1)), torch.randn(64, 2, generator=seeded(2))
    base = torch.randn(64, 4, 3, generator=seeded(3))
    bounds, schedule = (torch.full((3,), -9.0), torch.full((3,), 9.0)), cosine_schedule(2)

    def drawn(**scales):
        config = PlanConfig(guide_steps=1, unguided_steps=0, temperature=0.0, **scales)
        gradient = lambda x: guide_gradient(random_models, x, z, 2, 0.9, config)  # noqa: E731
        seen = []

        def predict(x, k):
            seen.append(x)
            return base

        draw_plans(predict, gradient, first, (4, 3), bounds, schedule, config, seeded())
        return seen[1]  # tau_1: after the one guided step

    figures = {
        "return": lambda x: plan_return(random_models, x, z, 2, 0.9),
        "dynamics": lambda x: plan_consistency(random_models, x, z, 2),
    }
    nothing = drawn(return_scale=0.0, dynamics_scale=0.0)
    assert torch.equal(nothing[:, 0, :2], first)
    alone = drawn(**{f"{aim}_scale": 0.02, f"{other}_scale": 0.0})
    both = drawn(return_scale=0.02, dynamics_scale=0.02)
    assert (figures[aim](alone) > figures[aim](nothing)).float().mean() > 0.95
    total = lambda x: figures["return"](x) + figures["dynamics"](x)  # noqa: E731
    assert (total(both) > total(nothing)).float().mean() > 0.95
    assert torch.equal(alone[:, 0, :2], first)


def test_the_last_steps_are_not_guided():
    calls = []
    config = PlanConfig(unguided_steps=3, guide_steps=2)
    draw_plans(
        lambda x, k: torch.zeros_like(x),
        lambda x: calls.append(1) or torch.zeros_like(x),
        torch.zeros(1, 1),
        (2, 2),
        (torch.full((2,), -1.0), torch.full((2,), 1.0)),
        cosine_schedule(10),
        config,
        seeded(),
    )
    assert len(calls) == 2 * 7


# Drawing ------------------------------------------------------------------------------------

WIDE = (torch.full((2,), -50.0), torch.full((2,), 50.0))


def test_a_point_mass_is_drawn_exactly():
    plan = torch.randn(1, 4, 2, generator=seeded(5))
    first = plan[:, 0, :1].expand(6, 1)
    found = draw_plans(
        lambda x, k: plan.expand(6, -1, -1), nothing, first, (4, 2), WIDE, cosine_schedule(7),
        PlanConfig(temperature=1.0), seeded(),
    )  # fmt: skip
    torch.testing.assert_close(found, plan.expand(6, -1, -1), rtol=0, atol=1e-6)


def test_a_normal_distribution_is_drawn_with_its_mean_and_deviation():
    """The denoiser of N(3, 2^2) is known: m + s^2 sqrt(a) / (s^2 a + 1 - a) (x - sqrt(a) m)."""
    schedule, m, s = cosine_schedule(100), 3.0, 2.0

    def predict(x, k):
        a = schedule.alpha_bar[k][:, None, None]
        return m + s**2 * a.sqrt() / (s**2 * a + 1 - a) * (x - a.sqrt() * m)

    draw = lambda temperature: draw_plans(  # noqa: E731
        predict, nothing, torch.full((4000, 1), 3.0), (2, 2), WIDE, schedule,
        PlanConfig(temperature=temperature), seeded(),
    )  # fmt: skip
    found = draw(1.0)
    assert found[:, 1].mean().item() == pytest.approx(m, abs=0.1)
    assert found[:, 1].std().item() == pytest.approx(s, rel=0.06)
    assert (found[:, 0, 0] == 3.0).all()
    assert draw(0.0)[:, 1].std() < 0.8 * found[:, 1].std()


def test_guides_bring_whole_plans_where_they_should_be():
    """The denoiser of N(0, 1): with the guides more return, and less error, of what is drawn."""
    schedule, z = cosine_schedule(30), torch.zeros(500, 1)
    predict = lambda x, k: x * schedule.alpha_bar[k].sqrt()[:, None, None]  # noqa: E731

    def figures(**scales):
        config = PlanConfig(temperature=1.0, **scales)
        gradient = lambda x: guide_gradient(ByHand(), x, z, 1, 0.9, config)  # noqa: E731
        first = torch.full((500, 1), 0.5)
        found = draw_plans(predict, gradient, first, (4, 2), WIDE, schedule, config, seeded())
        return (
            plan_return(ByHand(), found, z, 1, 0.9).mean().item(),
            plan_consistency(ByHand(), found, z, 1).mean().item(),
        )

    plain = figures(return_scale=0.0, dynamics_scale=0.0)
    assert figures(return_scale=0.3, dynamics_scale=0.0)[0] > plain[0] + 1
    assert figures(return_scale=0.0, dynamics_scale=0.3)[1] > 0.7 * plain[1]
    both = figures(return_scale=0.3, dynamics_scale=0.3)
    assert both[0] > plain[0] + 0.5 and both[1] > 0.8 * plain[1]


def test_plans_stay_within_the_data():
    low, high = torch.tensor([-1.0, -0.5]), torch.tensor([1.0, 0.25])
    found = draw_plans(
        lambda x, k: 100 * x, nothing, torch.zeros(50, 1), (3, 2), (low, high), cosine_schedule(4),
        PlanConfig(), seeded(),
    )  # fmt: skip
    assert (found >= low).all() and (found <= high).all()
    assert found[..., 1].max() == 0.25


# The network --------------------------------------------------------------------------------


def test_the_network_sees_step_and_context_and_can_do_without_the_latter():
    before = torch.random.get_rng_state()
    net = TemporalUNet(3, 8, (1, 2), 3, context_size=2, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    x, z = torch.randn(4, 6, 3, generator=seeded()), torch.randn(4, 2, generator=seeded(1))
    k = torch.tensor([1, 1, 2, 2])
    out = net(x, k, z)
    assert out.shape == x.shape
    assert not torch.allclose(net(x, k + 1, z), out) and not torch.allclose(net(x, k, -z), out)
    keep = torch.tensor([1.0, 0.0, 1.0, 0.0])
    some, other = net(x, k, z, keep), net(x, k, -z, keep)
    torch.testing.assert_close(some[keep == 1], out[keep == 1])
    torch.testing.assert_close(some[keep == 0], other[keep == 0])
    assert not torch.allclose(some[keep == 0], out[keep == 0])


def test_every_level_and_weight_takes_part():
    net = TemporalUNet(3, 8, (1, 2, 2), 5, context_size=2, seed=1)
    x = torch.randn(2, 8, 3, generator=seeded())
    net(x, torch.tensor([1, 3]), torch.randn(2, 2)).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    for block in net.up:  # half of what a block up reads came from the way down
        weight = block.first[0].weight
        assert weight.grad[:, weight.shape[1] // 2 :].abs().max() > 0
    twin = TemporalUNet(3, 8, (1, 2, 2), 5, context_size=2, seed=1)
    assert all(map(torch.equal, net.state_dict().values(), twin.state_dict().values()))


@pytest.mark.parametrize(
    "changes", [{"return_scale": -1.0}, {"temperature": math.nan}, {"guide_steps": 0},
                {"replan_every": 0}, {"unguided_steps": -1}],
)  # fmt: skip
def test_a_plan_config_out_of_range_is_refused(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be"):
        PlanConfig(**changes)
