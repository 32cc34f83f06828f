"""Action distributions written out: no argument checks, and they compile into one graph.

Each has `sample(noise)` with noise drawn beforehand, `log_prob(action)`, `entropy()`, `kl(other)`
and `mode()`. The last axis is the action; results drop it.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import softplus

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class DiagGaussian:
    """Independent normal per action element.

    Args:
        mean: (..., A), in action units.
        log_std: (A,), natural logarithm of the standard deviation.
    """

    mean: Float[Tensor, "*batch A"]
    log_std: Float[Tensor, " A"]

    def mode(self) -> Float[Tensor, "*batch A"]:
        """The most likely action."""
        return self.mean

    def sample(self, noise: Float[Tensor, "*batch A"]) -> Float[Tensor, "*batch A"]:
        """From standard normal noise."""
        return torch.addcmul(self.mean, self.log_std.exp(), noise)

    def log_prob(self, action: Float[Tensor, "*batch A"]) -> Float[Tensor, "*batch"]:
        """-1/2 z^2 - log std - 1/2 log 2 pi, summed over the action; z = (a - mean) / std."""
        z = (action - self.mean) * (-self.log_std).exp()
        constant = self.log_std.sum() + _HALF_LOG_2PI * action.shape[-1]
        return -0.5 * z.square().sum(-1) - constant

    def entropy(self) -> Float[Tensor, ""]:
        """Sum of log std + 1/2 log 2 pi e: the same for every row."""
        return self.log_std.sum() + (_HALF_LOG_2PI + 0.5) * self.log_std.shape[-1]

    def kl(self, other: "DiagGaussian") -> Float[Tensor, "*batch"]:
        """KL(self || other), closed form."""
        variance_ratio = (2 * (self.log_std - other.log_std)).exp()
        distance = ((self.mean - other.mean) * (-other.log_std).exp()).square()
        log_ratio = other.log_std - self.log_std
        return (log_ratio + 0.5 * (variance_ratio + distance - 1)).sum(-1)


@dataclass(frozen=True)
class ClippedGaussian(DiagGaussian):
    """A normal whose samples are clipped to bounds: the clipped number is the action.

    The tails become point masses at the bounds, so that the probability of a stored action is
    that of the action itself, whatever the sample was before clipping (Fujita and Maeda, "Clipped
    action policy gradient", ICML 2018, arXiv:1802.07564). `entropy` and `kl` are those of the
    normal beneath; its KL is an upper bound of this one's.

    Args:
        mean: (..., A), in action units; may lie outside the bounds.
        log_std: (A,)
        low: (A,), -inf where there is no bound.
        high: (A,), inf where there is no bound.
    """

    low: Float[Tensor, " A"]
    high: Float[Tensor, " A"]

    def mode(self) -> Float[Tensor, "*batch A"]:
        """The clipped mean."""
        return torch.clamp(self.mean, self.low, self.high)

    def sample(self, noise: Float[Tensor, "*batch A"]) -> Float[Tensor, "*batch A"]:
        """From standard normal noise, within the bounds."""
        return torch.clamp(super().sample(noise), self.low, self.high)

    def log_prob(self, action: Float[Tensor, "*batch A"]) -> Float[Tensor, "*batch"]:
        """Log density inside the bounds, log mass of the tail at them."""
        z = (action - self.mean) * (-self.log_std).exp()
        inside = -0.5 * z.square() - self.log_std - _HALF_LOG_2PI
        # At a bound the action is the bound, so z is where the tail begins.
        side = (action <= self.low).to(z.dtype) - (action >= self.high).to(z.dtype)
        tail = _log_tail(side * z)
        return torch.where(side == 0, inside, tail).sum(-1)


def squash(
    x: Float[Tensor, "*batch A"], low: Float[Tensor, " A"], high: Float[Tensor, " A"]
) -> Float[Tensor, "*batch A"]:
    """tanh, stretched to finite bounds per dimension: 0 becomes the middle of the range."""
    stretched = torch.addcmul((high + low) / 2, (high - low) / 2, torch.tanh(x))
    return torch.clamp(stretched, low, high)  # rounding could pass a bound by one bit


def unit_scaled(
    action: Float[Tensor, "*batch A"], low: Float[Tensor, " A"], high: Float[Tensor, " A"]
) -> Float[Tensor, "*batch A"]:
    """An action in its units, scaled so that its bounds become -1 and 1."""
    return (2 * action - (high + low)) / (high - low)


@dataclass(frozen=True)
class SquashedGaussian:
    """A normal u whose samples pass through `squash`: action = middle + half_range tanh(u).

    log pi(a) = log N(u) - sum log(half_range (1 - tanh(u)^2)): the density is that of the action
    in its own units (Haarnoja et al., arXiv:1812.05905, appendix C, and the change of units).
    1 - tanh(u)^2 is written as 4 e^(-2u) / (1 + e^(-2u))^2, which does not round to 0.

    Args:
        mean: (..., A), of u.
        log_std: (..., A), of u.
        low: (A,), finite, in action units.
        high: (A,), finite, in action units.
    """

    mean: Float[Tensor, "*batch A"]
    log_std: Float[Tensor, "*batch A"]
    low: Float[Tensor, " A"]
    high: Float[Tensor, " A"]

    def mode(self) -> Float[Tensor, "*batch A"]:
        """The squashed mean of u, which is the median of the action."""
        return squash(self.mean, self.low, self.high)

    def sample(self, noise: Float[Tensor, "*batch A"]) -> Float[Tensor, "*batch A"]:
        """From standard normal noise, within the bounds."""
        return squash(torch.addcmul(self.mean, self.log_std.exp(), noise), self.low, self.high)

    def sample_with_log_prob(
        self, noise: Float[Tensor, "*batch A"]
    ) -> tuple[Float[Tensor, "*batch A"], Float[Tensor, "*batch"]]:
        """A sample and its log density; both carry gradients to mean and log_std."""
        u = torch.addcmul(self.mean, self.log_std.exp(), noise)
        normal = -0.5 * noise.square() - self.log_std - _HALF_LOG_2PI
        slope = 2 * (math.log(2) - u - softplus(-2 * u))  # log(1 - tanh(u)^2)
        log_prob = normal - slope - ((self.high - self.low) / 2).log()
        return squash(u, self.low, self.high), log_prob.sum(-1)


def _log_tail(z: Float[Tensor, "*batch A"]) -> Float[Tensor, "*batch A"]:
    """log Phi(z), held from z = -12 downwards, where it is -75 and float32 ends.

    Twice as fast as `torch.special.log_ndtr`, which neither vectorises nor fuses.
    """
    return (0.5 * torch.erfc(-math.sqrt(0.5) * z.clamp(min=-12.0))).log()


@dataclass(frozen=True)
class Categorical:
    """One of n choices.

    Args:
        logits: (..., n), unnormalised.
    """

    logits: Float[Tensor, "*batch n"]

    def mode(self) -> Int[Tensor, "*batch"]:
        """The most likely choice."""
        return self.logits.argmax(-1)

    def sample(self, noise: Float[Tensor, "*batch n"]) -> Int[Tensor, "*batch"]:
        """From standard normal noise.

        Gumbel's trick needs -log(-log u); u = Phi(noise) turns the normal into a uniform, so
        that every policy draws the same kind of noise.
        """
        return (self.logits - (-torch.special.log_ndtr(noise)).log()).argmax(-1)

    def log_prob(self, action: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """log softmax at the action."""
        return self.logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]

    def entropy(self) -> Float[Tensor, "*batch"]:
        """-sum p log p per row."""
        log_prob = self.logits.log_softmax(-1)
        return -(log_prob.exp() * log_prob).sum(-1)

    def kl(self, other: "Categorical") -> Float[Tensor, "*batch"]:
        """KL(self || other)."""
        log_prob = self.logits.log_softmax(-1)
        return (log_prob.exp() * (log_prob - other.logits.log_softmax(-1))).sum(-1)


def project(
    prob: Float[Tensor, "B K"], moved: Float[Tensor, "B K"], atoms: Float[Tensor, " K"]
) -> Float[Tensor, "B K"]:
    """Mass at moved atoms, put on evenly spaced ones.

    Bellemare et al., "A distributional perspective on reinforcement learning", ICML 2017,
    arXiv:1707.06887, algorithm 1.

    An atom between two of `atoms` gives each a share that falls linearly with the distance, so the
    mean stays; one beyond the outermost goes there whole.

    Args:
        prob: mass of each atom.
        moved: where it lies.
        atoms: where it is put; ascending.

    Returns:
        Mass at `atoms`.
    """
    spacing = (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    place = (moved.clamp(atoms[0], atoms[-1]) - atoms[0]) / spacing
    below = place.floor().clamp(0, len(atoms) - 2)
    upper = prob * (place - below)
    index = below.nan_to_num().long()  # a NaN shows in the mass, and then in the loss
    out = torch.zeros_like(prob).scatter_add(1, index, prob - upper)
    return out.scatter_add(1, index + 1, upper)
