"""Diffuser and MetaDiffuser learn, resume and play; contexts tell tasks apart."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import ctrl_rl
from ctrl_rl import registry
from ctrl_rl.checkpoints import load_checkpoint
from ctrl_rl.compiled import Diverged
from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm
from offline import diffuser, metadiffuser
from offline.diffuser import Diffuser, DiffuserConfig
from offline.diffusion import PlanConfig
from offline.episodes import Episodes
from offline.metadiffuser import MetaDiffuser, MetaDiffuserConfig, MetaPlanner
from offline.planner import Planner
from offline.registry import POLICIES
from offline.segments import Segments

SMALL = {
    "horizon": 4,
    "multipliers": (1,),
    "width": 8,
    "kernel": 3,
    "diffusion_steps": 8,
    "batch_size": 32,
    "model_hidden": (32,),
    "model_tasks": 8,
    "model_batch": 8,
}
META = {**SMALL, "context_size": 4, "context_steps": 5, "encoder_hidden": (32, 32), "labels": 4}
SHORT = {"total_steps": 300, "model_steps": 150}


def make_spec(obs_size=1, action_size=1):
    names = [f"a{i}" for i in range(action_size)]
    return EnvSpec(
        task="Line-v0",
        num_envs=1,
        obs={"actor": (ObsTerm(name="x", kind="signal", size=obs_size),)},
        action=tuple(ActionDim(name=name, low=-1.0, high=1.0) for name in names),
        physics_dt=1.0,
        step_dt=1.0,
        max_episode_steps=10,
    )


def line(sign=1.0, seed=0, number=40, gain=-0.5, steps=10, noise=0.02):
    """x' = x + a with a = gain x and noise; the reward is sign * a."""
    rng = np.random.default_rng(seed)
    x, obs, action = rng.uniform(-1, 1, number), [], []
    for _ in range(steps):
        a = gain * x + noise * rng.normal(size=number)
        obs.append(x)
        action.append(a)
        x = x + a
    obs.append(x)
    flat = lambda values: np.stack(values, 1).reshape(-1, 1).astype("f4")  # noqa: E731
    return Episodes(
        obs=flat(obs),
        action=flat(action),
        reward=sign * flat(action)[:, 0],
        lengths=np.full(number, steps),
        terminated=np.zeros(number, bool),
        truncated=np.ones(number, bool),
        final_known=np.ones(number, bool),
    )


@pytest.fixture(scope="module")
def two_tasks():
    return Segments([line(1.0, 0, noise=0.2), line(-1.0, 1, noise=0.2)], 4)


class Keep(ctrl_rl.Run):
    """A run in memory that keeps what was saved last."""

    def __init__(self):
        super().__init__(console=False)

    def save(self, step, policy, learner, env, replay=None):
        self.policy, self.learner = policy, learner


@pytest.fixture(scope="module")
def trained(two_tasks):
    """Policy sections of both learners after a short training on two tasks."""
    meta, plain = Keep(), Keep()
    config = MetaDiffuserConfig(**META, total_steps=700, model_steps=500)
    metadiffuser.train(config, two_tasks, make_spec(), meta)
    diffuser.train(DiffuserConfig(**SMALL, **SHORT), two_tasks, make_spec(), plain)
    return meta.policy, plain.policy


# Learning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("predict", ["x0", "eps"])
def test_diffuser_plays_as_the_data_does(predict):
    """Plans from x begin with a = -x / 2, and go where the dynamics lead."""
    run = Keep()
    config = DiffuserConfig(**{**SMALL, "width": 16}, total_steps=600, model_steps=50,
                            predict=predict)  # fmt: skip
    diffuser.train(config, Segments([line()], 4), make_spec(), run)
    plan = PlanConfig(return_scale=0.0, dynamics_scale=0.0)
    planner = Planner(run.policy, plan=plan)
    x = torch.linspace(-0.8, 0.8, 9)[:, None]
    tolerance = 0.1 if predict == "x0" else 0.2
    torch.testing.assert_close(planner(x), -x / 2, rtol=0, atol=tolerance)
    plans = planner.draw(x, torch.zeros(9, 0))
    assert torch.allclose(plans[:, 0, :1], x, atol=1e-6)
    follows = plans[:, :-1, 0] + plans[:, :-1, 1]
    torch.testing.assert_close(plans[:, 1:, 0], follows, rtol=0, atol=2 * tolerance)


