import math

import pytest
import torch
from torch.distributions import (
    AffineTransform,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)
from torch.distributions import Categorical as TorchCategorical

from ctrl_rl.distributions import (
    Categorical,
    ClippedGaussian,
    DiagGaussian,
    SquashedGaussian,
    squash,
)

LOW, HIGH = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, math.inf])


def gaussian(cls=DiagGaussian, **bounds):
    mean = torch.tensor([[0.0, 1.0], [0.5, -2.0]], requires_grad=True)
    log_std = torch.tensor([0.0, math.log(2.0)], requires_grad=True)
    return cls(mean, log_std, **bounds)


def test_gaussian_by_hand():
    # z = (1, 0): -1/2 - log 1 - log 2 - log 2 pi
    log_prob = gaussian().log_prob(torch.tensor([1.0, 1.0]))
    assert log_prob[0].item() == pytest.approx(-0.5 - math.log(2) - math.log(2 * math.pi))
    # 1/2 log(2 pi e) each, plus log 2
    assert gaussian().entropy().item() == pytest.approx(
        math.log(2 * math.pi * math.e) + math.log(2)
    )


def test_gaussian_equals_torch():
    ours, action = gaussian(), torch.tensor([[0.3, -0.7], [2.0, 0.1]])
    other = DiagGaussian(ours.mean + 0.3, ours.log_std - 0.5)
    theirs = Normal(ours.mean, ours.log_std.exp())
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action).sum(-1))
    torch.testing.assert_close(ours.entropy().expand(2), theirs.entropy().sum(-1))
    kl = kl_divergence(theirs, Normal(other.mean, other.log_std.exp())).sum(-1)
    torch.testing.assert_close(ours.kl(other), kl)
    assert ours.kl(ours).abs().max() == 0
    noise = torch.tensor([[1.0, -1.0], [0.0, 2.0]])
    torch.testing.assert_close(ours.sample(noise), torch.tensor([[1.0, -1.0], [0.5, 2.0]]))
    assert torch.equal(ours.mode(), ours.mean)


def test_clipped_gaussian_is_a_distribution():
    """Density inside and mass at the bounds add up to 1, whatever the mean."""
    for mean in (-3.0, -0.5, 0.0, 0.9, 4.0):
        policy = ClippedGaussian(
            torch.tensor([mean]), torch.tensor([-0.5]), torch.tensor([-1.0]), torch.tensor([1.0])
        )
        inside = torch.linspace(-1, 1, 20_001)[1:-1, None]
        density = policy.log_prob(inside).exp().sum().item() * 1e-4
        mass = policy.log_prob(torch.tensor([[-1.0], [1.0]])).exp().sum().item()
        assert density + mass == pytest.approx(1.0, abs=2e-4)


def test_clipped_gaussian_tails():
    # Mean 0, std 1, bound 1: the mass above is 1 - Phi(1) = 0.15866.
    policy = gaussian(ClippedGaussian, low=LOW, high=HIGH)
    at_bound = policy.log_prob(torch.tensor([1.0, 1.0]))[0]
    inside = Normal(1.0, 2.0).log_prob(torch.tensor(1.0))
    assert at_bound.item() == pytest.approx(math.log(0.15865525) + inside.item(), abs=1e-5)
    # Second element: mean -2, std 2, lower bound 0: Phi(1) = 0.84134; no upper bound.
    at_bound = policy.log_prob(torch.tensor([0.5, 0.0]))[1]
    inside = Normal(0.5, 1.0).log_prob(torch.tensor(0.5))
    assert at_bound.item() == pytest.approx(math.log(0.84134475) + inside.item(), abs=1e-5)


def test_clipped_gaussian_within_its_bounds_is_the_gaussian():
    policy, action = gaussian(ClippedGaussian, low=LOW, high=HIGH), torch.tensor([0.3, 0.7])
    torch.testing.assert_close(policy.log_prob(action), gaussian().log_prob(action))
    sample = policy.sample(torch.tensor([[5.0, -5.0], [-5.0, 5.0]]))
    torch.testing.assert_close(sample, torch.tensor([[1.0, 0.0], [-1.0, 8.0]]))
    torch.testing.assert_close(policy.mode(), torch.tensor([[0.0, 1.0], [0.5, 0.0]]))


