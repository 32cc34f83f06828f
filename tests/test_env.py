"""`TaskEnv`: what `step` shares among tasks, with numbers worked out by hand."""

import dataclasses

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import AgeReward, ConstantReward, LastStepReward, PointMass, Probe, ProbeConfig
from toys import Toy, ToyConfig

import ctrl_rl
from ctrl_rl.env import Fault
from ctrl_rl.spec import PRIVILEGED, ActionDim, EnvSpec, ObsTerm
from robots.env import TaskEnv
from robots.observation import nominal_terms
from robots.sim.mujoco_backend import MujocoSim

ZERO = torch.zeros(2, 1)


def age_term(**values):
    return ObsTerm(**{"name": "age", "kind": "signal", "size": 1, "unit": "steps", **values})


class Age(ConstantReward):
    """Observes the age of the episode through whatever terms the test gives."""

    def __init__(self, *terms, critic=(), limit=100, num_envs=2, **values):
        self.groups = {"actor": terms} | ({"critic": critic} if critic else {})
        config = ProbeConfig(max_episode_steps=limit)
        super().__init__(config, num_envs=num_envs, **values)

    def make_spec(self):
        return dataclasses.replace(super().make_spec(), obs=self.groups)

    def observe_terms(self, rows):
        age = super().observe_terms(rows)["age"]
        pair = torch.cat([age, -age], 1)
        return {"age": age, "again": 10.0 + age, "pair": pair, "hidden": age}

    def play(self, age):
        for _ in range(age):
            step = self.step(torch.zeros(self.num_envs, 1))
        return step


# Observation ----------------------------------------------------------------------------------


def test_history_is_read_any_number_of_times():
    env = Age(age_term(history=3))
    step = env.play(3)
    for obs in (step.obs, env.observe(), env.observe(), env.observe()):
        assert obs["actor"].tolist() == [[1, 2, 3], [1, 2, 3]]
    assert env.step(ZERO).obs["actor"].tolist() == [[2, 3, 4], [2, 3, 4]]


@pytest.mark.parametrize(
    ("fill", "rows"),
    [
        ("repeat", [[10, 10, 10], [10, 10, 11], [10, 11, 12], [11, 12, 13]]),
        ("zero", [[0, 0, 10], [0, 10, 11], [10, 11, 12], [11, 12, 13]]),
    ],
)
def test_history_before_the_episode_began(fill, rows):
    env = Age(age_term(name="again", history=3, history_fill=fill))
    found = [env.observe()["actor"][0].tolist()]
    found += [env.step(ZERO).obs["actor"][0].tolist() for _ in range(3)]
    assert found == rows
    assert env.reset()["actor"][1].tolist() == rows[0]


def test_a_reset_of_one_row_touches_no_other_history():
    env = Age(age_term(name="again", history=3))
    env.play(5)
    env.step_count[0] = 99  # row 0 reaches its limit in the next step
    step = env.step(ZERO)
    assert step.truncated.tolist() == [True, False]
    assert step.next_obs["actor"].tolist() == [[14, 15, 110], [14, 15, 16]]
    assert step.obs["actor"].tolist() == [[10, 10, 10], [14, 15, 16]]
    assert env.step(ZERO).obs["actor"].tolist() == [[10, 10, 11], [15, 16, 17]]


@pytest.mark.parametrize(
    ("fill", "rows"),
    [
        ("repeat", [[10, 10], [10, 10], [10, 10], [10, 11], [11, 12]]),
        ("zero", [[0, 0], [0, 0], [0, 10], [10, 11], [11, 12]]),
    ],
)
def test_a_delay_of_two_steps_is_two_steps(fill, rows):
    env = Age(age_term(name="again", history=2, delay=(2, 2), history_fill=fill))
    found = [env.observe()["actor"][0].tolist()]
    found += [env.step(ZERO).obs["actor"][0].tolist() for _ in range(4)]
    assert found == rows


