"""What DDPG and ARO-DDPG have in common, and the losses and targets of DDPG by hand."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from probes import AgeReward, ConstantReward, FollowSignal, LastStepReward, PointMass, Probe
from test_ppo import Blind, differing, slope

import ctrl_rl
from ctrl_rl import aro_ddpg, ddpg
from ctrl_rl.policy import Policy
from ctrl_rl.run_folder import read_metrics
from ctrl_rl.runs import Run
from ctrl_rl.spec import ActionDim, Discrete


@dataclass(frozen=True)
class Case:
    """A learner, and a small configuration of it."""

    module: ModuleType
    learner: type
    config: object

    def make(self, env, **changes):
        return self.learner(dataclasses.replace(self.config, **changes), env.spec, env.device)

    def train(self, env, run=None, evaluate=None, **changes):
        config = dataclasses.replace(self.config, **changes)
        return self.module.train(config, env, Run() if run is None else run, evaluate)


COMMON = {
    "warmup_steps": 32,
    "update_every": 16,
    "buffer_size": 4000,
    "batch_size": 16,
    "hidden": (16,),
    "compile": "off",
}
CASES = {
    "ddpg": Case(ddpg, ddpg.DDPG, ddpg.DDPGConfig(**COMMON)),
    "aro_ddpg": Case(aro_ddpg, aro_ddpg.ARODDPG, aro_ddpg.ARODDPGConfig(**COMMON)),
}


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """Rows of the log every 32 env steps, so that short runs have some."""
    for case in CASES.values():
        monkeypatch.setattr(case.module, "LOG_EVERY", 32)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


class Keep(Run):
    """A run in memory that keeps the learner's last state."""

    def save(self, step, policy, learner, env, replay=None):
        self.learner = learner


class Uneven(Probe):
    """Bounds that differ: [-1, 1] and [0, 10]."""

    id = "Probe-Uneven-v0"
    action = (ActionDim(name="a", low=-1.0, high=1.0), ActionDim(name="b", low=0.0, high=10.0))

    def reward_terms(self, action):
        return {"one": torch.ones(self.num_envs, dtype=self.sim.dtype)}


class Choices(Uneven):
    action = Discrete(n=2)


class Privileged(Uneven):
    """The critic sees a column more than the actor."""

    def make_spec(self):
        spec = super().make_spec()
        more = dataclasses.replace(self.terms[0], name="more", size=2)
        return dataclasses.replace(spec, obs={**spec.obs, "critic": (more,)})

    def observe_terms(self, rows):
        age = super().observe_terms(rows)["age"]
        return {"age": age, "more": torch.cat([age, age], 1)}


def pendulum(num_envs=4, seed=0):
    return ctrl_rl.make("Pendulum-v0", num_envs, seed=seed)


def filled(learner, env, steps=20):
    """A replay of random steps."""
    replay, obs = learner.make_replay(), env.observe()
    for _ in range(steps):
        action = learner.act_randomly()
        step = env.step(action)
        replay.add(obs, action, step)
        obs = step.obs
    return replay


def without_time(rows):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


# DDPG by hand -------------------------------------------------------------------------------


def test_losses_by_hand():
    q = torch.tensor([[1.0, 2.0, -1.0]])
    y = ddpg.discounted_target(
        torch.ones(3), torch.tensor([0.9, 0.0, 0.9]), torch.tensor([[2.0, 2.0, -4.0]])
    )
    assert y.tolist() == pytest.approx([2.8, 1.0, -2.6])
    # errors -1.8, 1, 1.6: squares 3.24, 1, 2.56
    assert ddpg.critic_loss(q, y).item() == pytest.approx(6.8 / 3)
    assert ddpg.actor_loss(q).item() == pytest.approx(-2 / 3)


@pytest.mark.parametrize("probe", [ConstantReward, AgeReward, LastStepReward])
def test_exact_values_have_no_error_beyond_the_time_limit(probe):
    """The target of the exact Q is Q itself; a wrong successor or a lost bootstrap shows."""
    gamma = 0.9
    env = probe(num_envs=2)
    learner = CASES["ddpg"].make(env, gamma=gamma)
    exact = lambda obs, action: probe.value(obs[:, 0], gamma)[None]  # noqa: E731
    learner.target_critic = exact
    replay = filled(learner, env, 30)

    def error(batch) -> float:
        obs, next_obs = batch.obs["actor"], batch.next_obs["actor"]
        parts = (obs, batch.action, batch.reward, batch.discount, next_obs, next_obs)
        return learner._critic_objective(exact, *parts)[0].item()

    batch = replay.gather(torch.arange(60), 1, gamma)
    size = probe.value(torch.tensor(7.0), gamma).item() ** 2
    ended = replay.ended.view(-1)[:60]
    assert ended.sum() == 6
    assert error(batch) < 1e-9 * size
    # Negative controls: a time limit taken for a failure, and the reverse; a lost successor.
    wrong = torch.full_like(batch.discount, gamma)
    if probe is not LastStepReward:
        wrong = batch.discount * ~ended
    assert error(batch._replace(discount=wrong)) > 1e-3 * size
    if probe is AgeReward:
        reset = torch.where(ended[:, None], 0.0, batch.next_obs["actor"])
        assert error(batch._replace(next_obs={"actor": reset})) > 1e-3 * size


