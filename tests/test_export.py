import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from deployment import make_obs, make_policy, make_spec

import sim2real.export as export_module
from ctrl_rl.policy import load_policy
from ctrl_rl.spec import ActionDim, Discrete, ObsTerm
from sim2real.card import Card
from sim2real.export import ExportError, export, record_obs
from sim2real.runtime import load

PATH = Path("policy.onnx")
ACTIONS = (ActionDim(name="x", low=-1.0, high=1.0), ActionDim(name="y", low=0.0, high=10.0))


def box(size=6, action=ACTIONS):
    """A task without a robot."""
    terms = (ObsTerm(name="x", kind="signal", size=size),)
    return make_spec(terms, action=action, robot=None, command=())


def difference(policy, obs) -> float:
    network, _ = load(PATH)
    return float(np.abs(network(obs.numpy()) - policy(obs).numpy()).max())


def test_normaliser_is_inside_and_untouched():
    policy = make_policy(box(), mean=500.0, sd=1000.0)
    before = {k: v.clone() for k, v in policy.module.state_dict().items()}
    obs = make_obs(policy.spec, mean=500.0, sd=1000.0)
    export(policy, PATH, obs=obs)
    after = policy.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not policy.module.training
    assert difference(policy, obs) <= 1e-5
    assert difference(policy, make_obs(policy.spec, 500, mean=-3000.0, sd=5000.0)) <= 1e-5
    # negative control: these inputs do need the normaliser
    bare = policy.module.net(obs).clamp(policy.module.low, policy.module.high)
    assert (bare - policy(obs)).abs().max() > 0.1


def test_bounds_are_inside():
    policy = make_policy(box())
    policy.module.net.layers[-1].weight.mul_(8)  # beyond the bounds
    obs = make_obs(policy.spec, 500)
    export(policy, PATH, obs=obs)
    network, _ = load(PATH)
    actions = network(obs.numpy())
    np.testing.assert_allclose(actions, policy(obs).numpy(), atol=1e-5)
    assert actions.min(0).tolist() == [-1.0, 0.0]
    assert actions.max(0).tolist() == [1.0, 10.0]
    assert np.array_equal(actions, network(obs.numpy()))


def test_unbounded_actions_stay_unbounded():
    policy = make_policy(box(action=(ActionDim(name="x"),)))
    policy.module.net.layers[-1].weight.mul_(20)
    obs = make_obs(policy.spec, 500)
    export(policy, PATH, obs=obs)
    assert np.abs(load(PATH)[0](obs.numpy())).max() > 20
    assert difference(policy, obs) <= 1e-3  # of actions above 20: relative 1e-5


def test_choices_come_out_as_integers():
    policy = make_policy(box(action=Discrete(n=4)))
    obs = make_obs(policy.spec, 200)
    export(policy, PATH, obs=obs)
    actions = load(PATH)[0](obs.numpy())
    assert actions.dtype == np.int64
    assert set(actions) == {0, 1, 2, 3}
    assert np.array_equal(actions, policy(obs).numpy())


def test_any_batch_size():
    policy = make_policy(box())
    export(policy, PATH, obs=make_obs(policy.spec))
    network, _ = load(PATH)
    obs = make_obs(policy.spec, 33)
    whole = network(obs.numpy())
    for rows in (slice(0, 1), slice(1, 8), slice(8, 33)):
        np.testing.assert_allclose(network(obs[rows].numpy()), whole[rows], atol=1e-6)


def test_repeated_export_gives_the_same_bytes():
    policy = make_policy(make_spec())
    obs = make_obs(policy.spec)
    export(policy, PATH, obs=obs, train_steps=3)
    export(policy, "again.onnx", obs=obs, train_steps=3)
    assert PATH.read_bytes() == Path("again.onnx").read_bytes()


def test_nothing_of_this_machine_is_inside(repository):
    policy = make_policy(make_spec())
    export(policy, PATH, obs=make_obs(policy.spec))
    data = PATH.read_bytes()
    for word in (str(repository), "site-packages", os.path.expanduser("~"), "stack_trace"):
        assert word.encode() not in data
    model = onnx.load(PATH)
    graph = model.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info):
        assert not part.metadata_props
        assert not part.doc_string
    assert [n.op_type for n in model.graph.node].count("Gemm") == 2
    assert model.opset_import[0].version == export_module.OPSET
    assert [i.name for i in model.graph.input] == ["obs"]
    assert [o.name for o in model.graph.output] == ["actions"]


