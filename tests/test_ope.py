"""Off-policy estimates of a policy whose value is known."""

import itertools

import numpy as np
import pytest
import torch
from recorded import episodes, random_data, spec

from benchmarks.ope import cut_log_prob
from ctrl_rl import registry
from ctrl_rl.runs import Run
from offline import d4rl, ope
from offline.bc import BCConfig
from offline.bc import train as train_bc
from offline.commands.ope import main
from offline.decision_transformer import DecisionTransformerConfig
from offline.decision_transformer import train as train_transformer
from offline.ope import FQEConfig
from offline.registry import POLICIES
from offline.transitions import Transitions

GAMMA = 0.9

# Two states and two actions, two steps at most. From state 0 action 1 ends the episode half of the
# time; where it goes on, the next state is 0 or 1 with equal chance.
BEHAVIOR = np.array([[0.75, 0.25], [0.5, 0.5]])  # b(a|s)
POLICY = np.array([[0.5, 0.5], [0.25, 0.75]])
REWARD = np.array([[1.0, -2.0], [0.5, 4.0]])
ENDS = np.array([[0.0, 0.5], [0.0, 0.0]])


def values(last: np.ndarray | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Q and V of the policy at ages 0 and 1, backwards; `last`: V of the states after age 1."""
    found, v = [], np.zeros(2) if last is None else last
    for _ in range(2):
        q = REWARD + GAMMA * (1 - ENDS) * v.mean()
        v = (POLICY * q).sum(1)
        found.insert(0, (q, v))
    return found


TRUTH = float(values()[0][1][0])
"""From state 0."""


def all_episodes() -> list[list[tuple[int, int]]]:
    """Every course (state, action), ..., as often as the behaviour takes it, of 1024."""
    found = []
    for first, ends, state, second in itertools.product((0, 1), (0, 1), (0, 1), (0, 1)):
        chance = BEHAVIOR[0, first] * abs(1 - ends - ENDS[0, first])
        course = [(0, first)]
        if not ends:
            course.append((state, second))
            chance *= 0.5 * BEHAVIOR[state, second]
        else:
            chance *= 0.25  # the same course four times
        found += [course] * round(1024 * chance)
    assert len(found) == 1024
    return found


def laid_out(courses):
    pairs = np.array([pair for course in courses for pair in course])
    s, a = pairs.T
    ratio = torch.tensor(POLICY[s, a] / BEHAVIOR[s, a]).log()
    lengths = torch.tensor([len(course) for course in courses])
    age = np.concatenate([np.arange(len(course)) for course in courses])
    return ope.lay_out(torch.tensor(REWARD[s, a]), ratio, lengths), s, a, age


def test_the_truth_is_what_playing_gives():
    draw, total = np.random.default_rng(0), []
    for _ in range(20_000):
        a = draw.choice(2, p=POLICY[0])
        value = REWARD[0, a]
        if draw.random() >= ENDS[0, a]:
            s = draw.integers(2)
            value += GAMMA * REWARD[s, draw.choice(2, p=POLICY[s])]
        total.append(value)
    assert np.mean(total) == pytest.approx(TRUTH, abs=4 * np.std(total) / 20_000**0.5)


@pytest.mark.parametrize("weighted", [False, True])
def test_every_estimate_is_the_value_where_all_courses_are_as_frequent_as_they_should(weighted):
    steps, s, a, _ = laid_out(all_episodes())
    assert ope.importance_sampling(steps, GAMMA, weighted) == pytest.approx(TRUTH, abs=1e-9)
    assert ope.per_decision(steps, GAMMA, weighted) == pytest.approx(TRUTH, abs=1e-9)
    wrong = np.random.default_rng(0).normal(size=(2, 2))  # any Q does, with its own V
    q, v = torch.tensor(wrong[s, a]), torch.tensor((POLICY * wrong).sum(1)[s])
    assert ope.doubly_robust(steps, q, v, GAMMA, weighted=weighted) == pytest.approx(
        TRUTH, abs=1e-9
    )
    # negative control: without ratios it is the behaviour's value
    plain = steps._replace(weight=torch.ones_like(steps.weight))
    assert abs(ope.per_decision(plain, GAMMA, weighted) - TRUTH) > 0.1


def test_estimates_of_few_episodes_by_hand():
    """Two episodes. A: rewards 1, 2, ratios 2, 3, weights 2, 6. B: reward 10, ratio 1/2, which
    stays its weight: it ended. gamma 0.5."""
    steps = ope.lay_out(
        torch.tensor([1.0, 2.0, 10.0]), torch.tensor([2.0, 3.0, 0.5]).log(), torch.tensor([2, 1])
    )
    torch.testing.assert_close(steps.weight, torch.tensor([[2.0, 6.0], [0.5, 0.5]]).double())
    # Returns 2 and 10: (6 * 2 + 0.5 * 10) / 2, and / 6.5.
    assert ope.importance_sampling(steps, 0.5) == pytest.approx(8.5)
    assert ope.importance_sampling(steps, 0.5, weighted=True) == pytest.approx(17 / 6.5)
    # (2 * 1 + 0.5 * 10) / 2 + 0.5 * 6 * 2 / 2; weighted / 2.5 and / 6.5.
    assert ope.per_decision(steps, 0.5) == pytest.approx(3.5 + 3.0)
    assert ope.per_decision(steps, 0.5, weighted=True) == pytest.approx(7 / 2.5 + 6 / 6.5)
    # V 3, 4 and 5, Q 1, 1, 2: (2 * 0 + 3 + 0.5 * (6 * 1 + 2 * 4) + 0.5 * 8 + 5) / 2 = 9.5.
    q, v = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])
    assert ope.doubly_robust(steps, q, v, 0.5) == pytest.approx(9.5)
    # t = 0: 4 / 2.5 + 8 / 2; t = 1: 0.5 (6 / 6.5 * 1 + 2 / 2.5 * 4).
    expected = 1.6 + 4.0 + 0.5 * (6 / 6.5 + 3.2)
    assert ope.doubly_robust(steps, q, v, 0.5, weighted=True) == pytest.approx(expected)
    # A was cut where V is 7: 0.25 * 6 * 7 / 2 more; B terminated.
    more = ope.doubly_robust(steps, q, v, 0.5, torch.tensor([7.0, 0.0]))
    assert more == pytest.approx(9.5 + 5.25)


def test_with_the_right_values_each_course_alone_is_almost_the_value():
    """Of the policy's own randomness nothing is left; that of the world stays."""
    courses = all_episodes()
    right = values()
    spread = {"robust": [], "sampled": []}
    for course in courses[::16]:
        steps, s, a, age = laid_out([course])
        q = torch.tensor([right[t][0][x, y] for t, x, y in zip(age, s, a, strict=True)])
        v = torch.tensor([right[t][1][x] for t, x in zip(age, s, strict=True)])
        spread["robust"].append(ope.doubly_robust(steps, q, v, GAMMA))
        spread["sampled"].append(ope.per_decision(steps, GAMMA))
    assert np.std(spread["robust"]) < 0.6 * np.std(spread["sampled"])


def test_bad_ratios_are_named():
    lengths = torch.tensor([2])
    with pytest.raises(ValueError, match="2 rewards and 3 ratios for 2 steps"):
        ope.lay_out(torch.zeros(2), torch.zeros(3), lengths)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="step 1: the ratio"):
            ope.lay_out(torch.zeros(2), torch.tensor([0.0, bad]), lengths)
    never = ope.lay_out(torch.ones(2), torch.tensor([-torch.inf, 0.0]), lengths)
    assert ope.per_decision(never, 0.9) == 0
    with pytest.raises(ValueError, match="does nothing that was recorded"):
        ope.per_decision(never, 0.9, weighted=True)


