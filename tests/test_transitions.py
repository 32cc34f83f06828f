"""Minibatches hold true pairs only: nothing across an end, every dropped step counted."""

import numpy as np
import pytest
import torch

from offline.episodes import Episodes, concatenate
from offline.transitions import Transitions, reward_transform


def episode(first, steps, *, reward=1.0, terminated=False, truncated=False, known=True, d=2):
    """Observations (first, -first), (first + 1, ...), ...; action = first of the observation."""
    count = np.arange(first, first + steps + 1, dtype=np.float32)
    obs = np.stack([count * (-1) ** i for i in range(d)], 1)
    if not known:
        obs[-1] = obs[-2]
    return Episodes(
        obs=obs,
        action=count[:-1, None] / 100,
        reward=np.full(steps, reward) + np.arange(steps) / 10,
        lengths=np.array([steps]),
        terminated=np.array([terminated]),
        truncated=np.array([truncated]),
        final_known=np.array([known]),
    )


MIXED = [
    episode(0, 3, terminated=True, known=False),
    episode(10, 2, truncated=True, reward=2.0),
    episode(20, 2, truncated=True, known=False),
    episode(30, 1, terminated=True, truncated=True),
    episode(40, 2, known=False),
    episode(50, 2),
]


def everything(data):
    """(s, a, r, s', terminated) of all transitions as plain numbers, in order."""
    batch = data.batch(data.index[None])
    columns = (batch.obs[0, :, 0], batch.action[0, :, 0], batch.reward[0])
    columns += (batch.next_obs[0, :, 0], batch.terminated[0])
    return [tuple(round(v, 4) for v in row) for row in torch.stack(columns, 1).tolist()]


def test_pairs_by_hand():
    data = Transitions.from_episodes(concatenate(MIXED), timeouts="keep")
    found = everything(data)
    assert found[:2] == [(0, 0, 1, 1, 0), (1, 0.01, 1.1, 2, 0)]
    s, a, r, _, terminated = found[2]  # what follows a termination is never looked at
    assert (s, a, r, terminated) == (2, 0.02, 1.2, 1)
    assert found[3:] == [
        (10, 0.10, 2.0, 11, 0),
        (11, 0.11, 2.1, 12, 0),  # cut, and the file knows what followed
        (20, 0.20, 1.0, 21, 0),  # 21 is dropped
        (30, 0.30, 1.0, 31, 1),  # terminated on the last allowed step
        (40, 0.40, 1.0, 41, 0),  # 41 is dropped
        (50, 0.50, 1.0, 51, 0),
        (51, 0.51, 1.1, 52, 0),
    ]
    assert data.report["dropped_unknown_successor"] == 2
    assert data.report["dropped_at_timeouts"] == 0
    assert data.report["transitions"] == len(data) == 10
    assert data.report["steps"] == 12


def test_timeouts_are_dropped_and_counted():
    kept = Transitions.from_episodes(concatenate(MIXED), timeouts="keep")
    data = Transitions.from_episodes(concatenate(MIXED), timeouts="drop")
    assert everything(data) == [row for row in everything(kept) if row[0] != 11]
    assert data.report["dropped_at_timeouts"] == 2
    assert data.report["dropped_unknown_successor"] == 1
    assert data.report["terminated"] == 2
    with pytest.raises(ValueError, match="timeouts must be one of drop, keep, not 'cut'"):
        Transitions.from_episodes(concatenate(MIXED), timeouts="cut")


def test_no_usable_step_is_an_error():
    with pytest.raises(ValueError, match="no step is a usable transition"):
        Transitions.from_episodes(episode(0, 1, truncated=True))


