"""FastSAC: what every off-policy learner must do, and what is its own."""

import copy
import dataclasses
import math

import pytest
import torch
from probes import AgeReward, ConstantReward, FollowSignal, LastStepReward
from test_off_policy import (  # the contract, collected here once more for this learner
    Case,
    Privileged,
    TwoBounds,
    Unbounded,
    filled,
    pendulum,
    test_a_buffer_smaller_than_a_step_is_refused,  # noqa: F401
    test_a_run_without_its_replay_says_so,  # noqa: F401
    test_actions_stay_within_the_bounds_of_each_dimension,  # noqa: F401
    test_compiled_updates_are_those_of_eager_but_for_rounding,  # noqa: F401
    test_every_declared_key_is_logged,  # noqa: F401
    test_every_logged_key_is_documented,  # noqa: F401
    test_exported_file_gives_the_actions_of_the_policy,  # noqa: F401
    test_run_folder_resumes_exactly,  # noqa: F401
    test_same_seed_same_bits,  # noqa: F401
    test_squashed_policies_refuse_another_bound,  # noqa: F401
    test_targets_follow_by_polyak,  # noqa: F401
    test_the_action_stored_is_the_action_sent,  # noqa: F401
    test_the_critic_reads_its_group,  # noqa: F401
    test_the_global_generator_is_not_touched,  # noqa: F401
    test_the_policy_section_is_the_policy,  # noqa: F401
    test_unbounded_and_discrete_actions_are_refused,  # noqa: F401
    test_updates_count_env_steps_whatever_the_number_of_environments,  # noqa: F401
    test_updates_move_every_weight_and_leave_the_batch_alone,  # noqa: F401
    without_time,
)
from test_ppo import Blind, Counter, differing, slope

import ctrl_rl
from ctrl_rl import fast_sac, registry, sac
from ctrl_rl.distributions import project
from ctrl_rl.fast_sac import FastSAC, FastSACConfig, target_distribution
from ctrl_rl.networks import EnsembleMLP, action_bounds
from ctrl_rl.policy import Policy, load_policy
from ctrl_rl.runs import Run
from sim2real.export import build_graph

CASE = Case(
    fast_sac,
    FastSAC,
    FastSACConfig(
        warmup_steps=32,
        updates_per_step=1.0,
        buffer_size=4000,
        batch_size=32,
        policy_delay=1,
        policy_average=1.0,
        num_atoms=21,
        value_bound=20.0,
        hidden=(16, 16),
        critic_hidden=(16, 16),
        compile="off",
    ),
)


@pytest.fixture
def case() -> Case:
    return CASE


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """Rows of the log every 64 env steps, so that short runs have some."""
    monkeypatch.setattr(fast_sac, "LOG_EVERY", 64)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


# Distributions by hand ----------------------------------------------------------------------


def test_projection_by_hand():
    atoms = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    prob = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1]])
    # r = 0.25, discount 0.5: atoms move to -0.75, -0.25, 0.25, 0.75, 1.25.
    # -1: .75 * .1;  0: .25 * .1 + .75 * .2 + ... each mass goes to its two neighbours:
    #   -0.75 -> -1: .075,  0: .025        -0.25 -> -1: .05, 0: .15
    #    0.25 ->  0: .3,    1: .1           0.75 ->  0: .05, 1: .15        1.25 -> 1: .075, 2: .025
    found = project(prob, 0.25 + 0.5 * atoms[None], atoms)
    expected = torch.tensor([[0.0, 0.125, 0.525, 0.325, 0.025]])
    torch.testing.assert_close(found, expected)
    # Beyond the ends all mass lies on the outermost atoms; on an atom it stays there.
    torch.testing.assert_close(project(prob, 7.0 + atoms[None], atoms)[0, -1].item(), 1.0)
    torch.testing.assert_close(project(prob, atoms[None] - 9.0, atoms)[0, 0].item(), 1.0)
    torch.testing.assert_close(project(prob, atoms[None] * 1.0, atoms), prob)
    # A termination leaves the reward alone: 1.25 is 3/4 on 1 and 1/4 on 2.
    ended = project(prob, torch.full((1, 5), 1.25), atoms)
    torch.testing.assert_close(ended, torch.tensor([[0.0, 0.0, 0.0, 0.75, 0.25]]))


