import dataclasses
import math

import numpy as np
import onnx
import pytest
import torch
from deployment import (
    JOINTS,
    ROLL_90,
    TERMS,
    YAW_90,
    make_obs,
    make_policy,
    make_spec,
    reading_values,
)
from onnx import TensorProto, helper

from ctrl_rl.spec import KINDS, ActionDim, Discrete, ObsTerm, Robot
from sim2real.card import CardError
from sim2real.export import export
from sim2real.observer import Observer, Reading
from sim2real.runtime import Controller, JointCommand, load, run
from sim2real.safety import Guard, Limits

NAMES = ("c", "a", "b")
"""The robot's joint order, another than the card's."""


def observe(term, spec=None, command=(0.4, 0.2), prev_action=(0, 0, 0), **values):
    """One observation of one term."""
    spec = spec or make_spec((term,))
    reading = Reading(time=0.0, **reading_values() | values)
    observer = Observer(spec, NAMES if spec.robot else ())
    return observer.build(reading, np.array([command]), np.array([prev_action]))[0]


GRAVITY = ObsTerm(name="gravity", kind="projected_gravity_b", size=3)
GYRO = ObsTerm(name="gyro", kind="base_ang_vel_b", size=3)


@pytest.mark.parametrize(
    ("quat", "gravity"),
    [
        (ROLL_90, (0, -1, 0)),  # misread as xyzw: (0, 0, 1)
        (YAW_90, (0, 0, -1)),  # misread as xyzw: (0, -1, 0)
        ((1, 0, 0, 0), (0, 0, -1)),
        ((0.5**0.5, 0, 0.5**0.5, 0), (1, 0, 0)),  # pitch 90: nose down
        ((2, 2, 0, 0), (0, -1, 0)),  # not of unit length
    ],
)
def test_gravity_of_an_orientation(quat, gravity):
    np.testing.assert_allclose(observe(GRAVITY, quat=np.array(quat)), gravity, atol=1e-7)


def test_gravity_may_be_measured_instead():
    found = observe(GRAVITY, quat=None, gravity=np.array([0.0, -9.81, 0.0]))
    np.testing.assert_allclose(found, (0, -1, 0))
    with pytest.raises(ValueError, match="neither quat nor gravity"):
        observe(GRAVITY, quat=None)


