import dataclasses
import math

import numpy as np
import pytest
from deployment import JOINTS, YAW_90, make_spec

from sim2real.card import CardError
from sim2real.observer import Reading
from sim2real.safety import Guard, Limits

NAMES = ("c", "a", "b")
DEFAULT = np.array([0.3, 0.1, 0.2])
KP = np.array([30.0, 10.0, 20.0])
KD, EFFORT, VELOCITY, LOW, HIGH = 0.5, 20.0, 10.0, -1.0, 2.0  # of the made-up robot
DT = 0.02
LIMITS = Limits(soft_start_s=0.0, pos_margin=0.1)


class Bench:
    """A guard that is called every 20 ms with a robot at rest, unless told otherwise."""

    def __init__(self, limits=LIMITS, spec=None):
        self.guard = Guard(spec or make_spec(), NAMES, limits)
        self.now = 50.0

    def __call__(
        self, wanted=DEFAULT, *, pos=DEFAULT, vel=0.0, age=0.0, gap=DT, asked=None, **orientation
    ):
        self.now += gap
        if orientation.keys() <= {"gyro"}:
            orientation["quat"] = np.array([1.0, 0, 0, 0])
        reading = Reading(
            time=self.now - age,
            joint_pos=np.array(pos, float),
            joint_vel=np.zeros(3) + vel,
            **orientation,
        )
        return self.guard.check(np.array(wanted, float), reading, self.now, asked)

    @property
    def cause(self):
        return self.guard.causes[0]


def tilted(degrees):
    half = math.radians(degrees) / 2
    return np.array([math.cos(half), 0.0, math.sin(half), 0.0])


def test_a_safe_target_passes_unchanged():
    bench = Bench()
    bench()
    sent = bench(DEFAULT + 0.1)
    np.testing.assert_array_equal(sent.pos, [DEFAULT + 0.1])
    np.testing.assert_array_equal(sent.kp, [KP])
    np.testing.assert_array_equal(sent.kd, [[KD] * 3])
    assert not bench.guard.altered[0]
    assert bench.cause is None


def test_position_limits_with_margin():
    # in range of torque: each joint near its limit; limits -1 to 2, margin 0.1
    bench = Bench()
    bench(pos=[1.8, -0.8, 1.8], wanted=[1.8, -0.8, 1.8])
    sent = bench(pos=[1.8, -0.8, 1.8], wanted=[5.0, -5.0, 2.0])
    np.testing.assert_allclose(sent.pos, [[1.9, -0.9, 1.9]])
    assert bench.guard.altered[0]


def test_targets_move_at_most_so_fast():
    # 2 times 10 rad/s times 20 ms: 0.4 rad
    bench = Bench()
    bench()
    np.testing.assert_allclose(bench(DEFAULT + [0.5, -0.5, 0.3]).pos, [[0.7, -0.3, 0.5]])
    np.testing.assert_allclose(bench(DEFAULT + [0.5, -0.5, 0.3]).pos, [[0.8, -0.4, 0.5]])


def test_torque_stays_inside_the_effort_limit():
    bench = Bench(dataclasses.replace(LIMITS, target_speed=100.0))
    bench()
    # c: 30 N·m/rad, so 20 N·m are 2/3 rad; a: 2 rad, stopped by the position limit at -0.9
    np.testing.assert_allclose(bench(DEFAULT + [1.2, -1.2, 0.0]).pos, [[0.3 + 2 / 3, -0.9, 0.2]])
    # at 6 rad/s damping takes 3 N·m: 23/30 rad forward and 17/30 backward
    np.testing.assert_allclose(bench(DEFAULT + [1.2, 0, 0], vel=6.0).pos[0, 0], 0.3 + 23 / 30)
    np.testing.assert_allclose(bench(DEFAULT - [1.2, 0, 0], vel=6.0).pos[0, 0], 0.3 - 17 / 30)
    half = Bench(dataclasses.replace(LIMITS, target_speed=100.0, effort_share=0.5))
    half()
    np.testing.assert_allclose(half(DEFAULT + [1.2, 0, 0]).pos[0, 0], 0.3 + 1 / 3)