def test_projection_keeps_mass_and_mean_and_agrees_with_a_loop():
    generator = torch.Generator().manual_seed(0)
    atoms = torch.linspace(-3.0, 3.0, 13, dtype=torch.float64)
    prob = torch.randn(50, 13, generator=generator, dtype=torch.float64).softmax(-1)
    moved = torch.rand(50, 13, generator=generator, dtype=torch.float64) * 8 - 4
    found = project(prob, moved, atoms)
    slow = torch.zeros_like(prob)
    for b in range(50):
        for j in range(13):
            z = min(max(moved[b, j].item(), -3.0), 3.0)
            for i in range(13):
                slow[b, i] += prob[b, j] * max(0.0, 1 - abs(z - atoms[i].item()) / 0.5)
    torch.testing.assert_close(found, slow)
    torch.testing.assert_close(found.sum(1), torch.ones(50, dtype=torch.float64))
    mean = (prob * moved.clamp(-3, 3)).sum(1)
    torch.testing.assert_close((found * atoms).sum(1), mean)


def test_the_target_is_the_mean_of_both_critics():
    atoms = torch.tensor([-1.0, 0.0, 1.0])
    big = 50.0  # a logit that leaves the others nothing
    one, zero, minus = big * torch.eye(3).flip(0)
    logits = torch.stack([torch.stack([one, minus]), torch.stack([zero, zero])])
    reward, discount = torch.tensor([0.0, 0.5]), torch.tensor([1.0, 0.5])
    log_prob, alpha = torch.tensor([1.0, 0.0]), torch.tensor(0.25)
    found = target_distribution(reward, discount, logits, log_prob, alpha, atoms)
    # Row 0: half at 1, half at 0, moved by -0.25 for the entropy: to 0.75 and -0.25.
    # Row 1: half at -1, half at 0, moved to 0.5 - 0.5 = 0 and 0.5.
    expected = torch.tensor([[0.125, 0.5, 0.375], [0.0, 0.75, 0.25]])
    torch.testing.assert_close(found, expected)


def test_losses_by_hand():
    logits = torch.tensor([[[0.0, 0.0]], [[math.log(3.0), 0.0]]])  # (2, 1, 2): 1/2 1/2, 3/4 1/4
    target = torch.tensor([[0.5, 0.5]])
    # log 2 + (-(log 3/4 + log 1/4) / 2) = 0.6931 + 0.8370
    assert fast_sac.critic_loss(logits, target).item() == pytest.approx(1.5301, abs=1e-4)
    q = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    found = fast_sac.actor_loss(torch.tensor([-1.0, 2.0]), q, torch.tensor(0.5))
    assert found.item() == -1.25  # (0.5 * -1 - 1.5 + 0.5 * 2 - 1.5) / 2


def test_critics_start_near_zero_wherever_the_atoms_reach():
    env = TwoBounds(num_envs=8)
    learner = CASE.make(env, value_bound=400.0, num_atoms=101)
    value = learner.critic.value(env.observe()["actor"], 9 * torch.rand(8, 2))
    assert value.abs().max() < 8.0  # one spacing


def test_layer_norm_by_hand():
    net = EnsembleMLP(2, (3, 4, 1), "relu", generator=torch.Generator(), layer_norm=True)
    x = torch.randn(5, 3)
    for e in range(2):
        h = x @ net.layers[0].weight[e] + net.layers[0].bias[e]  # pyright: ignore
        mean, var = h.mean(1, keepdim=True), h.var(1, correction=0, keepdim=True)
        h = ((h - mean) / (var + 1e-5).sqrt()).relu()
        out = h @ net.layers[1].weight[e] + net.layers[1].bias[e]  # pyright: ignore
        torch.testing.assert_close(net(x)[e], out)