def test_each_seed_draws_as_if_alone():
    data = Transitions.from_episodes(concatenate(MIXED))
    generators = lambda seeds: [torch.Generator().manual_seed(s) for s in seeds]  # noqa: E731
    together = data.draw(64, generators((0, 1, 2)))
    assert together.shape == (3, 64)
    for i in range(3):
        assert torch.equal(data.draw(64, generators((i,)))[0], together[i])
    assert not torch.equal(together[0], together[1])
    assert set(together.unique().tolist()) == set(data.index.tolist())
    batch = data.batch(together)
    assert [x.shape for x in batch] == [(3, 64, 2), (3, 64, 1), (3, 64), (3, 64, 2), (3, 64)]
    goes_on = batch.terminated == 0
    assert torch.equal(batch.next_obs[goes_on][:, 0], batch.obs[goes_on][:, 0] + 1)
    assert torch.equal(batch.obs[..., 1], -batch.obs[..., 0])


def test_standardised_by_hand_and_undone_by_the_policy_section():
    from ctrl_rl.normalize import Normalizer

    episodes = concatenate([episode(1000, 3, truncated=True), episode(1010, 1, terminated=True)])
    data = Transitions.from_episodes(episodes, normalize_obs=True)
    # Transitions start from 1000, 1001 (1002 is dropped) and 1010.
    started = np.array([1000.0, 1001.0, 1010.0])
    assert data.normalizer is not None
    assert data.normalizer.mean.tolist() == pytest.approx([started.mean(), -started.mean()])
    assert data.normalizer.std.tolist() == pytest.approx([started.std()] * 2)
    want = (started - started.mean()) / (started.std() + 1e-3)
    batch = data.batch(data.index[None])
    np.testing.assert_allclose(batch.obs[0, :, 0], want, rtol=1e-4)
    first_next = (1001 - started.mean()) / (started.std() + 1e-3)
    assert batch.next_obs[0, 0, 0].item() == pytest.approx(first_next, rel=1e-4)
    assert batch.action[0, :, 0].tolist() == pytest.approx([10.0, 10.01, 10.1])
    raw = torch.from_numpy(episodes.obs[:2])
    torch.testing.assert_close(data.normalizer(raw), data.rows[:2, :2], rtol=1e-4, atol=1e-4)
    saved = data.normalizer.section()
    assert saved["var"].tolist() == pytest.approx([(started.std() + 1e-3) ** 2] * 2, rel=1e-6)
    policy = Normalizer(2, saved["clip"], saved["epsilon"])
    policy.load_state_dict({k: saved[k] for k in ("mean", "var", "count")})
    torch.testing.assert_close(policy(raw), data.rows[:2, :2], rtol=1e-3, atol=1e-4)
    assert Transitions.from_episodes(episodes).normalizer is None


def test_a_constant_column_stays_finite():
    data = Transitions.from_episodes(episode(5, 1, d=3), normalize_obs=True)
    assert data.batch(data.index[None]).obs.tolist() == [[[0.0, 0.0, 0.0]]]


def test_reward_presets_by_hand():
    # Returns: 1 + 1.1 + 1.2 = 3.3, and 2 + 2.1 = 4.1.
    ended = [episode(0, 3, terminated=True), episode(9, 2, reward=2.0, truncated=True)]
    with_rest = concatenate([*ended, episode(20, 1, reward=0.5)])  # a recording that just stops
    np.testing.assert_allclose(with_rest.returns(), [3.3, 4.1, 0.5])
    assert reward_transform(with_rest, "locomotion") == pytest.approx((1000 / 0.8, 0.0))
    ended[1] = episode(9, 2, reward=2.0)  # where one ended, it alone counts; else all
    with pytest.raises(ValueError, match="all 1 are 3.3"):
        reward_transform(concatenate(ended), "locomotion")
    episodes = concatenate([episode(0, 3), episode(9, 2, reward=2.0)])
    assert reward_transform(episodes, "locomotion") == pytest.approx((1000 / 0.8, 0.0))
    data = Transitions.from_episodes(episodes, reward="locomotion")
    reward = data.batch(data.index[None]).reward[0]
    assert reward.tolist() == pytest.approx([1250, 1375, 1500, 2500, 2625])
    assert data.raw_reward(reward).tolist() == pytest.approx([1, 1.1, 1.2, 2, 2.1])
    assert data.report["reward"]["max"] == pytest.approx(2625)
    assert data.report["reward"]["preset"] == "locomotion"

    data = Transitions.from_episodes(episodes, reward="antmaze")
    reward = data.batch(data.index[None]).reward[0]
    assert reward.tolist() == pytest.approx([0, 0.1, 0.2, 1, 1.1], abs=1e-6)
    assert data.raw_reward(reward)[0].item() == pytest.approx(1)
    assert (data.report["reward"]["scale"], data.report["reward"]["shift"]) == (1.0, -1.0)

    with pytest.raises(ValueError, match="reward must be one of raw, locomotion, antmaze, not 'x'"):
        reward_transform(episodes, "x")
    with pytest.raises(ValueError, match="all 1 are 3.3"):
        reward_transform(episode(0, 3), "locomotion")