# Fitted Q evaluation ------------------------------------------------------------------------


def test_fqe_target_by_hand():
    y = ope.fqe_target(
        torch.tensor([[1.0, 5.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 9.0]]), 0.9
    )
    torch.testing.assert_close(y, torch.tensor([[2.8, 5.0]]))


CELLS = 4


def corridor(offset) -> Transitions:
    """Random walks of ten steps at most; a positive action goes right, where the end pays 1."""
    draw = np.random.default_rng(0)
    obs, action, reward, lengths, ended = [], [], [], [], []
    for _ in range(200):
        cell, rows = 0, 0
        while True:
            obs.append(cell)
            if cell == CELLS - 1 or rows == 10:
                break
            action.append(draw.choice([-0.5, 0.5]))
            cell = cell + 1 if action[-1] > 0 else max(cell - 1, 0)
            reward.append(float(cell == CELLS - 1))
            rows += 1
        lengths.append(rows)
        ended.append(cell == CELLS - 1)
    found = episodes(
        offset + np.eye(CELLS)[obs], np.array(action)[:, None], reward, lengths, ended,
        ~np.array(ended),
    )  # fmt: skip
    return Transitions.from_episodes(found, timeouts="keep", normalize_obs=offset > 0)


def right(obs):
    return torch.full((len(obs), 1), 0.5)