def test_the_critic_finds_the_value_beyond_the_time_limit():
    """A constant reward of 1, cut after 3 steps, is worth 1 / (1 - 0.9), not at most 2.7."""
    settings = {"critic_learning_rate": 1e-2, "polyak": 0.3, "gamma": 0.9, "warmup_steps": 0}
    env, run = Blind(num_envs=4), Keep()
    CASES["ddpg"].train(env, run, total_steps=400, **settings)
    learner = CASES["ddpg"].make(env)
    learner.load_state_dict(run.learner)
    found = learner.critic(torch.zeros(9, 1), torch.linspace(-1, 1, 9)[:, None])
    assert found.mean().item() == pytest.approx(10, abs=0.3)


def test_the_noise_of_ddpg_begins_anew_with_an_episode():
    learner = CASES["ddpg"].make(pendulum(2))
    learner.noise = torch.tensor([[1.0], [2.0]])
    learner.forget_noise(torch.tensor([True, False]))
    assert learner.noise.tolist() == [[0.0], [2.0]]
    env = ConstantReward(num_envs=2)
    run = Keep()
    CASES["ddpg"].train(env, run, total_steps=32, warmup_steps=0)  # two episodes each
    assert run.learner["noise"].tolist() == [[0.0], [0.0]]


# Actions ------------------------------------------------------------------------------------


def test_bounds_and_noise_are_per_dimension(case):
    env = Uneven(num_envs=2)
    learner = case.make(env, ou_theta=1.0, ou_sigma=0.0)
    with torch.no_grad():
        for p in learner.actor.parameters():
            p.zero_()
    obs = env.observe()
    assert learner.act(obs).tolist() == [[0.0, 5.0]] * 2
    noise = torch.tensor([[0.0, 0.0], [0.5, -0.1]])  # of half a range: 1 and 5
    learner.config = dataclasses.replace(learner.config, ou_theta=0.5)
    learner.noise = 2 * noise
    assert learner.act(obs).tolist() == [[0.0, 5.0], [0.5, 4.5]]
    learner.noise = torch.full((2, 2), 99.0)
    assert learner.act(obs).tolist() == [[1.0, 10.0]] * 2
    learner.noise = torch.full((2, 2), -99.0)
    assert learner.act(obs).tolist() == [[-1.0, 0.0]] * 2
    drawn = torch.stack([learner.act_randomly() for _ in range(500)])
    low, high = drawn.amin((0, 1)), drawn.amax((0, 1))
    assert -1 <= low[0] < -0.98 and 0 <= low[1] < 0.1
    assert 0.98 < high[0] <= 1 and 9.9 < high[1] <= 10


def test_noise_has_its_spread_and_memory(case):
    """Ornstein-Uhlenbeck: deviation 0.2 / sqrt(1 - 0.85^2) = 0.3797, correlation 0.85."""
    assert ddpg.noise_deviation(0.15, 0.2) == pytest.approx(0.3797, abs=1e-4)
    env = Uneven(num_envs=64)
    learner = case.make(env)
    obs, drawn = env.observe(), []
    for _ in range(400):
        learner.act(obs)
        drawn.append(learner.noise)
    drawn = torch.stack(drawn[50:])
    assert drawn.std().item() == pytest.approx(0.380, abs=0.02)
    variance = drawn.square().mean()
    assert ((drawn[1:] * drawn[:-1]).mean() / variance).item() == pytest.approx(0.85, abs=0.01)
    assert abs((drawn[:, :, 0] * drawn[:, :, 1]).mean() / variance) < 0.05  # dimensions
    assert abs((drawn[:, ::2] * drawn[:, 1::2]).mean() / variance) < 0.05  # environments


@pytest.mark.parametrize("env", [PointMass, Choices])
def test_actions_that_cannot_be_squashed_are_refused(case, env):
    wanted = "none for force" if env is PointMass else "needs continuous actions"
    with pytest.raises(ValueError, match=wanted):
        case.make(env(None, num_envs=1))


def test_the_critic_reads_its_group(case):
    env = Privileged(num_envs=2)
    learner = case.make(env)
    assert learner.make_replay().obs_sizes == {"actor": 1, "critic": 2}
    learner.update(learner.sample(filled(learner, env)))
    assert case.make(Uneven(num_envs=2)).make_replay().obs_sizes == {"actor": 1}


# Updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [1, 4, 32])
def test_updates_count_env_steps_whatever_the_number_of_environments(case, num_envs):
    """(256 - 64) / 2 updates after 256 env steps, the first 64 without, in rounds of 64."""
    run = Keep()
    config = {"total_steps": 256, "warmup_steps": 64, "update_every": 64, "updates_per_step": 0.5}
    case.train(pendulum(num_envs), run, **config)
    assert run.learner["critic_step"]["optimizer"]["state"][0]["step"] == 96
    rows = [row["step"] for row in run.rows if "loss/critic" in row]
    assert rows == [128, 192, 256]


