import dataclasses
import json
import math

import numpy as np
import pytest
from deployment import JOINTS, make_spec

from ctrl_rl import registry
from ctrl_rl.commands.train import rebuild
from ctrl_rl.spec import ActionDim, Discrete, ObsTerm, spec_differences
from sim2real.card import (
    KEY,
    Card,
    CardError,
    action_difference,
    match_joints,
)


def make_card(spec=None, **changes) -> Card:
    spec = spec or make_spec()
    random = np.random.default_rng(0)
    values = {
        "spec": spec,
        "train_steps": 1234,
        "version": "0.1.0",
        "commit": "abc",
        "task_config": {"speed": [1.0, 2.0]},
        "reference_obs": random.normal(size=(5, spec.obs_size())).astype(np.float32),
        "reference_actions": random.normal(size=(5, spec.action_size)).astype(np.float32),
    }
    return Card(**values | changes)


def test_json_round_trip_loses_nothing():
    spec = make_spec(
        action=tuple(ActionDim(name=j.name, offset=1 / 3, high=math.inf) for j in JOINTS)
    )
    card = make_card(spec)
    back = Card.from_json(card.to_json())
    assert back.spec == spec
    assert (back.train_steps, back.version, back.commit) == (1234, "0.1.0", "abc")
    assert back.task_config == card.task_config
    # float32 to the bit, though written as short decimals
    assert back.reference_obs.tobytes() == card.reference_obs.tobytes()
    assert back.reference_actions.tobytes() == card.reference_actions.tobytes()
    assert len(card.to_json()) < 14 * card.reference_obs.size + 6000


def test_strict_json():
    spec = make_spec(action=tuple(ActionDim(name=j.name) for j in JOINTS))  # infinite bounds
    json.loads(make_card(spec).to_json(), parse_constant=pytest.fail)


@pytest.mark.parametrize("task", registry.names("tasks"))
def test_settings_of_every_task_survive(task):
    """Hopper's healthy height has no upper end."""
    config = registry.load("tasks", task).Config
    card = make_card(task_config=dataclasses.asdict(config()))
    text = card.to_json()
    json.loads(text, parse_constant=pytest.fail)
    assert rebuild(config, Card.from_json(text).task_config) == config()


def test_discrete_actions_stay_integers():
    spec = make_spec(action=Discrete(n=4), robot=None)
    actions = np.array([0, 3, 1], np.int64)
    card = make_card(spec, reference_obs=np.ones((3, spec.obs_size()), np.float32))
    card = dataclasses.replace(card, reference_actions=actions)
    back = Card.from_json(card.to_json())
    assert back.reference_actions.dtype == np.int64
    assert back.check(lambda obs: actions) == 0
    with pytest.raises(CardError):
        back.check(lambda obs: actions[::-1].copy())


def edited(change) -> str:
    data = json.loads(make_card().to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "damaged"),
        ("[1]", "damaged"),
        ("{}", "damaged"),
        (edited(lambda d: d.update(format=2)), "format 2, this program reads format 1"),
        (edited(lambda d: d.update(format="1")), "format '1', this program reads format 1"),
        (edited(lambda d: d.update(format=True)), "format True"),
        (edited(lambda d: d.update(format=1.0)), "format 1.0"),
        (edited(lambda d: d.pop("spec")), "spec"),
        (edited(lambda d: d["spec"].update(surprise=1)), "surprise"),
        (edited(lambda d: d["spec"]["obs"]["actor"][0].update(kind="smell")), "smell"),
        (edited(lambda d: d["spec"].update(robot=3)), "damaged"),
        (edited(lambda d: d["reference_obs"].pop()), "do not fit"),
        (edited(lambda d: d["reference_obs"][0].pop()), "damaged"),
        (edited(lambda d: d.update(reference_obs=[], reference_actions=[])), "do not fit"),
    ],
)
def test_damaged_cards_are_refused_in_one_line(text, says):
    with pytest.raises(CardError, match=says) as caught:
        Card.from_json(text)
    assert "\n" not in str(caught.value)


def test_check_replays_the_reference():
    card = make_card()
    right = card.reference_actions
    assert card.check(lambda obs: right.copy()) == 0
    with pytest.raises(CardError, match="differ by 0.01"):
        card.check(lambda obs: right + np.float32(0.01) * (np.abs(right) < 1))
    with pytest.raises(CardError):
        card.check(lambda obs: np.full_like(right, np.nan))
    with pytest.raises(CardError):
        card.check(lambda obs: right[:, :2])


