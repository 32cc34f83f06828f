import dataclasses
import math
from pathlib import Path

import pytest
import torch
from probes import AgeReward, FollowSignal, Probe
from torch import Tensor

import ctrl_rl
from ctrl_rl.multi_critic_ppo import MultiCriticPPOConfig
from ctrl_rl.policy import Policy
from ctrl_rl.ppo import (
    METRICS,
    PPO,
    PPOConfig,
    adapted_learning_rate,
    clipped_objective,
    kl_estimate,
    train,
)
from ctrl_rl.recurrent_ppo import RecurrentPPOConfig
from ctrl_rl.rollout import collect, selected
from ctrl_rl.runs import Run
from ctrl_rl.spec import Discrete, ObsTerm

SMALL = PPOConfig(num_steps=8, num_epochs=2, num_minibatches=4, hidden=(16,), compile="off")


def small(**changes) -> PPOConfig:
    return dataclasses.replace(SMALL, **changes)


def pendulum(num_envs=8, seed=0):
    return ctrl_rl.make("Pendulum-v0", num_envs, seed=seed)


def learner(env, config=SMALL) -> PPO:
    return PPO(config, env.spec, env.device)


def roll(ppo, env):
    return collect(ppo.act, env, ppo.draw_noise())[0]


def flatten(state) -> dict[str, object]:
    """Leaves of nested dicts and lists by their path."""
    if isinstance(state, (dict, list, tuple)):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {f"{k}.{path}": leaf for k, v in pairs for path, leaf in flatten(v).items()}
    return {"": state}


def differing(a, b) -> list[str]:
    """Paths at which two states differ in any bit."""
    a, b = flatten(a), flatten(b)
    assert a.keys() == b.keys()
    same = lambda x, y: torch.equal(x, y) if isinstance(x, Tensor) else x == y  # noqa: E731
    return [k for k in a if not same(a[k], b[k])]


class Bandit(Probe):
    """One step, three choices; the last pays 1, the others nothing."""

    id = "Probe-Bandit-v0"
    action = Discrete(n=3)

    def reward_terms(self, action):
        return {"hit": (action == 2).to(self.sim.dtype)}

    def terminations(self):
        return {"end": self.step_count > 0}


class Counter(Probe):
    """Counts its steps 0, 1, 2, 3 in a group of its own for the critic; cut after 3."""

    id = "Probe-Counter-v0"

    def make_spec(self):
        spec = super().make_spec()
        twice = ObsTerm(name="twice", kind="signal", size=1)
        return dataclasses.replace(spec, obs={**spec.obs, "critic": (twice,)}, max_episode_steps=3)

    def observe_terms(self, rows):
        return {**super().observe_terms(rows), "twice": 2.0 * self.step_count[rows, None]}

    def reward_terms(self, action):
        return {"one": torch.ones(self.num_envs, dtype=self.sim.dtype)}


class Blind(Counter):
    """The same, but nothing is seen: the state after a cut is one that is known."""

    id = "Probe-Blind-v0"

    def observe_terms(self, rows):
        return {k: torch.zeros_like(v) for k, v in super().observe_terms(rows).items()}


# Losses -------------------------------------------------------------------------------------


def test_clipped_objective_by_hand():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    # The smaller of ratio * A and clip(ratio, .8, 1.2) * A: 1.2, -1.5, 0.5, -0.8, 2.2
    expected = -(1.2 - 1.5 + 0.5 - 0.8 + 2.2) / 5
    assert clipped_objective(ratio, advantage, 0.2).item() == pytest.approx(expected)


def test_kl_estimate_agrees_with_the_closed_form():
    # KL(N(0, 1) || N(0.3, 1)) = 0.3^2 / 2
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_ratio = -0.5 * (x - 0.3).square() + 0.5 * x.square()
    assert kl_estimate(log_ratio).item() == pytest.approx(0.045, abs=0.001)
    assert kl_estimate(torch.zeros(3)).item() == 0


def test_learning_rate_follows_the_divergence():
    rate = torch.tensor(1e-3)
    for kl, expected in ((0.021, 1e-3 / 1.5), (0.004, 1.5e-3), (0.01, 1e-3), (0.02, 1e-3)):
        new = adapted_learning_rate(rate, torch.tensor(kl), 0.01)
        assert new.item() == pytest.approx(expected)
    assert adapted_learning_rate(torch.tensor(1e-5), torch.tensor(1.0), 0.01).item() == (
        pytest.approx(1e-5)
    )
    assert adapted_learning_rate(torch.tensor(1e-2), torch.tensor(0.0), 0.01).item() == (
        pytest.approx(1e-2)
    )