def test_a_fault_is_never_learnt_from(case):
    env = pendulum(2)
    learner = case.make(env)
    replay, obs = learner.make_replay(), env.observe()
    action = torch.tensor([[0.0], [math.nan]])
    step = env.step(action)
    assert [fault.row for fault in step.info.faults] == [1]
    replay.add(obs, action, step)
    batch = learner.sample(replay)
    assert torch.equal(batch.obs["actor"], obs["actor"][[0] * 16])


def test_learns_how_the_action_depends_on_the_observation(case):
    """Best is half the signal."""
    rates = {"actor_learning_rate": 3e-3, "critic_learning_rate": 1e-2, "polyak": 0.1}
    rows = case.train(
        FollowSignal(num_envs=8),
        None,
        lambda policy: {"eval/slope": slope(policy)},
        **(rates | {"total_steps": 1_500, "batch_size": 64, "hidden": (32,), "ou_sigma": 0.4}),
    ).rows
    assert rows[-1]["eval/slope"] == pytest.approx(0.5, abs=0.1)


# Randomness, state, failure -------------------------------------------------------------------


def test_same_seed_same_bits_and_the_global_generator_is_left_alone(case):
    run = lambda seed: without_time(case.train(pendulum(), total_steps=128, seed=seed).rows)  # noqa: E731
    state = torch.get_rng_state()
    assert run(3) == run(3)
    assert run(3) != run(4)
    assert torch.equal(torch.get_rng_state(), state)


def test_run_folder_resumes_exactly(case, tmp_path):
    """Stopped after an odd number of updates, with noise and episodes under way."""
    config = {"total_steps": 256, "warmup_steps": 33}
    case.train(pendulum(), Run(tmp_path / "whole", console=False), **config)
    stopped = Run(tmp_path / "parts", stop_after=96, console=False)
    case.train(pendulum(), stopped, **config)
    assert stopped.rows[-1]["step"] == 96
    case.train(pendulum(), Run(tmp_path / "parts", resume=True, console=False), **config)
    folders = [tmp_path / name / "checkpoints" for name in ("whole", "parts")]
    for file, keys in (
        ("last.pt", ("step", "policy", "learner", "env")),
        ("replay-256.pt", ("step", "replay")),
    ):
        a, b = ({k: torch.load(f / file)[k] for k in keys} for f in folders)
        assert differing(a, b) == [], file
    rows = [without_time(read_metrics(tmp_path / name)) for name in ("whole", "parts")]
    assert rows[0] == rows[1]


def test_warm_start_takes_the_networks_alone(case):
    env = pendulum()
    learner, other = case.make(env), case.make(env, seed=5)
    replay = filled(learner, env)
    for _ in range(3):
        learner.update(learner.sample(replay))
    learner.act(env.observe())
    other.warm_start(learner.state_dict())
    a, b = learner.state_dict(), other.state_dict()
    for part in ("actor", "critic", "target_actor", "target_critic"):
        assert differing(a[part], b[part]) == []
    assert b["critic_step"]["optimizer"]["state"][0]["step"] == 0
    assert not b["noise"].any()
    with pytest.raises(ValueError, match="other networks"):
        case.make(env, hidden=(8,)).warm_start(learner.state_dict())


def test_config_refuses_nonsense(case):
    for change in (
        {"update_every": 0},
        {"critic_learning_rate": math.nan},
        {"polyak": 0.0},
        {"ou_theta": 1.5},
        {"updates_per_step": 0.0},
        {"hidden": ()},
        {"activation": "gelu"},
        {"compile": "yes"},
        {"gamma": 1.1} if case.module is ddpg else {"reset_cost": -1.0},
        {"batch_size": 0} if case.module is ddpg else {"actor_every": 0},
    ):
        name = next(iter(change))
        with pytest.raises(ValueError, match=f"^{name} must be .*, not "):
            dataclasses.replace(case.config, **change)


# Policy section and documentation -------------------------------------------------------------


def test_the_policy_section_is_the_policy(case):
    env = Uneven(num_envs=3)
    learner = case.make(env, ou_sigma=0.0)
    replay = filled(learner, env)
    for _ in range(4):
        learner.update(learner.sample(replay))
    policy = Policy.from_section(learner.policy_section())
    assert torch.equal(policy(env.observe()), learner.act(env.observe()))
    spread = case.make(env).policy_section()["noise_std"]
    assert spread.tolist() == pytest.approx([0.3797, 5 * 0.3797], abs=1e-3)


def test_every_logged_key_is_documented(case, repository: Path):
    name = case.module.__name__.split(".")[1]
    page = (repository / f"docs/algorithms/{name}.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    table = {row[1].strip().strip("`"): row[2].strip() for row in rows if "/" in row[1]}
    assert table == case.module.METRICS


def test_every_declared_key_is_logged(case):
    rows = case.train(pendulum(), None, lambda policy: {"eval/x": 0.0}, total_steps=1000).rows
    logged = set().union(*rows) - {"step"}
    plain = {k for k in case.module.METRICS if "<" not in k}
    assert plain - logged == set()
    assert {k.split("/")[0] for k in logged - plain} <= {"reward", "task", "eval"}