def test_delays_are_drawn_per_term_and_episode_and_stay_for_the_episode():
    env = Age(age_term(delay=(1, 3)), age_term(name="again", delay=(0, 3)), num_envs=3000)
    lags = []
    for _ in range(2):
        first = 5 - (env.play(5).obs["actor"] - torch.tensor([0.0, 10.0]))
        second = 7 - (env.play(2).obs["actor"] - torch.tensor([0.0, 10.0]))
        assert torch.equal(first, second)
        lags.append(first)
        env.reset()
    for column, values in enumerate(((1, 2, 3), (0, 1, 2, 3))):
        counts = torch.stack([(lags[0][:, column] == v).sum() for v in values])
        expected = 3000 / len(values)
        assert counts.sum() == 3000
        assert (counts - expected).abs().max() < 5 * expected**0.5
    assert not torch.equal(lags[0], lags[1])
    assert abs(torch.corrcoef(lags[0].T)[0, 1]) < 0.1


def test_a_raw_value_is_clipped_then_scaled_element_by_element():
    env = Age(age_term(name="pair", size=2, clip=(-2.0, 3.0), scale=(0.5, 10.0)))
    assert env.play(5).obs["actor"][0].tolist() == [1.5, -20.0]


def test_noise_is_uniform_clipped_and_for_the_actor_only():
    noisy = age_term(name="again", noise=0.5, clip=(9.75, 99.0))
    env = Age(age_term(), noisy, critic=(age_term(name="again"),), num_envs=4000)
    obs = env.observe()
    assert (obs["critic"] == 10.0).all() and (obs["actor"][:, 0] == 0.0).all()
    noise = obs["actor"][:, 1] - 10.0
    assert noise.min() == -0.25 and 0.49 < noise.max() < 0.5
    assert (noise == -0.25).float().mean() == pytest.approx(0.25, abs=0.03)
    later = env.step(torch.zeros(4000, 1)).obs["actor"][:, 1] - 11.0
    assert abs(torch.corrcoef(torch.stack([noise, later]))[0, 1]) < 0.1
    assert nominal_terms((noisy,))[0] == dataclasses.replace(noisy, noise=0.0)


def test_the_order_of_keys_does_not_matter():
    class Reversed(Toy):
        def observe_terms(self, rows):
            return dict(reversed(super().observe_terms(rows).items()))

    a, b = Toy(num_envs=4), Reversed(num_envs=4)
    for _ in range(20):
        action = torch.randn(4, 1)
        x, y = a.step(action), b.step(action)
        assert all(torch.equal(x.next_obs[g], y.next_obs[g]) for g in ("critic", "actor"))


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"vel": None}, r"observe_terms gives nothing for 'vel', the spec says \(rows, 1\)"),
        ({"vel": torch.zeros(2)}, r"gives \(2,\) for 'vel', the spec says \(rows, 1\)"),
        ({"vel": torch.zeros(2, 3)}, r"gives \(2, 3\) for 'vel', the spec says \(rows, 1\)"),
    ],
)
def test_a_term_of_a_wrong_size_is_named(terms, message):
    class Wrong(Toy):
        def observe_terms(self, rows):
            found = super().observe_terms(rows) | terms
            return {name: value for name, value in found.items() if value is not None}

    with pytest.raises(ValueError, match=message):
        Wrong(num_envs=2)


# Episodes -------------------------------------------------------------------------------------


def test_the_last_observation_is_kept_and_the_next_episode_starts_at_zero():
    hidden = age_term(name="hidden", kind=PRIVILEGED, scale=(100.0,))
    env = Age(age_term(), critic=(age_term(history=2), hidden), limit=3)
    rows = []
    for _ in range(4):
        step = env.step(ZERO)
        both = torch.cat([step.next_obs["actor"], step.obs["actor"]], 1)
        rows.append(both[1].tolist())
        assert step.truncated.tolist() == [len(rows) == 3] * 2
        assert not step.terminated.any()
        assert (step.next_obs is step.obs) == (len(rows) != 3)
        if len(rows) == 3:
            assert step.next_obs["critic"][0].tolist() == [2, 3, 300]
            assert step.obs["critic"][0].tolist() == [0, 0, 0]
    assert rows == [[1, 1], [2, 2], [3, 0], [1, 1]]