# Update -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [pendulum, lambda: FollowSignal(num_envs=8), lambda: Bandit(None, num_envs=8)]
)
def test_the_ratio_is_one_before_the_first_step(make):
    """Also with moved statistics, at the bounds of the action and for discrete actions."""
    env = make()
    ppo = learner(env, small(initial_std=3.0, num_epochs=1, num_minibatches=1, target_kl=None))
    for _ in range(3):
        metrics = ppo.update(roll(ppo, env))
        assert abs(metrics["policy/kl"]) < 1e-6
        assert metrics["policy/clip_fraction"] == 0


def test_an_update_moves_every_weight():
    env = pendulum()
    ppo = learner(env, small(entropy_coef=0.01))
    before = ppo.state_dict()["networks"]
    ppo.update(roll(ppo, env))
    after = ppo.state_dict()["networks"]
    assert [k for k in before if torch.equal(before[k], after[k])] == []


def test_the_entropy_bonus_widens_the_policy():
    """All rewards equal, so that nothing else moves the standard deviation."""
    widths = []
    for coefficient in (0.0, 0.5):
        env = Blind(num_envs=8)
        ppo = learner(env, small(entropy_coef=coefficient, num_epochs=5))
        rollout = roll(ppo, env)
        rollout = dataclasses.replace(rollout, reward=torch.zeros_like(rollout.reward))
        widths.append(ppo.update(rollout)["policy/std"])
    assert widths[1] > widths[0] + 1e-3


def test_every_epoch_and_minibatch_is_a_step():
    env = pendulum()
    ppo = learner(env, small(num_epochs=3, num_minibatches=4))
    ppo.update(roll(ppo, env))
    (state,) = ppo.state_dict()["step"]["optimizer"]["state"].values()
    assert state["step"] == 12


def test_share_of_terminated_episodes():
    env = Counter(num_envs=2)
    ppo = learner(env)
    rollout = roll(ppo, env)  # 8 steps of 2 environments, cut after 3: 2 episodes each
    terminated = torch.zeros_like(rollout.terminated)
    terminated[2, 0] = True
    assert rollout.truncated[2, 0]
    truncated = rollout.truncated & ~terminated
    rollout = dataclasses.replace(rollout, terminated=terminated, truncated=truncated)
    assert ppo.update(rollout)["rollout/terminated"] == 1 / 4


def test_the_rollout_is_left_alone():
    env = pendulum()
    ppo = learner(env)
    rollout = roll(ppo, env)
    copy = {f.name: getattr(rollout, f.name) for f in dataclasses.fields(rollout)}
    copy = flatten(copy)
    copy = {k: v.clone() for k, v in copy.items()}
    ppo.update(rollout)
    now = flatten({f.name: getattr(rollout, f.name) for f in dataclasses.fields(rollout)})
    assert all(torch.equal(copy[k], now[k]) for k in copy)


