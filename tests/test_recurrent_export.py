"""A policy with memory as a file: its state goes in and out, and is zero where episodes begin."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from deployment import make_obs, make_spec, reading_values
from test_runtime import NAMES, Bench, Clock

import ctrl_rl
import sim2real.export as export_module
from ctrl_rl import registry
from ctrl_rl.memory import RecurrentNet
from ctrl_rl.policy import Policy, load_policy
from ctrl_rl.spec import ActionDim, Discrete, ObsTerm
from sim2real.card import Card, CardError
from sim2real.export import ExportError, export, record_obs
from sim2real.observer import Reading
from sim2real.runtime import Controller, Network, load, run
from sim2real.safety import Guard, Limits
from sim2real.verify import Case, Procedure, Report, Thresholds, check_observation

PATH = Path("policy.onnx")
CELLS = pytest.mark.parametrize("cell", ["gru", "lstm"])


def recurrent_policy(spec, cell="gru", seed=0) -> Policy:
    """Random weights, large enough that what was seen before changes the action by 0.1 and more."""
    discrete = isinstance(spec.action, Discrete)
    sizes = (spec.obs_size(), 8, spec.action_size)
    net = RecurrentNet(cell, 6, sizes, "tanh", 2.0, torch.Generator().manual_seed(seed))
    size = (spec.obs_size(),)
    section = {
        "format": 1,
        "kind": f"{'categorical' if discrete else 'gaussian'}_{cell}",
        "spec": spec.to_json(),
        "group": "actor",
        "memory_size": 6,
        "hidden": [8],
        "activation": "tanh",
        "normalizer": {
            "mean": torch.full(size, 500.0, dtype=torch.float64),
            "var": torch.full(size, 1e6, dtype=torch.float64),
            "count": torch.tensor(1000.0, dtype=torch.float64),
            "clip": 10.0,
            "epsilon": 1e-8,
        },
        "bound": "clip",
        "weights": net.state_dict(),
    }
    if not discrete:
        section["log_std"] = torch.zeros(spec.action_size)
    return Policy.from_section(section)


ACTIONS = (ActionDim(name="x"), ActionDim(name="y", low=0.0, high=1.0))


def box(action=ACTIONS):
    """A task without a robot."""
    terms = (ObsTerm(name="x", kind="signal", size=5),)
    return make_spec(terms, action=action, robot=None, command=())


def sequence(spec, steps, rows) -> torch.Tensor:
    return make_obs(spec, steps * rows, 500.0, 1000.0).view(steps, rows, -1)


@CELLS
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("discrete", [False, True])
def test_answers_over_a_sequence_with_a_reset_in_its_midst(cell, rows, discrete):
    # O-39: 20 steps, an end at step 10 in the last row
    spec = box(Discrete(n=3)) if discrete else box()
    policy = recurrent_policy(spec, cell)
    export(policy, PATH, obs=sequence(spec, 30, 1)[:, 0])
    (network, _), loaded = load(PATH), load_policy(PATH)
    x = sequence(spec, 20, rows)
    kept, differs = [], False
    for t in range(20):
        if t == 10:
            policy.reset(torch.tensor([rows - 1]))
            loaded.reset(torch.tensor([rows - 1]))
            network.reset(np.array([rows - 1]))
        expected = policy(x[t])
        for found in (loaded(x[t]), torch.from_numpy(network(x[t].numpy()))):
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        kept.append(expected)
    policy.reset()
    for t in range(20):  # negative control: without the reset the last row answers otherwise
        differs |= bool(((policy(x[t]) - kept[t])[-1].abs() > 1e-2).any())
    assert differs or discrete  # of three choices the same one may stand out twice


@CELLS
def test_inputs_and_outputs_have_the_names_that_deployments_read(cell):
    spec = box()
    export(recurrent_policy(spec, cell), PATH, obs=sequence(spec, 8, 1)[:, 0])
    graph = onnx.load(PATH).graph
    states = ["h"] if cell == "gru" else ["h", "c"]
    assert [i.name for i in graph.input] == ["obs", *(f"{s}_in" for s in states)]
    assert [o.name for o in graph.output] == ["actions", *(f"{s}_out" for s in states)]
    for value in (*graph.input[1:], *graph.output[1:]):
        one, rows, size = value.type.tensor_type.shape.dim
        assert one.dim_value == 1 and rows.dim_param and size.dim_value == 6
    assert [n.op_type for n in graph.node].count(cell.upper()) == 1


def test_the_card_holds_one_episode_s_first_observations():
    policy = recurrent_policy(ctrl_rl.make("Pendulum-v0").spec)
    obs, begins = record_obs(policy, {"max_episode_steps": 5})
    assert begins[:, 0].nonzero().flatten().tolist() == list(range(0, 64, 5))
    card = export(policy, PATH, task_config={"max_episode_steps": 5})
    assert card.recurrent and len(card.reference_obs) == 5
    np.testing.assert_array_equal(card.reference_obs, obs[:5, 0].numpy())
    assert load(PATH)[1].recurrent
    network = load(PATH)[0]
    assert card.check(network) <= 1e-5
    with pytest.raises(CardError, match="differ by"):  # seen as if all in one step
        card.check(lambda obs: load(PATH)[0](np.repeat(obs, 2, 0))[:1] + 1e-3)
    with pytest.raises(CardError, match="differ by"):  # goes on where the check before ended
        card.check(network)


def test_a_graph_that_remembers_otherwise_is_not_written(monkeypatch):
    """Its first answer is right, the second is not: only a sequence shows it."""
    build = export_module.build_graph

    def corrupt(module, obs_size):
        model = build(module, obs_size)
        node = next(n for n in model.graph.node if n.op_type == "GRU")
        weight = next(t for t in model.graph.initializer if t.name == node.input[2])
        values = onnx.numpy_helper.to_array(weight) * np.float32(1.01)
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        return model

    monkeypatch.setattr(export_module, "build_graph", corrupt)
    spec = box()
    with pytest.raises(ExportError, match="nothing was written"):
        export(recurrent_policy(spec), PATH, obs=sequence(spec, 8, 1)[:, 0])
    assert not PATH.exists()


def test_card_and_graph_must_agree_on_memory():
    spec = box()
    export(recurrent_policy(spec), PATH, obs=sequence(spec, 8, 1)[:, 0])
    network, card = load(PATH)
    plain = dataclasses.replace(card, recurrent=False)
    with pytest.raises(CardError, match="without its state"):
        Network(network._session, plain)
    assert Card.from_json(card.to_json()).recurrent
    assert not Card.from_json(plain.to_json()).recurrent


def test_another_number_of_rows_needs_a_reset():
    spec = box()
    export(recurrent_policy(spec), PATH, obs=sequence(spec, 8, 1)[:, 0])
    network, _ = load(PATH)
    x = sequence(spec, 1, 4)[0].numpy()
    first = network(x)
    with pytest.raises(ValueError, match=r"remembers 4 rows, the observation has 2"):
        network(x[:2])
    network.reset()
    np.testing.assert_allclose(network(x[:2]), first[:2], atol=1e-6)


# On the robot -------------------------------------------------------------------------------


@pytest.fixture
def robot_file():
    spec = make_spec()
    export(recurrent_policy(spec, "lstm"), PATH, obs=make_obs(spec, 20, 0.0, 1.0))
    return PATH


def test_controllers_of_one_file_have_memories_of_their_own(robot_file):
    network, card = load(robot_file)
    one, two = Controller(network, card, NAMES, 2), Controller(network, card, NAMES, 3)
    reading = Reading(time=0.0, **reading_values(2))
    command = np.zeros((2, 2))
    first = one.act(reading, command)
    two.act(Reading(time=0.0, **reading_values(3)), np.zeros((3, 2)))
    second = one.act(reading, command)
    assert np.abs(second - first).min() > 1e-6
    one.reset([1])
    one.observer.reset()
    one.prev_action[:] = 0.0
    third = one.act(reading, command)
    np.testing.assert_array_equal(third[1], first[1])
    assert np.abs(third[0] - first[0]).max() > 1e-6


def state_of(controller) -> np.ndarray | None:
    return controller.network._state and np.concatenate(controller.network._state)


def test_an_emergency_stop_empties_the_memory(robot_file):
    network, card = load(robot_file)
    clock, states = Clock(), []
    bench = Bench(clock)
    controller = Controller(network, card, NAMES)
    guard = Guard(card.spec, NAMES, Limits(soft_start_s=0.0))

    def command(t):
        states.append(state_of(controller))
        if t > 0.05:
            guard.stop("button")
        return [0.5, 0.0]

    run(bench, controller, guard, command, 0.2, clock=clock, sleep=clock.sleep)
    assert len(states) == 3  # at 0.02, 0.04 and 0.06 s, then the policy waits
    assert states[0] is None and all(np.abs(s).max() > 0.01 for s in states[1:])
    assert not state_of(controller).any()


# Verification -------------------------------------------------------------------------------


def pendulum_case(policy) -> Case:
    export(policy, PATH, task_config={"max_episode_steps": 40})
    network, card = load(PATH)
    task = registry.load("tasks", "Pendulum-v0")
    return Case(
        path=PATH,
        network=network,
        card=card,
        policy=policy,
        task=task,
        limits=Thresholds(),
        how=Procedure(threads=1),
    )


def test_verify_carries_the_state_over_ends(monkeypatch):
    policy = recurrent_policy(ctrl_rl.make("Pendulum-v0").spec)
    case = pendulum_case(policy)
    policy(torch.zeros(3, 3))  # what it saw elsewhere does not count
    report = Report("Pendulum-v0")
    check_observation(case, report)
    (check,) = [c for c in report.checks if c.name == "action/difference"]
    assert check.passed, check
    monkeypatch.setattr(Network, "reset", lambda self, rows=None: None)  # negative control
    report = Report("Pendulum-v0")
    check_observation(case, report)
    (check,) = [c for c in report.checks if c.name == "action/difference"]
    assert check.value > 0.01