def left_in_the_second(obs):
    """Never gets beyond the second cell; reads observations as they were recorded."""
    assert float(obs.max() - obs.min()) == pytest.approx(1)
    return 0.5 - (obs[:, 1:2] - obs.min())


@pytest.mark.parametrize(
    ("policy", "offset", "expected"),
    [(right, 0, GAMMA**2), (left_in_the_second, 0, 0.0), (left_in_the_second, 500, 0.0)],
)
def test_fitted_q_is_the_value_of_the_policy_and_not_of_the_data(policy, offset, expected):
    data = corridor(offset)
    config = FQEConfig(total_steps=800, batch_size=128, hidden=(32,), learning_rate=5e-3,
                       gamma=GAMMA, polyak=0.05, compile="off")  # fmt: skip
    made = ope.fitted_q(config, data, spec(CELLS), policy, (0, 1))
    assert made.value().tolist() == pytest.approx([expected] * 2, abs=0.05)
    # One step to the right from the second cell, and then as the policy does: to the end.
    second = (data.rows[:, 1] > data.rows[:, 0]).nonzero()[:1, 0]
    onwards = made.q(second, torch.full((1, 1), 0.5)).mean()
    assert float(onwards) == pytest.approx(GAMMA, abs=0.07)
    alone = ope.fitted_q(config, data, spec(CELLS), policy, (1,))
    assert float(alone.value()) == pytest.approx(float(made.value()[1]), abs=1e-4)


@pytest.mark.parametrize("reward", ["raw", "antmaze"])
def test_the_datas_own_value_by_hand(reward):
    """1 + 0.5 * 2 and 10 + 0.5 * 20 + 0.25 * 40."""
    found = episodes(
        np.zeros((7, 1)), np.zeros((5, 1)), [1.0, 2, 10, 20, 40], [2, 3], [False, True]
    )
    data = Transitions.from_episodes(found, reward=reward)
    assert ope.recorded_value(data, 0.5) == pytest.approx((2 + 30) / 2)


def test_what_has_settled_by_hand():
    at = lambda value, residual: ope.Progress(1, value, residual)  # noqa: E731
    assert ope.settled([at(9.5, 3.0), at(10.0, 2.5)], 0.0)
    assert not ope.settled([at(8.5, 3.0), at(10.0, 3.0)], 0.0)
    assert ope.settled([at(0.05, 3.0), at(0.2, 3.0)], -20.0)  # 0, as values here go
    assert not ope.settled([at(-16.0, 3.0), at(-42.0, 3.0)], -571.0)  # has hardly begun
    assert not ope.settled([at(10.0, 1.0), at(10.0, 2.5)], 0.0)
    assert not ope.settled([at(-10.0, 2.5), at(-10.0, 1.0)], 0.0)
    assert not ope.settled([at(10.0, 1.0)], 0.0)  # one update has no half


def test_the_course_is_that_of_the_half_and_the_end():
    config = FQEConfig(total_steps=40, batch_size=8, hidden=(4,), gamma=GAMMA, compile="off")
    data = corridor(0)
    made = ope.fitted_q(config, data, spec(CELLS), right, (0, 1))
    again = ope.FQE(config, data, spec(CELLS), ope.actions_of(right, data), (0, 1))
    losses, values = [], []
    for _ in range(40):
        losses.append(float(again.update()[-1].mean()))
        values.append(float(again.value().mean()))
    assert [at.updates for at in made.course] == [20, 40]
    for at in made.course:  # a tenth of 40 updates is 4
        assert at.value == pytest.approx(values[at.updates - 1])
        assert at.residual == pytest.approx(np.mean(losses[at.updates - 4 : at.updates]) ** 0.5)
    assert made.course[0].value != made.course[1].value


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


def noise(path):
    draw = np.random.default_rng(0)
    found = episodes(
        draw.normal(size=(210, 3)), draw.uniform(-1, 1, (200, 2)), np.ones(200), np.full(10, 20),
        np.zeros(10), np.ones(10),
    )  # fmt: skip
    d4rl.write(path, found)
    return Transitions.from_episodes(found)