def test_a_failure_on_the_last_allowed_step_is_terminated_and_not_truncated():
    env = LastStepReward(num_envs=2)  # terminates on step 8, which is its limit
    for _ in range(7):
        step = env.step(ZERO)
    assert not (step.terminated | step.truncated).any()
    step = env.step(ZERO)
    assert step.terminated.tolist() == [True, True]
    assert step.truncated.tolist() == [False, False]


def test_rewards_of_two_episodes_in_a_row():
    env = AgeReward(num_envs=2)
    steps = [env.step(ZERO) for _ in range(10)]
    assert [s.reward[1].item() for s in steps] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert [s.truncated[0].item() for s in steps] == [False] * 7 + [True] + [False] * 2
    assert env.episode.tolist() == [1, 1] and env.step_count.tolist() == [2, 2]


def test_the_reward_is_summed_in_order_whatever_n():
    class Order(Probe):
        def reward_terms(self, action):
            one = torch.ones(self.num_envs, dtype=self.sim.dtype)
            return {"a": 1e16 * one, "b": one, "c": one, "d": one, "e": -1e16 * one}

    for n in (1, 4, 37):  # 1e16 + 1 is 1e16; a sum in another order is up to 3
        assert Order(num_envs=n).step(torch.zeros(n, 1)).reward.tolist() == [0.0] * n


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaggeredConfig(ProbeConfig):
    staggered_start: bool = True


class Staggered(ConstantReward):
    Config = StaggeredConfig

    def begin(self, rows):
        self.sim.qpos[rows, 0] = self.step_count[rows].double()  # a task sees its age


def test_first_episodes_are_staggered_and_later_ones_whole():
    env = Staggered(num_envs=4000)
    age = env.step_count.clone()
    counts = torch.bincount(age, minlength=8)
    assert len(counts) == 8 and (counts - 500).abs().max() < 5 * 500**0.5
    assert torch.equal(env.sim.qpos[:, 0], age.double())
    assert torch.equal(env.observe()["actor"][:, 0], age.float())
    zero = torch.zeros(4000, 1)
    ended = torch.stack([env.step(zero).truncated for _ in range(16)])
    first = ended.int().argmax(0) + 1
    assert torch.equal(first, 8 - age)
    assert torch.equal(ended.sum(0), (16 + age) // 8)
    assert not torch.equal(env.reset()["actor"][:, 0], age.float())
    assert env.step_count.float().std() > 2.0


def test_rows_start_differently_and_numbering_continues_on_another_rank():
    eight, again, four = Toy(num_envs=8), Toy(num_envs=8), Toy(num_envs=4)
    upper = Toy(num_envs=4, first_index=4)
    for _ in range(30):
        obs = eight.observe()["critic"]
        assert len(obs.unique(dim=0)) == 8
        assert torch.equal(obs, again.observe()["critic"])
        assert torch.equal(obs, torch.cat([e.observe()["critic"] for e in (four, upper)]))
        action = torch.randn(8, 1)
        eight.step(action), again.step(action), four.step(action[:4]), upper.step(action[4:])


# Faults ---------------------------------------------------------------------------------------


def healthy_and_faulty(change, steps=4, **values):
    """The last steps of two equal toys; `change(env)` is called before the last of the second."""
    one, two = Toy(num_envs=4, **values), Toy(num_envs=4, **values)
    for t in range(steps):
        action = 0.1 * torch.randn(4, 1, generator=torch.Generator().manual_seed(t))
        before = two.observe()
        other = action.clone()
        if t == steps - 1:
            other = change(two, other)
        a, b = one.step(action), two.step(other)
    return a, b, before, two


def nan_action(env, action):
    action[2] = torch.nan
    return action


def infinite_state(env, action):
    env.sim.qvel[2] = torch.inf
    return action


def nan_reward(env, action):
    env.reward_terms = lambda a: {
        "good": torch.ones(4),
        "bad": torch.tensor([1.0, 1.0, torch.nan, 1.0]),
    }
    return action


def nan_obs(env, action):
    inner = env.observe_terms

    def terms(rows):
        found = inner(rows)
        if isinstance(rows, slice):  # not after the reset
            found["vel"][2] = torch.nan
        return found

    env.observe_terms = terms
    return action


def nan_metric(env, action):
    env.metrics = lambda: {
        "good": torch.ones(4),
        "bad": torch.tensor([1.0, 1.0, torch.nan, 1.0]),
    }
    return action


def infinite_sum(env, action):
    env.reward_terms = lambda a: {"big": torch.tensor([0.0, 0.0, 1e39, 0.0], dtype=torch.float64)}
    return action


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (nan_action, "action: not finite in force"),
        (infinite_state, "simulator: state is not finite"),
        (nan_reward, "reward: not finite in bad"),
        (infinite_sum, "reward: not finite in the sum of terms"),
        (nan_metric, "metrics: not finite in bad"),
        (nan_obs, "observation: not finite in critic/vel"),
    ],
)
def test_a_faulty_row_is_cut_with_its_last_healthy_observation(change, cause):
    good, bad, before, env = healthy_and_faulty(change)
    assert bad.info.faults == (Fault(2, cause),)
    assert bad.truncated.tolist() == [False, False, True, False]
    assert not bad.terminated.any()
    assert bad.reward[2] == 0.0
    assert all(v[2] == 0.0 for v in (bad.info.reward_terms | bad.info.metrics).values())
    others = torch.tensor([0, 1, 3])
    for group in ("actor", "critic"):
        assert torch.equal(bad.next_obs[group][2], before[group][2])
        assert torch.isfinite(bad.obs[group]).all()
        assert not torch.equal(bad.obs[group][2], before[group][2])
        assert torch.equal(bad.obs[group][others], good.obs[group][others])
    assert env.episode.tolist() == [0, 0, 1, 0] and env.step_count.tolist() == [4, 4, 0, 4]
    if change in (nan_action, infinite_state):
        assert torch.equal(bad.reward[others], good.reward[others])
        again = env.step(torch.zeros(4, 1))
        assert not again.info.faults and torch.isfinite(again.obs["actor"]).all()