def test_the_encoder_separates_two_tasks_whose_rewards_differ(two_tasks, trained):
    """r = a in one task and -a in the other; only a context can tell which."""
    meta, plain = MetaPlanner(trained[0]), Planner(trained[1])
    fresh = [line(1.0, 7, gain=0.3), line(-1.0, 8, gain=0.3)]  # another policy acts
    x = [torch.as_tensor(e.obs.reshape(40, 11, 1)[:5, 0]) for e in fresh]
    a = [torch.as_tensor(e.action.reshape(40, 10, 1)[:5, 0]) for e in fresh]
    r = [torch.as_tensor(e.reward.reshape(40, 10)[:5, 0]) for e in fresh]
    z = meta.warm_start(*(torch.stack(v) for v in (x, a, r)), torch.stack(x) + torch.stack(a))
    for planner, context in ((meta, z), (plain, torch.zeros(2, 0))):
        obs, action = torch.zeros(2, 1), torch.full((2, 1), 0.25)
        scaled = planner.scale.apply(obs), planner.scale.apply(action, 1)
        reward = planner.scale.undo(planner.models.reward(*scaled, context)[:, None], 2)[:, 0]
        if planner is meta:
            torch.testing.assert_close(reward, torch.tensor([0.25, -0.25]), rtol=0, atol=0.1)
        else:  # nothing can be told
            assert reward[0] == reward[1] and abs(reward[0]) < 0.15


def test_what_guides_is_the_return_of_the_task_that_was_shown(trained):
    """Where noise is free to go anywhere, the guide takes each task's actions its own way."""
    found = {}
    for scale in (0.0, 1.0):
        plan = PlanConfig(return_scale=scale, dynamics_scale=0.0)
        planner = MetaPlanner(trained[0], plan=plan)
        show(planner)
        planner._predict = lambda x, k, z: x
        action = planner(torch.zeros(200, 1)).view(100, 2)
        found[scale] = action.mean(0)
    assert found[0.0].abs().max() < 0.1
    assert found[1.0][0] > 0.2 and found[1.0][1] < -0.2


def test_models_stand_still_once_the_network_learns(two_tasks):
    learner = MetaDiffuser(MetaDiffuserConfig(**META, total_steps=20, model_steps=10),
                           two_tasks, make_spec())  # fmt: skip
    for _ in range(10):
        learner.update()
    before, net = learner.models.state_dict(), learner.average.state_dict()
    before, net = ({k: v.clone() for k, v in x.items()} for x in (before, net))
    assert learner.labels.abs().max() == 0
    for _ in range(3):
        assert set(learner.update()) == {"loss/diffusion", "gradient/diffusion"}
    assert all(torch.equal(v, before[k]) for k, v in learner.models.state_dict().items())
    labels = learner.labels.clone()
    assert labels.abs().amax((1, 2)).min() > 0 and not torch.equal(labels[:, 0], labels[:, 1])
    learner.update()
    assert torch.equal(learner.labels, labels)
    assert not torch.equal(learner.average.last[-1].weight, net["last.3.weight"])


def test_each_task_gets_labels_of_its_own_data(monkeypatch, two_tasks):
    seen, draw = [], Segments.draw_contexts

    def recorded(self, task, count, generator):
        seen.append((task, draw(self, task, count, generator)))
        return seen[-1][1]

    config = MetaDiffuserConfig(**META, **SHORT)
    learner = MetaDiffuser(config, two_tasks, make_spec())
    learner.updates = config.model_steps
    monkeypatch.setattr(Segments, "draw_contexts", recorded)
    learner.context(torch.tensor([0]))
    assert len(seen) == 2
    for i, (task, contexts) in enumerate(seen):
        assert task.tolist() == [i] * 4
        assert torch.equal(learner.labels[i], learner.models.encode(contexts))


def test_the_average_follows_the_network(two_tasks):
    config = DiffuserConfig(**SMALL, total_steps=9, model_steps=1, ema=0.9)
    learner = Diffuser(config, two_tasks, make_spec())
    learner.update()
    expected = learner.net.last[-1].weight.detach().clone()
    for _ in range(4):
        learner.update()
        expected = 0.9 * expected + 0.1 * learner.net.last[-1].weight.detach()
    torch.testing.assert_close(learner.average.last[-1].weight, expected)
    assert torch.equal(
        learner.policy_section()["weights"]["last.3.weight"], learner.average.last[-1].weight
    )