def test_sparse_rewards_without_a_shift_are_pointed_out():
    base = concatenate([episode(0, 4), episode(9, 4)])
    for reward, preset, warned in (
        ([0, 0, 0, 0, 0, 0, 0, 1], "raw", True),
        ([0, 0, 0, 0, 0, 0, 0, 1], "locomotion", True),
        ([0, 0, 0, 0, 0, 0, 0, 1], "antmaze", False),
        ([0, 1, 1, 1, 1, 1, 1, 2], "locomotion", False),
        ([0, 0, 0, 0, 0, 0, 0, -1], "raw", False),
        ([0, 1, 1, 1, 1, 1, 1, 1], "raw", False),
        ([0, 0, 0, 0, 0, 0, 0, 0], "raw", False),
    ):
        sparse = Episodes(**{**vars(base), "reward": np.array(reward, np.float32)})
        data = Transitions.from_episodes(sparse, reward=preset)
        assert bool(data.report["warnings"]) == warned


def test_memory_is_the_float32_data_and_an_index():
    steps = 20_000
    episodes = episode(0, steps, d=11)
    data = Transitions.from_episodes(episodes)
    assert data.rows.untyped_storage().nbytes() == (steps + 1) * (11 + 1 + 2) * 4
    assert data.nbytes <= 1.2 * steps * (11 + 1 + 2) * 4
    assert data.starts.tolist() == [0] and data.lengths.tolist() == [steps]


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("lengths", np.array([2, 0]), "episode 1 has no step"),
        ("lengths", np.array([], np.int64), "there is no episode"),
        ("lengths", np.array([2]), "obs has 4 rows, not 3"),
        ("reward", np.ones(2, np.float32), "reward has 2 rows, not 3"),
        ("reward", np.ones((3, 1), np.float32), "reward must have 1 dimensions"),
        ("terminated", np.zeros(2, bool), "terminated has 2 rows, not 1"),
        ("terminated", np.zeros(1), "terminated must be bool"),
        ("obs", np.zeros((4, 2)), "obs must be float32"),
        ("infos", {"qpos": np.zeros((4, 2))}, "infos/qpos has 4 rows, not 3"),
    ],
)
def test_arrays_that_do_not_belong_together(field, value, message):
    with pytest.raises(ValueError, match=message):
        Episodes(**{**vars(episode(0, 3)), field: value})


def test_episodes_are_chosen_whole():
    whole = concatenate(MIXED)
    assert whole.num_episodes == 6 and whole.num_steps == 12
    part = whole.select([3, 1])
    for name in ("obs", "action", "reward", "terminated", "truncated", "final_known"):
        want = np.concatenate([getattr(MIXED[3], name), getattr(MIXED[1], name)])
        np.testing.assert_array_equal(getattr(part, name), want)
    assert part.lengths.tolist() == [1, 2]
    with pytest.raises(ValueError, match="there is no episode"):
        whole.select([])
    with pytest.raises(ValueError, match="part 1 has observations and actions of 3 and 1 numbers"):
        concatenate([MIXED[0], episode(0, 1, d=3)])