def test_a_fault_on_the_last_allowed_step_or_in_a_failing_row_is_truncated():
    _, bad, _, _ = healthy_and_faulty(nan_action, config=ToyConfig(max_episode_steps=4))
    assert bad.truncated.tolist() == [True] * 4 and bad.reward[2] == 0.0

    def far_and_nan(env, action):
        env.sim.qpos[2] = 5.0
        return nan_action(env, action)

    good, bad, _, _ = healthy_and_faulty(far_and_nan)
    assert bad.truncated[2] and not bad.terminated[2]


def test_writing_to_returned_tensors_changes_nothing():
    def scribble_then_nan(env, action):
        step = env.step(0 * action)
        kept = env.observe()
        for value in (*step.obs.values(), *env.observe().values()):
            value.fill_(torch.nan)
        env.kept = kept
        return nan_action(env, action)

    _, bad, _, env = healthy_and_faulty(scribble_then_nan)
    assert torch.equal(bad.next_obs["critic"][2], env.kept["critic"][2])


def test_figures_of_ended_rows_are_those_of_the_old_episode():
    class Live(Toy):
        def metrics(self):
            return {"pos": self.sim.qpos[:, 0]}  # a view

        def reward_terms(self, action):
            return {"pos": self.sim.qpos[:, 0]}

    env = Live(num_envs=2)
    env.sim.qpos[0] = 5.0
    step = env.step(ZERO)
    assert step.terminated[0] and step.info.metrics["pos"][0] == pytest.approx(5.0, abs=0.1)
    assert step.info.reward_terms["pos"][0] == step.info.metrics["pos"][0]


@pytest.mark.parametrize(
    "action",
    [
        torch.zeros(2),
        torch.zeros(3, 1),
        torch.zeros(2, 2),
        torch.zeros(2, 1, dtype=torch.float64),
        torch.zeros(2, 1, dtype=torch.int64),
    ],
    ids=lambda a: f"{tuple(a.shape)} {a.dtype}",
)
def test_a_wrong_action_is_refused_in_one_line(action):
    env = Toy(num_envs=2)
    with pytest.raises(ValueError, match=r"Toy-v0: action must be float32 \(2, 1\), not torch"):
        env.step(action)
    assert env.step_count.tolist() == [0, 0]


