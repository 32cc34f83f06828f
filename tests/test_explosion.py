"""A critic that leaves what rewards allow is found, while its figures are still numbers.

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
    ],
)
def test_the_bound_is_the_largest_return(rows, gamma, bound):
    assert value_bound(rows, gamma) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("key", "limit"), [("value/q", 100.0), ("loss/critic", 1e4), ("loss/value", 1e4)]
)
def test_ten_times_the_bound_is_an_explosion(key, limit):
    assert explosion({key: limit * 0.999}, 10.0) == ""
    for value in (limit * 1.001, math.inf, math.nan):
        found = explosion({key: value, "loss/actor": 0.0}, 10.0)
        assert found == f"{key} is {value:.4g}, and the rewards so far allow values of 10 at most"
    assert ("-" in explosion({"value/q": -101.0}, 10.0)) and explosion(
        {"loss/actor": 1e30}, 1
    ) == ""


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