def test_file_carries_the_card_and_a_readable_copy():
    policy = make_policy(make_spec())
    obs = make_obs(policy.spec)
    written = export(
        policy, PATH, obs=obs, train_steps=77, commit="abc", task_config={"speed": 2.0}
    )
    network, card = load(PATH)
    assert card.spec == policy.spec
    assert (card.train_steps, card.commit, card.task_config) == (77, "abc", {"speed": 2.0})
    assert np.array_equal(card.reference_obs, written.reference_obs)
    np.testing.assert_array_equal(card.reference_obs[0], obs[0].numpy())
    assert card.check(network) <= 1e-5
    readable = json.loads(PATH.with_suffix(".json").read_text())
    assert readable == json.loads(card.to_json())
    assert "not normalised" in readable["input"]
    metadata = onnxruntime.InferenceSession(PATH).get_modelmeta().custom_metadata_map
    assert metadata["joint_names"] == "a,b,c"


def test_a_graph_that_answers_otherwise_is_not_written(monkeypatch):
    policy = make_policy(box())
    obs = make_obs(policy.spec)
    export(policy, PATH, obs=obs)
    before = PATH.read_bytes(), PATH.with_suffix(".json").read_bytes()
    build = export_module.build_graph

    def corrupt(module, obs_size):
        model = build(module, obs_size)
        bias = next(t for t in model.graph.initializer if list(t.dims) == [2])
        values = onnx.numpy_helper.to_array(bias) + np.float32(1e-4)
        bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
        return model

    monkeypatch.setattr(export_module, "build_graph", corrupt)
    with pytest.raises(ExportError, match="nothing was written"):
        export(policy, PATH, obs=obs)
    assert (PATH.read_bytes(), PATH.with_suffix(".json").read_bytes()) == before
    assert sorted(os.listdir()) == ["policy.json", "policy.onnx"]


def test_a_failed_write_leaves_the_old_file(monkeypatch):
    policy = make_policy(box())
    obs = make_obs(policy.spec)
    export(policy, PATH, obs=obs)
    before = PATH.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        export(policy, PATH, obs=obs, train_steps=9)
    assert PATH.read_bytes() == before
    assert sorted(os.listdir()) == ["policy.json", "policy.onnx"]


def test_broken_recordings_are_no_proof():
    policy = make_policy(box())
    obs = make_obs(policy.spec)
    obs[3, 0] = torch.nan
    card = export(policy, PATH, obs=obs)
    assert np.isfinite(card.reference_obs).all()
    with pytest.raises(ExportError, match="finite"):
        export(policy, PATH, obs=torch.full_like(obs, torch.nan))


def test_the_order_in_which_groups_arrive_does_not_matter():
    critic = (ObsTerm(name="x", kind="signal", size=6),)
    terms = (ObsTerm(name="b", kind="signal", size=2), ObsTerm(name="a", kind="signal", size=3))
    spec = make_spec(action=ACTIONS, robot=None, command=(), obs={"critic": critic, "actor": terms})
    policy = make_policy(spec)
    obs = make_obs(spec)
    export(policy, PATH, obs=obs)
    loaded = load_policy(PATH)
    other = torch.zeros(len(obs), 6)
    one = loaded({"actor": obs, "critic": other})
    two = loaded({"critic": other, "actor": obs})
    assert torch.equal(one, two)
    torch.testing.assert_close(one, policy(obs), atol=1e-5, rtol=0)
    assert [t.name for t in load(PATH)[1].spec.obs["actor"]] == ["b", "a"]
    with pytest.raises(ValueError, match="obs"):
        loaded({"critic": other})


def test_recording_plays_the_policys_own_task():
    import ctrl_rl

    policy = make_policy(ctrl_rl.make("Pendulum-v0").spec)
    obs, begins = record_obs(policy, {"max_episode_steps": 30})
    assert obs.shape == (export_module.RECORD_STEPS, export_module.RECORD_ENVS, 3)
    torch.testing.assert_close(obs[..., :2].norm(dim=2), torch.ones(obs.shape[:2]))  # cos, sin
    assert begins.all(1).nonzero().flatten().tolist() == [0, 30, 60]
    assert begins.any(1).sum() == 3
    card = export(policy, PATH)
    assert isinstance(card, Card)
    assert len(card.reference_obs) == export_module.REFERENCES


def test_an_exported_file_is_not_exported_again():
    policy = make_policy(box())
    export(policy, PATH, obs=make_obs(policy.spec))
    with pytest.raises(ValueError, match="already"):
        export(load_policy(PATH), "b.onnx")