# Time limits --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("probe", [ConstantReward, AgeReward, LastStepReward])
def test_exact_values_have_no_error_beyond_the_time_limit(probe, num_steps):
    """The mean of the target of the exact Q is Q itself; what is cut or bootstrapped wrongly shows.

    The exact critic is a distribution over two neighbouring atoms.
    """
    gamma = 0.9
    env = probe(num_envs=2)
    learner = CASE.make(env, gamma=gamma)
    replay = filled(learner, env, 30)
    atoms = torch.linspace(-200.0, 200.0, 41)

    def error(batch) -> float:
        def logits(obs):
            exact = probe.value(obs["actor"][:, :1], gamma)
            mass = torch.zeros(len(exact), len(atoms))
            mass[:, 0] = 1.0
            found = project(mass, exact.expand(-1, len(atoms)), atoms)
            return (found + 1e-30).log().expand(2, -1, -1)

        nothing = torch.zeros(len(batch.reward))
        parts = batch.reward, batch.discount, logits(batch.next_obs), nothing, torch.tensor(0.0)
        mean = (target_distribution(*parts, atoms) * atoms).sum(1)
        return (mean - probe.value(batch.obs["actor"][:, 0], gamma)).abs().max().item()

    index = torch.arange(60)
    batch = replay.gather(index, num_steps, gamma)
    size = probe.value(torch.tensor(7.0), gamma).item()
    assert error(batch) < 1e-4 * size
    ended = replay.ended.view(-1)[:60]  # by step, then environment; the last step ended none
    at_end = torch.stack([ended[(index + 2 * k).clamp(max=59)] for k in range(num_steps)]).any(0)
    assert at_end.any() and not ended[58:].any()
    if probe is not LastStepReward:  # negative control: a time limit taken for a failure
        assert error(batch._replace(discount=batch.discount * ~at_end)) > 0.03 * size
    if probe is LastStepReward:  # a failure taken for a time limit
        wrong = torch.where(at_end, gamma, batch.discount)
        assert error(batch._replace(discount=wrong)) > 0.03 * size


@pytest.mark.parametrize("bootstraps", [True, False])
def test_the_critic_finds_the_value_beyond_the_time_limit(bootstraps):
    """A constant reward of 1, cut after 3 steps, is worth 1 / (1 - 0.9), not at most 3."""
    env = Blind(num_envs=4)
    changes = {"learning_rate": 3e-3, "polyak": 0.2, "initial_temperature": 1e-6}
    learner = CASE.make(env, gamma=0.9, normalize_obs=False, **changes)
    replay = filled(learner, env, 100)
    ended = replay.ended.view(-1)
    for _ in range(700):
        index = replay.draw(32, learner.generator)
        batch = replay.gather(index, 1, 0.9)
        if not bootstraps:
            batch = batch._replace(discount=batch.discount * ~ended[index])
        learner.update(batch)
    found = learner.critic.value(batch.obs["critic"], batch.action).mean().item()
    if bootstraps:
        assert found == pytest.approx(10, abs=0.5)
    else:
        assert found < 3


# Warm-up ------------------------------------------------------------------------------------


def test_the_policy_acts_from_the_first_step_and_learns_after_the_warm_up():
    """Uniform actions would throw a robot over that stands: see the page of FastSAC."""
    env, sent = TwoBounds(num_envs=4), []
    step = env.step
    env.step = lambda action: (sent.append(action.clone()), step(action))[1]
    run = Run(checkpoint_every=0, eval_every=0)
    CASE.train(env, run, total_steps=128, warmup_steps=64, initial_std=1e-3)
    assert (torch.stack(sent)[:16] - torch.tensor([0.0, 5.0])).abs().max() < 0.5
    assert ["loss/critic" in row for row in run.rows] == [False, True]


