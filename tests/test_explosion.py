"""A critic or temperature that leaves what rewards allow is found while its figures are numbers.

That every learner is stopped so: `test_reliability.py`.
"""

import math

import pytest

import ctrl_rl
from ctrl_rl.compiled import Diverged
from ctrl_rl.explosion import REWARD, explosion, value_bound
from ctrl_rl.runs import Run
from ctrl_rl.sac import METRICS, SACConfig


@pytest.mark.parametrize(
    ("rows", "gamma", "bound"),
    [
        ([{REWARD: 3.0}, {REWARD: 2.0}], 0.99, 300),
        ([{REWARD: 0.0}], 0.9, 10),  # no reward yet counts as 1
        ([{"loss/critic": 1e9}], 0.9, 10),  # a row without the figure
        ([{REWARD: 3.0}], None, 30_000),
        ([{REWARD: 3.0}], 1.0, 30_000),
        ([{REWARD: 3.0, "policy/temperature": 2.0, "policy/entropy": -4.0}], 0.5, 22),
        ([{REWARD: 3.0, "policy/temperature": 2.0, "policy/entropy": 0.1}], 0.5, 10),
    ],
)
def test_the_bound_is_the_largest_return(rows, gamma, bound):
    assert value_bound(rows, gamma) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("key", "limit"), [("value/q", 100.0), ("loss/critic", 1e4), ("loss/value", 1e4)]
)
def test_ten_times_the_bound_is_an_explosion(key, limit):
    judge = lambda figures: explosion([{REWARD: 0.5}, {REWARD: 0.0, **figures}], 0.9)  # noqa: E731
    assert judge({key: limit * 0.999}) == ""
    for value in (limit * 1.001, math.inf, math.nan):
        found = judge({key: value, "loss/actor": 0.0})
        assert found == f"{key} is {value:.4g}, and the rewards so far allow values of 10 at most"
    assert "-" in judge({"value/q": -101.0}) and judge({"loss/actor": 1e30}) == ""


@pytest.mark.parametrize(
    ("rewards", "entropy", "most"),
    [
        ((0.0, 0.0), 0.0, 1000.0),  # sparse: no reward yet counts as 1; an entropy of 0 as a nat
        ((0.05, 0.01), -18.0, 1000 / 18),
        ((20.0, 1.0), -4.0, 5000.0),  # the largest reward so far
    ],
)
def test_a_temperature_may_not_outgrow_the_rewards(rewards, entropy, most):
    """It would raise what values are allowed, and those of FastSAC's atoms never leave them."""
    for beside in ({}, {"value/edge_mass": 1.0, "loss/critic": 5.0}):
        for temperature, good in ((most * 0.999, True), (most * 1.001, False), (math.inf, False)):
            figures = {"policy/temperature": temperature, "policy/entropy": entropy, **beside}
            found = explosion(
                [{REWARD: x} for x in rewards[:1]] + [{REWARD: rewards[1]} | figures], 0.9
            )
            assert (found == "") == good
            if not good:
                assert found == (
                    f"policy/temperature is {temperature:.4g}, and the rewards so far allow "
                    f"{most:.4g} at most, at an entropy of {entropy:.4g} nat"
                )


def test_a_cross_entropy_has_a_bound_of_its_own():
    row = {REWARD: 1.0, "value/edge_mass": 0.0, "value/q": 3.0}
    assert explosion([row | {"loss/critic": 999.0}], 0.0) == ""  # squared errors: at most 100
    for value in (1001.0, math.inf, math.nan):
        found = explosion([row | {"loss/critic": value}], 0.99)
        assert found == f"loss/critic is {value:.4g}, and 1000 nat are the most"


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_stops_the_run(reward):
    run = Run(console=False)
    run.start(METRICS, SACConfig(), ctrl_rl.make("Pendulum-v0", 2), "sac")
    run.log(2, {REWARD: 1.0})
    with pytest.raises(Diverged, match=f"before step 4: {REWARD} is {reward}: a reward of the env"):
        run.log(4, {REWARD: reward})


def test_a_run_remembers_its_largest_reward(tmp_path):
    env, figures = ctrl_rl.make("Pendulum-v0", 2), {"value/q": 1900.0}
    first = Run(tmp_path / "r", console=False)
    first.start(METRICS, SACConfig(gamma=0.9), env, "sac")
    first.log(2, {REWARD: 20.0})
    first.log(4, {REWARD: 1.0, **figures})  # 20 / 0.1, ten times
    first.save(4, {"weights": {}}, {"count": 1}, {"count": 1})
    with pytest.raises(Diverged, match="before step 6: value/q is 2001, .* values of 200 at most"):
        first.log(6, {REWARD: 1.0, "value/q": 2001.0})
    first.close()
    again = Run(tmp_path / "r", console=False, resume=True)
    again.start(METRICS, SACConfig(gamma=0.9), env, "sac")
    assert again.restore() and again.rows[-1]["step"] == 4
    again.log(6, {REWARD: 1.0, **figures})
    again.log(6, {"eval/episode_return": 1e9})  # what does not say how large rewards are is let be
    again.close()
