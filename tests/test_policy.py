"""Policy sections: complete, independent of key order, refused where something is missing."""

import dataclasses
import json
import shutil

import onnx
import pytest
import torch

import ctrl_rl
from ctrl_rl import ppo
from ctrl_rl.checkpoints import load_checkpoint, save_checkpoint
from ctrl_rl.networks import MLP
from ctrl_rl.policy import (
    CARD_FORMAT,
    CARD_TOLERANCE,
    OnnxPolicy,
    Policy,
    check_fits,
    load_policy,
)
from ctrl_rl.runs import Run
from ctrl_rl.spec import ActionDim, CommandDim, Discrete, EnvSpec, Joint, ObsTerm, Robot

SPEC = EnvSpec(
    task="Toy-v0",
    num_envs=2,
    obs={
        "actor": (
            ObsTerm(name="b", kind="signal", size=2),
            ObsTerm(name="a", kind="signal", size=3),
        ),
        "critic": (ObsTerm(name="c", kind="privileged", size=7),),
    },
    action=(ActionDim(name="x", low=-1.0, high=1.0), ActionDim(name="y", low=0.0, high=10.0)),
    physics_dt=0.1,
    step_dt=0.1,
    max_episode_steps=10,
)


def section(spec=SPEC, **changes) -> dict:
    net = MLP((spec.obs_size(), 4, spec.action_size), "tanh", generator=torch.Generator())
    discrete = isinstance(spec.action, Discrete)
    found = {
        "format": 1,
        "kind": "categorical_mlp" if discrete else "gaussian_mlp",
        "spec": spec.to_json(),
        "group": "actor",
        "hidden": [4],
        "activation": "tanh",
        "normalizer": {
            "mean": torch.full((5,), 500.0, dtype=torch.float64),
            "var": torch.full((5,), 1e6, dtype=torch.float64),
            "count": torch.tensor(123.0, dtype=torch.float64),
            "clip": 10.0,
            "epsilon": 1e-8,
        },
        "bound": "clip",
        "weights": net.state_dict(),
    }
    if not discrete:
        found["log_std"] = torch.zeros(spec.action_size)
    return found | changes