def test_a_tenth_of_the_plans_is_learned_without_context(two_tasks):
    learner = MetaDiffuser(MetaDiffuserConfig(**META, **SHORT), two_tasks, make_spec())
    learner.updates = 150
    z, keep = learner.context(torch.tensor([0, 1]).repeat(2_000))
    assert keep.mean().item() == pytest.approx(0.9, abs=0.02)
    for task in (0, 1):
        chosen = z[task::2].unique(dim=0)
        assert len(chosen) == 4
        distance = (chosen[:, None] - learner.labels[task]).abs().sum(2)
        assert (distance == 0).any(1).all()


def test_guidance_extrapolates_from_without_to_with_context(trained):
    x, k = torch.randn(2, 4, 2), torch.full((2,), 3)
    z, ones = torch.randn(2, 4), torch.ones(2)
    outs = {}
    for w in (0.0, 1.0, 1.5):
        planner = MetaPlanner(trained[0], plan=PlanConfig(guidance=w))
        outs[w] = planner._predict(x, k, z)
    net = planner.net
    without, with_it = net(x, k, z, 0 * ones), net(x, k, z, ones)
    torch.testing.assert_close(outs[0.0], without)
    torch.testing.assert_close(outs[1.0], with_it)
    torch.testing.assert_close(outs[1.5], without + 1.5 * (with_it - without))
    assert not torch.allclose(without, with_it, atol=1e-3)


# Runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [10, 20])
def test_resume_is_exact_in_both_phases(tmp_path, monkeypatch, two_tasks, stop):
    monkeypatch.setattr(diffuser, "LOG_EVERY", 10)
    config = MetaDiffuserConfig(**META, total_steps=30, model_steps=15)
    folder = {}
    for name, stops in (("whole", [None]), ("parts", [stop, None])):
        folder[name] = tmp_path / name
        for i, stop_after in enumerate(stops):
            run = ctrl_rl.Run(folder[name], stop_after=stop_after, resume=i > 0, console=False)
            metadiffuser.train(config, two_tasks, make_spec(), run)
    whole, parts = (load_checkpoint(f / "checkpoints" / "last.pt") for f in folder.values())
    assert whole["step"] == parts["step"] == 30
    for part in ("policy", "learner", "env"):
        assert_same(whole[part], parts[part], part)


def test_a_run_does_not_go_on_with_other_data(tmp_path, monkeypatch, two_tasks):
    monkeypatch.setattr(diffuser, "LOG_EVERY", 2)
    config = DiffuserConfig(**SMALL, total_steps=8, model_steps=4)
    run = ctrl_rl.Run(tmp_path / "r", stop_after=4, console=False)
    diffuser.train(config, two_tasks, make_spec(), run)
    other = Segments([line(1.0, 5, noise=0.2), line(-1.0, 1, noise=0.2)], 4)
    with pytest.raises(ValueError, match="another rows_sha256"):
        run = ctrl_rl.Run(tmp_path / "r", resume=True, console=False)
        diffuser.train(config, other, make_spec(), run)


