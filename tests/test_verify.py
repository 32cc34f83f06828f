import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import mujoco
import numpy as np
import pytest
import torch
from deployment import JOINTS, YAW_90, make_policy, make_spec

import ctrl_rl
from ctrl_rl import cli, registry
from ctrl_rl.evaluation import Metric
from ctrl_rl.spec import CommandDim, Robot
from sim2real import verify as verify_module
from sim2real.card import CardError
from sim2real.commands.verify import Verify
from sim2real.commands.verify import main as verify_command
from sim2real.export import export, record_obs
from sim2real.observer import Observer
from sim2real.plain_mujoco import Robots, Sensors
from sim2real.runtime import JointCommand
from sim2real.thresholds import Procedure, Thresholds
from sim2real.tracking import Tracking
from sim2real.verify import (
    Case,
    Check,
    Report,
    check_observation,
    check_standing,
    check_tracking,
    measure_randomised,
    open_case,
    verify,
)

GO1 = "Go1-Velocity-Flat-v0"
SHORT = {"episode_length_s": 1.0}
"""Task configuration of the Go1 files below: episodes of 50 steps."""

# Joints in the order c, a, b; actuators in the order b, c, a, with gains that the card overrules.
TOY = """
<mujoco>
  <option timestep="0.005"/>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 .1"/>
    <body name="trunk" pos="0 0 1">
      <freejoint/>
      <geom name="trunk" type="box" size=".2 .1 .05" mass="5"/>
      <body pos=".2 0 0"><joint name="c" axis="0 1 0"/><geom size=".05" mass=".2"/></body>
      <body pos="0 .1 0"><joint name="a" axis="0 1 0"/><geom size=".05" mass=".2"/></body>
      <body pos="0 -.1 0">
        <joint name="b" axis="0 1 0"/>
        <geom name="foot" size=".05" mass=".2"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <position name="mb" joint="b" kp="1" kv="1"/>
    <position name="mc" joint="c" kp="1" kv="1"/>
    <position name="ma" joint="a" kp="1" kv="1"/>
  </actuator>
</mujoco>
"""


def toy():
    return mujoco.MjModel.from_xml_string(TOY)


def toy_states(n=1, seed=0):
    """Random positions (n, 10) and velocities (n, 9)."""
    random = np.random.default_rng(seed)
    qpos, qvel = random.normal(size=(n, 10)), random.normal(size=(n, 9))
    qpos[:, 3:7] /= np.linalg.norm(qpos[:, 3:7], axis=1, keepdims=True)
    return qpos, qvel


# Sensors and single robots ----------------------------------------------------------------------


def test_readings_go_by_joint_name():
    sensors = Sensors(toy(), make_spec())
    assert sensors.joint_names == ("c", "a", "b")
    qpos, qvel = toy_states()
    reading = sensors.read(qpos, qvel, 3.0)
    np.testing.assert_array_equal(reading.joint_pos, qpos[:, 7:])
    np.testing.assert_array_equal(reading.joint_vel, qvel[:, 6:])
    np.testing.assert_array_equal(reading.gyro, qvel[:, 3:6])
    np.testing.assert_array_equal(reading.quat, qpos[:, 3:7])
    assert reading.time == 3.0


