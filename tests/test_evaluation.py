"""Evaluation: which episodes count, and intervals with known values."""

import math

import pytest
import torch

import ctrl_rl
from ctrl_rl.env import Fault, Info, Step
from ctrl_rl.evaluation import bootstrap, evaluate, ratio_metric, wilson
from ctrl_rl.policy import Policy
from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm


class Lengths:
    """Row i plays episodes of given lengths, over and over; reward 1 per step.

    An odd length terminates, an even one is a time limit. The figure "age" is the step number.
    """

    def __init__(self, *lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.device = torch.device("cpu")
        self.metric_units = {"age": "steps"}
        self.spec = EnvSpec(
            task="Lengths-v0",
            num_envs=len(lengths),
            obs={"actor": (ObsTerm(name="t", kind="signal", size=1),)},
            action=(ActionDim(name="a"),),
            physics_dt=1.0,
            step_dt=1.0,
            max_episode_steps=100,
        )
        self.actions = []

    def reset(self):
        self.t = torch.zeros(len(self.lengths))
        self.count = [0] * len(self.lengths)
        return {"actor": self.t[:, None].clone()}

    def step(self, action):
        self.actions.append(action)
        self.t += 1
        age = self.t.clone()
        length = torch.tensor(
            [float(row[k % len(row)]) for row, k in zip(self.lengths, self.count, strict=True)]
        )
        ended = self.t >= length
        terminated = ended & (length % 2 == 1)
        faults = tuple(Fault(i, "x") for i in range(len(ended)) if ended[i] and length[i] == 8)
        next_obs = {"actor": self.t[:, None].clone()}
        for i in ended.nonzero().flatten().tolist():
            self.count[i] += 1
            self.t[i] = 0
        obs = {"actor": self.t[:, None].clone()}
        info = Info(metrics={"age": age}, faults=faults)
        return Step(obs, torch.ones(len(age)), terminated, ended & ~terminated, next_obs, info)


class Still:
    """A policy that does nothing, and counts what it is told."""

    group, device = "actor", torch.device("cpu")

    def __init__(self, env):
        self.spec, self.resets = env.spec, []

    def __call__(self, obs):
        return torch.zeros(len(obs["actor"]), 1)

    def sample(self, obs, generator):
        return torch.rand(len(obs["actor"]), 1, generator=generator)

    def reset(self, rows=None):
        self.resets.append(None if rows is None else rows.tolist())


def test_the_first_k_by_environment_and_episode_count():
    # K = 5 of N = 2: each plays 3; row 0 gives 2, 4, 6, row 1 its first two, 10 and 12. The
    # first five to finish would be 2, 4, 10, 6, 2: shorter.
    env = Lengths((2, 4, 6), (10, 12, 14))
    result = evaluate(Still(env), env, 5)
    assert result.episodes["episode_length"].tolist() == [2, 4, 6, 10, 12]
    assert result.episodes["episode_return"].tolist() == [2, 4, 6, 10, 12]
    metric = result.metrics["episode_length"]
    assert metric.mean == pytest.approx(34 / 5) and metric.n == 5 and metric.unit == "steps"
    # the mean age over the steps of an episode of length L is (L + 1) / 2
    assert result.episodes["age"].tolist() == [1.5, 2.5, 3.5, 5.5, 6.5]
    assert result.metrics["age"].unit == "steps"


def test_short_episodes_are_not_favoured():
    env = Lengths(*[(1,)] * 5, *[(9,)] * 5)
    assert evaluate(Still(env), env, 10).metrics["episode_length"].mean == 5.0


def test_the_average_reward_counts_every_step_the_same():
    # 2 in 2 steps and 30 in 10: 32 / 12, where the mean of the two ratios would be 2
    found = ratio_metric(torch.tensor([2.0, 30.0]), torch.tensor([2.0, 10.0]))
    assert found.mean == pytest.approx(32 / 12) and found.n == 2
    assert found.ci95 == pytest.approx((1.0, 3.0))  # both resamples of one episode alone
    same = ratio_metric(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]))
    assert same.ci95 == (2.0, 2.0)
    assert ratio_metric(torch.tensor([2.0]), torch.tensor([1.0])).ci95 is None
    env = Lengths((2, 4), (10, 12))
    assert evaluate(Still(env), env, 4).metrics["average_reward"].mean == 1.0


