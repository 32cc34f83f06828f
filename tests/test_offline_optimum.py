"""Problems whose optimum is known: every value-based learner comes within 5 % of it; BC does not.

corridor   five cells in a row, one-hot. A negative action walks left, a positive one right; the
           right end pays 1 and terminates, the left end is a wall. V*(cell) = 0.8^(3 - cell).
           The data walks left more often than right.
point      s' = s + 0.5 a, reward -(s^2 + 0.1 a^2), gamma 0.8, |a| <= 1, cut after 10 steps.
           A linear-quadratic problem; the best gain solves the discounted Riccati equation. The
           data's gain is a quarter of it, with noise.
"""

import numpy as np
import pytest
import torch
from recorded import episodes, spec

from ctrl_rl.policy import Policy
from offline import training
from offline.bc import BC, BCConfig
from offline.cql import CQL, CQLConfig
from offline.iql import IQL, IQLConfig
from offline.td3_bc import TD3BC, TD3BCConfig
from offline.transitions import Transitions

GAMMA = 0.8
SHARED = {"batch_size": 128, "compile": "off", "activation": "tanh"}

LEARNERS = {
    "bc": lambda steps: (
        BC,
        BCConfig(total_steps=steps, learning_rate=3e-3, hidden=(32,), **SHARED),
    ),
    "td3_bc": lambda steps: (
        TD3BC,
        TD3BCConfig(total_steps=steps, gamma=GAMMA, learning_rate=3e-3, polyak=0.02, alpha=20.0,
                    hidden=(32, 32), **SHARED),
    ),
    "iql": lambda steps: (
        IQL,
        IQLConfig(total_steps=steps, gamma=GAMMA, learning_rate=3e-3, polyak=0.02, expectile=0.9,
                  inverse_temperature=20.0, hidden=(32, 32), **SHARED),
    ),
    "cql": lambda steps: (
        CQL,
        CQLConfig(total_steps=steps, gamma=GAMMA, learning_rate=3e-3, actor_learning_rate=3e-3,
                  polyak=0.02, conservatism=0.01, num_actions=4, hidden=(32, 32), **SHARED),
    ),
}  # fmt: skip


def learned(algo, data, steps) -> Policy:
    made, config = LEARNERS[algo](steps)
    learner = made(config, data, spec(data.obs_size))
    training.fit(learner, data)
    return Policy.from_section(learner.policy_section(0))


# Corridor -----------------------------------------------------------------------------------

CELLS = 5


def corridor(count=200) -> Transitions:
    """Episodes from a random cell, of at most ten steps."""
    draw = np.random.default_rng(0)
    obs, action, reward, lengths, terminated = [], [], [], [], []
    for _ in range(count):
        cell, rows = draw.integers(CELLS - 1), 0
        while True:
            obs.append(cell)
            if cell == CELLS - 1 or rows == 10:
                break
            action.append(draw.uniform(-1, 0.6))
            cell = max(cell - 1, 0) if action[-1] < 0 else cell + 1
            reward.append(float(cell == CELLS - 1))
            rows += 1
        lengths.append(rows)
        terminated.append(cell == CELLS - 1)
    found = episodes(
        np.eye(CELLS)[obs], np.array(action)[:, None], reward, lengths, terminated,
        ~np.array(terminated),
    )  # fmt: skip
    return Transitions.from_episodes(found, timeouts="keep")


def corridor_value(policy: Policy) -> float:
    """Mean discounted return from the four cells."""
    right = policy(torch.eye(CELLS))[:, 0] >= 0
    values = []
    for cell in range(CELLS - 1):
        steps = 0
        while cell < CELLS - 1 and steps < 100:
            cell, steps = (cell + 1 if right[cell] else max(cell - 1, 0)), steps + 1
        values.append(GAMMA ** (steps - 1) if cell == CELLS - 1 else 0.0)
    return float(np.mean(values))


CORRIDOR_BEST = float(np.mean([GAMMA ** (CELLS - 2 - cell) for cell in range(CELLS - 1)]))


# Point --------------------------------------------------------------------------------------


def riccati() -> tuple[float, float]:
    """Best gain, and p: the best cost from s is p s^2."""
    p = 1.0
    for _ in range(1000):
        gain = GAMMA * p * 0.5 / (0.1 + GAMMA * p * 0.25)
        p = 1 + 0.1 * gain**2 + GAMMA * p * (1 - 0.5 * gain) ** 2
    return gain, p


def point(count=400) -> Transitions:
    draw = np.random.default_rng(1)
    gain, _ = riccati()
    s, obs, action = draw.uniform(-0.6, 0.6, count), [], []
    for _ in range(10):
        obs.append(s)
        action.append(np.clip(-gain / 4 * s + draw.normal(0, 0.5, count), -1, 1))
        s = s + 0.5 * action[-1]
    obs = np.stack([*obs, s], 1)
    action = np.stack(action, 1)
    reward = -(obs[:, :-1] ** 2 + 0.1 * action**2)
    found = episodes(
        obs.reshape(-1, 1), action.reshape(-1, 1), reward.reshape(-1), np.full(count, 10),
        np.zeros(count), np.ones(count),
    )  # fmt: skip
    return Transitions.from_episodes(found, timeouts="keep")


def point_cost(policy) -> float:
    """Mean discounted cost from starts within -0.6..0.6."""
    s = torch.linspace(-0.6, 0.6, 33)
    cost = torch.zeros_like(s)
    for step in range(100):
        action = policy(s[:, None])[:, 0]
        cost += GAMMA**step * (s.square() + 0.1 * action.square())
        s = s + 0.5 * action
    return float(cost.mean())


def test_the_optimum_of_the_point_is_what_the_equation_says():
    gain, p = riccati()
    best = float((p * torch.linspace(-0.6, 0.6, 33).square()).mean())
    assert gain * 0.6 < 1  # the bounds never bind
    assert point_cost(lambda s: -gain * s) == pytest.approx(best, rel=1e-4)
    assert point_cost(lambda s: -1.2 * gain * s) > best
    assert point_cost(lambda s: -0.8 * gain * s) > best


# Learners -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["td3_bc", "iql", pytest.param("cql", marks=pytest.mark.slow)])
def test_the_corridor_is_walked_to_the_paying_end(algo):
    assert corridor_value(learned(algo, corridor(), 500)) >= 0.95 * CORRIDOR_BEST


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "steps"), [("td3_bc", 800), ("iql", 1200), ("cql", 1000)])
def test_the_point_is_steered_almost_as_the_equation_says(algo, steps):
    _, p = riccati()
    best = float((p * torch.linspace(-0.6, 0.6, 33).square()).mean())
    assert point_cost(learned(algo, point(), steps)) <= 1.05 * best


def test_cloning_the_same_data_is_far_from_the_optimum():
    """The negative control: the data's own behaviour is no answer to either problem."""
    assert corridor_value(learned("bc", corridor(), 300)) < 0.5 * CORRIDOR_BEST
    _, p = riccati()
    best = float((p * torch.linspace(-0.6, 0.6, 33).square()).mean())
    assert point_cost(learned("bc", point(), 300)) > 1.3 * best