@pytest.mark.parametrize(
    "action", [None, np.zeros((2, 1), dtype=np.float32)], ids=["None", "numpy"]
)
def test_an_action_that_is_no_tensor_is_refused(action):
    with pytest.raises(
        ValueError, match="Toy-v0: action must be a tensor, not a (NoneType|ndarray)"
    ):
        Toy(num_envs=2).step(action)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="num_envs must be at least 1, not 0"):
        Toy(num_envs=0)
    with pytest.raises(
        ValueError, match="Toy-v0 does not run on backend 'warp'; choose from torch"
    ):
        Toy(num_envs=1, backend="warp")


# State ----------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(before=st.integers(0, 30), after=st.integers(1, 15), seed=st.integers(0, 99))
def test_a_saved_state_continues_to_the_bit_anywhere(before, after, seed):
    one, two = Toy(num_envs=3, seed=seed, first_index=5), Toy(num_envs=3, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed)
    actions = 2 * torch.randn(before + after, 3, 1, generator=generator)
    for action in actions[:before]:
        one.step(action)
    two.load_state_dict(one.state_dict())
    for action in actions[before:]:
        a, b = one.step(action), two.step(action)
        assert torch.equal(a.reward, b.reward) and torch.equal(a.truncated, b.truncated)
        assert all(torch.equal(a.obs[g], b.obs[g]) for g in a.obs)


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes():
    env = Toy(num_envs=3, seed=7)
    before = env.state_dict()
    short = Toy(num_envs=2).state_dict()
    other = ConstantReward(num_envs=3).state_dict()
    less = Toy(num_envs=3).state_dict()
    del less["memory"]["wind"]
    for state, message in (
        (short, "the saved state has 2 environments, this has 3"),
        (other, "the saved state is of Probe-Constant-v0, this is Toy-v0"),
        (less, "the saved state is of Toy-v0 with another configuration"),
    ):
        with pytest.raises(ValueError, match=message):
            env.load_state_dict(state)
    after = env.state_dict()
    assert after["seed"] == 7
    assert all(torch.equal(after["memory"][k], v) for k, v in before["memory"].items())


def test_copied_worlds_look_alike_and_then_draw_for_themselves():
    env = Toy(num_envs=4, seed=3)
    for _ in range(5):
        env.step(torch.zeros(4, 1))
    env.set_rows(torch.tensor([1, 3]), env.get_rows(torch.tensor([0, 0])))
    obs = env.observe()
    assert torch.equal(obs["actor"][[1, 3]], obs["actor"][[0, 0]])
    assert not torch.equal(obs["actor"][2], obs["actor"][0])
    step = env.step(torch.zeros(4, 1))
    assert step.obs["critic"][0].tolist() == step.obs["critic"][3].tolist()  # no noise there
    assert step.obs["actor"][0].tolist() != step.obs["actor"][3].tolist()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_learner_may_step_in_any_autograd_mode(mode):
    env = PointMass(num_envs=2)
    weight = torch.ones(1, requires_grad=True)
    with mode():
        step = env.step(weight * torch.ones(2, 1))
    (step.obs["actor"] * weight).sum().backward()  # usable in a graph, but not part of one
    assert weight.grad is not None and not step.obs["actor"].requires_grad
    assert not env.sim.qpos.requires_grad
    env.set_rows(torch.tensor([1]), env.get_rows(torch.tensor([0])))
    env.load_state_dict(env.state_dict())
    env.reset()
    env.step(ZERO)


# Randomisation --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeavyConfig(ProbeConfig):
    mass: tuple[float, float] | None = None
    """Factor on the mass, drawn at each reset; None: no randomiser."""
    friction: tuple[float, float] | None = None
    """Factor on the joint's friction, drawn once per world; None: no randomiser."""