def test_a_joint_that_is_too_fast_is_only_braked():
    bench = Bench(dataclasses.replace(LIMITS, target_speed=100.0))
    bench()
    # 12 rad/s is over 10: torque 30 (target - 0.3) - 0.5 * 12 at most 0, target at most 0.5
    np.testing.assert_allclose(bench(DEFAULT + [1, 0, 0], vel=[12, 0, 0]).pos[0, 0], 0.5)
    np.testing.assert_allclose(bench(DEFAULT + [0.1, 0, 0], vel=[12, 0, 0]).pos[0, 0], 0.4)
    np.testing.assert_allclose(bench(DEFAULT - [1, 0, 0], vel=[-12, 0, 0]).pos[0, 0], 0.1)


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        ({"wanted": [0.1, np.nan, 0.1]}, "target of a is no number"),
        ({"wanted": [0.1, 0.1, np.inf]}, "target of b is no number"),
        ({"pos": [np.nan, 0.1, 0.2]}, "position of c is no number"),
        ({"vel": [0.0, 0.0, np.nan]}, "velocity of b is no number"),
        ({"age": 0.0601}, "60 ms old"),
        ({"age": np.nan}, "old"),
        ({"age": -1.0}, "old"),  # from the future: two clocks
        ({"gap": 0.0601}, "missed deadline: 60 ms"),
        ({"gap": -0.01}, "missed deadline"),
        ({"quat": tilted(61)}, "tilt of 61 degrees"),
        ({"quat": tilted(180)}, "tilt of 180 degrees"),
        ({"quat": np.array([np.nan, 0, 0, 0])}, "orientation is no number"),
        ({"quat": np.zeros(4)}, "orientation is no number"),
        ({"quat": np.array([0.8, 0, 0, 0])}, "quaternion of length 0.8"),
        ({"quat": np.array([1e200, 0, 0, 0])}, "quaternion of length inf"),
        ({"gyro": np.array([0.0, np.inf, 0.0])}, "gyro's angular velocity"),
        # a broken reading makes the target no number, too; the reading is named
        ({"gyro": np.array([np.nan, 0, 0]), "wanted": [np.nan] * 3}, "gyro's angular velocity"),
        ({"quat": np.zeros(4), "wanted": [np.nan] * 3}, "orientation is no number"),
        # so does a command that is none; order walk, turn
        ({"asked": [0.5, np.nan], "wanted": [np.nan] * 3}, "command turn is no number"),
        ({"asked": [-np.inf, np.nan]}, "command walk, turn is no number"),
        ({"gravity": np.array([1.0, 0.0, 0.0])}, "tilt of 90"),
        ({"quat": None}, "no orientation"),
        ({"pos": [0.3, 5.0, 0.2]}, "no safe target for a"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_cannot_be_made_safe_stops_and_latches(call, cause):
    bench = Bench()
    bench()
    sent = bench(**call)
    assert cause in bench.cause
    assert "\n" not in bench.cause
    assert not sent.kp.any()
    assert np.isfinite(sent.pos).all()
    for _ in range(3):  # all is well again, yet it stays stopped
        sent = bench()
        assert not sent.kp.any()
        np.testing.assert_array_equal(sent.kd, [[KD] * 3])
    assert cause in bench.cause
    bench.guard.reset()
    assert bench.cause is None
    np.testing.assert_array_equal(bench().kp, [KP])


@pytest.mark.parametrize("call", [{"quat": tilted(59)}, {"age": 0.0599}, {"gap": 0.0599}])
def test_what_is_just_allowed_goes_on(call):
    bench = Bench()
    bench()
    np.testing.assert_array_equal(bench(**call).kp, [KP])


def calls_until_stopped(bench, gaps) -> int:
    bench()
    for count, gap in enumerate(gaps, 1):
        if not bench(gap=gap).kp.any():
            return count
    return 0


def test_a_loop_that_is_always_late_is_stopped():
    # each command is one step late and none is too late by itself: the eleventh is one too many
    bench = Bench()
    assert calls_until_stopped(bench, [2 * DT] * 60) == 11
    assert bench.cause == (
        "missed deadlines: the last 11 commands took 11 policy steps too long (at most 10)"
    )
    bench.guard.reset()
    bench.now += 5.0  # a pause before the release counts as nothing
    bench()
    assert bench.cause is None
    # every third is one step late: 50 commands lose more than ten steps
    assert 0 < calls_until_stopped(Bench(), [DT, DT, 2 * DT] * 20) <= 50
    # a slow clock of the robot's own loop: 25 ms lose 12.5 steps in 50 commands, 23 ms 7.5
    assert 0 < calls_until_stopped(Bench(), [0.025] * 60) <= 50
    assert calls_until_stopped(Bench(), [0.023] * 500) == 0


def test_a_release_of_one_robot_forgives_no_other():
    guard = Guard(make_spec(), NAMES, LIMITS, num_robots=2)
    pos, quat = np.tile(DEFAULT, (2, 1)), np.tile([1.0, 0, 0, 0], (2, 1))
    for k in range(12):  # each one step late
        now = 2 * DT * k
        reading = Reading(time=now, joint_pos=pos, joint_vel=0 * pos, quat=quat)
        guard.check(pos, reading, now)
        assert guard.stopped.tolist() == [k == 11, False]
        if k == 5:
            guard.reset([1])


def test_late_commands_now_and_then_are_allowed():
    assert calls_until_stopped(Bench(), ([DT] * 9 + [2 * DT]) * 50) == 0
    assert calls_until_stopped(Bench(), [0.012, 0.028] * 300) == 0  # jitter is no lateness
    patient = dataclasses.replace(LIMITS, max_behind_steps=20.0)
    assert calls_until_stopped(Bench(patient), [2 * DT] * 60) == 21
    with pytest.raises(ValueError, match="max_behind_steps"):
        Limits(max_behind_steps=0.0)


def test_tilt_is_the_bases_not_the_imus():
    imu_roll = (math.sqrt(0.5), math.sqrt(0.5), 0.0, 0.0)
    bench = Bench(spec=make_spec(imu_quat=imu_roll))
    upright = np.array(imu_roll)  # R_imu = R_base R_mount with R_base = 1
    np.testing.assert_array_equal(bench(quat=upright).kp, [KP])
    assert not bench(quat=np.array([1.0, 0, 0, 0])).kp.any()
    assert "tilt of 90" in bench.cause


def test_a_fixed_base_needs_no_orientation():
    bench = Bench(dataclasses.replace(LIMITS, max_tilt=math.inf))
    np.testing.assert_array_equal(bench(quat=None).kp, [KP])


def test_emergency_stop_latches():
    bench = Bench()
    bench()
    bench.guard.stop("button")
    assert not bench().kp.any()
    assert bench.cause == "button"
    bench.guard.stop("button again")
    assert bench.cause == "button"


def test_one_robot_of_many_stops():
    guard = Guard(make_spec(), NAMES, LIMITS, num_robots=3)
    pos = np.tile(DEFAULT, (3, 1))
    quat = np.tile([1.0, 0, 0, 0], (3, 1))
    quat[1] = tilted(90)
    sent = guard.check(pos, Reading(time=0.0, joint_pos=pos, joint_vel=0 * pos, quat=quat), 0.0)
    assert guard.stopped.tolist() == [False, True, False]
    assert [k.any() for k in sent.kp] == [True, False, True]
    guard.stop("button", [2])
    guard.reset([1])
    assert guard.stopped.tolist() == [False, False, True]
    assert guard.causes == [None, None, "button"]


def test_damping_of_a_fast_joint_stays_inside_the_effort_limit():
    bench = Bench()
    bench()
    bench.guard.stop("button")
    sent = bench(vel=[100.0, -100.0, 1.0])
    np.testing.assert_allclose(sent.kd, [[0.2, 0.2, 0.5]])  # 20 N·m at 100 rad/s
    # unknown speed: safe up to the velocity limit, kd at most 20 / 10
    strong = make_spec()
    joints = tuple(dataclasses.replace(j, kd=5.0) for j in JOINTS)
    strong = dataclasses.replace(strong, robot=dataclasses.replace(strong.robot, joints=joints))
    np.testing.assert_allclose(Guard(strong, NAMES).damping().kd, [[2.0] * 3])


def test_hold_keeps_the_last_safe_target_while_it_is_safe():
    bench = Bench(dataclasses.replace(LIMITS, stop="hold"))
    bench()
    bench(DEFAULT + 0.1)
    bench.guard.stop("button")
    sent = bench(DEFAULT - 1.0)
    np.testing.assert_array_equal(sent.pos, [DEFAULT + 0.1])
    np.testing.assert_array_equal(sent.kp, [KP])
    sent = bench(pos=[-0.9, 0.1, 0.2])  # 1.3 rad away, 39 N·m for joint c: damped instead
    np.testing.assert_array_equal(sent.kp, [[0.0, 10.0, 20.0]])
    sent = bench(pos=[np.nan, 0.1, 0.2])
    np.testing.assert_array_equal(sent.kp, [[0.0, 10.0, 20.0]])


def test_soft_start_from_the_pose_found():
    bench = Bench(Limits(soft_start_s=0.4, pos_margin=0.1))
    found = np.array([1.0, -0.5, 0.5])
    guard = bench.guard
    sent = [bench(DEFAULT, pos=found, gap=DT).pos[0]]
    assert guard.starting[0]
    for _ in range(19):
        sent.append(bench(DEFAULT, pos=sent[-1]).pos[0])
    assert guard.starting[0]
    sent.append(bench(DEFAULT, pos=sent[-1]).pos[0])
    assert not guard.starting[0]
    np.testing.assert_array_equal(sent[0], found)
    np.testing.assert_allclose(sent[10], (found + DEFAULT) / 2)
    np.testing.assert_array_equal(sent[20], DEFAULT)
    steps = np.abs(np.diff(np.array(sent), axis=0)).max(1)
    assert steps.max() <= 1.5 * 0.7 / 20 + 1e-9  # smoothstep's greatest slope is 1.5
    assert steps[0] < 0.2 * steps.max()


def test_soft_start_from_outside_the_limits():
    bench = Bench(Limits(soft_start_s=1.0, pos_margin=0.1))
    np.testing.assert_allclose(bench(pos=[2.05, -1.05, 0.2]).pos, [[1.9, -0.9, 0.2]])
    assert bench.cause is None


def test_limits_are_checked():
    with pytest.raises(ValueError, match="max_tilt"):
        Limits(max_tilt=0.0)
    with pytest.raises(ValueError, match="effort_share"):
        Limits(effort_share=1.1)
    with pytest.raises(ValueError, match="pos_margin"):
        Limits(pos_margin=math.nan)
    with pytest.raises(ValueError, match="stop"):
        Limits(stop="panic")
    with pytest.raises(CardError, match="no safe command exists for c, a, b"):
        Guard(make_spec(), NAMES, Limits(pos_margin=1.5))
    with pytest.raises(CardError, match="missing: c"):
        Guard(make_spec(), ("a", "b"))


# A million steps ------------------------------------------------------------------------------


class Oracle:
    """What a command must satisfy, written down from the outside.

    It knows the robot's numbers, what the sensors said and what was sent before; it does not look
    into the guard.
    """

    def __init__(self, n, limits):
        self.limits = limits
        self.last = np.full((n, 3), np.nan)  # targets sent before, nan after a reset
        self.latched = np.zeros(n, bool)
        self.begin_pos = np.full((n, 3), np.nan)
        self.begin_time = np.full(n, np.nan)
        self.last_time = np.nan

    def reset(self, rows):
        self.last[rows] = self.begin_pos[rows] = np.nan
        self.begin_time[rows] = np.nan
        self.latched[rows] = False

    def must_stop(self, wanted, reading, now, fresh):
        """Rows that may on no account be driven on."""
        broken = ~(
            np.isfinite(wanted) & np.isfinite(reading.joint_pos) & np.isfinite(reading.joint_vel)
        ).all(1)
        w, x, y, z = reading.quat.T
        up = (w * w - x * x - y * y + z * z) / (w * w + x * x + y * y + z * z)
        fallen = ~(np.degrees(np.arccos(np.clip(up, -1, 1))) <= 60 + 1e-6)
        stale = not now - reading.time <= 3 * DT + 1e-9
        late = now - self.last_time > 3 * DT + 1e-9
        return broken | fallen | stale | (late & ~fresh)

    def violations(self, wanted, reading, now, sent, claims):
        """Name of each broken rule; `claims`: robots that the guard says it stopped."""
        found = []
        pos, vel = reading.joint_pos, reading.joint_vel
        fresh = np.isnan(self.begin_time)
        self.begin_time[fresh] = now
        self.begin_pos[fresh] = np.clip(pos, LOW + 0.1, HIGH - 0.1)[fresh]
        must_stop = self.must_stop(wanted, reading, now, fresh) | self.latched
        driven = sent.kp > 0
        self.latched |= must_stop | ~driven.any(1) | claims

        if not (np.isfinite(sent.pos) & np.isfinite(sent.kp) & np.isfinite(sent.kd)).all():
            found.append("not finite")
        if (sent.kp < 0).any() or (sent.kd <= 0).any() or (sent.kp > KP).any():
            found.append("gains")
        holds = self.limits.stop == "hold"
        if not holds and driven[must_stop].any():
            found.append("driven though it must stop")
        if not holds and (driven.any(1) != driven.all(1)).any():
            found.append("half stopped")
        if (
            holds
            and (np.abs(sent.pos - self.last)[must_stop] > 0)[~np.isnan(self.last)[must_stop]].any()
        ):
            found.append("hold that moves")

        known = np.isfinite(pos) & np.isfinite(vel)
        torque = sent.kp * (sent.pos - pos) - sent.kd * vel
        if (np.abs(torque)[known] > EFFORT + 1e-6).any():
            found.append("torque")
        blind = np.isfinite(vel) & ~known  # no position: at least the damping must be safe
        if (sent.kd * VELOCITY > EFFORT + 1e-6)[blind].any():
            found.append("blind damping")
        if ((torque > 1e-6) & (vel >= VELOCITY))[known].any():
            found.append("pushes a fast joint on")
        if ((torque < -1e-6) & (vel <= -VELOCITY))[known].any():
            found.append("pushes a fast joint back")

        if ((sent.pos < LOW + 0.1 - 1e-9) | (sent.pos > HIGH - 0.1 + 1e-9))[driven].any():
            found.append("position")
        before = np.where(np.isnan(self.last), self.begin_pos, self.last)
        if (np.abs(sent.pos - before) > 2 * VELOCITY * DT + 1e-9)[driven].any():
            found.append("rate")
        # A soft start that lasts T has after t gone at most 1.5 t/T and 3 (t/T)^2 of the way ...
        x = (now - self.begin_time) / self.limits.soft_start_s
        share = np.minimum(1.0, np.minimum(1.5 * x, 3 * x * x))[:, None]
        far = np.abs(sent.pos - self.begin_pos) > share * np.abs(wanted - self.begin_pos) + 1e-9
        # ... unless the torque or rate limit holds the target where the joint is.
        forced = np.abs(np.abs(torque) - EFFORT) < 1e-6
        forced |= (np.abs(vel) >= VELOCITY) & (np.abs(torque) < 1e-6)
        forced |= np.abs(np.abs(sent.pos - before) - 2 * VELOCITY * DT) < 1e-9
        if (far & driven & known & ~forced & ~self.latched[:, None]).any():
            found.append("soft start")
        self.last = sent.pos.copy()
        self.last_time = now
        return found


def storm(guard, oracle, n, steps, seed):
    """Random targets and sensors, mostly sane, now and then absurd; yields broken rules."""
    random = np.random.default_rng(seed)
    chance = lambda p, *shape: random.random(shape or n) < p  # noqa: E731
    pos, now = np.tile(DEFAULT, (n, 1)), 7.0
    for _ in range(steps):
        gap = DT if random.random() < 0.99 else random.uniform(0.0, 0.09)
        now += gap
        sent_before = np.where(np.isnan(oracle.last), pos, oracle.last)
        pos = pos + 0.5 * (sent_before - pos) + 0.05 * random.normal(size=(n, 3))
        vel = 3.0 * random.normal(size=(n, 3))
        wanted = DEFAULT + random.uniform(-1, 1, (n, 3)) * random.choice([0.1, 1.0, 4.0], (n, 1))
        wild = chance(0.01, n, 3)
        vel[wild] *= 10
        seen = np.where(chance(0.002, n, 3), random.uniform(-4, 4, (n, 3)), pos)
        for array, p in ((seen, 3e-4), (vel, 3e-4), (wanted, 3e-4)):
            bad = chance(p, n, 3)
            array[bad] = random.choice([np.nan, np.inf, -np.inf], bad.sum())
        angle = np.where(chance(0.001), random.uniform(0, math.pi, n), random.uniform(0, 0.5, n))
        quat = np.zeros((n, 4))
        axis = random.uniform(-math.pi, math.pi, n)
        quat[:, 0], half = np.cos(angle / 2), np.sin(angle / 2)
        quat[:, 1], quat[:, 2] = half * np.cos(axis), half * np.sin(axis)
        quat[chance(2e-4)] = np.nan
        age = random.uniform(0, 0.02) if random.random() < 0.99 else random.uniform(0.05, 0.09)
        reading = Reading(time=now - age, joint_pos=seen, joint_vel=vel, quat=quat)
        sent = guard.check(wanted, reading, now)
        yield oracle.violations(wanted, reading, now, sent, guard.stopped)
        again = oracle.latched & chance(0.2)
        guard.reset(again)
        oracle.reset(again)


@pytest.mark.parametrize("stop", ["damp", "hold"])
def test_a_million_random_steps_without_an_unsafe_command(stop):
    n, steps = 1000, 1000
    limits = Limits(soft_start_s=0.5, pos_margin=0.1, stop=stop)
    guard = Guard(make_spec(), NAMES, limits, n)
    oracle = Oracle(n, limits)
    driven = latched = 0
    with np.errstate(invalid="ignore"):
        for found in storm(guard, oracle, n, steps, seed=3):
            assert found == []
            driven += np.sum(~oracle.latched)
            latched += np.sum(oracle.latched)
    # the storm must have had both: mostly driven, yet often stopped
    assert driven > 0.4 * n * steps
    assert latched > 0.02 * n * steps


@pytest.mark.parametrize(
    ("weaken", "rule"),
    [
        ({"effort": 1.1 * EFFORT}, "torque"),
        ({"velocity": 1.1 * VELOCITY}, "pushes a fast joint on"),
        ({"low": LOW, "high": HIGH}, "position"),
        ({"max_step": 2.2 * VELOCITY * DT}, "rate"),
        ({"_min_upright": 0.4}, "driven though it must stop"),
        ({"_tilts": False}, "driven though it must stop"),
        ({"limits": Limits(max_age_steps=4.0, soft_start_s=0.5)}, "driven though it must stop"),
        ({"limits": Limits(max_gap_steps=4.0, soft_start_s=0.5)}, "driven though it must stop"),
        ({"limits": Limits(soft_start_s=0.4)}, "soft start"),
    ],
)
def test_the_storm_finds_a_guard_that_is_too_weak(weaken, rule):
    n, limits = 200, Limits(soft_start_s=0.5, pos_margin=0.1)
    guard = Guard(make_spec(), NAMES, limits, n)
    for name, value in weaken.items():
        before = getattr(guard, name)
        setattr(guard, name, np.full(3, value) if isinstance(before, np.ndarray) else value)
    oracle = Oracle(n, limits)
    found = set()
    with np.errstate(invalid="ignore"):
        for broken in storm(guard, oracle, n, 1000, seed=4):
            found |= set(broken)
    assert rule in found


def test_yaw_is_no_tilt():
    bench = Bench()
    np.testing.assert_array_equal(bench(quat=np.array(YAW_90)).kp, [KP])