def obs(n=16, generator=None) -> torch.Tensor:
    generator = generator or torch.Generator().manual_seed(0)
    return 500 + 1000 * torch.randn(n, 5, generator=generator)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run of Pendulum, its learner, and observations of scale 1000 and offset 500."""
    folder = tmp_path_factory.mktemp("run") / "r"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
        env = ctrl_rl.make("Pendulum-v0", 4)
        learners = []
        init = ppo.PPO.__init__
        patch.setattr(
            ppo.PPO, "__init__", lambda self, *a: (init(self, *a), learners.append(self))[0]
        )
        run = Run(folder, console=False, eval_every=0, checkpoint_every=64)
        ppo.train(ppo.PPOConfig(total_steps=192, num_steps=16, hidden=(8,)), env, run)
    return folder, learners[0]


# Round trip ---------------------------------------------------------------------------------


def test_the_policy_acts_as_the_learner_s_mean(trained):
    _, learner = trained
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(1)) * 5
    policy = Policy.from_section(learner.policy_section())
    with torch.no_grad():
        mean = learner.networks.actor(learner.normalizers["actor"](x)).clamp(-2.0, 2.0)
    assert torch.equal(policy(x), mean)
    assert policy(x).abs().max() <= 2.0


def test_statistics_are_bit_equal_after_a_round_trip_and_the_action_the_same(tmp_path):
    # O-14: observations of scale 1000 and offset 500.
    before = Policy.from_section(section())
    save_checkpoint(tmp_path / "p.pt", {"step": 3, "policy": before.section()})
    after = load_policy(tmp_path / "p.pt")
    for key in ("mean", "var", "count"):
        assert torch.equal(after.section()["normalizer"][key], section()["normalizer"][key])
    assert torch.equal(after(obs()), before(obs()))
    # (600 - 500) / 1000 = 0.1 reaches the network
    seen = []
    after.module.net.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    after(torch.full((1, 5), 600.0))
    assert torch.allclose(seen[0], torch.full((1, 5), 0.1), atol=1e-7)


def test_weights_without_statistics_are_refused():
    bare = section()
    del bare["normalizer"]
    with pytest.raises(ValueError, match="lacks observation statistics"):
        Policy.from_section(bare)
    Policy.from_section(section(normalizer=None))  # trained without, and says so


def test_statistics_of_another_size_are_refused():
    other = section()["normalizer"] | {"mean": torch.zeros(4, dtype=torch.float64)}
    with pytest.raises(ValueError, match="do not fit"):
        Policy.from_section(section(normalizer=other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "policy format 2"),
        ({"kind": "lstm"}, "unknown kind of policy 'lstm'"),
        ({"kind": "categorical_mlp"}, "cannot act in Toy-v0"),
        ({"hidden": [5]}, "do not fit"),
        ({"activation": "softplus"}, "unknown activation"),
        ({"spec": "{}"}, "not an environment spec"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Policy.from_section(section() | change)
    save_checkpoint(tmp_path / "p.pt", {"step": 0, "policy": section() | change})
    with pytest.raises(ValueError, match=message) as error:
        load_policy(tmp_path / "p.pt")
    assert str(tmp_path / "p.pt") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"step": 0}, "holds no policy"),
        ({"policy": section()}, "holds no step"),
        ({"step": "7", "policy": section()}, r"holds no step \(int\)"),
        ({"step": 0, "policy": [1]}, r"holds no policy \(dict\)"),
        ({"step": 0, "policy": section(weights=[torch.ones(2)])}, "weights"),
    ],
)
def test_a_checkpoint_without_a_whole_policy_is_one_line(content, message, tmp_path):
    save_checkpoint(tmp_path / "p.pt", content)
    with pytest.raises(ValueError, match=message) as error:
        load_policy(tmp_path / "p.pt")
    assert str(tmp_path / "p.pt") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(bad):
    good = section()
    weights = good["weights"] | {"layers.1.bias": torch.tensor([0.0, bad])}
    mean = torch.tensor([bad, 0, 0, 0, 0], dtype=torch.float64)
    for change, name in (
        ({"weights": weights}, r"layers\.1\.bias"),
        ({"log_std": torch.tensor([bad, 0.0])}, "log_std"),
        ({"normalizer": good["normalizer"] | {"mean": mean}}, "mean"),
    ):
        with pytest.raises(ValueError, match=f"policy weight {name} is not finite"):
            Policy.from_section(good | change)


# Calls --------------------------------------------------------------------------------------


def test_key_order_does_not_matter_and_sizes_are_checked():
    policy, x, critic = Policy.from_section(section()), obs(2), torch.zeros(2, 7)
    assert torch.equal(
        policy({"actor": x, "critic": critic}), policy({"critic": critic, "actor": x})
    )
    assert torch.equal(policy({"actor": x}), policy(x))
    for bad, message in (
        ({"critic": critic}, "reads 'actor'"),
        ({"actor": x, "camera": x}, "camera"),
        ({"actor": critic}, r"must be \(N, 5\), not \(2, 7\)"),
        (x[:, :4], r"must be \(N, 5\), not \(2, 4\)"),
        (x[0], r"must be \(N, 5\), not \(5,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            policy(bad)


def test_actions_are_clipped_per_dimension():
    # O-41: low [-1, 0], high [1, 10]
    weights = section()["weights"]
    weights["layers.1.weight"] = weights["layers.1.weight"] * 0
    for bias, action in (((50.0, 50.0), [1.0, 10.0]), ((-50.0, -50.0), [-1.0, 0.0])):
        weights["layers.1.bias"] = torch.tensor(bias)
        clipped = Policy.from_section(section(weights=weights))
        assert clipped(obs(1)).tolist() == [action]
        free = Policy.from_section(section(weights=weights, bound="none"))
        assert free(obs(1)).tolist() == [list(bias)]


def test_samples_spread_as_log_std_says_and_repeat_with_the_seed():
    policy = Policy.from_section(section(bound="none", log_std=torch.tensor([-1.0, 1.0])))
    x = obs(1).expand(20_000, 5)
    first = policy.sample(x, torch.Generator().manual_seed(3))
    assert torch.equal(first, policy.sample(x, torch.Generator().manual_seed(3)))
    # exp(-1) = 0.368, exp(1) = 2.718; standard error of a deviation at 20,000: 0.5 %
    assert torch.allclose(first.std(0), torch.tensor([0.368, 2.718]), rtol=0.03)
    assert torch.allclose(first.mean(0), policy(x[:1])[0], atol=0.08)


def test_a_discrete_policy_takes_the_likeliest_choice():
    spec = dataclasses.replace(SPEC, action=Discrete(n=3))
    weights = section(spec)["weights"]
    weights["layers.1.weight"] *= 0
    weights["layers.1.bias"] = torch.tensor([0.0, 2.0, 1.0])
    policy = Policy.from_section(section(spec, weights=weights))
    assert policy(obs(2)).tolist() == [1, 1] and policy(obs(2)).dtype == torch.int64
    drawn = policy.sample(obs(1).expand(20_000, 5), torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=3) / 20_000
    # softmax(0, 2, 1) = (0.090, 0.665, 0.245)
    assert torch.allclose(share, torch.tensor([0.090, 0.665, 0.245]), atol=0.015)


def test_another_observation_or_action_is_refused_by_name():
    policy = Policy.from_section(section())
    noisy = tuple(dataclasses.replace(t, noise=0.1, delay=(0, 2)) for t in SPEC.obs["actor"])
    check_fits(policy, dataclasses.replace(SPEC, obs={"actor": noisy}))
    b, a = SPEC.obs["actor"]
    for terms, message in (
        ((a, b), r"observes b \(2\) where Toy-v0 has a \(3\)"),
        ((b,), r"observes a \(3\) where Toy-v0 has nothing"),
        ((b, dataclasses.replace(a, scale=(2.0,))), "another scale of a than"),
        ((b, dataclasses.replace(a, kind="joint_vel")), "another kind of a than"),
    ):
        with pytest.raises(ValueError, match=message):
            check_fits(policy, dataclasses.replace(SPEC, obs={"actor": terms}))
    with pytest.raises(ValueError, match="action is not that of"):
        check_fits(policy, dataclasses.replace(SPEC, action=SPEC.action[:1]))


def test_the_policys_own_task_must_be_as_it_was():
    pose = {"kp": 20.0, "kd": 0.5, "effort_limit": 20.0, "velocity_limit": 10.0}
    pose |= {"pos_low": -1.0, "pos_high": 2.0}
    joint = Joint(name="knee", default_pos=0.1, **pose)
    spec = dataclasses.replace(SPEC, robot=Robot(name="r", joints=(joint,), imu_body="trunk"))
    policy = Policy.from_section(section(spec))
    check_fits(policy, dataclasses.replace(spec, num_envs=9, max_episode_steps=7))
    walk = CommandDim(name="walk", unit="m/s", low=0, high=1)
    check_fits(policy, dataclasses.replace(spec, command=(walk,)))  # it may be asked for more
    raised = dataclasses.replace(joint, default_pos=0.2)
    for robot, message in (
        (dataclasses.replace(spec.robot, joints=()), r"robot.joints: \(knee\) and \(\)$"),
        (dataclasses.replace(spec.robot, joints=(raised,)), r"\[knee\].default_pos: 0.1 and 0.2$"),
        (None, "robot: r and nothing$"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            check_fits(policy, dataclasses.replace(spec, robot=robot))
        assert "not trained on Toy-v0 as it is installed here" in str(error.value)
    slow = dataclasses.replace(spec, step_dt=2 * spec.step_dt)
    with pytest.raises(ValueError, match="step_dt"):
        check_fits(policy, slow)
    # another task with the same observation and action may have another body
    check_fits(policy, dataclasses.replace(slow, task="Other-v0", robot=None))


# Loading ------------------------------------------------------------------------------------


def test_load_policy_takes_a_folder_a_checkpoint_or_a_step(trained, tmp_path):
    folder, learner = trained
    x = torch.randn(5, 3)
    expected = Policy.from_section(learner.policy_section())(x)
    assert torch.equal(load_policy(folder)(x), expected)  # no evaluation was made: last
    assert torch.equal(load_policy(folder / "checkpoints/last.pt")(x), expected)
    step = load_policy(folder, "64")
    assert torch.equal(
        step(x), Policy(load_checkpoint(folder / "checkpoints/step-64.pt")["policy"])(x)
    )
    assert not torch.equal(step(x), expected)
    copy = tmp_path / "r"
    shutil.copytree(folder, copy)
    shutil.copy(copy / "checkpoints/step-64.pt", copy / "checkpoints/best.pt")
    assert torch.equal(load_policy(copy)(x), step(x))
    assert torch.equal(load_policy(copy, "last")(x), expected)
    for path, message in (
        (tmp_path, "not a run folder"),
        (tmp_path / "nothing", "does not exist"),
        (folder / "metrics.csv", "not a run folder"),
        (tmp_path / "nothing.pt", "does not exist"),
        (tmp_path / "nothing.onnx", "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            load_policy(path)


def test_an_exported_file_answers_as_the_policy_does(trained, tmp_path):
    from sim2real.export import export_run

    folder, _ = trained
    path, _ = export_run(folder, None, tmp_path / "policy.onnx")
    exported, policy = load_policy(path), load_policy(folder)
    assert isinstance(exported, OnnxPolicy) and exported.spec == policy.spec
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(2)) * 3
    assert (exported({"actor": x}) - policy({"actor": x})).abs().max() <= 1e-5
    with pytest.raises(ValueError, match=r"must be \(N, 3\)"):
        exported(x[:, :2])
    with pytest.raises(ValueError, match="no noise"):
        exported.sample(x)

    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged or not an ONNX file") as error:
        load_policy(path)
    assert "\n" not in str(error.value)
    model = onnx.load_from_string(whole)
    for prop in model.metadata_props:
        if prop.key == "ctrl_rl_card":
            prop.value = prop.value[:50]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="card is damaged"):
        load_policy(path)
    del model.metadata_props[:]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="not exported by ctrl-rl: it has no ctrl_rl_card"):
        load_policy(path)


def damaged_weights(model, card):
    (matrix,) = [t for t in model.graph.initializer if list(t.dims) == [8, 3]]
    weights = onnx.numpy_helper.to_array(matrix)
    matrix.CopyFrom(onnx.numpy_helper.from_array(-3 * weights, matrix.name))


def damaged_reference(model, card):
    card["reference_actions"][3][0] = float("nan")


def short_reference(model, card):
    del card["reference_actions"][5:]


def no_reference(model, card):
    card["reference_obs"] = card["reference_actions"] = []


def another_format(model, card):
    card["format"] = 2


def format_as_text(model, card):
    card["format"] = "1"


def renamed_output(model, card):
    for node in model.graph.node:
        node.output[:] = ["logits" if name == "actions" else name for name in node.output]
    model.graph.output[0].name = "logits"


def more_inputs(model, card):
    state = onnx.helper.make_tensor_value_info("h_in", onnx.TensorProto.FLOAT, [1, "N", 8])
    model.graph.input.append(state)


def said_recurrent(model, card):
    card["recurrent"] = True


def one_row_only(model, card):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 16


def other_width(model, card):
    term = card["spec"]["obs"]["actor"][0]
    term |= {"size": term["size"] + 1, "labels": [], "scale": [1.0]}


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    from sim2real.export import export_run

    return export_run(trained[0], None, tmp_path_factory.mktemp("file") / "policy.onnx")[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged_weights, "answers differ by .* from the card's reference actions"),
        (damaged_reference, "answers differ by nan"),
        (short_reference, "its card is damaged: .* reference"),
        (no_reference, "its card is damaged: .* reference"),
        (another_format, "its card has format 2, this version reads 1"),
        (format_as_text, "its card has format '1', this version reads 1"),
        (renamed_output, "inputs and outputs .*'logits'"),
        (more_inputs, "inputs and outputs .*'h_in'"),
        (said_recurrent, "inputs and outputs .*'obs'"),
        (one_row_only, r"its obs is \[16, 3\], its card's is \(N, 3\)"),
        (other_width, r"its obs is .*3\], its card's is \(N, 4\)"),
    ],
)
def test_a_file_that_a_robot_would_refuse_is_refused(exported, tmp_path, damage, message):
    from sim2real import card as sim2real_card
    from sim2real import runtime

    assert CARD_FORMAT == sim2real_card.FORMAT
    assert CARD_TOLERANCE == sim2real_card.TOLERANCE
    model, path = onnx.load(exported), tmp_path / "policy.onnx"
    (prop,) = [p for p in model.metadata_props if p.key == "ctrl_rl_card"]
    card = json.loads(prop.value)
    damage(model, card)
    prop.value = json.dumps(card)
    onnx.save(model, path)
    with pytest.raises(ValueError, match="policy.onnx"):
        runtime.load(path)
    with pytest.raises(ValueError, match=message) as error:
        load_policy(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