class Heavy(TaskEnv):
    """A mass of 1 kg on a slide."""

    id = "Heavy-v0"
    Config = HeavyConfig
    backends = ("mujoco",)
    model = mujoco.MjModel.from_xml_string(
        """
        <mujoco><option timestep="0.01"/><worldbody><body>
          <joint name="slide" type="slide" axis="1 0 0" damping="0.1" frictionloss="0.05"/>
          <geom size="0.1" mass="1"/>
        </body></worldbody><actuator><motor joint="slide"/></actuator></mujoco>
        """
    )

    def make_sim(self, backend, device, threads):
        return MujocoSim(self.model, self.num_envs, threads)

    def make_spec(self):
        terms = (ObsTerm(name="pos", kind="signal", size=1, unit="m"),)
        return EnvSpec(
            task=self.id,
            num_envs=self.num_envs,
            obs={"actor": terms},
            action=(ActionDim(name="force", unit="N"),),
            physics_dt=0.01,
            step_dt=0.02,
            max_episode_steps=self.config.max_episode_steps,
        )

    def prepare(self):
        if self.config.mass:
            self.sim.expand("body_mass")
        if self.config.friction:
            factor = self.world_uniform("friction", 1, *self.config.friction)
            friction = self.sim.model_field("dof_frictionloss")
            self.sim.expand("dof_frictionloss")[:] = friction * factor
            self.sim.commit()

    def begin(self, rows):
        if self.config.mass:
            factor = self.uniform("mass", rows, 1, *self.config.mass)
            self.sim.expand("body_mass")[rows] = self.sim.model_field("body_mass") * factor
            self.sim.commit()

    def observe_terms(self, rows):
        return {"pos": self.sim.qpos[rows]}

    def apply_action(self, action):
        self.sim.ctrl[:] = action

    def reward_terms(self, action):
        return {"pos": self.sim.qpos[:, 0]}


def positions(**config):
    env = Heavy(HeavyConfig(**config), num_envs=4)
    return torch.stack([env.step(torch.ones(4, 1)).next_obs["actor"][:, 0] for _ in range(20)], 1)


def test_randomisation_does_not_compound_over_resets():
    env = Heavy(HeavyConfig(mass=(1.1, 1.1)), num_envs=2)
    for _ in range(3):
        env.reset()
    assert env.sim.expand("body_mass")[:, 1].tolist() == pytest.approx([1.1, 1.1], rel=1e-12)


def test_randomising_by_nothing_changes_no_bit():
    plain = positions()
    assert torch.equal(positions(mass=(1.0, 1.0)), plain)
    assert torch.equal(positions(friction=(1.0, 1.0)), plain)
    assert plain[0, 7] > 0.003  # it moves: half of 1 N / 1 kg * (0.16 s)^2 is 0.0128


@pytest.mark.parametrize("config", [{"mass": (0.5, 2.0)}, {"friction": (0.1, 5.0)}])
def test_each_randomiser_alone_tells_worlds_apart(config):
    found = positions(**config)
    assert len(found[:, 7].unique()) == 4
    fixed = torch.equal(found[:, :8], found[:, 8:16])  # two episodes of 8 steps
    assert fixed == ("friction" in config)  # drawn per world, or anew for each episode


def test_draws_have_the_bounds_dtype_and_lifetime_that_they_say():
    env = Toy(num_envs=2000)
    low = torch.tensor([1.0, -2.0], dtype=torch.float64)
    draw = env.uniform("x", slice(None), 2, low, low + 0.5)
    assert draw.dtype == env.sim.dtype and draw.shape == (2000, 2)
    assert ((draw >= low) & (draw < low + 0.5)).all()
    assert draw.mean(0).tolist() == pytest.approx([1.25, -1.75], abs=0.02)
    rows = torch.tensor([7, 3])
    assert torch.equal(env.uniform("x", rows, 2, low[0], low[0] + 0.5)[:, 0], draw[rows, 0])
    assert env.normal("x", slice(None), 1).std() == pytest.approx(1.0, abs=0.06)
    fixed = env.world_uniform("y", 1)
    env.reset()
    assert torch.equal(env.world_uniform("y", 1), fixed) and len(fixed.unique()) == 2000
    assert not torch.equal(env.uniform("x", slice(None), 2), draw)


def test_make_passes_on_what_it_is_given():
    env = ctrl_rl.make("Pendulum-v0", 3, seed=5, first_index=2, config=None, threads=1)
    same = ctrl_rl.make("Pendulum-v0", 5, seed=5)
    assert torch.equal(env.observe()["actor"], same.observe()["actor"][2:])
    with pytest.raises(ValueError, match="did you mean 'Pendulum-v0'"):
        ctrl_rl.make("pendulum-v1")
