"""Randomness of environments as a pure function of counters.

A draw is a hash of (seed, environment index, episode, step, term, element), so the only state is
counters: environment i's stream does not depend on how many others there are, the bits are the
same on every device, and a resume needs no generator state.

The counters become one 64-bit key per environment. Elements of a draw are the outputs of
splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
started at key + term; int64 arithmetic wraps in torch as uint64 does. Each output serves two
elements with 32 bits: finer than the float32 that a draw ends in.

    k = random.key(seed, index, episode, step)      once per step
    push = random.uniform(k, "push", 3)             (n, 3)
"""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the same bits as the uint64 `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """splitmix64 finaliser; `>>` is arithmetic on int64, so the sign bits are masked away.

    In place after each shift: at 4096 x 48 fresh memory costs more than the arithmetic.
    """
    x = (x >> 30).bitwise_and_(0x3FFFFFFFF).bitwise_xor_(x).mul_(_MIX1)
    x = (x >> 27).bitwise_and_(0x1FFFFFFFFF).bitwise_xor_(x).mul_(_MIX2)
    return (x >> 31).bitwise_and_(0x1FFFFFFFF).bitwise_xor_(x)


@lru_cache(maxsize=4096)
def term_id(name: str) -> int:
    """A stable 64-bit number for a term's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def key(seed: int, index: Tensor, episode: Tensor, step: Tensor) -> Tensor:
    """One hash of all counters per environment.

    Args:
        seed: the run's seed.
        index: environment index (n,) int64.
        episode: episode counter of each environment (n,) int64.
        step: step within the episode (n,) int64.

    Returns:
        (n,) int64.
    """
    x = _mix(index + _signed(seed * _GAMMA))
    x = _mix(x + episode * _signed(_GAMMA))
    return _mix(x + step * _signed(_GAMMA))


def bits(key: Tensor, term: str, size: int) -> Tensor:
    """64 random bits per element.

    Args:
        key: what `key` gives, (n,) int64.
        term: what is drawn, e.g. "push"; other names give independent draws.
        size: elements per environment.

    Returns:
        (n, size) int64.
    """
    return _mix(key[:, None] + _offsets(term, size, key.device))


@lru_cache(maxsize=4096)
def _offsets(term: str, size: int, device: torch.device) -> Tensor:
    """Distance of each element's splitmix64 counter from the key."""
    values = [_signed(term_id(term) + k * _GAMMA) for k in range(1, size + 1)]
    return torch.tensor(values, dtype=torch.int64, device=device)


def _halves(key: Tensor, term: str, size: int) -> Tensor:
    """32 random bits per element, (n, size) int32: low half first, then high half."""
    return bits(key, term, (size + 1) // 2).view(torch.int32)[:, :size]


def uniform(key: Tensor, term: str, size: int) -> Tensor:
    """Uniform multiples of 2**-32 in [0, 1), (n, size) float64; arguments as in `bits`."""
    return _halves(key, term, size).to(torch.float64).mul_(2.0**-32).add_(0.5)


def normal(key: Tensor, term: str, size: int) -> Tensor:
    """Standard normal, (n, size) float64; arguments as in `bits`.

    The scaled sum of two table look-ups: unlike a logarithm or a cosine, a look-up, an addition
    and a product give the same bits on every device. The largest value is 6.1.
    """
    x = _halves(key, term, size).flatten()
    table = _quantiles(x.device)
    high, low = table.index_select(0, (x >> 16) & 0xFFFF), table.index_select(0, x & 0xFFFF)
    return high.add_(low).mul_(0.5**0.5).view(-1, size)


@lru_cache(maxsize=8)
def _quantiles(device: torch.device) -> Tensor:
    """65,536 mid-quantiles of the standard normal, scaled to unit variance, float64."""
    p = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    z = torch.special.ndtri(p)
    return (z / z.square().mean().sqrt()).to(device)
