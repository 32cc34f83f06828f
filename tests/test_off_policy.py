"""What every off-policy learner must do, and the losses of SAC and TD3 by hand."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import pytest
import torch
from probes import AgeReward, ConstantReward, FollowSignal, LastStepReward, Probe
from test_ppo import Bandit, Blind, differing, slope
from test_runs import same

import ctrl_rl
from ctrl_rl import registry, sac, td3
from ctrl_rl.policy import Policy, load_policy
from ctrl_rl.runs import Run
from ctrl_rl.spec import ActionDim
from sim2real.export import export_run


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
        return self.module.train(config, env, run or Run(), evaluate)


COMMON = {
    "warmup_steps": 32,
    "buffer_size": 4000,
    "batch_size": 32,
    "hidden": (16, 16),
    "compile": "off",
}
CASES = {
    "sac": Case(sac, sac.SAC, sac.SACConfig(**COMMON)),
    "td3": Case(td3, td3.TD3, td3.TD3Config(**COMMON)),
}


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """Rows of the log every 64 env steps, so that short runs have some."""
    for name in CASES:
        monkeypatch.setattr(CASES[name].module, "LOG_EVERY", 64)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


def pendulum(num_envs=4, seed=0):
    return ctrl_rl.make("Pendulum-v0", num_envs, seed=seed)


def filled(learner, env, steps=50):
    """A replay of steps with uniform actions."""
    replay, obs = learner.make_replay(), env.observe()
    for _ in range(steps):
        x = torch.rand(env.spec.num_envs, env.spec.action_size, generator=learner.generator)
        action = torch.lerp(learner.actor.low, learner.actor.high, x)
        step = env.step(action)
        replay.add(obs, action, step)
        obs = step.obs
    return replay


def without_time(rows):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


class TwoBounds(Probe):
    """Two action dimensions of different ranges."""

    id = "Probe-TwoBounds-v0"
    action = (ActionDim(name="a", low=-1.0, high=1.0), ActionDim(name="b", low=0.0, high=10.0))

    def reward_terms(self, action):
        return {"one": torch.ones(self.num_envs, dtype=self.sim.dtype)}


class Unbounded(TwoBounds):
    action = (ActionDim(name="a", low=-1.0, high=1.0), ActionDim(name="b", low=0.0))


class Privileged(TwoBounds):
    """The critic sees a column more than the actor."""

    def make_spec(self):
        spec = super().make_spec()
        more = dataclasses.replace(self.terms[0], name="more", size=2)
        return dataclasses.replace(spec, obs={**spec.obs, "critic": (more,)})

    def observe_terms(self, rows):
        age = super().observe_terms(rows)["age"]
        return {"age": age, "more": torch.cat([age, age], 1)}


# Updates ------------------------------------------------------------------------------------


def test_updates_move_every_weight_and_leave_the_batch_alone(case):
    env = Privileged(num_envs=4)
    learner = case.make(env)
    batch = filled(learner, env).sample(32, learner.generator)
    copy = [x.clone() for x in (*batch.obs.values(), *batch.next_obs.values(), *batch[1:3])]
    before = learner.state_dict()
    learner.update(batch)
    learner.update(batch)
    after = learner.state_dict()
    for part in ("actor", "critic", *(k for k in before if k.startswith("target"))):
        still = [k for k in before[part] if torch.equal(before[part][k], after[part][k])]
        assert still == [], part
    now = [*batch.obs.values(), *batch.next_obs.values(), *batch[1:3]]
    assert all(torch.equal(a, b) for a, b in zip(copy, now, strict=True))


def test_targets_follow_by_polyak(case):
    env = pendulum()
    learner = case.make(env, polyak=0.25)
    batch = filled(learner, env).sample(32, learner.generator)
    old = [x.clone() for x in learner._targets]
    steps = getattr(learner.config, "policy_delay", 1)
    for _ in range(steps):
        learner.update(batch)
    for before, now, source in zip(old, learner._targets, learner._sources, strict=True):
        torch.testing.assert_close(now, 0.75 * before + 0.25 * source)


@pytest.mark.parametrize("num_envs", [1, 4, 48])
def test_updates_count_env_steps_whatever_the_number_of_environments(case, num_envs):
    """(480 - 96) / 2 updates after 480 env steps, the first 96 without."""
    learners = []
    init = case.learner.__init__
    with pytest.MonkeyPatch.context() as patch:
        record = lambda self, *a: (init(self, *a), learners.append(self))[0]  # noqa: E731
        patch.setattr(case.learner, "__init__", record)
        case.train(pendulum(num_envs), total_steps=480, warmup_steps=96, updates_per_step=0.5)
    (state,) = learners[0].state_dict()["critic_step"]["optimizer"]["state"].values()
    assert state["step"] == 192


@pytest.mark.parametrize("probe", [ConstantReward, AgeReward, LastStepReward])
def test_exact_values_have_no_error_beyond_the_time_limit(case, probe):
    """The target of the exact Q is Q itself; a wrong successor or a lost bootstrap shows."""
    gamma = 0.9
    env = probe(num_envs=2)
    changes = {"temperature": 1e-12} if case.module is sac else {}
    learner = case.make(env, gamma=gamma, **changes)
    exact = lambda obs, action: probe.value(obs[:, 0], gamma).expand(2, -1)  # noqa: E731
    learner.target = learner.target_critic = exact
    replay = filled(learner, env, 30)

    def error(batch) -> float:
        noise = learner._noise(len(batch.reward))
        parts = (batch.reward, batch.discount, batch.next_obs["actor"], batch.next_obs["actor"])
        loss, _ = learner._critic_objective(exact, batch.obs["actor"], batch.action, *parts, noise)
        return loss.item()

    batch = replay.gather(torch.arange(60), 1, gamma)
    size = probe.value(torch.tensor(7.0), gamma).item() ** 2
    assert error(batch) < 1e-9 * size
    ended = replay.ended.view(-1)[:60]
    assert ended.sum() == 6
    if probe is not LastStepReward:  # negative control: a time limit taken for a failure
        assert error(batch._replace(discount=batch.discount * ~ended)) > 1e-3 * size
    if probe is AgeReward:  # the successor replaced by what the action answered to, and by a reset
        stale = torch.where(ended[:, None], batch.obs["actor"], batch.next_obs["actor"])
        assert error(batch._replace(next_obs={"actor": stale})) > 1e-6 * size
        reset = torch.where(ended[:, None], 0.0, batch.next_obs["actor"])
        assert error(batch._replace(next_obs={"actor": reset})) > 1e-3 * size
    if probe is LastStepReward:  # a failure taken for a time limit
        assert error(batch._replace(discount=torch.full_like(batch.discount, gamma))) > 1e-3 * size


def test_the_critic_reads_its_group(case):
    env = Privileged(num_envs=2)
    learner = case.make(env)
    assert learner.critic.net.layers[0].weight.shape[1] == 2 + 2
    assert learner.actor.net.layers[0].weight.shape[1] == 1
    assert learner.make_replay().obs_sizes == {"actor": 1, "critic": 2}
    assert case.make(TwoBounds(num_envs=2)).make_replay().obs_sizes == {"actor": 1}


# Actions ------------------------------------------------------------------------------------


def test_actions_stay_within_the_bounds_of_each_dimension(case):
    env = TwoBounds(num_envs=4000)
    learner = case.make(env, buffer_size=4000)
    check_noise(learner.act(env.observe()))
    # The last layer starts small: the policy's mode is near the middle.
    policy = Policy.from_section(learner.policy_section())
    assert policy(env.observe()).mean(0).tolist() == pytest.approx([0.0, 5.0], abs=0.5)


def check_noise(action):
    """Within the bounds of `TwoBounds`; each row has its own noise, and each dimension."""
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 10.0])
    assert ((action >= low) & (action <= high)).all()
    assert action.std(0, correction=0).min() > 0
    assert abs(torch.corrcoef(action.T)[0, 1]) < 0.1


def test_the_warm_up_is_uniform(case):
    random = case.make(TwoBounds(num_envs=4000), buffer_size=4000).act_randomly()
    check_noise(random)
    assert random.mean(0).tolist() == pytest.approx([0.0, 5.0], abs=0.15)
    assert random.std(0).tolist() == pytest.approx([2 / 12**0.5, 10 / 12**0.5], rel=0.05)


def test_unbounded_and_discrete_actions_are_refused(case):
    name = case.module.__name__.rpartition(".")[2]
    with pytest.raises(ValueError, match=f"^{name} squashes.*gives none for b: use ppo") as error:
        case.make(Unbounded(num_envs=2))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"^{name} needs continuous actions.*3 choices: use ppo"):
        case.make(Bandit(None, num_envs=2))


def test_the_action_stored_is_the_action_sent(case):
    env, sent, kept = pendulum(), [], []
    step, make = env.step, case.learner.make_replay
    env.step = lambda action: (sent.append(action.clone()), step(action))[1]
    with pytest.MonkeyPatch.context() as patch:
        record = lambda self: (kept.append(make(self)), kept[0])[1]  # noqa: E731
        patch.setattr(case.learner, "make_replay", record)
        case.train(env, total_steps=128)
    assert torch.equal(kept[0].action[:32], torch.stack(sent))


def test_the_policy_section_is_the_policy(case):
    env = TwoBounds(num_envs=6)
    learner = case.make(env)
    batch = filled(learner, env).sample(32, learner.generator)
    for _ in range(4):
        learner.update(batch)
    policy = Policy.from_section(learner.policy_section())
    obs = env.observe()
    learner._noise = lambda rows: torch.zeros(rows, 2)
    assert torch.equal(policy(obs), learner.act(obs))
    noise = torch.randn(6, 2, generator=torch.Generator().manual_seed(3))
    learner._noise = lambda rows: noise
    drawn = policy.sample(obs, torch.Generator().manual_seed(3))
    torch.testing.assert_close(drawn, learner.act(obs))
    assert not torch.equal(drawn, policy(obs))
    before = policy(obs).clone()
    del learner._noise  # the method again
    learner.update(batch)
    learner.update(batch)
    assert torch.equal(Policy.from_section(policy.section())(obs), before)


def test_squashed_policies_refuse_another_bound(case):
    section = case.make(TwoBounds(num_envs=1)).policy_section()
    with pytest.raises(ValueError, match="cannot have bound 'clip'"):
        Policy.from_section(section | {"bound": "clip"})


# Randomness, state, failure -------------------------------------------------------------------


def test_same_seed_same_bits(case):
    run = lambda seed: without_time(case.train(pendulum(), total_steps=256, seed=seed).rows)  # noqa: E731
    assert run(3) == run(3)
    assert run(3) != run(4)


def test_the_global_generator_is_not_touched(case):
    state = torch.get_rng_state()
    case.train(pendulum(), total_steps=128)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("stop_after", [20, 128, 250])
def test_run_folder_resumes_exactly(case, tmp_path, stop_after):
    """Also from within the warm-up and amid episodes; the ring has turned by the end."""
    train = partial(case.train, total_steps=480, buffer_size=200)
    short = registry.load("tasks", "Pendulum-v0").Config(max_episode_steps=20)
    make = lambda: ctrl_rl.make("Pendulum-v0", 4, config=short)  # noqa: E731
    whole = train(make(), Run(tmp_path / "whole", console=False))
    stopped = Run(tmp_path / "parts", stop_after=stop_after, console=False)
    train(make(), stopped)
    assert stop_after <= stopped.rows[-1]["step"] < stop_after + 64
    resumed = train(make(), Run(tmp_path / "parts", resume=True, console=False))
    names = ("checkpoints/last.pt", "checkpoints/replay-480.pt")
    for name in names:
        a, b = (torch.load(tmp_path / part / name) for part in ("whole", "parts"))
        a, b = ({k: v for k, v in x.items() if k != "config"} for x in (a, b))
        assert differing(a, b) == []
    cut = stopped.rows[-1]["step"]  # FastSAC ends a row there, which makes two of one
    end = next(row["step"] for row in whole.rows if row["step"] >= cut)
    apart = lambda rows: [r for r in rows if cut == end or not cut <= r["step"] <= end]  # noqa: E731
    assert without_time(apart(whole.rows)) == without_time(apart(resumed.rows))


def test_a_run_without_its_replay_says_so(case, tmp_path):
    case.train(pendulum(), Run(tmp_path / "r", console=False), total_steps=128)
    (tmp_path / "r/checkpoints/replay-128.pt").unlink()
    with pytest.raises(ValueError, match="replay-128.pt does not exist.*--init-from"):
        Run(tmp_path / "r", resume=True, console=False)


def test_warm_start_takes_weights_alone(case):
    env = pendulum()
    learner, other = case.make(env), case.make(env, seed=5)
    learner.update(filled(learner, env).sample(32, learner.generator))
    other.warm_start(learner.state_dict())
    a, b = learner.state_dict(), other.state_dict()
    for part in ("actor", "critic"):
        assert differing(a[part], b[part]) == []
    assert b["critic_step"]["optimizer"]["state"][0]["step"] == 0
    with pytest.raises(ValueError, match="other networks"):
        case.make(env, hidden=(8,)).warm_start(learner.state_dict())
    others = {"sac": td3.TD3, "td3": sac.SAC}[case.module.__name__.rpartition(".")[2]]
    foreign = next(c for c in CASES.values() if c.learner is others).make(env)
    with pytest.raises(ValueError, match="cannot start from a run"):
        learner.warm_start(foreign.state_dict())


def test_configurations_refuse_nonsense(case):
    changes = [
        {"total_steps": 0},
        {"batch_size": 0},
        {"warmup_steps": -1},
        {"updates_per_step": 0.0},
        {"learning_rate": math.nan},
        {"gamma": 1.1},
        {"polyak": 0.0},
        {"hidden": ()},
        {"activation": "gelu"},
        {"compile": "yes"},
    ]
    own = {
        "sac": [{"temperature": 0.0}, {"initial_temperature": 0.0}, {"target_entropy": math.nan}],
        "td3": [{"policy_delay": 0}, {"exploration_noise": -0.1}, {"noise_clip": math.inf}],
    }
    for change in changes + own[case.module.__name__.rpartition(".")[2]]:
        name = next(iter(change))
        with pytest.raises(ValueError, match=f"^{name} must be .*, not "):
            dataclasses.replace(case.config, **change)


def test_a_buffer_smaller_than_a_step_is_refused(case):
    with pytest.raises(ValueError, match="cannot hold one step of 8 environments"):
        case.make(pendulum(8), buffer_size=7).make_replay()


# Documentation, export ------------------------------------------------------------------------


def test_every_logged_key_is_documented(case, repository):
    name = case.module.__name__.rpartition(".")[2]
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


def test_exported_file_gives_the_actions_of_the_policy(case, tmp_path):
    folder = tmp_path / "r"
    case.train(pendulum(), Run(folder, console=False), total_steps=128)
    path, _ = export_run(folder)
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) * 3
    ours, file = load_policy(folder), load_policy(path)
    torch.testing.assert_close(file(x), ours(x), atol=1e-5, rtol=0)
    assert ours(x).abs().max() <= 2.0


@pytest.mark.parametrize("task", ["Pendulum-v0", "HalfCheetah-v5", "Hopper-v5"])
def test_tasks_have_presets(case, task):
    name = case.module.__name__.rpartition(".")[2]
    assert registry.load("tasks", task).presets[name]["num_envs"] == 1
    assert isinstance(ctrl_rl.preset(task, name), type(case.config))


# Losses by hand -------------------------------------------------------------------------------


def test_soft_target_by_hand():
    y = sac.soft_target(
        torch.tensor([1.0, 1.0]),
        torch.tensor([0.9, 0.0]),
        torch.tensor([[5.0, 5.0], [4.0, 6.0]]),
        torch.tensor([-2.0, 3.0]),
        torch.tensor(0.5),
    )
    # 1 + 0.9 (min(5, 4) + 0.5 * 2) = 5.5; a terminated row has its reward alone
    assert y.tolist() == [5.5, 1.0]


def test_sac_losses_by_hand():
    q, y = torch.tensor([[1.0, 3.0], [2.0, 0.0]]), torch.tensor([2.0, 1.0])
    # 1/2 (mean(1, 4) + mean(0, 1)) = 1.5
    assert sac.critic_loss(q, y).item() == 1.5
    log_prob = torch.tensor([-1.0, 2.0])
    # (0.5 * -1 - 1 + 0.5 * 2 - 0) / 2 = -0.25
    assert sac.actor_loss(log_prob, q, torch.tensor(0.5)).item() == -0.25
    log_alpha = torch.tensor(0.3, requires_grad=True)
    # entropy -0.5, target -2: above it, so that a step down the gradient lowers alpha
    loss = sac.temperature_loss(log_alpha, log_prob, -2.0)
    assert loss.item() == pytest.approx(0.3 * 1.5)
    assert torch.autograd.grad(loss, log_alpha)[0].item() == pytest.approx(1.5)


def test_td3_losses_by_hand():
    next_q = torch.tensor([[5.0, 5.0], [4.0, 6.0]])
    y = td3.clipped_target(torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.0]), next_q)
    assert y.tolist() == [3.0, 1.0]
    q = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    assert td3.critic_loss(q, torch.tensor([2.0, 1.0])).item() == 3.0
    assert td3.actor_loss(q).item() == -2.0  # the first critic, not the smaller one


def test_target_noise_is_in_units_of_each_range():
    # O-17: bounds +-0.4, noise 0.2, clip 0.5: deviation 0.08, at most 0.20
    low, high = torch.tensor([-0.4, 0.0]), torch.tensor([0.4, 10.0])
    noise = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0))
    middle = torch.tensor([[0.0, 5.0]]).expand_as(noise)
    moved = td3.smoothed(middle, noise, CASES["td3"].config, low, high) - middle
    assert moved.abs().amax(0).tolist() == pytest.approx([0.2, 2.5])
    assert moved.std(0).tolist() == pytest.approx([0.08, 1.0], rel=0.03)
    assert moved.std(1).min() > 0
    at_bound = td3.smoothed(high.expand_as(noise), noise, CASES["td3"].config, low, high)
    assert (at_bound <= high).all()


def test_td3_steps_the_actor_on_every_second_update():
    env = pendulum()
    learner = CASES["td3"].make(env, policy_delay=2)
    batch = filled(learner, env).sample(32, learner.generator)
    moved = []
    for _ in range(4):
        before = learner.state_dict()
        learner.update(batch)
        after = learner.state_dict()
        parts = ("critic", "actor", "target_critic", "target_actor")
        moved.append([bool(differing(before[p], after[p])) for p in parts])
    assert moved == [[True, False, False, False], [True] * 4] * 2


def test_temperature_keeps_moving_after_a_restore_and_a_fixed_one_stays():
    # O-13
    env = pendulum()
    learner = CASES["sac"].make(env)
    batch = filled(learner, env).sample(32, learner.generator)
    alphas = []
    for _ in range(3):
        learner.update(batch)
        alphas.append(learner.actor.log_temperature.item())
    other = CASES["sac"].make(env, seed=9)
    other.load_state_dict(learner.state_dict())
    assert other.actor.log_temperature.item() == alphas[-1] != 0.0
    other.update(batch)
    learner.update(batch)
    assert other.actor.log_temperature.item() == learner.actor.log_temperature.item() < alphas[-1]
    fixed = CASES["sac"].make(env, temperature=0.2)
    fixed.update(batch)
    again = CASES["sac"].make(env, temperature=0.2, seed=1)
    again.load_state_dict(fixed.state_dict())
    again.update(batch)
    assert again.actor.log_temperature.item() == pytest.approx(math.log(0.2))


def test_a_kept_temperature_is_kept_whatever_a_run_is_warm_started_from():
    env = pendulum()
    learner = CASES["sac"].make(env, temperature=0.01)
    for state in (CASES["sac"].make(env), CASES["sac"].make(env, temperature=0.5)):
        learner.warm_start(state.state_dict())
        assert learner.actor.log_temperature.item() == pytest.approx(math.log(0.01))
    for extra in ({"target_entropy": -1.0}, {"initial_temperature": 0.5}):
        with pytest.raises(ValueError, match="no effect with a kept temperature"):
            CASES["sac"].make(env, temperature=0.01, **extra)


def test_temperature_does_not_depend_on_the_units_of_the_action():
    """Entropy and its target shift by the same sum of log half ranges: log 1 + log 5."""
    spec = TwoBounds(num_envs=1)
    learner = CASES["sac"].make(spec)
    assert learner.actor.target_entropy == pytest.approx(-2 + math.log(5))
    given = CASES["sac"].make(spec, target_entropy=-3.0)
    assert given.actor.target_entropy == pytest.approx(-3 + math.log(5))


def test_a_target_entropy_that_no_action_has_is_refused():
    spec = TwoBounds(num_envs=1)
    CASES["sac"].make(spec, target_entropy=1.38)
    with pytest.raises(ValueError, match=r"target_entropy must be below 1.386, .* not 1.387"):
        CASES["sac"].make(spec, target_entropy=1.387)


# Learning -------------------------------------------------------------------------------------


def test_learns_how_the_action_depends_on_the_observation(case):
    run = case.train(
        FollowSignal(num_envs=16),
        None,
        lambda policy: {"eval/slope": slope(policy)},
        total_steps=6000,
        updates_per_step=0.2,
        learning_rate=3e-3,
        batch_size=64,
    )
    assert run.rows[-1]["eval/slope"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("bootstraps", [True, False])
def test_the_critic_finds_the_value_beyond_the_time_limit(case, bootstraps):
    """A constant reward of 1, cut after 3 steps, is worth 1 / (1 - 0.9), not at most 3.

    Negative control: with the limit taken for a failure it is 1 of 3 steps on the way to 2.71.
    """
    env = Blind(num_envs=4)
    changes = {"temperature": 1e-6} if case.module is sac else {}
    learner = case.make(env, gamma=0.9, learning_rate=3e-3, polyak=0.5, **changes)
    replay = filled(learner, env, 100)
    ended = replay.ended.view(-1)
    for _ in range(300):
        index = replay.draw(32, learner.generator)
        batch = replay.gather(index, 1, 0.9)
        if not bootstraps:
            batch = batch._replace(discount=batch.discount * ~ended[index])
        learner.update(batch)
    obs = batch.obs["critic"]
    found = learner.critic(obs, batch.action).mean().item()
    if bootstraps:
        assert found == pytest.approx(10, abs=0.5)
    else:
        assert found < 3


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_swings_the_pendulum_up(name, monkeypatch):
    """A random policy has about -1200; the best about -150."""
    monkeypatch.setattr(CASES[name].module, "LOG_EVERY", 1000)
    config = dataclasses.replace(ctrl_rl.preset("Pendulum-v0", name), total_steps=10_000,
                                 warmup_steps=1000, compile="off")  # fmt: skip
    returns = {}

    def evaluate(policy):
        judged = ctrl_rl.make("Pendulum-v0", 20, seed=77)
        found = ctrl_rl.evaluate(policy, judged, 20).metrics["episode_return"].mean
        returns[len(returns)] = found
        return {"eval/episode_return": found}

    CASES[name].module.train(config, pendulum(1), Run(eval_every=0), evaluate)
    assert returns[0] > -300


@pytest.mark.slow
def test_compiled_updates_are_those_of_eager_but_for_rounding(case):
    found = []
    for mode in ("off", "on"):
        env = pendulum()
        learner = case.make(env, compile=mode)
        replay = filled(learner, env)
        stats = [learner.update(replay.sample(32, learner.generator)) for _ in range(4)]
        assert learner.critic_step.compiled == (mode == "on")
        found.append((learner.state_dict(), learner.figures(stats)))
    for part in ("actor", "critic"):
        for key, value in found[0][0][part].items():
            torch.testing.assert_close(found[1][0][part][key], value, atol=2e-5, rtol=1e-4)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4, abs=1e-5)
    same(list(found[0][0]), list(found[1][0]))