def test_the_command_estimates_a_run(tmp_path, short, capsys):
    """Reward 1 for ever: 1 / (1 - 0.8), whatever the policy does."""
    data = noise(tmp_path / "noise.hdf5")
    bounds = spec(3, (-1.0, -1.0), (1.0, 1.0))
    train_bc(BCConfig(total_steps=5, hidden=(8,), compile="off"), data, bounds,
             run=Run(tmp_path / "r", console=False))  # fmt: skip
    words = "--fqe.gamma 0.8 --fqe.total-steps 600 --fqe.hidden 16 --fqe.batch-size 32 "
    words += "--fqe.learning-rate 0.01 --fqe.polyak 0.1 --fqe.compile off --seeds 2"
    found = main([str(tmp_path / "r"), "--dataset", str(tmp_path / "noise.hdf5"), *words.split()])
    assert found["metrics"]["fitted_q"]["mean"] == pytest.approx(5.0, rel=0.05)
    assert len(found["values"]) == 2 and found["values"][0] != found["values"][1]
    # As recorded it ends after 20 steps.
    assert found["metrics"]["recorded"]["mean"] == pytest.approx((1 - 0.8**20) / 0.2)
    text = capsys.readouterr().out
    assert "over 2 seeds" in text and "the data's own: 4.94" in text
    half, end = found["course"]
    assert f"after 300 updates: {half['value']:.4g}, TD error {half['residual']:.4g}" in text
    assert f"after 600 updates: {end['value']:.4g}" in text and "still move" not in text
    assert found["settled"]
    words = words.replace("total-steps 600", "total-steps 20")
    found = main([str(tmp_path / "r"), "--dataset", str(tmp_path / "noise.hdf5"), *words.split()])
    assert "warning: these still move; try --fqe.total-steps 40\n" in capsys.readouterr().out
    assert not found["settled"]


def test_the_command_refuses_what_it_cannot_judge(tmp_path, short, monkeypatch):
    names = registry.names
    monkeypatch.setattr(
        registry, "names", lambda g: {**names(g), **(POLICIES if g == "policies" else {})}
    )
    data = noise(tmp_path / "noise.hdf5")
    bounds = spec(3, (-1.0, -1.0), (1.0, 1.0))
    config = DecisionTransformerConfig(total_steps=1, context=2, width=4, layers=1, batch_size=2)
    train_transformer(config, data, bounds, run=Run(tmp_path / "dt", console=False))
    with pytest.raises(ValueError, match="its policy has a memory"):
        main([str(tmp_path / "dt"), "--dataset", str(tmp_path / "noise.hdf5")])
    other = random_data(obs_size=4)
    run, wide = Run(tmp_path / "bc", console=False), spec(4, (-1.0, -1.0), (1.0, 1.0))
    train_bc(BCConfig(total_steps=1, hidden=(4,), compile="off"), other, wide, run=run)
    with pytest.raises(ValueError, match="of 3 and 2 numbers"):
        main([str(tmp_path / "bc"), "--dataset", str(tmp_path / "noise.hdf5")])


def test_what_a_cut_normal_says_adds_up_to_one():
    """The benchmark's ratios: bounds that differ per dimension, each end with its own mass."""
    low, high = torch.tensor([-1.0, -0.5]), torch.tensor([0.5, 2.0])
    mean, std = torch.tensor([[0.3, -0.2]]).double(), torch.tensor([0.7, 0.4]).double()

    def of(action):
        return cut_log_prob(mean, std, torch.tensor([action]), low, high).exp().item()

    masses = {}
    for x in (-1.0, 0.5):
        masses[x] = of([x, 0.0]) / of([0.0, 0.0])
    grid = torch.linspace(-1.0, 0.5, 20_001)[1:-1]
    inside = sum(of([float(x), 0.0]) for x in grid[::100]) / of([0.0, 0.0])
    density_at_0 = torch.distributions.Normal(0.3, 0.7).log_prob(torch.tensor(0.0)).exp().item()
    total = density_at_0 * (sum(masses.values()) + inside * 100 * 1.5 / 20_000)
    assert total == pytest.approx(1.0, abs=0.01)
    upper = 1 - torch.distributions.Normal(0.3, 0.7).cdf(torch.tensor(0.5)).item()
    assert masses[0.5] * density_at_0 == pytest.approx(upper, rel=1e-4)
    assert masses[0.5] > 2 * masses[-1.0]  # the mean lies at the upper end