def test_imu_frame_is_turned_into_the_base():
    # The IMU is mounted turned by 90 degrees of yaw: its x axis is the base's y axis.
    turned = lambda term: make_spec((term,), imu_quat=YAW_90)  # noqa: E731
    found = observe(GYRO, turned(GYRO), gyro=np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(found, (-2, 1, 3), atol=1e-6)
    # A base at roll 90: R_imu = R_base R_mount, so quat = ROLL_90 * YAW_90 = (1, 1, -1, 1) / 2.
    quat = np.array([0.5, 0.5, -0.5, 0.5])
    found = observe(GRAVITY, turned(GRAVITY), quat=quat)
    np.testing.assert_allclose(found, (0, -1, 0), atol=1e-6)
    found = observe(GRAVITY, turned(GRAVITY), quat=None, gravity=np.array([-1.0, 0.0, 0.0]))
    np.testing.assert_allclose(found, (0, -1, 0), atol=1e-6)


def test_joints_go_by_name():
    robot_pos, robot_vel = np.array([3.3, 1.1, 2.2]), np.array([30.0, 10.0, 20.0])  # c, a, b
    term = ObsTerm(name="p", kind="joint_pos_rel", size=3, labels=("a", "b", "c"))
    np.testing.assert_allclose(observe(term, joint_pos=robot_pos), [1.0, 2.0, 3.0], rtol=1e-6)
    other = dataclasses.replace(term, labels=("b", "c", "a"))
    np.testing.assert_allclose(observe(other, joint_pos=robot_pos), [2.0, 3.0, 1.0], rtol=1e-6)
    default = dataclasses.replace(term, labels=())  # the card's own order
    np.testing.assert_allclose(observe(default, joint_pos=robot_pos), [1.0, 2.0, 3.0], rtol=1e-6)
    some = ObsTerm(name="v", kind="joint_vel", size=2, labels=("c", "b"))
    np.testing.assert_allclose(observe(some, joint_vel=robot_vel), [30.0, 20.0])


def test_command_goes_by_name_and_stays_in_range():
    term = ObsTerm(name="c", kind="command", size=2, labels=("turn", "walk"), scale=(1.0, 2.0))
    np.testing.assert_allclose(observe(term, command=(0.4, 0.2)), [0.2, 0.8], rtol=1e-6)
    # ranges: walk -1 to 1, turn -0.5 to 0.5
    np.testing.assert_allclose(observe(term, command=(-3.0, 9.0)), [0.5, -2.0])
    with pytest.raises(ValueError, match="walk, turn"):
        observe(term, command=(0.4, 0.2, 0.0))


@pytest.mark.parametrize("num_robots", [1, 3])
def test_a_command_is_one_for_all_robots_or_one_for_each(num_robots):
    observer = Observer(make_spec(), NAMES, num_robots)
    for shape in ((2,), (1, 2), (num_robots, 2)):
        found = observer.clamp(np.full(shape, 0.3))
        assert found.shape in {(1, 2), (num_robots, 2)} and (found == 0.3).all()
    who = "1 robot takes" if num_robots == 1 else "3 robots take"
    for shape in ((2, 2), (4, 2), (num_robots, 3), (0, 2), (1, 1, 2), ()):
        with pytest.raises(ValueError, match=f"a command of shape .* where {who} walk, turn$"):
            observer.clamp(np.zeros(shape))


def test_clip_comes_before_scale():
    term = ObsTerm(name="s", kind="signal", size=1, clip=(-2.0, 3.0), scale=(10.0,))
    assert observe(term, signals={"s": np.array([5.0])}) == 30.0
    assert observe(term, signals={"s": np.array([-5.0])}) == -20.0
    assert observe(term, signals={"s": np.array([1.5])}) == 15.0


def test_missing_or_misshapen_sensors_are_named():
    signal = ObsTerm(name="range", kind="signal", size=1)
    with pytest.raises(ValueError, match="'range'"):
        observe(signal, signals={})
    with pytest.raises(ValueError, match="'range'.*expected \\(1, 1\\)"):
        observe(signal, signals={"range": np.zeros(2)})
    with pytest.raises(ValueError, match="needs gyro"):
        observe(GYRO, gyro=None)


def sequence(term, values, **changes):
    """Observations of a signal that takes `values` one after the other."""
    spec = make_spec((term,), robot=None, command=(), **changes)
    observer = Observer(spec)
    none = np.zeros((1, 0))
    for value in values:
        reading = Reading(
            time=0.0, joint_pos=none, joint_vel=none, signals={"s": np.array([value])}
        )
        yield observer.build(reading, none, none)[0].tolist()


def test_history_is_oldest_first():
    term = ObsTerm(name="s", kind="signal", size=1, history=3, scale=(2.0,))
    assert list(sequence(term, [1.0, 2.0, 3.0, 4.0])) == [
        [2, 2, 2],
        [2, 2, 4],
        [2, 4, 6],
        [4, 6, 8],
    ]
    zero = dataclasses.replace(term, history_fill="zero")
    assert list(sequence(zero, [1.0, 2.0])) == [[0, 0, 2], [0, 2, 4]]


def test_histories_of_different_length_and_reset_of_one_robot():
    terms = (
        ObsTerm(name="s", kind="signal", size=1),
        ObsTerm(name="t", kind="signal", size=2, history=2, history_fill="zero"),
    )
    observer = Observer(make_spec(terms, robot=None, command=()), num_robots=2)
    none = np.zeros((2, 0))

    def build(s, t):
        signals = {"s": np.array(s, float), "t": np.array(t, float)}
        reading = Reading(time=0.0, joint_pos=none, joint_vel=none, signals=signals)
        return observer.build(reading, none, none).tolist()

    assert build([1, 2], [[3, 4], [5, 6]]) == [[1, 0, 0, 3, 4], [2, 0, 0, 5, 6]]
    observer.reset(np.array([False, True]))
    assert build([1, 2], [[7, 8], [9, 10]]) == [[1, 3, 4, 7, 8], [2, 0, 0, 9, 10]]


def test_clock_stands_still_at_zero_command():
    term = ObsTerm(name="clock", kind="phase", size=2, rate_hz=2.5)  # 0.05 turns per step
    observer = Observer(make_spec((term,)), NAMES)
    reading = Reading(time=0.0, **reading_values())
    build = lambda command: observer.build(reading, command, np.zeros((1, 3)))[0]  # noqa: E731
    np.testing.assert_allclose(build([0.5, 0.0]), [0, 1])
    np.testing.assert_allclose(build([0.0, 0.0]), [0, 0])
    angle = 2 * math.pi * 0.1
    np.testing.assert_allclose(build([0.0, 0.1]), [math.sin(angle), math.cos(angle)], rtol=1e-6)
    observer.reset()
    np.testing.assert_allclose(build([0.5, 0.0]), [0, 1])


def test_clock_runs_on_as_long_as_the_term_says():
    term = ObsTerm(name="clock", kind="phase", size=2, rate_hz=2.5, run_on_s=0.06)  # 3 steps
    observer = Observer(make_spec((term,)), NAMES)
    reading = Reading(time=0.0, **reading_values())
    build = lambda command: observer.build(reading, command, np.zeros((1, 3)))[0]  # noqa: E731
    assert not build([0.0, 0.0]).any()  # nothing to run on from
    build([0.5, 0.0])
    running = [bool(build([0.0, 0.0]).any()) for _ in range(5)]
    assert running == [True, True, True, False, False]
    build([0.5, 0.0])
    observer.reset()
    assert not build([0.0, 0.0]).any()


def test_clock_is_exact_after_hours():
    term = ObsTerm(name="clock", kind="phase", size=2, rate_hz=2.5)
    observer = Observer(make_spec((term,)), NAMES)
    observer.steps[:] = 20 * 50_000 + 5  # whole turns and a quarter
    found = observer.build(Reading(time=0.0, **reading_values()), [1.0, 0.0], np.zeros((1, 3)))
    np.testing.assert_allclose(found[0], [1, 0], atol=1e-6)


def test_every_kind_of_the_spec_is_built():
    built = {}
    for kind in KINDS:
        size = {"command": 2, "phase": 2, "signal": 1}.get(kind, 3)
        built[kind] = observe(ObsTerm(name="range", kind=kind, size=size, rate_hz=1.0))
    assert all(len(x) and np.isfinite(x).all() for x in built.values())


def test_joints_and_labels_must_match():
    with pytest.raises(CardError, match="missing: c; extra: d"):
        Observer(make_spec(), ("a", "b", "d"))
    wrong = ObsTerm(name="p", kind="joint_pos_rel", size=1, labels=("knee",))
    with pytest.raises(CardError, match="knee"):
        Observer(make_spec((wrong,)), NAMES)
    action = (ActionDim(name="knee"),)
    with pytest.raises(CardError, match="knee"):
        Controller(lambda obs: obs, make_card(make_spec(action=action)), NAMES)


class make_card:
    """As much of a card as a controller reads."""

    def __init__(self, spec):
        self.spec = spec


def test_many_robots_are_many_single_robots():
    spec, n = make_spec(), 5
    policy = make_policy(spec)
    network = lambda obs: policy(torch.from_numpy(obs)).numpy()  # noqa: E731
    many = Controller(network, make_card(spec), NAMES, n)
    ones = [Controller(network, make_card(spec), NAMES) for _ in range(n)]
    for t in range(4):
        values = reading_values(n, seed=t)
        command = np.random.default_rng(t).normal(size=(n, 2))
        targets = many.step(Reading(time=0.0, **values), command)
        for i, one in enumerate(ones):
            mine = {k: v[i] for k, v in values.items() if k != "signals"}
            signals = {"range": values["signals"]["range"][i]}
            alone = one.step(Reading(time=0.0, **mine, signals=signals), command[i])
            np.testing.assert_allclose(one.obs[0], many.obs[i], atol=1e-6)
            np.testing.assert_allclose(alone[0], targets[i], atol=1e-6)
        many.reset([2])
        ones[2].reset()


def test_targets_are_offset_plus_scaled_action_by_name():
    spec = make_spec()
    action = np.array([[1.0, 2.0, -1.0]], np.float32)
    controller = Controller(lambda obs: action, make_card(spec), NAMES)
    reading = Reading(time=0.0, **reading_values())
    # a 0.1 + 0.1, b 0.2 + 0.2 * 2, c 0.3 - 0.3; the robot's order is c, a, b
    np.testing.assert_allclose(controller.step(reading, [0, 0]), [[0.0, 0.2, 0.6]], atol=1e-7)
    controller.step(reading, [0, 0])
    start = sum(t.width for t in TERMS[:5])
    np.testing.assert_array_equal(controller.obs[0, start : start + 6], [0, 0, 0, 1, 2, -1])
    controller.reset()
    controller.step(reading, [0, 0])
    assert not controller.obs[0, start : start + 6].any()


def test_joints_without_an_action_keep_their_default():
    spec = make_spec(action=(ActionDim(name="b", scale=0.5, offset=0.2),))
    controller = Controller(lambda obs: np.ones((1, 1), np.float32), make_card(spec), NAMES)
    terms = Reading(time=0.0, **reading_values())
    with pytest.raises(ValueError):  # this spec's prev_action term wants three
        controller.step(terms, [0, 0])
    np.testing.assert_allclose(controller.targets(np.ones((1, 1))), [[0.3, 0.1, 0.7]])


def test_a_choice_drives_no_joints():
    with pytest.raises(CardError, match="choice"):
        Controller(lambda obs: obs, make_card(make_spec(action=Discrete(n=3))), NAMES)


# Files ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "policy.onnx"
    policy = make_policy(make_spec())
    export(policy, path, obs=make_obs(policy.spec))
    return path


def test_load(exported):
    network, card = load(exported)
    assert card.spec == make_spec()
    assert network(card.reference_obs).shape == card.reference_actions.shape


def changed(exported, change) -> str:
    model = onnx.load(exported)
    change(model)
    onnx.save(model, "changed.onnx")
    return "changed.onnx"


def add_input(model):
    model.graph.input.append(helper.make_tensor_value_info("h_in", TensorProto.FLOAT, [1, 8]))


def rename_output(model):
    model.graph.node[-1].output[0] = model.graph.output[0].name = "logits"


def fix_batch(model):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def double_input(model):
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    cast = helper.make_node("Cast", ["obs"], ["obs_single"], to=TensorProto.FLOAT)
    for node in model.graph.node:
        node.input[:] = ["obs_single" if name == "obs" else name for name in node.input]
    model.graph.node.insert(0, cast)


def failing_node(model):
    model.graph.node[-1].output[0] = "all"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([99]), "absent"))
    model.graph.node.append(helper.make_node("Gather", ["all", "absent"], ["actions"], axis=1))