def test_true_successors_are_stored_for_rows_that_ended():
    env = Counter(num_envs=2)
    ppo = learner(env, small(num_steps=7, num_minibatches=1))
    rollout = roll(ppo, env)
    assert rollout.obs["actor"][:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert rollout.truncated[:, 0].tolist() == [False, False, True, False, False, True, False]
    assert rollout.ended_next_obs["actor"].flatten().tolist() == [3.0] * 4
    assert rollout.ended_next_obs["critic"].flatten().tolist() == [6.0] * 4
    assert rollout.last_obs["critic"].flatten().tolist() == [2.0, 2.0]
    # Each next_obs finds its own place: the critic sees 2 (t + 1), and 6 at the limit.
    ppo.networks.critic = torch.nn.Identity()
    ppo.normalizers = {}
    ppo.config = small(normalize_obs=False)
    value, next_value = ppo._values(rollout)
    assert value[:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    assert next_value[:, 1].tolist() == [2, 4, 6, 2, 4, 6, 2]


def test_statistics_see_each_observation_once():
    env = Counter(num_envs=2)
    ppo = learner(env, small(num_steps=4, num_minibatches=1))
    ppo.update(roll(ppo, env))
    # Rows 0 1 2 0 and the successor 3 of the ended one, for each of two environments.
    assert ppo.normalizers["actor"].count == 10
    assert ppo.normalizers["actor"].mean.item() == pytest.approx(6 / 5)
    assert ppo.normalizers["critic"].mean.item() == pytest.approx(12 / 5)


def test_a_faulty_successor_does_not_count():
    env = Counter(num_envs=2)
    ppo = learner(env, small(num_steps=1, num_minibatches=1))
    action = torch.tensor([[0.0], [math.nan]])
    rollout, metrics = collect(lambda obs, noise: (noise, action), env, ppo.draw_noise())
    assert metrics["rollout/faults"] == 1
    assert rollout.ended_faulty.tolist() == [True]
    ppo._update_normalizers(rollout)
    assert ppo.normalizers["actor"].count == 2


def test_single_sample_minibatches_and_equal_advantages():
    env = AgeReward(num_envs=1)
    ppo = learner(env, small(num_steps=4, num_minibatches=4))
    ppo.update(roll(ppo, env))
    assert all(p.isfinite().all() for p in ppo.networks.parameters())
    # gamma 0 and a critic that says 0: every advantage is 0.1, whose mean float32 cannot hold.
    env = Counter(num_envs=3)
    env.reward_terms = lambda action: {"tenth": torch.full((3,), 0.1)}
    ppo = learner(env, small(gamma=0.0))
    with torch.no_grad():
        for p in ppo.networks.critic.parameters():
            p.zero_()
    actor = [p.clone() for p in ppo.networks.actor.parameters()]
    metrics = ppo.update(roll(ppo, env))
    assert metrics["loss/policy"] == 0
    for before, after in zip(actor, ppo.networks.actor.parameters(), strict=True):
        assert torch.equal(before, after)


def test_leftover_samples_are_refused():
    with pytest.raises(ValueError, match=r"num_minibatches 4 does not divide the 9 samples"):
        learner(pendulum(3), small(num_steps=3))


def test_actions_are_stored_as_they_are_sent():
    env = pendulum()
    sent = []
    step = env.step
    env.step = lambda action: (sent.append(action.clone()), step(action))[1]
    rollout = roll(learner(env, small(initial_std=3.0)), env)
    assert torch.equal(rollout.action, torch.stack(sent))
    assert rollout.action.abs().max() == 2.0  # [N·m], the bound


# Randomness, state, failure -------------------------------------------------------------------


def test_same_seed_same_bits():
    def run(seed):
        env = pendulum()
        return train(small(total_steps=200, seed=seed), env, Run()).rows

    drop = lambda rows: [{k: v for k, v in r.items() if "time/" not in k} for r in rows]  # noqa: E731
    assert drop(run(3)) == drop(run(3))
    assert drop(run(3)) != drop(run(4))


def test_the_global_generator_is_not_touched():
    env = pendulum()
    state = torch.get_rng_state()
    ppo = learner(env)
    ppo.update(roll(ppo, env))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("task", ["Pendulum-v0", "bandit"])
def test_resumed_equals_uninterrupted(task):
    """Weights, moments, step size, statistics, generator, episodes and environments, to the bit."""

    def fresh(seed):
        env = pendulum(seed=seed) if task != "bandit" else Bandit(None, num_envs=8, seed=seed)
        return env, learner(env, small(seed=seed))

    env, ppo = fresh(0)
    for _ in range(3):
        ppo.update(roll(ppo, env))
    saved = ppo.state_dict(), env.state_dict()
    for _ in range(3):
        metrics = ppo.update(roll(ppo, env))
    other_env, other = fresh(1)
    other.load_state_dict(saved[0])
    other_env.load_state_dict(saved[1])
    assert differing(saved[0], other.state_dict()) == []
    for _ in range(3):
        other_metrics = other.update(roll(other, other_env))
    assert differing(ppo.state_dict(), other.state_dict()) == []
    assert differing(env.state_dict(), other_env.state_dict()) == []
    assert metrics == other_metrics
    assert differing(saved[0], ppo.state_dict())  # training did move on from what was saved


def test_run_folder_resumes_exactly(tmp_path):
    config = small(total_steps=512)
    train(config, pendulum(), Run(tmp_path / "whole", console=False))
    stopped = Run(tmp_path / "parts", stop_after=192, console=False)
    train(config, pendulum(), stopped)
    assert stopped.rows[-1]["step"] == 192
    train(config, pendulum(), Run(tmp_path / "parts", resume=True, console=False))
    last = [torch.load(tmp_path / name / "checkpoints/last.pt") for name in ("whole", "parts")]
    a, b = ({k: x[k] for k in ("step", "policy", "learner", "env")} for x in last)
    assert differing(a, b) == []


def test_warm_start_takes_weights_and_statistics_alone():
    env = pendulum()
    ppo, other = learner(env), learner(env, small(seed=5))
    ppo.update(roll(ppo, env))
    other.warm_start(ppo.state_dict())
    a, b = ppo.state_dict(), other.state_dict()
    assert differing(a["networks"], b["networks"]) == []
    assert differing(a["normalizers"], b["normalizers"]) == []
    assert b["step"]["optimizer"]["state"][0]["step"] == 0
    with pytest.raises(ValueError, match="other networks"):
        learner(env, small(hidden=(8,))).warm_start(ppo.state_dict())
    with pytest.raises(ValueError, match="normalize_obs"):
        learner(env, small(normalize_obs=False)).warm_start(ppo.state_dict())


@pytest.mark.parametrize("config", [PPOConfig, RecurrentPPOConfig, MultiCriticPPOConfig])
def test_a_learning_rate_that_target_kl_would_clamp_is_refused(config):
    """0.02, 0.1 and 5 gave one and the same run."""
    for rate in (9e-6, 0.02, 5.0):
        with pytest.raises(
            ValueError, match=rf"learning_rate must be in 1e-05..0.01 .*, not {rate}"
        ):
            config(learning_rate=rate)
        assert config(learning_rate=rate, target_kl=None).learning_rate == rate
    for rate in (1e-5, 1e-2):
        assert config(learning_rate=rate).target_kl is not None


@pytest.mark.parametrize("config", [PPOConfig, RecurrentPPOConfig, MultiCriticPPOConfig])
def test_target_kl_is_refused_where_nothing_could_be_measured(config):
    """Before the only step of an iteration the divergence is 0, which only raises the rate."""
    with pytest.raises(ValueError, match="target_kl needs two minibatches in an iteration"):
        config(num_epochs=1, num_minibatches=1)
    for changes in ({"num_epochs": 2}, {"num_minibatches": 2}, {"target_kl": None}):
        config(**{"num_epochs": 1, "num_minibatches": 1} | changes)


def test_config_refuses_nonsense():
    for change in (
        {"num_steps": 0},
        {"learning_rate": -1.0},
        {"learning_rate": math.nan},
        {"gamma": 1.1},
        {"target_kl": 0.0},
        {"hidden": ()},
        {"activation": "gelu"},
        {"compile": "yes"},
        {"entropy_coef": -0.1},
    ):
        name = next(iter(change))
        with pytest.raises(ValueError, match=f"^{name} must be .*, not "):
            small(**change)


# Policy section and documentation -----------------------------------------------------------


def test_the_policy_section_is_the_policy():
    env = pendulum()
    ppo = learner(env, small(initial_std=0.1))
    for _ in range(2):
        ppo.update(roll(ppo, env))
    policy = Policy.from_section(ppo.policy_section())
    obs = env.observe()
    _, action = ppo.act(obs, torch.zeros(8, 1))
    assert torch.equal(policy(obs), action)
    other_order = dict(reversed(obs.items()))
    assert torch.equal(policy(other_order), action)
    section = ppo.policy_section()
    copy = {k: v.clone() for k, v in section["weights"].items()}
    ppo.update(roll(ppo, env))
    assert all(torch.equal(copy[k], section["weights"][k]) for k in copy)


def test_every_logged_key_is_documented(repository: Path):
    page = (repository / "docs/algorithms/ppo.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    table = {row[1].strip().strip("`"): row[2].strip() for row in rows if "/" in row[1]}
    assert table == METRICS


def test_every_declared_key_is_logged():
    rows = train(small(total_steps=2000), pendulum(), Run(), lambda policy: {"eval/x": 0.0}).rows
    logged = set().union(*rows) - {"step"}
    plain = {k for k in METRICS if "<" not in k}
    assert plain - logged == set()
    assert {k.split("/")[0] for k in logged - plain} <= {"reward", "task", "eval"}


# Learning -----------------------------------------------------------------------------------


def test_learns_which_action_pays():
    env = Bandit(None, num_envs=32)
    rows = train(small(total_steps=10_000), env, Run()).rows
    assert rows[0]["rollout/episode_return"] < 0.5
    assert rows[-1]["rollout/episode_return"] > 0.95


def test_learns_how_the_action_depends_on_the_observation():
    env = FollowSignal(num_envs=64)
    config = small(total_steps=60_000, num_steps=16, initial_std=0.5)
    run = train(config, env, Run(), lambda policy: {"eval/slope": slope(policy)})
    assert run.rows[-1]["eval/slope"] == pytest.approx(0.5, abs=0.08)


def slope(policy) -> float:
    """What the policy answers to a signal of 1 more."""
    low, high = policy(torch.tensor([[-0.5], [0.5]])).flatten().tolist()
    return high - low


def test_the_critic_finds_the_value_beyond_the_time_limit():
    """A constant reward of 1, cut after 3 steps, is worth 1 / (1 - 0.9), not at most 3."""
    env = Blind(num_envs=16)
    ppo = learner(env, small(gamma=0.9, target_kl=None, learning_rate=0.01, num_epochs=4))
    for _ in range(80):
        rollout = roll(ppo, env)
        ppo.update(rollout)
    found = ppo._values(rollout)[0]
    assert found.mean().item() == pytest.approx(10, abs=0.5)


def test_rows_of_columns_are_copied_once_each():
    x, y = torch.arange(12.0).view(4, 3), torch.arange(4)
    rows = torch.tensor([2, 0])
    one, other, again = selected([x, y, x], rows)
    assert one.tolist() == [[6, 7, 8], [0, 1, 2]] and other.tolist() == [2, 0]
    assert again is one
    one.zero_()
    assert x[0, 1] == 1