def assert_same(a, b, where):
    """Two trees of tensors and plain values are equal to the bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, (list, tuple)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}.{i}")
    else:
        assert a == b, where


def test_seeds_differ_and_repeat(two_tasks):
    def weights(seed):
        learner = MetaDiffuser(
            MetaDiffuserConfig(**META, total_steps=6, model_steps=3, seed=seed),
            two_tasks,
            make_spec(),
        )
        for _ in range(6):
            learner.update()
        return learner.policy_section()["weights"]["last.3.weight"]

    assert torch.equal(weights(0), weights(0)) and not torch.equal(weights(0), weights(1))


def test_divergence_is_one_line(monkeypatch, two_tasks):
    monkeypatch.setattr(diffuser, "LOG_EVERY", 10)
    config = DiffuserConfig(**SMALL, **SHORT)
    learner = Diffuser(config, two_tasks, make_spec())
    with torch.no_grad():
        learner.models.of_reward.layers[-1].bias.fill_(math.nan)
    with pytest.raises(Diverged, match="before update 10: loss/reward is nan"):
        diffuser.fit(learner)


def test_every_figure_is_declared_and_logged(monkeypatch, two_tasks):
    monkeypatch.setattr(diffuser, "LOG_EVERY", 4)
    config = DiffuserConfig(**SMALL, total_steps=8, model_steps=4)
    run = diffuser.train(config, two_tasks, make_spec())
    assert {key for row in run.rows for key in row} == {"step", *diffuser.METRICS}
    assert [row["step"] for row in run.rows] == [4, 8]


# The planner --------------------------------------------------------------------------------


@pytest.fixture
def planner(trained):
    planner = MetaPlanner(trained[0])
    show(planner)
    return planner


def show(planner, tasks=2):
    x = torch.zeros(tasks, 4, 1)
    a = torch.linspace(-0.4, 0.4, 4)[None, :, None].expand(tasks, -1, -1)
    sign = torch.tensor([1.0, -1.0])[:tasks, None]
    return planner.warm_start(x, a, sign * a[..., 0], x + a)


def test_rows_play_the_tasks_in_turn(planner):
    z = show(planner)
    assert not torch.allclose(z[0], z[1], atol=0.05)
    assert torch.equal(planner.context(torch.tensor([0, 1, 2, 5])), z[[0, 1, 0, 1]])


def test_draws_repeat_after_a_reset_of_all(planner):
    x = torch.linspace(-1, 1, 6)[:, None]
    first, second = planner(x), planner(x)
    assert not torch.equal(first, second)
    planner.reset()
    assert torch.equal(planner(x), first)
    assert (first.abs() <= 1).all() and first.dtype == torch.float32


def test_a_plan_is_played_for_as_many_steps_as_asked(trained):
    planner = MetaPlanner(trained[0], plan=PlanConfig(replan_every=3))
    show(planner)
    drawn = []
    draw = planner.draw
    planner.draw = lambda obs, z: drawn.append(draw(obs, z)) or drawn[-1]
    x = torch.zeros(3, 1)
    played = torch.stack([planner(x) for _ in range(3)], 1)
    assert len(drawn) == 1
    torch.testing.assert_close(played[..., 0], drawn[0][:, :3, 1].clamp(-1, 1))
    planner.reset(torch.tensor([False, True, False]))  # in the midst of nothing: all are due
    planner(x)
    assert len(drawn[1]) == 3
    planner.reset(torch.tensor([1]))  # row 1 begins anew, the others go on
    action = planner(x)
    assert len(drawn[2]) == 1
    torch.testing.assert_close(action[1], drawn[2][0, 0, 1:].clamp(-1, 1))
    torch.testing.assert_close(action[[0, 2]], drawn[1][[0, 2], 1, 1:].clamp(-1, 1))


def test_other_rows_than_before_are_refused(planner):
    planner(torch.zeros(3, 1))
    with pytest.raises(ValueError, match="plays 3 rows, the observation has 2; planner.reset"):
        planner(torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"must be \(N, 1\)"):
        planner(torch.zeros(3, 2))


def test_a_planner_that_was_shown_nothing_says_so(trained):
    with pytest.raises(ValueError, match="call warm_start with a few transitions"):
        MetaPlanner(trained[0])(torch.zeros(2, 1))


def test_bad_warm_starts_are_refused(planner):
    good = torch.zeros(2, 3, 1), torch.zeros(2, 3, 1), torch.zeros(2, 3), torch.zeros(2, 3, 1)
    with pytest.raises(
        ValueError, match=r"takes \(M, h, 1\), .* not \(2, 3, 1\), \(2, 3, 1\), \(6,\)"
    ):
        planner.warm_start(good[0], good[1], good[2].flatten(), good[3])
    with pytest.raises(ValueError, match="not "):
        planner.warm_start(*(x[:, :0] for x in good))
    good[2][1, 2] = math.inf
    with pytest.raises(ValueError, match="warm start of task 1 holds a number that is not finite"):
        planner.warm_start(*good)


def test_the_order_of_a_warm_start_and_its_length_matter_not(planner):
    x, a = torch.zeros(1, 8, 1), torch.linspace(-0.4, 0.4, 8)[None, :, None]
    whole = planner.warm_start(x, a, a[..., 0], x + a)
    turned = planner.warm_start(x, a.flip(1), a.flip(1)[..., 0], x + a.flip(1))
    torch.testing.assert_close(whole, turned, rtol=0, atol=1e-5)
    twice = planner.warm_start(*(torch.cat([v, v], 1) for v in (x, a, a[..., 0], x + a)))
    torch.testing.assert_close(whole, twice, rtol=0, atol=1e-5)


def test_a_run_folder_is_played_by_the_usual_calls(tmp_path, monkeypatch):
    """train -> load_policy -> evaluate, on Point-Robot; no export."""
    from robots.tasks.point_robot import PointRobotConfig
    from sim2real.export import export_run

    known = registry.names
    monkeypatch.setattr(
        registry,
        "names",
        lambda group: {**known(group), **(POLICIES if group == "policies" else {})},
    )
    env = ctrl_rl.make("Point-Robot-v0", 6, config=PointRobotConfig(index=(0, 1)))
    rng = np.random.default_rng(0)
    action = rng.uniform(-0.1, 0.1, (2, 20, 2)).astype("f4")
    obs = np.concatenate([np.zeros((2, 1, 2), "f4"), action.cumsum(1, dtype="f4")], 1)
    tasks = [
        Episodes(
            obs=obs[i],
            action=action[i],
            reward=-np.linalg.norm(obs[i, 1:], axis=1),
            lengths=np.array([20]),
            terminated=np.array([False]),
            truncated=np.array([True]),
            final_known=np.array([True]),
        )
        for i in (0, 1)
    ]
    short = {"total_steps": 4, "model_steps": 2}
    data = Segments(tasks, 4)
    meta, plain = tmp_path / "meta", tmp_path / "plain"
    spec = env.spec
    metadiffuser.train(
        MetaDiffuserConfig(**META, **short), data, spec, ctrl_rl.Run(meta, console=False)
    )
    diffuser.train(DiffuserConfig(**SMALL, **short), data, spec, ctrl_rl.Run(plain, console=False))
    planner = ctrl_rl.load_policy(meta)
    assert type(planner) is MetaPlanner and type(ctrl_rl.load_policy(plain)) is Planner
    with pytest.raises(ValueError, match="call warm_start"):
        ctrl_rl.evaluate(planner, env, 6)
    now, after = (torch.as_tensor(x) for x in (obs[:, :-1], obs[:, 1:]))
    planner.warm_start(now, torch.as_tensor(action), torch.zeros(2, 20), after)
    result, again = (
        ctrl_rl.evaluate(planner, ctrl_rl.make("Point-Robot-v0", 6, config=env.config), 6)
        for _ in range(2)
    )
    assert torch.equal(result.episodes["episode_return"], again.episodes["episode_return"])
    assert result.metrics["episode_length"].mean == 20
    with pytest.raises(ValueError, match="a metadiffuser policy is played .* not exported"):
        export_run(meta)
    damaged = load_checkpoint(meta / "checkpoints" / "last.pt")["policy"]
    del damaged["scale"]
    with pytest.raises(ValueError, match="lacks scale"):
        MetaPlanner(damaged)


def test_a_section_that_is_not_finite_or_of_another_kind_is_refused(trained):
    section = {**trained[0], "weights": dict(trained[0]["weights"])}
    name = next(iter(section["weights"]))
    section["weights"][name] = torch.full_like(section["weights"][name], math.nan)
    with pytest.raises(ValueError, match=f"weights {name} of the policy is not finite"):
        MetaPlanner(section)
    with pytest.raises(ValueError, match="no diffuser of format 1"):
        Planner(trained[0])
    short = {**trained[1], "scale": {k: v[:1] for k, v in trained[1]["scale"].items()}}
    with pytest.raises(ValueError, match="scale is not of 1 observations and 1 actions"):
        Planner(short)
    other = {**trained[1], "config": {**trained[1]["config"], "width": 16}}
    with pytest.raises(ValueError, match="weights of the planner do not fit"):
        Planner(other)


# Settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 6}, "horizon must be a multiple of 4"),
        ({"total_steps": 5, "model_steps": 5}, "total_steps must be more than model_steps"),
        ({"predict": "v"}, "predict must be x0 or eps"),
        ({"width": 12}, "width must be a multiple of 8"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"learning_rate": math.nan}, "learning_rate must be positive"),
        ({"drop": 1.0}, "drop must be in 0..1, below 1"),
        ({"context_steps": 0}, "context_steps must be at least 1"),
        ({"plan": PlanConfig(replan_every=17)}, "plan must be replanned within the horizon"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MetaDiffuserConfig(**changes)


def test_data_that_does_not_fit_is_refused(two_tasks):
    config = DiffuserConfig(**SMALL, **SHORT)
    with pytest.raises(
        ValueError, match="1 and 1 numbers and segments of 4 steps, Line-v0 has 2 and 1"
    ):
        Diffuser(config, two_tasks, make_spec(obs_size=2))
    with pytest.raises(ValueError, match="and horizon is 8"):
        Diffuser(dataclasses.replace(config, horizon=8), two_tasks, make_spec())