def test_action_difference():
    a = np.array([[0.5, 100.0]], np.float32)
    # 0.25 at an action below 1 counts in full, 1 at 100 counts a hundredth
    assert action_difference(a + np.float32(0.25) * np.array([[1, 0]], np.float32), a) == 0.25
    assert action_difference(np.array([[0.5, 101.0]], np.float32), a) == pytest.approx(0.01)
    assert action_difference(a.astype(np.float64), a) == math.inf
    assert action_difference(a[:, :1], a) == math.inf
    assert action_difference(np.array([[np.nan, 100.0]], np.float32), a) == math.inf


def test_joints_are_matched_by_name():
    spec = make_spec()
    order = match_joints(spec, ("c", "a", "b"))
    assert np.array(["c", "a", "b"])[order].tolist() == ["a", "b", "c"]
    with pytest.raises(CardError, match="missing: c; extra: d, e"):
        match_joints(spec, ("a", "b", "d", "e"))
    with pytest.raises(CardError, match="missing: a, b, c; extra: none"):
        match_joints(spec, ())
    with pytest.raises(CardError):
        match_joints(spec, ("a", "b", "c", "c"))
    with pytest.raises(CardError, match="no robot"):
        match_joints(make_spec(robot=None), ("a",))


def test_differences_name_each_field():
    spec = make_spec()
    assert spec_differences(spec, spec) == []
    action = list(spec.action)
    action[1] = dataclasses.replace(action[1], scale=0.55)
    joints = list(JOINTS)
    joints[2] = dataclasses.replace(joints[2], default_pos=0.31)
    actor = list(spec.obs["actor"])
    actor[0], actor[1] = actor[1], actor[0]
    other = dataclasses.replace(
        spec,
        action=tuple(action),
        robot=dataclasses.replace(spec.robot, joints=tuple(joints)),
        obs={"actor": tuple(actor)},
    )
    found = spec_differences(spec, other)
    assert [line.split(":")[0] for line in found] == [
        "obs order[0]",
        "obs order[1]",
        "action[b].scale",
        "robot.joints[c].default_pos",
    ]
    assert "0.2 and 0.55" in found[2]
    fewer = dataclasses.replace(spec, obs={"actor": spec.obs["actor"][:-1]})
    assert any("range" in line for line in spec_differences(spec, fewer))
    bare = dataclasses.replace(spec, robot=dataclasses.replace(spec.robot, joints=()))
    assert spec_differences(spec, bare) == ["robot.joints: (a, b, c) and ()"]


def test_noise_and_delay_are_no_difference():
    spec = make_spec()
    noisy = [dataclasses.replace(t, noise=0.1, delay=(0, 2)) for t in spec.obs["actor"]]
    assert spec_differences(spec, dataclasses.replace(spec, obs={"actor": tuple(noisy)})) == []


def test_other_programs_find_their_keys_by_joint():
    keys = make_card().metadata()
    names = keys["joint_names"].split(",")
    per_joint = lambda key: dict(zip(names, map(float, keys[key].split(",")), strict=True))  # noqa: E731
    assert per_joint("joint_stiffness") == {"a": 10, "b": 20, "c": 30}
    assert per_joint("joint_damping") == {"a": 0.5, "b": 0.5, "c": 0.5}
    assert per_joint("default_joint_pos") == {"a": 0.1, "b": 0.2, "c": 0.3}
    assert per_joint("action_scale") == pytest.approx({"a": 0.1, "b": 0.2, "c": 0.3})
    assert keys["observation_names"].split(",")[2] == "command"
    assert keys["observation_terms_scale"].split(",")[2] == "1.0;2.0"
    assert keys["observation_terms_clip"].split(",")[4] == "-5.0;5.0"
    assert keys["observation_terms_history_length"] == "1,1,1,1,3,2,1,1"
    assert keys["command_names"] == "walk,turn"
    assert all(isinstance(value, str) for value in keys.values())
    assert Card.from_json(keys[KEY]).spec == make_spec()


def test_an_action_in_another_order_keeps_its_names():
    spec = make_spec(
        terms=(ObsTerm(name="range", kind="signal", size=1),), action=make_spec().action[::-1]
    )
    keys = make_card(spec).metadata()
    assert keys["joint_names"] == "c,b,a"
    assert keys["joint_stiffness"] == "30.0,20.0,10.0"


@pytest.mark.parametrize(
    "changes",
    [
        # an observation in another order than the action: joint_names could serve only one
        {"terms": (ObsTerm(name="p", kind="joint_pos_rel", size=3, labels=("c", "a", "b")),)},
        # the scaled action is added to something else than the default pose
        {"action": tuple(ActionDim(name=j.name, offset=0.0) for j in JOINTS)},
    ],
)
def test_keys_that_others_would_misread_are_left_out(changes):
    keys = make_card(make_spec(**changes)).metadata()
    assert KEY in keys
    assert "joint_names" not in keys