def test_rates_count_terminations_and_faults():
    env = Lengths((1, 2, 3, 4), (5, 6, 7, 8))
    result = evaluate(Still(env), env, 8)
    assert result.metrics["terminated_rate"].mean == 0.5
    assert result.metrics["fault_rate"].mean == 1 / 8
    assert result.metrics["terminated_rate"].ci95 == pytest.approx(wilson(4, 8))
    assert list(result.log()) == [f"eval/{k}" for k in result.metrics]


def test_the_policy_is_told_which_rows_ended():
    env = Lengths((2,), (3,))
    policy = Still(env)
    evaluate(policy, env, 2)
    assert policy.resets == [None, [0], [1]]  # what it remembers begins with the evaluation


def test_sampling_is_asked_for_and_seeded():
    env = Lengths((2,), (2,))
    runs = []
    for seed in (1, 1, 2):
        env.actions.clear()
        evaluate(Still(env), env, 2, deterministic=False, seed=seed)
        runs.append(torch.cat(env.actions))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    # centre (p + z^2/2n) / (1 + z^2/n), z = 1.95996; for 0 of 100 the upper end is
    # (z^2/n) / (1 + z^2/n) = 0.038415 / 1.038415 = 0.0370
    [
        (0, 100, 0.0, 0.0370),
        (10, 100, 0.0552, 0.1744),
        (100, 100, 0.9630, 1.0),
        (1, 2, 0.0945, 0.9055),
    ],
)
def test_wilson(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=1e-4)


def test_bootstrap_is_close_to_the_normal_interval_and_honest_at_the_edges():
    x = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = bootstrap(x)
    half = 1.96 * float(x.std()) / math.sqrt(400)
    assert low == pytest.approx(float(x.mean()) - half, abs=0.2 * half)
    assert high == pytest.approx(float(x.mean()) + half, abs=0.2 * half)
    assert bootstrap(x) == (low, high)
    assert bootstrap(torch.tensor([3.0, 3.0])) == (3.0, 3.0)
    assert bootstrap(torch.tensor([3.0])) is None


def test_bad_calls_are_refused():
    env = Lengths((2,))
    with pytest.raises(ValueError, match="at least 1"):
        evaluate(Still(env), env, 0)
    other = ctrl_rl.make("Pendulum-v0", 1)
    with pytest.raises(ValueError, match="trained on Lengths-v0"):
        evaluate(Still(env), other, 1)


def test_evaluation_repeats_and_changes_no_statistics():
    from ctrl_rl.ppo import PPO, PPOConfig

    env = ctrl_rl.make("Pendulum-v0", 4, seed=7)
    learner = PPO(PPOConfig(num_steps=16, hidden=(8,)), env.spec, "cpu")
    for normalizer in learner.normalizers.values():
        normalizer.update(500 + 1000 * torch.randn(64, 3))
    policy = Policy.from_section(learner.policy_section())
    before = {
        k: v.clone() for k, v in policy.section()["normalizer"].items() if k in ("mean", "var")
    }
    start = env.state_dict()
    first = evaluate(policy, env, 4)
    env.load_state_dict(start)
    second = evaluate(policy, env, 4)
    assert torch.equal(first.episodes["episode_return"], second.episodes["episode_return"])
    for key, value in before.items():
        assert torch.equal(policy.module.normalizer.state_dict()[key], value)
        assert torch.equal(policy.section()["normalizer"][key], value)
    # and the figures are those of a hand-written loop
    env.load_state_dict(start)
    obs, total = env.reset(), 0
    for _ in range(200):
        step = env.step(policy(obs))
        obs, total = step.obs, total + step.reward.double()
    assert torch.allclose(first.episodes["episode_return"], total, atol=1e-9)


def test_a_policy_that_asks_is_told_each_reward_before_it_forgets_an_episode():
    """Reward 1 per step: what it was told since its episodes began is their age."""

    class Told(Still):
        def reset(self, rows=None):
            self.told = torch.zeros(2) if rows is None else self.told.index_fill(0, rows, 0.0)

        def receive(self, reward):
            self.told = self.told + reward

        def __call__(self, obs):
            assert torch.equal(self.told, obs["actor"][:, 0])
            return super().__call__(obs)

    env = Lengths((3,), (5,))
    policy = Told(env)
    result = evaluate(policy, env, 4)
    assert result.episodes["episode_return"].tolist() == [3, 3, 5, 5]
