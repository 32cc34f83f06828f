"""Statistics of few runs, against arithmetic by hand, scipy's tests and rliable."""

import numpy as np
import pytest
from scipy.stats import binom, mannwhitneyu

from offline.statistics import (
    estimate,
    iqm,
    iqm_difference,
    mean,
    median,
    performance_profile,
    probability_of_improvement,
)

SCORES = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 90.0], [4.0, 40.0]])
"""Four runs of two tasks."""


def some(runs: int, tasks: int, seed: int, middle: float = 50.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(middle, 12.0, (runs, tasks))


def test_aggregates_by_hand():
    # Sorted: 1 2 | 3 4 10 20 | 40 90: a quarter of eight, two, goes on each side.
    assert iqm(SCORES) == (3 + 4 + 10 + 20) / 4
    assert mean(SCORES) == (10 + 160) / 8
    # Means of the tasks are 2.5 and 40; with a third task of mean 7 the middle one is 7.
    assert median(SCORES) == (2.5 + 40) / 2
    assert median(np.column_stack([SCORES, np.full(4, 7.0)])) == 7.0
    # Five runs of one task: 5 // 4 = 1 goes on each side.
    assert iqm(np.array([[0.0], [7.0], [8.0], [9.0], [100.0]])) == 8.0


def test_probability_of_improvement_by_hand():
    # Task 0: of x = 1, 3 against y = 1, 2, 2: a tie and two losses, then three wins: 3.5 / 6.
    # Task 1: all of x is above: 1.
    x, y = np.array([[1.0, 9.0], [3.0, 9.0]]), np.array([[1.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    assert probability_of_improvement(x, y) == pytest.approx((3.5 / 6 + 1) / 2)
    assert probability_of_improvement(y, x) == pytest.approx(1 - (3.5 / 6 + 1) / 2)
    assert probability_of_improvement(x, x) == 0.5
    x, y = some(5, 3, 0), some(7, 3, 1)
    each = [mannwhitneyu(a, b).statistic / 35 for a, b in zip(x.T, y.T, strict=True)]
    assert probability_of_improvement(x, y) == pytest.approx(np.mean(each))


def test_profile_by_hand():
    taus = np.array([0.0, 1.0, 4.0, 39.9, 90.0])
    # A score equal to the threshold is not above it.
    expected = [1.0, 7 / 8, 4 / 8, 2 / 8, 0.0]
    assert performance_profile(SCORES, taus).tolist() == expected


@pytest.mark.parametrize("statistic", [iqm, mean, median])
def test_statistics_treat_resamples_alike(statistic):
    many = np.stack([some(4, 3, seed) for seed in range(6)]).reshape(2, 3, 4, 3)
    alone = [[statistic(many[i, j]) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(statistic(many), alone)


def test_two_algorithms_in_resamples():
    x, y = (np.stack([some(r, 3, s) for s in range(k, k + 6)]) for r, k in ((4, 0), (5, 9)))
    for statistic in (probability_of_improvement, iqm_difference):
        alone = [statistic(a, b) for a, b in zip(x, y, strict=True)]
        np.testing.assert_allclose(statistic(x, y), alone)
    assert iqm_difference(x[0], y[0]) == iqm(x[0]) - iqm(y[0])


def test_the_interval_of_a_mean_is_that_of_a_table_of_all_resamples():
    # Runs 0 and 6 of the only task: a resample's mean is 0, 3 or 6 with 1/4, 1/2, 1/4.
    found = estimate(mean, np.array([[0.0], [6.0]]))
    assert (found.value, found.ci95) == (3.0, [0.0, 6.0])
    # Two tasks of six runs at 0 and six at 8, 100 more in the second. Each task's resample draws
    # its own number of eights, Binomial(12, 1/2), so the mean is 50 + Binomial(24, 1/2) / 3.
    runs = np.array([[0.0, 100.0], [8.0, 108.0]] * 6)
    ends = 50 + binom.ppf((0.025, 0.975), 24, 0.5) / 3
    assert estimate(mean, runs).ci95 == pytest.approx(list(ends))


def test_intervals_say_nothing_where_nothing_is_known():
    assert estimate(iqm, SCORES[:1]).ci95 is None
    assert estimate(probability_of_improvement, SCORES, SCORES[:1]).ci95 is None
    assert estimate(iqm, np.full((3, 2), 4.0)).ci95 == [4.0, 4.0]
    assert str(estimate(iqm, SCORES[:1])) == "5.5"  # of 1 and 10 none is left out
    assert str(estimate(mean, np.full((2, 1), 4.0))) == "4.0 [4.0, 4.0]"


def test_an_interval_is_the_same_each_time():
    x, y = some(5, 4, 0), some(5, 4, 1)
    first, second = (estimate(iqm_difference, x, y) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ((np.zeros(3),), r"runs x tasks, not of shape \(3,\)"),
        ((np.zeros((0, 2)),), r"runs x tasks, not of shape \(0, 2\)"),
        ((np.array([[1.0, 2.0], [3.0, np.nan]]),), "run 1 on task 1 is nan"),
        ((np.zeros((2, 2)), np.zeros((2, 3))), "scores of 2 and 3 tasks are compared"),
    ],
)
def test_scores_that_are_none_are_refused(scores, message):
    with pytest.raises(ValueError, match=message):
        estimate(lambda *matrices: np.float64(0.0), *scores)


# Against rliable ----------------------------------------------------------------------------


@pytest.fixture
def rliable():
    """The library and its metrics; what it warns about is its own."""
    library = pytest.importorskip("rliable.library", exc_type=ImportError)
    from rliable import metrics

    return library, metrics


@pytest.mark.filterwarnings("ignore")
def test_figures_and_intervals_are_those_of_rliable(rliable):
    library, metrics = rliable
    x = some(5, 4, 0) + np.arange(4) * 20
    pairs = [
        (iqm, metrics.aggregate_iqm),
        (mean, metrics.aggregate_mean),
        (median, metrics.aggregate_median),
    ]
    for ours, theirs in pairs:
        value, interval = library.get_interval_estimates(
            {"x": x}, lambda scores, theirs=theirs: np.array([theirs(scores)]), reps=5000
        )
        found = estimate(ours, x)
        assert found.value == pytest.approx(value["x"][0], rel=1e-12)
        # Two draws of 5000 resamples: a percentile moves by about 1 % of the width.
        width = np.ptp(interval["x"])
        np.testing.assert_allclose(found.ci95, interval["x"][:, 0], atol=0.06 * width)


@pytest.mark.filterwarnings("ignore")
def test_improvement_and_profiles_are_those_of_rliable(rliable):
    library, metrics = rliable
    x, y = some(5, 4, 0, 53.0), some(6, 4, 1)
    value, interval = library.get_interval_estimates(
        {"xy": (x, y)}, metrics.probability_of_improvement, reps=2000
    )
    found = estimate(probability_of_improvement, x, y)
    assert found.value == pytest.approx(np.ravel(value["xy"])[0], rel=1e-12)
    bounds = np.ravel(interval["xy"])
    np.testing.assert_allclose(found.ci95, bounds, atol=0.06 * np.ptp(bounds))
    taus = np.linspace(0, 100, 21)
    theirs, bands = library.create_performance_profile({"x": x}, taus, reps=2000)
    found = estimate(lambda scores: performance_profile(scores, taus), x)
    np.testing.assert_allclose(found.value, theirs["x"])
    np.testing.assert_allclose([found.low, found.high], bands["x"], atol=0.051)  # one run of 20
