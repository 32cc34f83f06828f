"""Keyed randomness: reference values, distribution, independence of everything but its counters."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ctrl_rl import random

N = 4096
INDEX = torch.arange(N)
ZERO = torch.zeros_like(INDEX)


def key(seed=0, index=INDEX, episode=0, step=0):
    return random.key(
        seed, index, torch.zeros_like(index) + episode, torch.zeros_like(index) + step
    )


def test_bits_are_splitmix64():
    # The first five outputs for seed 1234567 as other implementations print them (uint64).
    start = random._signed(1234567 - random.term_id("any"))
    found = random.bits(torch.tensor([start]), "any", 5)[0].tolist()
    assert [value % 2**64 for value in found] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def splitmix64(x: int) -> int:
    """The finaliser in Python's own integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@given(
    seed=st.integers(-(2**70), 2**70),
    index=st.integers(0, 2**40),
    episode=st.integers(-1, 2**40),
    step=st.integers(0, 2**40),
)
def test_key_chains_the_counters(seed, index, episode, step):
    gamma = 0x9E3779B97F4A7C15
    x = splitmix64((index + seed * gamma) % 2**64)
    x = splitmix64((x + episode * gamma) % 2**64)
    x = splitmix64((x + step * gamma) % 2**64)
    found = random.key(seed, *(torch.tensor([c]) for c in (index, episode, step)))
    assert found.item() % 2**64 == x


def test_a_term_has_the_same_number_on_every_machine():
    assert random.term_id("push") == 0x51EDA00D38178199  # as b2sum -l 64 prints it


def test_uniform_moments_and_range():
    x = random.uniform(key(), "noise", 48)
    assert x.shape == (N, 48) and x.dtype == torch.float64
    assert 0.0 <= x.min() and x.max() < 1.0
    count = x.numel()
    # Bounds of five standard errors of mean, variance and third moment.
    assert abs(x.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / count)
    assert abs(x.square().mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / count)
    assert abs(x.pow(3).mean() - 1 / 4) < 5 * math.sqrt(9 / 112 / count)
    assert stats.kstest(x.flatten().numpy(), "uniform").pvalue > 1e-3


def test_uniform_maps_32_bits_to_both_ends_of_its_range(monkeypatch):
    lowest_and_highest = torch.tensor([[-(2**31), 2**31 - 1]], dtype=torch.int32)
    monkeypatch.setattr(random, "_halves", lambda *args: lowest_and_highest)
    assert random.uniform(ZERO, "any", 2).tolist() == [[0.0, 1 - 2.0**-32]]


def test_normal_moments_and_tails():
    x = random.normal(key(), "noise", 256).flatten()
    assert x.dtype == torch.float64
    count = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(count)
    assert abs(x.square().mean() - 1) < 5 * math.sqrt(2 / count)
    assert abs(x.pow(3).mean()) < 5 * math.sqrt(15 / count)
    assert abs(x.pow(4).mean() - 3) < 5 * math.sqrt(96 / count)
    for bound in (1.0, 2.0, 3.0, 4.0):  # P(|x| > bound)
        share = 2 * stats.norm.sf(bound)
        found = (x.abs() > bound).double().mean()
        assert abs(found - share) < 5 * math.sqrt(share / count) + 0.02 * share
    assert stats.kstest(x.numpy()[:100_000], "norm").pvalue > 1e-3


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"index": INDEX + N},
        {"index": INDEX + 1},
        {"episode": 1},
        {"step": 1},
        {"step": 4},
        {"episode": -1},
    ],
    ids=str,
)
def test_another_counter_gives_independent_draws(other):
    a = random.normal(key(), "noise", 16).flatten()
    b = random.normal(key(**other), "noise", 16).flatten()
    assert not (a == b).any()
    # correlation and correlation of squares, five standard errors
    assert abs((a * b).mean()) < 5 / math.sqrt(len(a))
    assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < 10 / math.sqrt(len(a))


def test_terms_and_elements_are_independent():
    k = key()
    a, b = random.normal(k, "noise", 8), random.normal(k, "noise/actor", 8)
    columns = torch.cat([a, b], 1)
    correlation = torch.corrcoef(columns.T) - torch.eye(16)
    assert correlation.abs().max() < 5 / math.sqrt(N)
    serial = torch.corrcoef(torch.stack([columns[1:, 0], columns[:-1, 0]]))[0, 1]  # rows
    assert abs(serial) < 5 / math.sqrt(N)


def test_no_two_keys_collide():
    keys = torch.cat(
        [key(seed, episode=e, step=s) for seed in (0, 1) for e in (0, 1) for s in (0, 1)]
    )
    assert len(keys.unique()) == 8 * N


@pytest.mark.parametrize("draw", [random.uniform, random.normal])
@given(
    size=st.integers(1, 9),
    rows=st.lists(st.integers(0, 63), min_size=1, max_size=8),
    seed=st.integers(0, 10**6),
)
def test_a_row_does_not_depend_on_the_others(draw, size, rows, seed):
    every = draw(key(seed, torch.arange(64), 3, 5), "push", size)
    some = draw(key(seed, torch.tensor(rows), 3, 5), "push", size)
    assert torch.equal(every[rows], some)
    assert torch.equal(draw(key(seed, torch.arange(8), 3, 5), "push", size), every[:8])


@pytest.mark.parametrize("draw", [random.uniform, random.normal])
def test_a_longer_draw_begins_like_a_shorter_one_and_draws_are_pure(draw):
    k = key()
    long = draw(k, "push", 7)
    kept = long.clone()
    assert torch.equal(draw(k, "push", 4), long[:, :4])
    long.zero_()
    assert torch.equal(draw(k, "push", 7), kept)


def test_normal_adds_the_values_of_two_disjoint_halves(monkeypatch):
    monkeypatch.setattr(random, "_halves", lambda *args: torch.tensor([[0x00010003]]).int())
    table = random._quantiles(torch.device("cpu"))
    assert random.normal(ZERO, "any", 1).item() == ((table[1] + table[3]) * 0.5**0.5).item()