# Statistics ---------------------------------------------------------------------------------


def test_statistics_see_each_observation_once_and_stay_between_rows():
    env = Counter(num_envs=2)
    learner = CASE.make(env)
    obs = env.observe()
    for _ in range(4):
        step = env.step(learner.act(obs))
        learner.see(obs, step)
        obs = step.obs
    assert learner.normalizers["actor"].count == 0
    learner.update_statistics()
    # Rows 0 1 2 0 and the successor 3 of the ended one, for each of two environments.
    assert learner.normalizers["actor"].count == 10
    assert learner.normalizers["actor"].mean.item() == pytest.approx(6 / 5)
    assert learner.normalizers["critic"].mean.item() == pytest.approx(12 / 5)
    step = env.step(torch.tensor([[0.0], [math.nan]]))
    assert len(step.info.faults) == 1
    learner.see(obs, step)
    learner.update_statistics()
    assert learner.normalizers["actor"].count == 12  # what was acted on, not the faulty successor


def test_statistics_begin_before_the_first_update():
    """A warm-up of less than a row learned on raw observations and saved another policy."""
    counts, update = [], FastSAC.update

    def counting(learner, batch):
        counts.append(int(learner.normalizers["actor"].count))
        return update(learner, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastSAC, "update", counting)
        patch.setattr(fast_sac, "LOG_EVERY", 1000)
        CASE.train(pendulum(), total_steps=64, warmup_steps=32)
        assert counts == [36] * 32  # what was acted on before the first update, 4 at a time
        patch.setattr(fast_sac, "LOG_EVERY", 32)
        counts.clear()
        CASE.train(pendulum(), total_steps=96, warmup_steps=40)
    assert counts == [32] * 24 + [64] * 32  # those of the last block, where there was one


def test_intervals_shorter_than_a_row_are_kept_and_change_nothing_that_is_learned(tmp_path):
    settings = {"total_steps": 256, "warmup_steps": 40, "final_learning_rate": 2e-4}
    rare = {"console": False, "eval_every": 0, "checkpoint_every": 0}
    whole = CASE.train(pendulum(), Run(tmp_path / "whole", **rare), **settings)
    assert [row["step"] for row in whole.rows] == [64, 128, 192, 256]
    often = {"console": False, "eval_every": 24, "checkpoint_every": 40}
    evaluated = []
    for more, end in (({"stop_after": 48}, 48), ({"resume": True}, 256)):
        run = Run(tmp_path / "often", **often, **more)
        judge = lambda _, run=run: evaluated.append(run.rows[-1]["step"]) or {}  # noqa: E731
        CASE.train(pendulum(), run, judge, **settings)
        assert run.rows[-1]["step"] == end
    assert evaluated == [*range(24, 256, 24), 256]
    assert {*range(40, 256, 40), *evaluated} <= {
        int(path.stem[5:]) for path in (tmp_path / "often/checkpoints").glob("step-*.pt")
    }
    last = [torch.load(tmp_path / name / "checkpoints/last.pt") for name in ("whole", "often")]
    for part in ("learner", "policy", "env"):
        assert differing(last[0][part], last[1][part]) == [], part


def test_a_stop_within_a_row_is_kept(tmp_path):
    run = CASE.train(pendulum(), Run(tmp_path / "r", stop_after=16, console=False), total_steps=640)
    assert run.rows[-1]["step"] == 16
    run = CASE.train(pendulum(), Run(tmp_path / "s", stop_after=80, console=False), total_steps=640)
    assert run.rows[-1]["step"] == 128  # a row or more: at the end of one, as in every learner