def test_clipped_gaussian_score_has_mean_zero():
    """E[d log p / d mean] = 0, which the density of the unclipped sample's clip does not fulfil."""
    noise = torch.randn(200_000, 1, generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([-1.0]), torch.tensor([1.0])
    mean = torch.full((1,), 0.8, requires_grad=True)
    policy = ClippedGaussian(mean, torch.zeros(1), *bounds)
    action = policy.sample(noise).detach()
    score = torch.autograd.grad(policy.log_prob(action).mean(), mean)[0].item()
    assert abs(score) < 0.01
    naive = DiagGaussian(mean, torch.zeros(1)).log_prob(action).mean()
    assert torch.autograd.grad(naive, mean)[0].item() < -0.2


@pytest.mark.parametrize("mean", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_clipped_gaussian_far_outside_stays_finite(mean):
    mean = torch.full((1, 1), mean, requires_grad=True)
    log_std = torch.zeros(1, requires_grad=True)
    bounds = torch.tensor([-1.0]), torch.tensor([1.0])
    policy = ClippedGaussian(mean, log_std, *bounds)
    log_prob = policy.log_prob(torch.tensor([[-1.0], [1.0]]))
    assert log_prob.isfinite().all()
    for gradient in torch.autograd.grad(log_prob.sum(), (mean, log_std)):
        assert gradient.isfinite().all()


def test_categorical_equals_torch():
    logits = torch.tensor([[1.0, 2.0, 0.5], [-1.0, 0.0, 30.0]])
    ours, theirs = Categorical(logits), TorchCategorical(logits=logits)
    action = torch.tensor([2, 1])
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    other = torch.zeros(2, 3)
    kl = kl_divergence(theirs, TorchCategorical(logits=other))
    torch.testing.assert_close(ours.kl(Categorical(other)), kl)
    assert ours.mode().tolist() == [1, 2]


def test_categorical_sample_has_the_right_shares():
    share = torch.tensor([0.1, 0.2, 0.7])
    noise = torch.randn(100_000, 3, generator=torch.Generator().manual_seed(0))
    action = Categorical(share.log().expand(100_000, 3)).sample(noise)
    assert action.dtype == torch.int64
    found = torch.bincount(action) / 100_000
    assert (found - share).abs().max() < 0.006  # 4 standard errors


def test_squash_stretches_each_dimension_to_its_own_bounds():
    # O-17: raw 0 is the middle, tanh(raw) = 0.5 three quarters of the way.
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 10.0])
    raw = torch.tensor([[0.0, 0.0], [math.atanh(0.5)] * 2, [40.0, 40.0], [-40.0, -40.0]])
    expected = [[0.0, 5.0], [0.5, 7.5], [1.0, 10.0], [-1.0, 0.0]]
    assert torch.allclose(squash(raw, low, high), torch.tensor(expected))
    low, high = torch.tensor([-0.1, 0.1]), torch.tensor([0.7, 0.9])
    for x in (squash(raw, low, high), squash(-raw, low, high)):  # no bit beyond a bound
        assert (x >= low).all() and (x <= high).all()


def test_squashed_log_prob_is_torch_s_with_the_scale_of_the_action():
    low, high = torch.tensor([-1.0, 0.0]).double(), torch.tensor([1.0, 10.0]).double()
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = torch.randn(3, 500, 2, generator=generator, dtype=torch.float64)
    policy = SquashedGaussian(mean, log_std, low, high)
    action, log_prob = policy.sample_with_log_prob(noise)
    stretch = [TanhTransform(), AffineTransform((low + high) / 2, (high - low) / 2)]
    theirs = TransformedDistribution(Normal(mean, log_std.exp()), stretch)
    inside = (log_prob.isfinite() & ((action - low).abs() > 1e-3).all(1)
              & ((high - action).abs() > 1e-3).all(1))  # fmt: skip
    assert inside.sum() > 250
    assert torch.allclose(log_prob[inside], theirs.log_prob(action).sum(1)[inside], atol=1e-6)
    assert torch.equal(action, policy.sample(noise))
    assert torch.equal(policy.mode(), squash(mean, low, high))


def test_squashed_density_integrates_to_one_over_the_range():
    """By hand: u on a fine grid is the action on a grid; sum of density x width is 1."""
    u = torch.linspace(-8, 8, 40_001, dtype=torch.float64)[:, None]
    low, high = torch.tensor([2.0]).double(), torch.tensor([7.0]).double()
    mean, log_std = torch.full_like(u, 0.3), torch.full_like(u, -0.5)
    noise = (u - mean) * (-log_std).exp()
    action, log_prob = SquashedGaussian(mean, log_std, low, high).sample_with_log_prob(noise)
    total = torch.trapezoid(log_prob.exp(), action[:, 0])
    assert total.item() == pytest.approx(1.0, abs=1e-6)


def test_squashed_gaussian_is_finite_far_out():
    mean = torch.tensor([[60.0], [-60.0]], requires_grad=True)
    policy = SquashedGaussian(mean, torch.full((2, 1), 2.0), torch.zeros(1), torch.ones(1))
    action, log_prob = policy.sample_with_log_prob(torch.ones(2, 1))
    assert action.tolist() == [[1.0], [0.0]]
    gradient = torch.autograd.grad(log_prob.sum(), mean)[0]
    assert log_prob.isfinite().all() and gradient.isfinite().all()
