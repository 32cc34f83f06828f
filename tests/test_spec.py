"""The environment's spec: JSON and back, and what it refuses."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ctrl_rl
from ctrl_rl.spec import (
    FRAMES,
    HISTORY_FILLS,
    KINDS,
    PRIVILEGED,
    ActionDim,
    CommandDim,
    Discrete,
    EnvSpec,
    Joint,
    ObsTerm,
    Robot,
)
from robots.registry import TASKS

TERM = {"name": "pos", "kind": "signal", "size": 2}
JOINT = {
    "name": "hip",
    "default_pos": 0.1,
    "kp": 20.0,
    "kd": 0.5,
    "effort_limit": 23.7,
    "velocity_limit": 30.1,
    "pos_low": -0.8,
    "pos_high": 0.8,
}
SPEC = {
    "task": "Toy-v0",
    "num_envs": 3,
    "obs": {"actor": (ObsTerm(**TERM),)},
    "action": (ActionDim(name="a"),),
    "physics_dt": 0.005,
    "step_dt": 0.02,
    "max_episode_steps": 100,
}


@pytest.mark.parametrize("task", TASKS)
def test_every_registered_tasks_spec_survives_json(task):
    env = ctrl_rl.make(task, 2)
    text = env.spec.to_json()
    assert EnvSpec.from_json(text) == env.spec
    assert EnvSpec.from_json(text).to_json() == text
    json.loads(text, parse_constant=pytest.fail)  # strict JSON: neither NaN nor Infinity
    assert env.spec.task == task
    env.close()


numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)
words = st.text(min_size=1, max_size=8)


@st.composite
def terms(draw, name, kinds):
    size = draw(st.integers(1, 4))
    low, high = sorted((draw(st.floats(allow_nan=False)), draw(st.floats(allow_nan=False))))
    labels = draw(st.lists(words | st.just("inf"), min_size=size, max_size=size, unique=True))
    return ObsTerm(
        name=name,
        kind=draw(st.sampled_from([k for k in kinds if k != "phase"])),
        size=size,
        unit=draw(words),
        frame=draw(st.sampled_from(FRAMES)),
        labels=tuple(labels) if draw(st.booleans()) else (),
        scale=tuple(draw(st.lists(numbers, min_size=size, max_size=size))),
        clip=draw(st.none() | st.just((low, high))),
        noise=abs(draw(numbers)),
        delay=tuple(sorted(draw(st.tuples(st.integers(0, 5), st.integers(0, 5))))),
        history=draw(st.integers(1, 5)),
        history_fill=draw(st.sampled_from(HISTORY_FILLS)),
        constant=draw(st.booleans()),
    )


@st.composite
def specs(draw):
    names = draw(st.lists(words, min_size=1, max_size=3, unique=True))
    kinds = tuple(KINDS)
    bounds = st.sampled_from([(-math.inf, math.inf), (-1.0, 1.0), (0.0, math.inf)])
    dims = tuple(
        ActionDim(name=n, low=b[0], high=b[1], offset=draw(numbers))
        for n, b in ((n, draw(bounds)) for n in names)
    )
    robot = Robot(name="r", joints=(Joint(**JOINT),), imu_body="trunk")
    return EnvSpec(
        **{
            **SPEC,
            "obs": {
                "actor": tuple(draw(terms(n, kinds)) for n in names),
                "critic": tuple(draw(terms(n, (*kinds, PRIVILEGED))) for n in names),
            },
            "action": draw(st.just(dims) | st.builds(Discrete, n=st.integers(1, 9))),
        },
        command=draw(st.just(()) | st.just((CommandDim(name="v", unit="m/s", low=-1, high=1),))),
        robot=draw(st.none() | st.just(robot)),
        history=tuple(draw(st.lists(words, max_size=2))),
    )


@given(specs())
def test_any_spec_survives_json(spec):
    assert EnvSpec.from_json(spec.to_json()) == spec
    json.loads(spec.to_json(), parse_constant=pytest.fail)


def test_infinite_bounds_come_back_as_numbers_and_labels_as_text():
    term = ObsTerm(**TERM, clip=(-math.inf, 2.0), labels=("inf", "-inf"), history=2, unit="inf")
    spec = EnvSpec(**{**SPEC, "obs": {"actor": (term,)}})
    (back,) = EnvSpec.from_json(spec.to_json()).obs["actor"]
    assert back.clip == (-math.inf, 2.0)
    assert back.labels == ("inf", "-inf") and back.unit == "inf"
    (action,) = EnvSpec.from_json(spec.to_json()).action
    assert (action.low, action.high) == (-math.inf, math.inf)


def test_sizes_and_groups():
    wide = ObsTerm(name="wide", kind="signal", size=3, history=4)
    spec = EnvSpec(**{**SPEC, "obs": {"actor": (wide, ObsTerm(**TERM))}})
    assert wide.width == 12 and spec.obs_size() == 14
    assert spec.critic_group == "actor" and spec.action_size == 1 and spec.decimation == 4
    critic = EnvSpec(**{**SPEC, "obs": {"actor": (wide,), "critic": (ObsTerm(**TERM),)}})
    assert critic.critic_group == "critic" and critic.obs_size("critic") == 2
    assert EnvSpec(**{**SPEC, "action": Discrete(n=5)}).action_size == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "velocity"}, "unknown kind 'velocity'; known: base_ang_vel_b, "),
        ({"size": 0}, "size must be at least 1"),
        ({"frame": "body"}, "frame must be one of b, w, joint, -"),
        ({"scale": (1.0, 1.0, 1.0)}, "scale needs 1 or 2 values"),
        ({"scale": (math.nan,)}, "scale must be finite"),
        ({"labels": ("x",)}, "labels need 2 names"),
        ({"labels": ("x", "x")}, "a label stands twice"),
        ({"clip": (1.0, -1.0)}, "clip must be"),
        ({"clip": (math.nan, 1.0)}, "clip must be"),
        ({"noise": -0.1}, "noise must be"),
        ({"noise": math.nan}, "noise must be"),
        ({"delay": (2, 1)}, "delay must be 0 <= least <= most"),
        ({"delay": (-1, 1)}, "delay must be 0 <= least <= most"),
        ({"history": 0}, "history must be at least 1"),
        ({"history_fill": "mirror"}, "history_fill must be one of repeat, zero"),
        ({"kind": "phase", "rate_hz": 0.0}, "rate_hz of a phase must be positive"),
        ({"kind": "phase", "rate_hz": 2.0, "size": 3}, "a phase has size 2"),
    ],
    ids=str,
)
def test_a_bad_term_is_refused_by_name(change, message):
    with pytest.raises(ValueError) as error:
        ObsTerm(**{**TERM, **change})
    assert str(error.value).startswith("observation term 'pos': ")
    assert message in str(error.value) and "\n" not in str(error.value)


def goals(**changes):
    """Groups of a task with goals, with one of them changed or left out (None)."""
    groups = {group: {} for group in ("actor", "critic", "goal", "achieved")} | changes
    return {g: (ObsTerm(**{**TERM, **c}),) for g, c in groups.items() if c is not None}


def test_a_task_with_goals():
    spec = EnvSpec(**{**SPEC, "obs": goals(actor={"scale": (2.0,), "clip": (0.0, 1.0)})})
    assert EnvSpec.from_json(spec.to_json()) == spec
    EnvSpec(**{**SPEC, "obs": goals(achieved={"kind": PRIVILEGED})})  # a simulator may know it
    EnvSpec(**{**SPEC, "obs": goals(critic=None)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": {"policy": (ObsTerm(**TERM),)}}, "observation group 'actor' is missing"),
        ({"obs": {"actor": ()}}, "group 'actor' has no terms"),
        ({"obs": {"actor": (ObsTerm(**TERM),) * 2}}, "a name stands twice in group 'actor'"),
        (
            {"obs": {"actor": (ObsTerm(**{**TERM, "kind": PRIVILEGED}),)}},
            "a privileged term stands in group 'actor'",
        ),
        ({"obs": goals(goal=None)}, "'goal' and 'achieved' come together"),
        ({"obs": goals(achieved=None)}, "'goal' and 'achieved' come together"),
        ({"obs": goals(achieved={"size": 3})}, "'goal' has 2 columns, 'achieved' 3"),
        ({"obs": goals(goal={"scale": (2.0,)})}, "'pos' in group 'goal' must be without noise"),
        ({"obs": goals(achieved={"clip": (0.0, 1.0)})}, "'pos' in group 'achieved' must be"),
        ({"obs": goals(actor={"noise": 0.1})}, "'pos' in group 'actor' must be without noise"),
        ({"obs": goals(actor={"delay": (0, 1)})}, "'pos' in group 'actor' must be without noise"),
        ({"obs": goals(critic={"history": 2})}, "'pos' in group 'critic' must be without noise"),
        ({"obs": goals(critic={"size": 3})}, "'pos' in group 'critic' must be without noise"),
        ({"obs": goals(actor={"name": "x"})}, "goal's term 'pos' in group 'actor' is missing"),
        ({"obs": goals(critic={"name": "x"})}, "goal's term 'pos' in group 'critic' is missing"),
        ({"action": ()}, "the action has no elements"),
        ({"action": (ActionDim(name="a"),) * 2}, "an action's name stands twice"),
        ({"num_envs": 0}, "num_envs must be at least 1"),
        ({"max_episode_steps": 0}, "max_episode_steps must be at least 1"),
        ({"physics_dt": 0.0}, "physics_dt must be positive"),
        ({"physics_dt": 0.03}, "step_dt 0.02 is not a multiple of physics_dt 0.03"),
        ({"physics_dt": 0.04}, "step_dt 0.02 is not a multiple of physics_dt 0.04"),
        ({"step_dt": 0.012}, "step_dt 0.012 is not a multiple of physics_dt 0.005"),
    ],
    ids=str,
)
def test_a_bad_spec_is_refused_with_its_task(change, message):
    with pytest.raises(ValueError) as error:
        EnvSpec(**{**SPEC, **change})
    assert str(error.value).startswith("Toy-v0: ") and message in str(error.value)


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (ActionDim, {"name": "a", "low": 1.0, "high": 1.0}, "low must be below high"),
        (ActionDim, {"name": "a", "low": math.nan}, "low must be below high"),
        (ActionDim, {"name": "a", "scale": 0.0}, "scale must be a number"),
        (ActionDim, {"name": "a", "offset": math.inf}, "offset must be finite"),
        (Discrete, {"n": 0}, "n must be at least 1"),
        (CommandDim, {"name": "v", "unit": "m/s", "low": 1.0, "high": 0.0}, "low must not"),
        (Joint, {**JOINT, "kp": -1.0}, "kp must be"),
        (Joint, {**JOINT, "kd": math.nan}, "kd must be"),
        (Joint, {**JOINT, "default_pos": math.nan}, "default_pos must be"),
        (Joint, {**JOINT, "effort_limit": 0.0}, "effort_limit must be"),
        (Joint, {**JOINT, "velocity_limit": -1.0}, "velocity_limit must be"),
        (Joint, {**JOINT, "pos_low": 0.8}, "pos_low must be below pos_high"),
        (
            Robot,
            {"name": "r", "joints": (Joint(**JOINT),) * 2, "imu_body": "b"},
            "a joint's name stands twice",
        ),
        (
            Robot,
            {"name": "r", "joints": (), "imu_body": "b", "imu_quat": (1.0, 1.0, 0.0, 0.0)},
            "imu_quat must be wxyz of length 1",
        ),
        (
            Robot,
            {"name": "r", "joints": (), "imu_body": "b", "imu_quat": (1.0, 0.0, 0.0)},
            "imu_quat must be wxyz of length 1",
        ),
    ],
    ids=str,
)
def test_bad_parts_are_refused(cls, values, message):
    with pytest.raises(ValueError, match=message):
        cls(**values)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.pop("obs"), "'obs' is missing"),
        (lambda d: d.pop("task"), "task"),
        (lambda d: d.update(colour="red"), "EnvSpec: unknown key.s. colour"),
        (lambda d: d["obs"]["actor"][0].update(gain=2), "ObsTerm: unknown key.s. gain"),
        (lambda d: d.update(obs=[1, 2]), "not an environment spec"),
        (lambda d: d.update(action=3), "not an environment spec"),
        (lambda d: d.update(num_envs="three"), "not an environment spec"),
        (lambda d: d["obs"]["actor"][0].update(size=0), "size must be at least 1"),
    ],
)
def test_damaged_json_is_one_clear_error(damage, message):
    data = json.loads(EnvSpec(**SPEC).to_json())
    damage(data)
    with pytest.raises(ValueError, match=message):
        EnvSpec.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"spec"'])
def test_text_that_is_no_spec_is_one_clear_error(text):
    with pytest.raises(ValueError, match="not an environment spec"):
        EnvSpec.from_json(text)


def test_specs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EnvSpec(**SPEC).num_envs = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_the_module_needs_the_standard_library_only():
    code = "import sys; import ctrl_rl.spec; print({'torch', 'numpy', 'mujoco'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
