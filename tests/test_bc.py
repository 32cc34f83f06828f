import numpy as np
import pytest
import torch
from recorded import episodes, spec

from ctrl_rl.policy import Policy
from offline import bc, training
from offline.bc import BC, BCConfig
from offline.transitions import Transitions


def test_loss_by_hand():
    # Half ranges 1 and 5: ((0.5/1)^2 + (5/5)^2 + 0 + 0) / 4 = 0.3125.
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 10.0])
    action = torch.tensor([[[0.5, 10.0], [0.0, 1.0]]])
    data_action = torch.tensor([[[0.0, 5.0], [0.0, 1.0]]])
    found = bc.cloning_loss(action, data_action, low, high)
    torch.testing.assert_close(found, torch.tensor([0.3125]))


def graded(reward="raw", timeouts="keep") -> Transitions:
    """Ten episodes of 1 to 10 steps; episode k has action k / 10 and return k % 5."""
    lengths = np.arange(1, 11)
    value = np.zeros(55)
    value[np.cumsum(lengths) - 1] = np.arange(10) % 5
    action = np.repeat(np.arange(10) / 10, lengths)[:, None]
    ends = np.arange(10) % 2 == 0
    found = episodes(np.zeros((65, 1)), action, value, lengths, ends, ~ends)
    return Transitions.from_episodes(found, reward=reward, timeouts=timeouts)


def cloned(data) -> list[int]:
    """Which episodes are left."""
    return sorted({round(10 * float(x)) for x in data.rows[data.index, 1]})


@pytest.mark.parametrize("reward", ["raw", "antmaze"])
def test_best_episodes_go_by_return_of_the_file_and_the_earlier_of_equals(reward):
    """The preset that shifts each step would put the short episodes first."""
    data = graded(reward)
    assert cloned(bc.best_episodes(data, 0.2)) == [4, 9]  # return 4
    assert cloned(bc.best_episodes(data, 0.3)) == [3, 4, 9]
    assert cloned(bc.best_episodes(data, 0.01)) == [4]
    assert bc.best_episodes(data, 1.0) is data
    kept = bc.best_episodes(data, 0.2)
    assert len(kept) == 5 + 10 and kept.report["transitions"] == 15
    assert kept.report["episodes_kept"] == 2 and "episodes_kept" not in data.report
    assert kept.rows.data_ptr() == data.rows.data_ptr()


def test_returns_count_steps_that_are_no_transitions():
    """The last step of episode 9, which holds its whole return, is dropped at the time-out."""
    assert cloned(bc.best_episodes(graded(timeouts="drop"), 0.2)) == [4, 9]


def test_no_transition_left_is_an_error():
    found = episodes(np.zeros((6, 1)), np.zeros((4, 1)), [0, 0, 0, 9], [3, 1], [1, 0], [0, 1])
    data = Transitions.from_episodes(found)
    with pytest.raises(ValueError, match="top_fraction 0.5: the best 1 episodes hold no usable"):
        bc.best_episodes(data, 0.5)


def test_it_clones_the_mean_and_the_best_tenth_the_best():
    """Two behaviours in one state; the rarer one has the larger return."""
    action = np.array([[-0.5]] * 90 + [[0.7]] * 10)
    reward = np.array([1.0] * 90 + [2.0] * 10)
    data = Transitions.from_episodes(
        episodes(np.zeros((200, 1)), action, reward, np.ones(100), np.ones(100))
    )
    for fraction, expected in ((1.0, -0.38), (0.1, 0.7)):
        config = BCConfig(
            total_steps=300, batch_size=64, hidden=(8,), learning_rate=1e-2, compile="off",
            top_fraction=fraction,
        )  # fmt: skip
        made = BC(config, data, spec(1))
        with pytest.MonkeyPatch.context() as patch:  # `train` builds one of its own
            patch.setattr(bc, "BC", lambda *_, made=made: made)
            run = bc.train(config, data, spec(1))
        policy = Policy.from_section(made.policy_section(0))
        assert float(policy(torch.zeros(1, 1))) == pytest.approx(expected, abs=0.05)
        assert run.rows[-1]["step"] == 300
        assert training.LOG_EVERY == 250 and len(run.rows) == 2