def test_learning_and_acting_see_normalised_observations():
    env = Privileged(num_envs=4)
    learner = CASE.make(env)
    replay = filled(learner, env, 40)
    for group, shift in (("actor", 3.0), ("critic", -2.0)):
        size = replay.obs_sizes[group]
        rows = shift + torch.randn(500, size, generator=torch.Generator().manual_seed(0))
        learner.normalizers[group].update(rows)
    batch = replay.sample(32, learner.generator)
    twin = CASE.make(env, normalize_obs=False)
    twin.actor.load_state_dict(learner.actor.state_dict())
    twin.critic.load_state_dict(learner.critic.state_dict())
    twin.target.load_state_dict(learner.target.state_dict())
    normal = lambda obs: {g: learner.normalizers[g](x) for g, x in obs.items()}  # noqa: E731
    scaled = batch._replace(obs=normal(batch.obs), next_obs=normal(batch.next_obs))
    noise = torch.randn(32, 2)
    learner._noise = twin._noise = lambda rows: noise[:rows]
    for _ in range(2):
        learner.update(batch)
        twin.update(scaled)
    a, b = learner.state_dict(), twin.state_dict()
    for part in ("actor", "critic", "target"):
        assert differing(a[part], b[part]) == [], part
    assert torch.equal(learner.act(batch.obs), twin.act(scaled.obs))


# Learning rate ------------------------------------------------------------------------------


def test_the_learning_rate_falls_with_the_env_steps_also_on_resuming(tmp_path):
    settings = {"total_steps": 256, "learning_rate": 1e-3, "final_learning_rate": 2e-4}
    rare = {"console": False, "eval_every": 0, "checkpoint_every": 0}
    whole = CASE.train(pendulum(), Run(tmp_path / "whole", **rare), **settings)
    # 1e-3 - 8e-4 k / 4 for k = 0 .. 3
    found = [row["loss/learning_rate"] for row in whole.rows]
    assert found == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4])
    CASE.train(pendulum(), Run(tmp_path / "parts", stop_after=100, **rare), **settings)
    parts = CASE.train(pendulum(), Run(tmp_path / "parts", resume=True, **rare), **settings)
    assert without_time(parts.rows) == without_time(whole.rows)
    saved = torch.load(tmp_path / "whole/checkpoints/last.pt")["learner"]
    for part in ("actor_step", "critic_step"):
        rate = saved[part]["optimizer"]["param_groups"][0]["lr"]
        assert rate.item() == pytest.approx(4e-4), part


def test_a_run_whose_learning_rate_falls_cannot_be_made_longer(tmp_path):
    for settings, refused in (({"final_learning_rate": 2e-4}, True), ({}, False)):
        folder = tmp_path / f"{refused}"
        CASE.train(pendulum(), Run(folder, console=False), total_steps=128, **settings)
        longer = Run(folder, resume=True, console=False)
        try:
            if refused:
                with pytest.raises(ValueError, match="total_steps must stay 128: step sizes of"):
                    CASE.train(pendulum(), longer, total_steps=256, **settings)
            else:
                CASE.train(pendulum(), longer, total_steps=256, **settings)
        finally:
            longer.close()


def test_the_learning_rate_stays_unless_told():
    learner = CASE.make(pendulum(), learning_rate=7e-4)
    assert learner.set_learning_rate(learner.config.total_steps) == 7e-4
    assert learner.critic_step.learning_rate.item() == pytest.approx(7e-4)


# Bounds -------------------------------------------------------------------------------------


def test_action_bound_stands_in_for_bounds_that_are_missing():
    spec = Unbounded(num_envs=4).spec  # a: -1..1, b: 0..inf
    low, high = action_bounds(spec, "fast_sac", 2.5)
    assert low.tolist() == [-1.0, 0.0] and high.tolist() == [1.0, 2.5]
    for bound in (-1.0, 0.0, math.nan):
        with pytest.raises(ValueError, match="^action_bound must be positive or None"):
            dataclasses.replace(CASE.config, action_bound=bound)
    bounded = TwoBounds(num_envs=4)
    with pytest.raises(ValueError, match="leave action_bound out: .* bounds its actions itself"):
        CASE.make(bounded, action_bound=2.0)


