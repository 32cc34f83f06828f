"""Randomness of environments as a pure function of counters.

A draw is a hash of (seed, environment index, episode, step, term, element), so the only state is
counters: environment i's stream does not depend on how many others there are, the bits are the
same on every device, and a resume needs no generator state.

The hash is splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), chained over the counters; int64 arithmetic wraps in torch as uint64 does.
"""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the same bits as the uint64 `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """splitmix64 finaliser; `>>` is arithmetic on int64, so the sign bits are masked away."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@lru_cache(maxsize=4096)
def term_id(name: str) -> int:
    """A stable 64-bit number for a term's name."""
    return _signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big"))


def bits(
    seed: int, index: Tensor, episode: Tensor, step: Tensor, term: str, size: int
) -> Tensor:
    """64 random bits per element.

    Args:
        seed: the run's seed.
        index: environment index (n,) int64.
        episode: episode counter of each environment (n,) int64.
        step: step within the episode (n,) int64.
        term: what is drawn, e.g. "push"; other names give independent draws.
        size: elements per environment.

    Returns:
        (n, size) int64.
    """
    x = _mix(index + _signed(seed * _GAMMA + term_id(term)))
    x = _mix(x + episode * _GAMMA)
    x = _mix(x + step * _GAMMA)
    element = torch.arange(1, size + 1, device=x.device, dtype=torch.int64) * _GAMMA
    return _mix(x[:, None] + element)


def uniform(
    seed: int, index: Tensor, episode: Tensor, step: Tensor, term: str, size: int
) -> Tensor:
    """Uniform in [0, 1) with 53 bits, (n, size) float64; arguments as in `bits`."""
    x = (bits(seed, index, episode, step, term, size) >> 11) & ((1 << 53) - 1)
    return x.to(torch.float64) * 2.0**-53


@lru_cache(maxsize=8)
def _quantiles(device: torch.device) -> Tensor:
    """65,536 mid-quantiles of the standard normal, scaled to unit variance, float64."""
    p = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    z = torch.special.ndtri(p)
    return (z / z.square().mean().sqrt()).to(device)


def normal(
    seed: int, index: Tensor, episode: Tensor, step: Tensor, term: str, size: int
) -> Tensor:
    """Standard normal, (n, size) float64; arguments as in `bits`.

    The scaled sum of two table look-ups: unlike a logarithm or a cosine, a look-up, an addition
    and a product give the same bits on every device.
    """
    x = bits(seed, index, episode, step, term, size)
    table = _quantiles(x.device)
    return (table[(x >> 48) & 0xFFFF] + table[(x >> 32) & 0xFFFF]) * 0.5**0.5