def other_weights(model):
    tensor = next(t for t in model.graph.initializer if list(t.dims) == [3])
    values = onnx.numpy_helper.to_array(tensor) + np.float32(0.01)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def no_card(model):
    del model.metadata_props[:]


def cut_card(model):
    for prop in model.metadata_props:
        prop.value = prop.value[:100]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (add_input, "h_in"),
        (rename_output, "logits"),
        (fix_batch, r"\[1, 29\]"),
        (double_input, "does not run"),
        (failing_node, "does not run"),
        (other_weights, "differ by"),
        (no_card, "ctrl_rl_card"),
        (cut_card, "damaged"),
    ],
)
def test_files_that_do_not_fit_are_refused(exported, change, says):
    path = changed(exported, change)
    with pytest.raises(CardError, match=says) as caught:
        load(path)
    assert str(caught.value).startswith("changed.onnx: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not an ONNX file", None, "half"])
def test_damaged_files_are_refused(exported, content, tmp_path):
    path = tmp_path / "policy.onnx"
    if content == "half":
        content = exported.read_bytes()[: exported.stat().st_size // 2]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CardError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# The loop ------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when someone waits or works."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0
        self.now += seconds


class Bench:
    """Hardware that notes what it is sent; each read takes as long as told."""

    joint_names = NAMES

    def __init__(self, clock, work=()):
        self.clock, self.work, self.sent, self.read_at = clock, list(work), [], []

    def read(self):
        self.read_at.append(self.clock.now)
        values = reading_values() | {"quat": np.array([1.0, 0, 0, 0])}
        values |= {"joint_pos": np.array([0.3, 0.1, 0.2]), "joint_vel": np.zeros(3)}
        reading = Reading(time=self.clock.now, **values)
        if self.work:
            work = self.work.pop(0)
            if isinstance(work, BaseException):
                raise work
            self.clock.now += work
        return reading

    def write(self, command: JointCommand):
        self.sent.append(command)

    def close(self):
        pass


def play(work=(), seconds=0.2, limits=None, command=lambda t: [0.5, 0.0]):
    clock = Clock()
    bench = Bench(clock, work)
    spec = make_spec()
    policy = make_policy(spec)
    network = lambda obs: policy(torch.from_numpy(obs)).numpy()  # noqa: E731
    controller = Controller(network, make_card(spec), NAMES)
    guard = Guard(spec, NAMES, limits or Limits(soft_start_s=0.04))
    report = run(bench, controller, guard, command, seconds, clock=clock, sleep=clock.sleep)
    return report, bench, controller


def test_loop_runs_at_the_policys_rate():
    report, bench, _ = play(work=[0.004] * 10)
    np.testing.assert_allclose(np.diff(bench.read_at), 0.02)
    assert len(report.begin) == 10
    assert report.skipped == 0
    assert report.stopped is None
    np.testing.assert_allclose(report.compute, 0.004)
    np.testing.assert_allclose(report.late, 0.0, atol=1e-9)
    assert "20.000 ms" in str(report)


def test_missed_ticks_are_skipped_not_made_up_for():
    report, bench, _ = play(work=[0.0, 0.0, 0.05, 0.0], limits=Limits(soft_start_s=0.0))
    # the third step, due at 0.04 s, lasts until 0.09 s; the ticks at 0.06 and 0.08 s are lost
    expected = [0.0, 0.02, 0.04, 0.10, 0.12, 0.14, 0.16, 0.18]
    np.testing.assert_allclose(np.array(bench.read_at) - 100, expected)
    assert report.skipped == 2


def test_policy_waits_for_the_soft_start():
    report, bench, controller = play(seconds=0.1, limits=Limits(soft_start_s=0.05))
    # at 0, 0.02, 0.04 and 0.06 s the robot is brought to its pose; then the policy acts once
    assert controller.observer.steps[0] == 1
    np.testing.assert_allclose(bench.sent[0].pos, [[0.3, 0.1, 0.2]])


def test_robot_is_damped_at_the_end_and_after_an_error():
    _, bench, _ = play()
    assert not bench.sent[-1].kp.any()
    assert bench.sent[-1].kd.all()
    assert bench.sent[-2].kp.all()
    clock = Clock()
    bench = Bench(clock, [0.0, 0.0, RuntimeError("cable")])
    spec = make_spec()
    controller = Controller(lambda obs: np.zeros((1, 3), np.float32), make_card(spec), NAMES)
    with pytest.raises(RuntimeError, match="cable"):
        guard = Guard(spec, NAMES)
        run(bench, controller, guard, lambda t: [0, 0], 1.0, clock=clock, sleep=clock.sleep)
    assert len(bench.sent) == 3
    assert not bench.sent[-1].kp.any()


def test_a_stop_is_reported():
    report, bench, _ = play(work=[0.0, 0.0, 0.2], seconds=0.5)
    assert "missed deadline" in report.stopped or "old" in report.stopped
    assert all(not c.kp.any() for c in bench.sent[3:])
    assert "missed" in str(report) or "old" in str(report)


def test_a_loop_that_always_overruns_is_stopped():
    report, bench, controller = play(work=[0.03] * 200, seconds=4.0)
    assert "missed deadlines" in report.stopped
    assert all(c.kp.all() for c in bench.sent[:11])
    assert all(not c.kp.any() for c in bench.sent[11:])


def test_a_command_that_is_no_number_stops_by_its_name():
    command = lambda t: [0.5, math.nan if t > 0.09 else 0.2]  # noqa: E731
    report, bench, _ = play(command=command)
    assert report.stopped == "command turn is no number"
    assert bench.sent[4].kp.all()  # at 0.08 s
    assert all(not c.kp.any() for c in bench.sent[5:])


def test_ctrl_c_damps_the_robot_and_keeps_the_report():
    report, bench, _ = play(work=[0.004] * 7 + [KeyboardInterrupt()], seconds=math.inf)
    assert len(report.begin) == len(report.compute) == len(report.late) == 7
    assert report.stopped is None
    assert "never stopped" in str(report)
    assert bench.sent[-2].kp.all()
    assert not bench.sent[-1].kp.any()


def test_a_reading_that_grew_old_while_the_policy_thought_is_not_acted_on():
    # read and network take 0.1 s; at most 0.06 s are allowed, and this very command is damped
    _, bench, _ = play(work=[0.0, 0.1], seconds=0.1, limits=Limits(soft_start_s=0.0))
    assert bench.sent[0].kp.all()
    assert not bench.sent[1].kp.any()


def test_after_a_released_stop_the_policy_begins_anew():
    clock = Clock()
    bench, spec = Bench(clock), make_spec()
    controller = Controller(lambda obs: np.ones((1, 3), np.float32), make_card(spec), NAMES)
    guard = Guard(spec, NAMES, Limits(soft_start_s=0.03))

    def command(t):
        if 0.09 < t < 0.11:
            guard.stop("button")
            guard.reset()
        return [0.5, 0.0]

    run(bench, controller, guard, command, 0.18, clock=clock, sleep=clock.sleep)
    # released at 0.1 s, brought to its pose until 0.14 s; then the policy acts once, at 0.16 s
    assert controller.observer.steps[0] == 1


def test_a_loop_without_a_step_has_a_report():
    report, _, _ = play(seconds=0.0)
    assert str(report).startswith("steps           0")


def test_robot_of_the_spec_is_not_changed_by_the_order_of_joints():
    shuffled = Robot(name="toy", joints=JOINTS[::-1], imu_body="trunk")
    reading = Reading(time=0.0, **reading_values())
    args = reading, np.array([[0.1, 0.1]]), np.zeros((1, 3))
    one = Observer(make_spec(), NAMES).build(*args)
    two = Observer(make_spec(robot=shuffled), NAMES).build(*args)
    np.testing.assert_array_equal(one, two)