def test_a_target_entropy_that_no_action_has_is_refused_whatever_the_action_bound():
    spec = Unbounded(num_envs=1)
    most = spec.spec.action_size * math.log(2)
    CASE.make(spec, action_bound=2.5, target_entropy=most - 0.01)
    with pytest.raises(ValueError, match="target_entropy must be below"):
        CASE.make(spec, action_bound=2.5, target_entropy=most)


def test_the_policy_is_a_running_average_of_the_actor():
    """By hand over three updates; what explores is the actor itself."""
    env = pendulum()
    learner = CASE.make(env, policy_average=0.25)
    batch = filled(learner, env).sample(32, learner.generator)
    weights = lambda net: torch.cat([p.detach().flatten() for p in net.parameters()])  # noqa: E731
    expected = weights(learner.actor.net)
    for _ in range(3):
        learner.update(batch)
        expected = 0.75 * expected + 0.25 * weights(learner.actor.net)
    section = learner.policy_section()
    found = torch.cat([x.flatten() for x in section["weights"].values()])
    torch.testing.assert_close(found.sort()[0], expected.sort()[0])
    obs = env.observe()
    learner._noise = lambda rows: torch.zeros(rows, 1)
    assert not torch.equal(Policy.from_section(section)(obs), learner.act(obs))
    other = CASE.make(env, policy_average=0.25, seed=7)
    other.load_state_dict(learner.state_dict())
    for name, x in other.policy_section()["weights"].items():
        assert torch.equal(x, section["weights"][name])


def test_the_average_waits_for_the_actor():
    env = pendulum()
    learner = CASE.make(env, policy_average=0.25, policy_delay=2)
    batch = filled(learner, env).sample(32, learner.generator)
    before = copy.deepcopy(learner.average.state_dict())
    learner.update(batch)
    assert all(torch.equal(x, before[k]) for k, x in learner.average.state_dict().items())
    learner.update(batch)
    assert not any(torch.equal(x, before[k]) for k, x in learner.average.state_dict().items())


def test_action_bound_travels_with_the_policy_and_its_graph():
    import onnxruntime

    env = Unbounded(num_envs=8)
    learner = CASE.make(env, action_bound=2.5)
    with torch.no_grad():
        learner.average.layers[-1].bias[:2] = 9.0  # to the upper end
    section = learner.policy_section()
    policy = Policy.from_section(section)
    obs = torch.zeros(8, 1)
    torch.testing.assert_close(policy(obs), torch.tensor([[1.0, 2.5]]).expand(8, -1))
    assert policy.sample(obs).amax(0).tolist() == pytest.approx([1.0, 2.5])
    model = build_graph(policy.module, 1)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (found,) = session.run(["actions"], {"obs": obs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), policy(obs))
    with pytest.raises(ValueError, match="lacks limits, and .* has no bounds"):
        Policy.from_section({k: v for k, v in section.items() if k != "limits"})


# State, failure, configuration ----------------------------------------------------------------


def test_resumes_between_two_updates_of_the_actor():
    """The count of updates is part of the state: else the actor would step out of turn."""
    env = pendulum()
    learner = CASE.make(env, policy_delay=3)
    batch = filled(learner, env).sample(32, learner.generator)
    learner.update(batch)
    other = CASE.make(env, policy_delay=3, seed=4)
    other.load_state_dict(learner.state_dict())
    for _ in range(3):
        learner.update(batch)
        other.update(batch)
        assert differing(learner.state_dict(), other.state_dict()) == []