def test_readings_are_copies():
    qpos, qvel = toy_states()
    reading = Sensors(toy(), make_spec()).read(qpos, qvel, 0.0)
    before = reading.gyro.copy(), reading.joint_pos.copy(), reading.quat.copy()
    qpos[:], qvel[:] = 0, 0
    for now, then in zip((reading.gyro, reading.joint_pos, reading.quat), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_turned_imu_measures_like_mujocos_own_sensors():
    spec = make_spec(imu_quat=YAW_90)
    site = f'<site name="imu" quat="{" ".join(map(str, YAW_90))}"/>'
    text = TOY.replace("<freejoint/>", "<freejoint/>" + site).replace(
        "</mujoco>",
        '<sensor><gyro site="imu"/><framequat objtype="site" objname="imu"/></sensor></mujoco>',
    )
    model = mujoco.MjModel.from_xml_string(text)
    data = mujoco.MjData(model)
    qpos, qvel = toy_states()
    data.qpos[:], data.qvel[:] = qpos[0], qvel[0]
    mujoco.mj_forward(model, data)
    reading = Sensors(model, spec).read(qpos, qvel, 0.0)
    np.testing.assert_allclose(reading.gyro[0], data.sensordata[:3], atol=1e-12)
    sign = np.sign(np.dot(reading.quat[0], data.sensordata[3:]))
    np.testing.assert_allclose(sign * reading.quat[0], data.sensordata[3:], atol=1e-12)
    # and the runtime turns it back: the observation is that of the base
    observer = Observer(spec, ("c", "a", "b"))
    found = observer.build(reading_with_range(reading), [0, 0], np.zeros((1, 3)))[0]
    np.testing.assert_allclose(found[:3], 0.25 * qvel[0, 3:6], rtol=1e-5)


def reading_with_range(reading):
    return dataclasses.replace(reading, signals={"range": np.zeros((1, 1))})


def test_velocities_are_the_bases_own():
    qpos, qvel = np.zeros((1, 10)), np.zeros((1, 9))
    qpos[0, 3:7] = YAW_90  # the base looks along the world's y
    qvel[0, :6] = 0, 2, 3, 4, 5, 6
    found = Sensors(toy(), make_spec()).velocities(qpos, qvel)
    np.testing.assert_allclose(found["lin"], [[2, 0, 3]], atol=1e-12)
    np.testing.assert_array_equal(found["ang"], [[4, 5, 6]])


@pytest.mark.parametrize(
    ("quat", "degrees"), [((1, 0, 0, 0), 0), (YAW_90, 0), ((0.5, 0.5, 0.5, 0.5), 90)]
)
def test_tilt(quat, degrees):
    qpos = np.zeros((1, 10))
    qpos[0, 3:7] = quat
    found = Sensors(toy(), make_spec()).tilt(qpos)
    np.testing.assert_allclose(np.degrees(found), degrees, atol=1e-5)


def test_models_that_do_not_fit_are_refused():
    fewer = dataclasses.replace(
        make_spec(), robot=Robot(name="t", joints=JOINTS[:2], imu_body="trunk")
    )
    with pytest.raises(ValueError, match="same joints: c"):
        Sensors(toy(), fewer)
    fixed = mujoco.MjModel.from_xml_string(TOY.replace("<freejoint/>", ""))
    with pytest.raises(ValueError, match="does not float"):
        Sensors(fixed, make_spec())
    motors = mujoco.MjModel.from_xml_string(
        TOY.replace('<position name="ma" joint="a" kp="1" kv="1"/>', '<motor joint="a"/>')
    )
    with pytest.raises(ValueError, match="'a'.*no position actuator"):
        Robots(motors, make_spec(), *toy_states(), 1)


def test_gains_of_the_card_reach_the_right_joint():
    model = toy()
    robots = Robots(model, make_spec(), *toy_states(), 1)
    gain = lambda m, name: float(m.actuator(name).gainprm[0])  # noqa: E731
    assert [gain(robots.model, n) for n in ("ma", "mb", "mc")] == [10, 20, 30]
    assert [float(robots.model.actuator(n).biasprm[1]) for n in ("ma", "mb", "mc")] == [
        -10,
        -20,
        -30,
    ]
    assert [float(robots.model.actuator(n).biasprm[2]) for n in ("ma", "mb", "mc")] == [-0.5] * 3
    assert [gain(model, n) for n in ("ma", "mb", "mc")] == [1, 1, 1]  # the model given is untouched
    robots.close()


def test_targets_reach_the_right_joint():
    qpos, qvel = np.zeros((2, 10)), np.zeros((2, 9))
    qpos[:, 2:4] = 1.0
    robots = Robots(toy(), make_spec(), qpos, qvel, 2)
    pos = np.array([[0.3, -0.1, 0.2], [0.0, 0.0, 0.0]])  # c, a, b
    robots.step(JointCommand(pos=pos, kp=pos, kd=pos))
    assert robots.data[0].actuator("mc").ctrl == 0.3
    assert robots.data[0].actuator("ma").ctrl == -0.1
    assert robots.data[0].actuator("mb").ctrl == 0.2
    assert robots.time == pytest.approx(0.02)
    robots.close()


def test_a_touch_in_any_physics_step_is_seen():
    qpos, qvel = np.zeros((2, 10)), np.zeros((2, 9))
    qpos[:, 3] = 1.0
    qpos[:, 2], qvel[:, 2] = (0.049, 1.0), 5.0  # the first leaves the floor at once
    robots = Robots(toy(), make_spec(), qpos, qvel, 1, ("trunk",))
    hold = JointCommand(pos=np.zeros((2, 3)), kp=np.zeros((2, 3)), kd=np.zeros((2, 3)))
    robots.step(hold)
    assert not robots.touching(("trunk",)).any()  # of the last physics step
    assert robots.touched.tolist() == [True, False]
    robots.step(hold)
    assert not robots.touched.any()
    robots.close()


def test_frozen_robots_stay_and_touch_nothing():
    qpos, qvel = np.zeros((2, 10)), np.zeros((2, 9))
    qpos[:, 3] = 1.0
    qpos[:, 2] = 0.04  # the trunk is 1 cm in the floor
    robots = Robots(toy(), make_spec(), qpos, qvel, 1)
    robots.alive[1] = False
    before = robots.qpos[1]
    robots.step(JointCommand(pos=np.zeros((2, 3)), kp=None, kd=None))
    assert robots.touching(("trunk", "foot")).tolist() == [[True, True], [False, False]]
    np.testing.assert_array_equal(robots.qpos[1], before)
    assert not robots.bad().any()
    robots.close()


@pytest.mark.filterwarnings("ignore")
def test_a_simulation_that_left_the_numbers_is_noticed():
    qpos, qvel = toy_states(2)
    qvel[1, 0] = 1e12
    mujoco.set_mju_user_warning(lambda text: None)
    try:
        robots = Robots(toy(), make_spec(), qpos, qvel, 1)
        robots.step(JointCommand(pos=np.zeros((2, 3)), kp=None, kd=None))
        assert np.isfinite(robots.qpos).all()  # MuJoCo has reset it without an error
        assert robots.bad().tolist() == [False, True]
        robots.close()
    finally:
        mujoco.set_mju_user_warning(None)


def test_plain_mujoco_equals_the_nominal_training_environment():
    task = registry.load("tasks", GO1)
    env = ctrl_rl.make(GO1, 3, config=task.Config().nominal(), seed=5, threads=1)
    model = task.plain_models()["training"]
    robots = Robots(model, env.spec, env.sim.qpos.numpy(), env.sim.qvel.numpy(), 1)
    order = [robots.joint_names.index(d.name) for d in env.spec.action]
    random = torch.Generator().manual_seed(0)
    for _ in range(8):
        action = 0.3 * torch.randn(3, 12, generator=random)
        targets = np.zeros((3, 12))
        targets[:, order] = [d.offset for d in env.spec.action]
        targets[:, order] += action.numpy() * np.array([d.scale for d in env.spec.action])
        env.step(action)
        robots.step(JointCommand(pos=targets, kp=None, kd=None))
        np.testing.assert_allclose(robots.qpos, env.sim.qpos.numpy(), atol=1e-6)
    robots.close()


# Arithmetic -------------------------------------------------------------------------------------

COMMAND = (
    CommandDim(name="lin_vel_x", unit="m/s", low=-1, high=1),
    CommandDim(name="height", unit="m", low=0, high=1),
    CommandDim(name="ang_vel_z", unit="rad/s", low=-1, high=1),
)


def test_tracking_leaves_out_the_time_after_each_new_command():
    tracking = Tracking(COMMAND, 2, step_dt=0.5, settle_s=1.0)  # two steps are left out
    alive = np.array([True, True])
    # robot 0 gets a new command at step 4; its forward error is 0.1 * (step + 1)
    for step in range(8):
        command = np.array([[1.0 if step < 4 else -1.0, 0, 0], [0.5, 0, 0.2]])
        lin = np.array([[command[0, 0] + 0.1 * (step + 1), 9, 9], [0.5, 9, 9]])
        ang = np.array([[9.0, 9, 0], [9, 9, 0.5]])
        if step == 6:
            alive = np.array([True, False])
        tracking.add(command, {"lin": lin, "ang": ang}, alive)
    # robot 0 counts steps 2, 3 and 6, 7: errors 0.3, 0.4, 0.7, 0.8; robot 1 steps 2 to 5
    assert tracking.count.tolist() == [4, 4]
    found = tracking.metrics("x")
    assert set(found) == {"x/rms_lin_vel_x", "x/rms_ang_vel_z"}  # a height is no velocity
    mean = (0.09 + 0.16 + 0.49 + 0.64) / 8
    assert found["x/rms_lin_vel_x"].mean == pytest.approx(math.sqrt(mean))
    assert found["x/rms_ang_vel_z"].mean == pytest.approx(math.sqrt(4 * 0.09 / 8))
    assert found["x/rms_ang_vel_z"].unit == "rad/s"
    low, high = found["x/rms_lin_vel_x"].ci95
    assert low <= found["x/rms_lin_vel_x"].mean <= high


def test_tracking_without_a_counted_step_is_no_number():
    tracking = Tracking(COMMAND, 1, step_dt=0.5, settle_s=1.0)
    assert math.isnan(tracking.metrics("x")["x/rms_lin_vel_x"].mean)
    report = Report("t", checks=[Check(name="x", value=math.nan, limit=1.0, unit="-")])
    assert not report.passed


def test_checks():
    check = lambda value, **k: Check(name="n", value=value, limit=0.5, unit="m", **k)  # noqa: E731
    assert check(0.5).passed
    assert not check(0.51).passed
    assert check(0.5, at_least=True).passed
    assert not check(0.49, at_least=True).passed
    assert not check(math.nan).passed
    assert not check(math.nan, at_least=True).passed
    assert not Report("t").passed  # nothing checked is nothing proven
    assert Report("t", checks=[check(0.1)]).passed
    report = Report("t", checks=[check(0.1), check(0.6)])
    report.metrics["n"] = Metric(mean=0.6, ci95=(0.5, 0.7), n=3, unit="m")
    assert not report.passed
    assert "FAIL  n  0.6 [0.5, 0.7] m  (<= 0.5)" in str(report)
    assert str(report).endswith("NOT passed")


def test_procedure_is_checked():
    with pytest.raises(ValueError, match="episodes"):
        Procedure(episodes=0)
    with pytest.raises(ValueError, match="settle_s"):
        Procedure(settle_s=5.0)


# What verify asks of the robots, with robots that do as they are told ----------------------------


class Told:
    """Stands in for `_Drive`: follows every command but for `errors`, and touches as it is told."""

    errors = (0.06, 0.08)  # of every velocity, of every other robot
    fallen = (False,) * 40
    feet = ((True, True),)
    """Which feet are down, step after step, and round again."""

    def __init__(self, case, model, n):
        self.commands, self.now = [], 0
        self.fallen = np.array(self.fallen[:n])
        sensors = SimpleNamespace(base_xy=lambda qpos: qpos)
        self.robots = SimpleNamespace(
            alive=~self.fallen, sensors=sensors, qpos=np.zeros((n, 2)), touching=self.touching
        )
        self.guard = SimpleNamespace(altered=np.zeros(n, bool), causes=[None] * n)
        Told.last = self

    def step(self, command):
        self.commands.append(command)
        self.now += 1
        self.robots.qpos = np.zeros((len(command), 2)) + [0.001 * self.now, 0]
        reached = np.tile(np.resize(self.errors, len(command))[:, None], 3)
        lin, ang = reached.copy(), reached.copy()
        lin[:, 0] += command[:, 0]
        ang[:, 2] += command[:, 2]
        return {"lin": lin, "ang": ang}

    def touching(self, geoms):
        assert geoms == ("left", "right")
        return np.tile(self.feet[self.now % len(self.feet)], (len(self.fallen), 1))

    def close(self):
        pass


def told_case(monkeypatch, **changes) -> Case:
    """A case whose robots are `Told`, with `changes` of that class."""
    monkeypatch.setattr(verify_module, "_Drive", type("Changed", (Told,), changes))
    return Case(
        path=Path(),
        network=lambda obs: obs,
        card=SimpleNamespace(spec=make_spec(command=COMMAND)),
        policy=None,
        task=SimpleNamespace(foot_geoms=("left", "right")),
        limits=Thresholds(),
        how=Procedure(episodes=40, episode_s=4.0, command_s=1.0, settle_s=0.5, stand_s=1.0),
    )


def test_commands_cover_the_trained_range_and_change_in_time(monkeypatch):
    report = Report("t")
    check_tracking(told_case(monkeypatch), report, "x", None)
    asked = np.array(Told.last.commands)  # (200 steps of 20 ms, 40 robots, 3)
    assert asked.shape == (200, 40, 3)
    changes = np.flatnonzero((asked[1:] != asked[:-1]).any((1, 2))) + 1
    assert changes.tolist() == [50, 100, 150]
    for k, dim in enumerate(COMMAND):
        span = dim.high - dim.low
        assert dim.low <= asked[..., k].min() < dim.low + 0.05 * span  # of 160 draws
        assert dim.high - 0.05 * span < asked[..., k].max() <= dim.high
    assert len(np.unique(asked)) == 160 * 3  # every robot has commands of its own
    value = {c.name: c.value for c in report.checks}
    rms = math.sqrt((0.06**2 + 0.08**2) / 2)
    assert value["x/rms_lin_vel_x"] == pytest.approx(rms)
    assert value["x/rms_ang_vel_z"] == pytest.approx(rms)
    assert value["x/falls"] == 0


def test_falls_are_counted(monkeypatch):
    report = Report("t")
    fallen = (True, False, False, False) * 10
    check_tracking(told_case(monkeypatch, fallen=fallen), report, "x", None)
    assert report.metrics["x/falls"].mean == 0.25
    assert report.metrics["x/falls"].n == 40


def test_standing_needs_all_feet_down_and_everyone(monkeypatch):
    def figures(**changes):
        report = Report("t")
        check_standing(told_case(monkeypatch, **changes), report, "x", None)
        return {c.name: c for c in report.checks}

    found = figures()
    assert found["x/feet_down"].value == 1.0
    assert found["x/feet_down"].passed
    assert found["x/drift"].value == pytest.approx(0.05)  # 1 mm per step for 50 steps
    asked = np.array(Told.last.commands)  # 150 steps of walking, 25 to settle, 50 of standing
    assert asked[:150].any((1, 2)).all()
    assert not asked[150:].any()
    assert len(asked) == 225
    one = figures(feet=((True, True), (True, False)))["x/feet_down"]  # every other step
    assert one.value == pytest.approx(0.5)
    assert not one.passed
    fell = figures(fallen=(False,) * 19 + (True,))["x/drift"]
    assert fell.value == math.inf
    assert not fell.passed


# Whole files ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pendulum_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("pendulum") / "policy.onnx"
    export(make_policy(ctrl_rl.make("Pendulum-v0").spec), path)
    return path


def go1_file(path, change=lambda spec: spec) -> Path:
    """An untrained Go1 policy whose card says what `change` makes of the spec."""
    task = registry.load("tasks", GO1)
    env = ctrl_rl.make(GO1, 2, config=task.Config(**SHORT), threads=1)
    obs = record_obs(make_policy(env.spec), SHORT)[0].flatten(0, 1)
    policy = make_policy(change(env.spec))
    policy.module.net.layers[-1].weight.mul_(0.1)  # stays near the default pose
    export(policy, path, obs=obs, task_config=SHORT)
    return path


@pytest.fixture(scope="module")
def go1(tmp_path_factory):
    return go1_file(tmp_path_factory.mktemp("go1") / "policy.onnx")


def observation(path) -> Report:
    """What the first check of `verify` finds."""
    report = Report("observation")
    check_observation(open_case(path, procedure=Procedure(threads=1)), report)
    return report


def test_observations_of_the_runtime_are_those_of_training(go1, pendulum_file):
    for path, terms in ((go1, 7), (pendulum_file, 2)):
        report = observation(path)
        assert report.passed, str(report)
        assert sum(c.name.startswith("obs/") for c in report.checks) == terms
        assert report.notes == []


def edit_term(spec, name, **changes):
    actor = tuple(
        dataclasses.replace(t, **changes) if t.name == name else t for t in spec.obs["actor"]
    )
    return dataclasses.replace(spec, obs={**spec.obs, "actor": actor})


def edit_joint(spec, name, **changes):
    joints = tuple(
        dataclasses.replace(j, **changes) if j.name == name else j for j in spec.robot.joints
    )
    return dataclasses.replace(spec, robot=dataclasses.replace(spec.robot, joints=joints))


def edit_action(spec, index, **changes):
    action = list(spec.action)
    action[index] = dataclasses.replace(action[index], **changes)
    return dataclasses.replace(spec, action=tuple(action))


def swap_labels(spec):
    (term,) = (t for t in spec.obs["actor"] if t.name == "joint_pos")
    labels = (term.labels[1], term.labels[0], *term.labels[2:])
    return edit_term(spec, "joint_pos", labels=labels)


@pytest.mark.parametrize(
    ("change", "failing", "note"),
    [
        (lambda s: edit_term(s, "joint_vel", scale=(0.06,)), "joint_vel", "joint_vel.scale"),
        (lambda s: edit_term(s, "phase", rate_hz=2.1), "phase", "phase.rate_hz"),
        (lambda s: edit_joint(s, "FR_thigh_joint", default_pos=0.91), "joint_pos", "default_pos"),
        (lambda s: edit_action(s, 3, scale=0.55), None, "action[FL_hip_joint].scale"),
        (lambda s: edit_joint(s, "RL_calf_joint", kp=34.0), None, "RL_calf_joint].kp"),
        (swap_labels, "joint_pos", "joint_pos.labels"),
        (
            lambda s: dataclasses.replace(s, robot=dataclasses.replace(s.robot, imu_quat=YAW_90)),
            # the simulated IMU is mounted as the card says, so the observation is right
            None,
            "imu_quat",
        ),
    ],
)
def test_a_card_with_other_constants_is_reported(change, failing, note, tmp_path):
    # Without a mirror: one joint is changed, and the one on the other side is not.
    one_sided = lambda spec: change(dataclasses.replace(spec, mirror=None))  # noqa: E731
    report = observation(go1_file(tmp_path / "policy.onnx", one_sided))
    assert not report.passed
    failed = {c.name for c in report.checks if not c.passed}
    assert failed == {"card/differences"} | ({f"obs/{failing}"} if failing else set())
    assert any(note in line for line in report.notes)


def test_verify_of_a_robot(go1):
    procedure = Procedure(episodes=3, episode_s=2.0, command_s=2.0, stand_s=0.5, threads=1)
    report = verify(go1, Thresholds(), procedure)
    by_name = {c.name: c for c in report.checks}
    # an untrained policy stands: it does not fall at once, and does not track
    assert not report.passed
    for model in ("training", "fine"):
        assert not by_name[f"{model}/rms_lin_vel_x"].passed
        assert by_name[f"{model}/rms_lin_vel_x"].limit == 0.15
        assert by_name[f"{model}/rms_ang_vel_z"].limit == 0.2
        assert by_name[f"{model}/falls"].limit == 0.02
        assert by_name[f"{model}/falls"].passed
        assert report.metrics[f"{model}/falls"].n == 3
    assert "randomised/falls" in report.metrics
    generous = Thresholds(
        max_falls=1, max_lin_error=9, max_ang_error=9, max_drift=9, min_feet_down=0
    )
    assert verify(go1, generous, procedure).passed


def test_both_kinds_of_physics_are_driven(go1, monkeypatch):
    seen = []
    for name in ("check_observation", "measure_randomised"):
        monkeypatch.setattr(verify_module, name, lambda case, report: None)
    for name in ("check_tracking", "check_standing"):
        monkeypatch.setattr(
            verify_module,
            name,
            lambda case, report, kind, model, part=name: seen.append(
                (part, kind, model.opt.timestep, model.opt.cone)
            ),
        )
    verify(go1)
    training, fine = (
        (0.005, mujoco.mjtCone.mjCONE_PYRAMIDAL),
        (0.001, mujoco.mjtCone.mjCONE_ELLIPTIC),
    )
    assert seen == [
        ("check_tracking", "training", *training),
        ("check_standing", "training", *training),
        ("check_tracking", "fine", *fine),
        ("check_standing", "fine", *fine),
    ]


def test_the_guard_stands_between_the_policy_and_the_robots(go1):
    case = open_case(go1, procedure=Procedure(threads=1))
    wild = dataclasses.replace(case, network=lambda obs: np.full((len(obs), 12), 1e3, np.float32))
    model = case.task.plain_models()["training"]
    drive = verify_module._Drive(wild, model, 2)
    assert drive.robots.model.opt.timestep == model.opt.timestep
    start = drive.robots.read().joint_pos
    drive.step(np.zeros((2, 3)))
    sent = drive.robots.data[0].ctrl[drive.robots._actuators]
    # what the policy wants is 500 rad away; a target moves by twice the velocity limit at most
    assert np.all(np.abs(sent - start[0]) <= drive.guard.max_step + 1e-9)
    assert drive.guard.altered.all()
    drive.close()
    broken = dataclasses.replace(case, network=lambda obs: np.full((len(obs), 12), np.nan))
    drive = verify_module._Drive(broken, model, 2)
    drive.step(np.zeros((2, 3)))
    assert drive.fallen.all()
    assert "target" in drive.guard.causes[0]
    drive.close()


def test_each_part_uses_its_own_environment(go1, monkeypatch):
    how = Procedure(episodes=2, episode_s=0.2, command_s=0.2, settle_s=0.1, threads=1)
    case = open_case(go1, procedure=how)
    config = case.task.Config(**SHORT)
    made, make = [], verify_module.make
    monkeypatch.setattr(
        verify_module, "make", lambda *a, **k: made.append(k["config"]) or make(*a, **k)
    )
    report = Report("t")
    measure_randomised(case, report)
    assert made == [config.evaluation()]
    assert report.metrics["randomised/falls"].n == 2
    check_tracking(case, report, "x", case.task.plain_models()["training"])
    check_observation(case, report)
    assert made[1:] == [config.nominal()] * 2
    assert config.nominal() != config.evaluation()


def test_a_fall_is_counted_once_and_freezes_the_robot(go1):
    # Nothing passes a tilt limit of a thousandth of a degree.
    procedure = Procedure(
        episodes=2, episode_s=2.0, command_s=2.0, max_tilt_deg=1e-3, stand_s=0.5, threads=1
    )
    report = verify(go1, procedure=procedure)
    by_name = {c.name: c for c in report.checks}
    assert by_name["training/falls"].value == 1.0
    assert by_name["training/drift"].value == math.inf
    assert math.isnan(by_name["training/rms_lin_vel_x"].value)
    assert any("guard stopped" in line for line in report.notes) or report.notes == []


def test_verify_without_a_robot(pendulum_file):
    report = verify(pendulum_file, procedure=Procedure(episodes=4, threads=1))
    assert report.passed
    assert report.metrics["training/episode_return"].n == 4
    assert -2000 < report.metrics["training/episode_return"].mean < 0


def test_a_folder_without_a_file_says_what_to_do(tmp_path):
    with pytest.raises(CardError, match="ctrl-rl export"):
        verify(tmp_path)


# The commands -----------------------------------------------------------------------------------


def call(capsys, *words) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command."""
    capsys.readouterr()
    status = cli.main(list(words))
    out, err = capsys.readouterr()
    return status, out, err


def test_commands_from_a_run_to_a_verdict(capsys):
    words = ("--total-steps", "2048", "--num-envs", "8", "--video-s", "0", "--eval-episodes", "8")
    status, _, err = call(capsys, "train", "Pendulum-v0", *words, "--run-dir", "run")
    assert status == 0, err
    Path("run/policy.onnx").unlink(missing_ok=True)
    status, _, err = call(capsys, "verify", "run")
    assert status == 2
    assert "ctrl-rl export run" in err
    status, out, err = call(capsys, "export", "run", "--checkpoint", "last")
    assert status == 0, err
    assert "run/policy.onnx: Pendulum-v0" in out
    card = json.loads(Path("run/policy.json").read_text())
    assert card["train_steps"] >= 2048
    assert card["commit"] == (json.loads(Path("run/config.json").read_text())["commit"] or "")
    status, out, err = call(capsys, "verify", "run", "--episodes", "4", "--threads", "1")
    assert status == 0, err
    for name in ("action/difference", "training/return_difference", "obs/speed"):
        assert f"ok    {name}" in out
    strict = ("--episodes", "4", "--max-obs-difference", "-1")
    status, out, _ = call(capsys, "verify", "run/policy.onnx", *strict)
    assert status == 1
    assert "FAIL  obs/speed" in out
    Path("broken.onnx").write_bytes(Path("run/policy.onnx").read_bytes()[:500])
    status, _, err = call(capsys, "verify", "broken.onnx")
    assert status == 2
    assert err.count("\n") == 1


def test_eval_and_play_refuse_a_card_that_is_not_the_task(capsys):
    spec = ctrl_rl.make("Pendulum-v0").spec
    export(make_policy(spec), "p.onnx", task_config={"max_episode_steps": 7})
    status, out, err = call(capsys, "eval", "p.onnx", "--episodes", "2")
    assert status == 0, err
    assert " 7 [7, 7] steps" in out  # as it was configured in training
    slow = dataclasses.replace(spec, step_dt=2 * spec.step_dt)
    export(make_policy(slow), "p.onnx", obs=torch.zeros(4, 3))
    for command in ("eval", "play"):
        status, _, err = call(capsys, command, "p.onnx")
        assert status == 2
        assert "step_dt: 0.1 and 0.05" in err
        assert err.count("\n") == 1


def test_what_json_holds(pendulum_file):
    args = Verify(policy=pendulum_file, procedure=Procedure(episodes=4, threads=1))
    result = verify_command(args)
    assert result["passed"] is True
    assert result["task"] == "Pendulum-v0"
    assert result["config"]["max_falls"] == 0.02
    assert result["checks"]["obs/angle"]["passed"]
    assert set(result["metrics"]["training/episode_return"]) == {"mean", "ci95", "n", "unit"}
    json.dumps(result)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("export", "absent"), "absent"),
        (("export", "a.pt", "--checkpoint", "best"), "leave --checkpoint out"),
        (("export", "."), "not a run folder"),
        (("verify", "absent.onnx"), "no such file"),
        (("verify", "a.onnx", "--episodes", "0"), "episodes"),
    ],
)
def test_a_users_error_is_one_line(capsys, words, says):
    status, _, err = call(capsys, *words)
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