def test_the_actor_steps_on_every_third_update():
    env = pendulum()
    learner = CASE.make(env, policy_delay=3)
    batch = filled(learner, env).sample(32, learner.generator)
    moved = []
    for _ in range(6):
        before = learner.state_dict()
        learner.update(batch)
        after = learner.state_dict()
        moved.append([bool(differing(before[p], after[p])) for p in ("critic", "actor", "target")])
    assert moved == [[True, False, True], [True, False, True], [True, True, True]] * 2


def test_warm_start_takes_weights_and_statistics_alone():
    env = pendulum()
    learner, other = CASE.make(env), CASE.make(env, seed=5)
    learner.normalizers["actor"].update(torch.randn(50, 3))
    learner.update(filled(learner, env).sample(32, learner.generator))
    other.warm_start(learner.state_dict())
    a, b = learner.state_dict(), other.state_dict()
    for part in ("actor", "critic", "target", "normalizers"):
        assert differing(a[part], b[part]) == []
    assert b["critic_step"]["optimizer"]["state"][0]["step"] == 0
    for changes in ({"hidden": (8,)}, {"critic_hidden": (8,)}, {"normalize_obs": False}):
        with pytest.raises(ValueError, match="cannot start from a run with other networks"):
            CASE.make(env, **changes).warm_start(learner.state_dict())
    foreign = sac.SAC(sac.SACConfig(hidden=(16, 16), compile="off"), env.spec, env.device)
    with pytest.raises(ValueError, match="cannot start from a run"):
        learner.warm_start(foreign.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"total_steps": 0},
        {"batch_size": 0},
        {"return_steps": 0},
        {"policy_delay": 0},
        {"warmup_steps": -1},
        {"updates_per_step": 0.0},
        {"learning_rate": math.nan},
        {"final_learning_rate": 0.0},
        {"gamma": 1.1},
        {"polyak": 0.0},
        {"num_atoms": 1},
        {"value_bound": 0.0},
        {"initial_temperature": 0.0},
        {"initial_std": math.inf},
        {"target_entropy": math.nan},
        {"hidden": ()},
        {"critic_hidden": (0,)},
        {"activation": "gelu"},
        {"compile": "yes"},
    ],
)
def test_configurations_refuse_nonsense(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"^{name} must be .*, not "):
        dataclasses.replace(CASE.config, **change)


@pytest.mark.parametrize("task", ["Go1-Velocity-Flat-v0", "HalfCheetah-v5", "Pendulum-v0"])
def test_tasks_have_presets(task):
    config = ctrl_rl.preset(task, "fast_sac")
    assert isinstance(config, FastSACConfig)
    assert registry.load("tasks", task).presets["fast_sac"]["num_envs"] >= 16
    FastSAC(config, ctrl_rl.make(task, 2).spec, "cpu")  # its bounds fit the task


# Learning -------------------------------------------------------------------------------------


def test_learns_how_the_action_depends_on_the_observation():
    run = CASE.train(
        FollowSignal(num_envs=16),
        None,
        lambda policy: {"eval/slope": slope(policy)},
        total_steps=8000,
        updates_per_step=0.2,
        learning_rate=3e-3,
        batch_size=64,
        value_bound=2.0,
        num_atoms=41,
    )
    assert run.rows[-1]["eval/slope"] == pytest.approx(0.5, abs=0.1)


def test_an_exported_go1_stays_within_its_action_bound(tmp_path, monkeypatch):
    """The task has no bounds; the run does, and its file gives what the policy gives."""
    from sim2real.export import export_run

    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 4)
    folder = tmp_path / "r"
    CASE.train(env, Run(folder, console=False), total_steps=128, action_bound=1.5)
    path, _ = export_run(folder)
    x = torch.randn(64, env.spec.obs_size(), generator=torch.Generator().manual_seed(0)) * 30
    ours, file = load_policy(folder), load_policy(path)
    torch.testing.assert_close(file(x), ours(x), atol=1e-5, rtol=0)
    assert 0 < ours(x).abs().max() <= 1.5
