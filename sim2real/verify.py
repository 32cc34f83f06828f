"""Proves an exported file outside the training environment, through the robot's own runtime.

For a task with a robot:

- *card*: what the file says agrees with the task as installed here, field by field;
- *observation*: in the same states, every term that the runtime builds from raw sensor readings
  equals the training environment's;
- *tracking*: runtime and guard drive single robots in plain MuJoCo (`mj_step`, no noise, pushes,
  randomisation or delay) with random commands over the whole trained range; counted are falls and
  the RMS error of each velocity, leaving out the time right after each new command. This is done
  with the model's training settings and again with finer physics;
- *standing*: after a walk the command becomes zero; counted are feet on the floor and drift;
- beside them the same figures in the randomised training environment, without a verdict.

For a task without a robot: observation, and the return in the training environment. Given a run
folder, the file is also compared with the checkpoint it came from.

Reading order: `sim2real.thresholds` -> `Report`, `Case` -> `verify` -> the parts as above.
"""

import copy
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch

from ctrl_rl import registry
from ctrl_rl.commands.train import rebuild
from ctrl_rl.evaluation import Metric, bootstrap, evaluate, wilson
from ctrl_rl.making import make
from ctrl_rl.policy import OnnxPolicy, Policy, load_policy
from ctrl_rl.spec import CommandDim, EnvSpec, spec_differences
from sim2real.card import (
    TOLERANCE,
    Card,
    CardError,
    action_difference,
    robot_of,
)
from sim2real.runtime import (
    Controller,
    JointCommand,
    Network,
    Reading,
    imu_to_base,
    load,
)
from sim2real.safety import Guard, Limits
from sim2real.thresholds import Procedure, Thresholds

AXES = {f"{kind}_vel_{axis}": (kind, k) for kind in ("lin", "ang") for k, axis in enumerate("xyz")}
"""Command name -> which body velocity follows it."""

PARITY_ENVS = 16
PARITY_MARGIN = 50  # steps beyond a whole episode, so that a time limit's reset is among them
STAND_ROBOTS = 20
WALK_BEFORE_STAND_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One figure with the limit it is held to."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False
    """True: the value must not be below the limit; else not above."""

    @property
    def passed(self) -> bool:
        """Not a number never passes."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class Report:
    """What `verify` found."""

    task: str
    checks: list[Check] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Lines for people: differences of the card, causes of safety stops."""
    wall_s: dict[str, float] = field(default_factory=dict)
    """Time of each part [s]."""

    @property
    def passed(self) -> bool:
        """All checks passed, and there was one."""
        return bool(self.checks) and all(c.passed for c in self.checks)

    def __str__(self) -> str:
        judged = {c.name for c in self.checks}
        width = max(len(n) for n in (*judged, *self.metrics))
        lines = []
        for c in self.checks:
            verdict = "ok  " if c.passed else "FAIL"
            sign = ">=" if c.at_least else "<="
            unit = "" if c.unit == "-" else f" {c.unit}"
            metric = self.metrics.get(c.name)
            ci95 = metric.ci95 if metric else None
            spread = f" [{ci95[0]:.3g}, {ci95[1]:.3g}]" if ci95 else ""
            lines.append(
                f"{verdict}  {c.name:<{width}}  {c.value:.4g}{spread}{unit}  ({sign} {c.limit:g})"
            )
        for name, metric in self.metrics.items():
            if name not in judged:
                lines.append(f"      {name:<{width}}  {metric}")
        lines += self.notes
        lines.append(", ".join(f"{k} {v:.1f} s" for k, v in self.wall_s.items()))
        lines.append("passed" if self.passed else "NOT passed")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is verified, and how."""

    path: Path
    network: Network
    card: Card
    policy: Policy | OnnxPolicy | None
    """The checkpoint that the file came from, where it is at hand."""
    task: Any
    """Class of the task; of one with a robot, `plain_models`, `trunk_geoms` and `foot_geoms`."""
    limits: Thresholds
    how: Procedure

    def make(self, variant: str, num_envs: int):
        """The training environment as configured in training, "evaluation" or "nominal"."""
        config = getattr(rebuild(self.task.Config, self.card.task_config), variant)()
        return make(
            self.task.id, num_envs, config=config, seed=self.how.seed, threads=self.how.threads
        )


def open_case(
    path: str | Path, thresholds: Thresholds | None = None, procedure: Procedure | None = None
) -> Case:
    """Load a file, or a run folder that holds one; arguments and errors as of `verify`."""
    path, run = Path(path), None
    if path.is_dir():
        run, path = path, path / "policy.onnx"
        if not path.is_file():
            raise CardError(f"{run} holds no policy.onnx; write it with: ctrl-rl export {run}")
    network, card = load(path)
    return Case(
        path=path,
        network=network,
        card=card,
        policy=None if run is None else load_policy(run, str(card.train_steps)),
        task=registry.load("tasks", card.spec.task),
        limits=thresholds or Thresholds(),
        how=procedure or Procedure(),
    )


def verify(
    path: str | Path,
    thresholds: Thresholds | None = None,
    procedure: Procedure | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Run all checks on an exported file.

    Args:
        path: `policy.onnx`, or a run folder that holds one; then the file is also compared with
            the checkpoint that it was exported from.
        thresholds: None for the defaults.
        procedure: None for the defaults.
        say: told what is going on.

    Raises:
        CardError: no file, or it is damaged, foreign or not of one piece.
        NotFound: its task, or that version of it, is not installed.
    """
    case = open_case(path, thresholds, procedure)
    report = Report(case.card.spec.task)

    def part(name: str, function, *args) -> None:
        say(f"{name} ...")
        start = time.perf_counter()
        function(case, report, *args)
        report.wall_s[name] = time.perf_counter() - start

    part("observation", check_observation)
    if case.card.spec.robot is None:
        part("return", check_return)
        return report
    for name, model in case.task.plain_models().items():
        part(f"{name} physics", check_tracking, name, model)
        part(f"{name} standing", check_standing, name, model)
    part("randomised", measure_randomised)
    return report


# Observation --------------------------------------------------------------------------------


def check_observation(case: Case, report: Report) -> None:
    """The runtime's observation beside the training environment's, in the same states.

    And the file's action beside the policy's, where there is one.
    """
    env, spec, policy = case.make("nominal", PARITY_ENVS), case.card.spec, case.policy
    different = spec_differences(spec, env.spec)
    report.notes += [f"card differs from the task: {line}" for line in different]
    report.checks.append(
        Check(name="card/differences", value=len(different), limit=0, unit="fields")
    )
    names, read = _environment_reader(env, spec)
    controller = Controller(case.network, case.card, names, PARITY_ENVS)
    if policy is not None:
        policy.reset()
    aligned = np.zeros((PARITY_ENVS, 1), bool)
    worst = {t.name: 0.0 for t in spec.obs["actor"]}
    worst_action = 0.0
    expected = env.observe()["actor"].numpy()
    for _ in range(spec.max_episode_steps + PARITY_MARGIN):
        raw = {k: v.numpy() for k, v in env.observe_terms(slice(None)).items()}
        _align_clock(controller, raw, aligned)
        action = controller.act(read(raw), _command(spec, raw))
        start = 0
        for term in spec.obs["actor"]:
            block = slice(start, start + term.width)
            there = expected[:, block]
            error = np.abs(controller.obs[:, block].astype(np.float64) - there)
            worst[term.name] = max(worst[term.name], float(np.nan_to_num(error, nan=np.inf).max()))
            start += term.width
        if policy is not None:
            answer = policy(torch.from_numpy(controller.obs)).numpy()
            worst_action = max(worst_action, action_difference(action, answer))
        step = env.step(torch.from_numpy(action))
        ended = (step.terminated | step.truncated).numpy()
        controller.reset(ended)
        if policy is not None:
            policy.reset(torch.from_numpy(ended))
        aligned[ended] = False
        expected = step.obs["actor"].numpy()
    env.close()
    if policy is not None:
        report.checks.append(
            Check(name="action/difference", value=worst_action, limit=TOLERANCE, unit="-")
        )
    for name, value in worst.items():
        report.checks.append(
            Check(name=f"obs/{name}", value=value, limit=case.limits.max_obs_difference, unit="-")
        )


def _environment_reader(env, spec: EnvSpec):
    """The robot's joint order, and a function that turns the env's present state to a reading."""
    signals = [t.name for t in spec.obs["actor"] if t.kind == "signal"]
    if spec.robot is None:
        empty = np.zeros((env.num_envs, 0))
        return (), lambda raw: Reading(
            time=0.0, joint_pos=empty, joint_vel=empty, signals={n: raw[n] for n in signals}
        )
    sensors = Sensors(_first_model(type(env)), spec)
    return sensors.joint_names, lambda raw: sensors.read(
        env.sim.qpos.numpy(), env.sim.qvel.numpy(), 0.0, {n: raw[n] for n in signals}
    )


def _first_model(task) -> mujoco.MjModel:
    """The plain model with training settings."""
    return next(iter(task.plain_models().values()))


def _command(spec: EnvSpec, raw: dict[str, np.ndarray]) -> np.ndarray:
    """The environment's command (N, C), in the order of `spec.command`."""
    term = next((t for t in spec.obs["actor"] if t.kind == "command"), None)
    if term is None:
        return np.zeros((1, len(spec.command)))
    labels = term.labels or tuple(d.name for d in spec.command)
    return raw[term.name][:, [labels.index(d.name) for d in spec.command]]


def _align_clock(controller: Controller, raw: dict[str, np.ndarray], aligned: np.ndarray) -> None:
    """Set the clock once per episode to where the environment's began, which is random.

    From then on it must run by itself, so rate and standing rule are still checked.
    """
    term = next((t for t in controller.spec.obs["actor"] if t.kind == "phase"), None)
    if term is None or aligned.all():
        return
    sin, cos = raw[term.name].T
    new = ~aligned[:, 0] & ((sin != 0) | (cos != 0))
    turns = np.arctan2(sin, cos) / math.tau
    observer = controller.observer
    elapsed = observer.steps * (controller.spec.step_dt * term.rate_hz)
    observer.clock_start[new] = (turns - elapsed)[new]
    aligned[new] = True


# Single robots in plain MuJoCo ------------------------------------------------------------------


class Sensors:
    """Raw sensor readings from plain MuJoCo states; addresses go by joint name.

    Args:
        model: compiled robot whose IMU's body floats freely.
        spec: from the card.

    Raises:
        ValueError: the model lacks a joint, or the IMU's body does not float.
    """

    def __init__(self, model: mujoco.MjModel, spec: EnvSpec) -> None:
        self.joint_names = tuple(
            model.joint(j).name
            for j in range(model.njnt)
            if model.jnt_type[j] != mujoco.mjtJoint.mjJNT_FREE
        )
        wanted = {j.name for j in robot_of(spec).joints}
        if wanted != set(self.joint_names):
            missing = ", ".join(sorted(wanted ^ set(self.joint_names)))
            raise ValueError(f"model and card do not have the same joints: {missing}")
        address = lambda key: [  # noqa: E731
            int(getattr(model, key)[model.joint(n).id]) for n in self.joint_names
        ]
        self.qpos, self.qvel = address("jnt_qposadr"), address("jnt_dofadr")
        body = model.body(robot_of(spec).imu_body)
        joint = int(body.jntadr[0]) if body.jntnum[0] else -1
        if joint < 0 or model.jnt_type[joint] != mujoco.mjtJoint.mjJNT_FREE:
            raise ValueError(
                f"body {robot_of(spec).imu_body!r}, which holds the IMU, does not float"
            )
        self.base_qpos = int(model.jnt_qposadr[joint])
        self.base_qvel = int(model.jnt_dofadr[joint])
        self._imu_to_base = imu_to_base(spec)
        self._imu_quat = np.array(robot_of(spec).imu_quat)

    def read(self, qpos: np.ndarray, qvel: np.ndarray, now: float, signals=None) -> Reading:
        """What the robot's sensors say in states (N, nq), (N, nv); no noise."""
        quat = self.base_quat(qpos).copy()
        if not np.array_equal(self._imu_quat, (1, 0, 0, 0)):
            for row in quat:
                mujoco.mju_mulQuat(row, row.copy(), self._imu_quat)
        gyro = qvel[:, self.base_qvel + 3 : self.base_qvel + 6] @ self._imu_to_base
        return Reading(
            time=now,
            joint_pos=qpos[:, self.qpos],
            joint_vel=qvel[:, self.qvel],
            gyro=gyro,
            quat=quat,
            signals=signals or {},
        )

    def velocities(self, qpos: np.ndarray, qvel: np.ndarray) -> dict[str, np.ndarray]:
        """Linear (N, 3) [m/s] and angular (N, 3) [rad/s] velocity of the base in its own frame."""
        linear = np.empty((len(qpos), 3))
        inverse = np.empty(4)
        for i, quat in enumerate(self.base_quat(qpos)):
            mujoco.mju_negQuat(inverse, quat)
            mujoco.mju_rotVecQuat(linear[i], qvel[i, self.base_qvel : self.base_qvel + 3], inverse)
        return {"lin": linear, "ang": qvel[:, self.base_qvel + 3 : self.base_qvel + 6]}

    def base_quat(self, qpos: np.ndarray) -> np.ndarray:
        """Orientation of the base in the world (N, 4), wxyz."""
        return qpos[:, self.base_qpos + 3 : self.base_qpos + 7]

    def base_xy(self, qpos: np.ndarray) -> np.ndarray:
        """Place of the base on the floor (N, 2) [m]."""
        return qpos[:, self.base_qpos : self.base_qpos + 2]

    def tilt(self, qpos: np.ndarray) -> np.ndarray:
        """Angle between the base's up axis and the vertical (N,) [rad]."""
        x, y = self.base_quat(qpos)[:, 1:3].T
        return np.arccos(np.clip(1 - 2 * (x * x + y * y), -1, 1))


class Robots:
    """N single robots, each an `MjData` of its own, stepped by `mj_step`.

    Position control runs in the model's actuators with the gains of the card.

    Args:
        model: the plain model; its actuators' gains are overwritten in a copy.
        spec: from the card.
        qpos: start (N, nq).
        qvel: start (N, nv).
        threads: 0 for all cores.
        watch: geoms whose contacts are noted in every physics step.

    Raises:
        ValueError: a joint without a position actuator.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        spec: EnvSpec,
        qpos: np.ndarray,
        qvel: np.ndarray,
        threads: int,
        watch: tuple[str, ...] = (),
    ) -> None:
        self.sensors = Sensors(model, spec)
        self.model = model = _with_gains(model, spec)
        self.joint_names = self.sensors.joint_names
        driver = {int(model.actuator_trnid[u, 0]): u for u in range(model.nu)}
        self._actuators = [driver[model.joint(n).id] for n in self.joint_names]
        self.num_steps = round(spec.step_dt / model.opt.timestep)
        self.data = [mujoco.MjData(model) for _ in range(len(qpos))]
        for data, q, v in zip(self.data, qpos, qvel, strict=True):
            data.qpos[:], data.qvel[:] = q, v
            mujoco.mj_forward(model, data)
        self.alive = np.ones(len(qpos), bool)
        self.touched = np.zeros(len(qpos), bool)
        """Robots of which a watched geom touched something during the last `step` (N,)."""
        self._watched = np.zeros(model.ngeom, bool)
        self._watched[[model.geom(g).id for g in watch]] = True
        self.time = 0.0
        count = threads or os.cpu_count() or 1
        self._chunks = np.array_split(np.arange(len(qpos)), count)
        self._pool = ThreadPoolExecutor(count)

    @property
    def qpos(self) -> np.ndarray:
        """Positions (N, nq)."""
        return np.stack([d.qpos for d in self.data])

    @property
    def qvel(self) -> np.ndarray:
        """Velocities (N, nv)."""
        return np.stack([d.qvel for d in self.data])

    def read(self) -> Reading:
        """Sensor readings now, (N, ...)."""
        return self.sensors.read(self.qpos, self.qvel, self.time)

    def step(self, command: JointCommand) -> None:
        """Hold a command for one policy step; robots that are not alive stay frozen."""

        def advance(rows: np.ndarray) -> None:
            for i in rows:
                if self.alive[i]:
                    data = self.data[i]
                    data.ctrl[self._actuators] = command.pos[i]
                    for _ in range(self.num_steps):
                        mujoco.mj_step(self.model, data)
                        if data.ncon and self._watched[data.contact.geom].any():
                            self.touched[i] = True

        self.touched[:] = False
        list(self._pool.map(advance, self._chunks))
        self.time += self.num_steps * self.model.opt.timestep

    def touching(self, geoms: tuple[str, ...]) -> np.ndarray:
        """Which of the named geoms touch something (N, G), as of the last physics step."""
        column = np.full(self.model.ngeom, len(geoms))  # the others share a last column
        column[[self.model.geom(g).id for g in geoms]] = np.arange(len(geoms))
        touch = np.zeros((len(self.data), len(geoms) + 1), bool)
        for i, data in enumerate(self.data):
            if self.alive[i] and data.ncon:
                touch[i, column[data.contact.geom]] = True
        return touch[:, :-1]

    def bad(self) -> np.ndarray:
        """Robots whose simulation left the numbers, which MuJoCo resets without an error (N,)."""
        kinds = (
            mujoco.mjtWarning.mjWARN_BADQPOS,
            mujoco.mjtWarning.mjWARN_BADQVEL,
            mujoco.mjtWarning.mjWARN_BADQACC,
        )
        return np.array([any(d.warning[k].number for k in kinds) for d in self.data])

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()


def _with_gains(model: mujoco.MjModel, spec: EnvSpec) -> mujoco.MjModel:
    """A copy of the model whose position actuators have the card's gains."""
    model = copy.deepcopy(model)
    driver = {int(model.actuator_trnid[u, 0]): u for u in range(model.nu)}
    for joint in robot_of(spec).joints:
        u = driver.get(model.joint(joint.name).id)
        if u is None or model.actuator_biastype[u] != mujoco.mjtBias.mjBIAS_AFFINE:
            raise ValueError(f"joint {joint.name!r} of the plain model has no position actuator")
        model.actuator_gainprm[u, 0] = joint.kp
        model.actuator_biasprm[u, 1:3] = -joint.kp, -joint.kd
    return model


class Tracking:
    """Sums of squared velocity errors, leaving out the time after each new command.

    Args:
        command: from the spec; only its velocities (`AXES`) are measured.
        num_robots: N.
        step_dt: [s].
        settle_s: left out [s].
    """

    def __init__(
        self, command: tuple[CommandDim, ...], num_robots: int, step_dt: float, settle_s: float
    ) -> None:
        self.dims = [(k, d) for k, d in enumerate(command) if d.name in AXES]
        self._settle_steps = round(settle_s / step_dt)
        self._last = np.full((num_robots, len(command)), np.nan)
        self._since = np.zeros(num_robots, np.int64)
        self.squares = np.zeros((num_robots, len(self.dims)))
        """Sum of squared errors (N, axes)."""
        self.count = np.zeros(num_robots, np.int64)
        """Steps counted (N,)."""

    def add(self, command: np.ndarray, velocities: dict[str, np.ndarray], alive) -> None:
        """One step: what was asked for before it, and what came of it."""
        changed = np.any(command != self._last, 1)
        self._last = np.array(command)
        self._since = np.where(changed, 1, self._since + 1)
        counts = alive & (self._since > self._settle_steps)
        self.count += counts
        for column, (k, dim) in enumerate(self.dims):
            kind, axis = AXES[dim.name]
            error = velocities[kind][:, axis] - command[:, k]
            self.squares[counts, column] += error[counts] ** 2

    def metrics(self, prefix: str) -> dict[str, Metric]:
        """RMS error over all steps of all robots; the interval is over robots."""
        found, rows = {}, self.count > 0
        for column, (_, dim) in enumerate(self.dims):
            squares = self.squares[rows, column]
            mean = math.sqrt(squares.sum() / self.count.sum()) if rows.any() else math.nan
            interval = None
            if rows.any():
                interval = bootstrap(torch.from_numpy(squares / self.count[rows]))
            if interval is not None:
                interval = math.sqrt(max(0.0, interval[0])), math.sqrt(max(0.0, interval[1]))
            found[f"{prefix}/rms_{dim.name}"] = Metric(
                mean=mean, ci95=interval, n=int(rows.sum()), unit=dim.unit
            )
        return found


def check_tracking(case: Case, report: Report, name: str, model: mujoco.MjModel) -> None:
    """Random commands over the whole trained range: falls and tracking errors."""
    spec, how, limits = case.card.spec, case.how, case.limits
    n = how.episodes
    commands = _random_commands(spec, n, math.ceil(how.episode_s / how.command_s), how.seed)
    per_command = round(how.command_s / spec.step_dt)
    drive = _Drive(case, model, n)
    tracking = Tracking(spec.command, n, spec.step_dt, how.settle_s)
    altered = 0
    counted = 0
    for k in range(round(how.episode_s / spec.step_dt)):
        command = commands[k // per_command]
        velocities = drive.step(command)
        alive = drive.robots.alive
        tracking.add(command, velocities, alive)
        altered += int(np.sum(drive.guard.altered & alive))
        counted += int(np.sum(alive))
    drive.close()
    falls = int(drive.fallen.sum())
    report.metrics[f"{name}/falls"] = Metric(mean=falls / n, ci95=wilson(falls, n), n=n, unit="-")
    report.checks.append(
        Check(name=f"{name}/falls", value=falls / n, limit=limits.max_falls, unit="-")
    )
    found = tracking.metrics(name)
    report.metrics |= found
    for _, dim in tracking.dims:
        linear = AXES[dim.name][0] == "lin"
        key = f"{name}/rms_{dim.name}"
        report.checks.append(
            Check(
                name=key,
                value=found[key].mean,
                limit=limits.max_lin_error if linear else limits.max_ang_error,
                unit=dim.unit,
            )
        )
    report.metrics[f"{name}/altered_by_guard"] = Metric(
        mean=altered / max(counted, 1), ci95=None, n=counted, unit="-"
    )
    causes = [c for c in drive.guard.causes if c]
    if causes:
        report.notes.append(f"{name}: the guard stopped {len(causes)} of {n}, first: {causes[0]}")


def check_standing(case: Case, report: Report, name: str, model: mujoco.MjModel) -> None:
    """Walk, then zero command: after `settle_s`, feet down and no drift for `stand_s`."""
    spec, how, limits = case.card.spec, case.how, case.limits
    n = min(STAND_ROBOTS, how.episodes)
    (walk,) = _random_commands(spec, n, 1, how.seed + 1)
    stand = np.zeros_like(walk)
    drive = _Drive(case, model, n)
    for _ in range(round(WALK_BEFORE_STAND_S / spec.step_dt)):
        drive.step(walk)
    for _ in range(round(how.settle_s / spec.step_dt)):
        drive.step(stand)
    sensors = drive.robots.sensors
    home = sensors.base_xy(drive.robots.qpos)
    drift, down = np.zeros(n), np.zeros(n)
    steps = round(how.stand_s / spec.step_dt)
    for _ in range(steps):
        drive.step(stand)
        away = np.linalg.norm(sensors.base_xy(drive.robots.qpos) - home, axis=1)
        drift = np.maximum(drift, away)
        down += drive.robots.touching(case.task.foot_geoms).all(1)
    drive.close()
    drift[drive.fallen] = np.inf
    down = down / steps
    report.metrics[f"{name}/feet_down"] = _mean_metric(down, "-")
    report.checks += [
        Check(name=f"{name}/drift", value=float(drift.max()), limit=limits.max_drift, unit="m"),
        Check(
            name=f"{name}/feet_down",
            value=float(down.mean()),
            limit=limits.min_feet_down,
            unit="-",
            at_least=True,
        ),
    ]


class _Drive:
    """Robots under the runtime and the guard, one policy step at a time."""

    def __init__(self, case: Case, model: mujoco.MjModel, n: int) -> None:
        env = case.make("nominal", n)  # whose starts are used
        qpos, qvel = env.sim.qpos.numpy().copy(), env.sim.qvel.numpy().copy()
        env.close()
        spec = case.card.spec
        trunk = case.task.trunk_geoms
        self.robots = Robots(model, spec, qpos, qvel, case.how.threads, trunk)
        names = self.robots.joint_names
        self.controller = Controller(case.network, case.card, names, n)
        self.max_tilt = math.radians(case.how.max_tilt_deg)
        limits = Limits(max_tilt=self.max_tilt, soft_start_s=0.0)
        self.guard = Guard(spec, names, limits, n)
        self.fallen = np.zeros(n, bool)

    def step(self, command: np.ndarray) -> dict[str, np.ndarray]:
        """Read, decide, guard, move; returns the velocities reached. Fallen robots are frozen."""
        robots = self.robots
        reading = robots.read()
        wanted = self.controller.step(reading, command)
        robots.step(self.guard.check(wanted, reading, robots.time))
        qpos, qvel = robots.qpos, robots.qvel
        tilted = robots.sensors.tilt(qpos) > self.max_tilt
        down = robots.touched | tilted | robots.bad() | self.guard.stopped
        self.fallen |= robots.alive & down
        robots.alive &= ~down
        return robots.sensors.velocities(qpos, qvel)

    def close(self) -> None:
        """Stop the threads."""
        self.robots.close()


def _random_commands(spec: EnvSpec, n: int, count: int, seed: int) -> np.ndarray:
    """Uniform over the trained range (count, n, C)."""
    low = np.array([d.low for d in spec.command])
    high = np.array([d.high for d in spec.command])
    draw = np.random.default_rng(seed).random((count, n, len(spec.command)))
    return low + (high - low) * draw


# The training environment itself --------------------------------------------------------------


def measure_randomised(case: Case, report: Report) -> None:
    """The same figures in the randomised training environment; no verdict."""
    spec, how = case.card.spec, case.how
    n = how.episodes
    env = case.make("evaluation", n)
    sensors = Sensors(_first_model(case.task), spec)
    tracking = Tracking(spec.command, n, spec.step_dt, how.settle_s)
    alive, fallen = np.ones(n, bool), np.zeros(n, bool)
    obs, network = env.observe(), case.network.fresh()
    for _ in range(round(how.episode_s / spec.step_dt)):
        raw = {k: v.numpy() for k, v in env.observe_terms(slice(None)).items()}
        step = env.step(torch.from_numpy(network(obs["actor"].numpy())))
        ended = (step.terminated | step.truncated).numpy()
        network.reset(ended)
        fallen |= alive & step.terminated.numpy()
        alive &= ~ended
        velocities = sensors.velocities(env.sim.qpos.numpy(), env.sim.qvel.numpy())
        tracking.add(_command(spec, raw), velocities, alive)
        obs = step.obs
    env.close()
    falls = int(fallen.sum())
    report.metrics["randomised/falls"] = Metric(
        mean=falls / n, ci95=wilson(falls, n), n=n, unit="-"
    )
    report.metrics |= tracking.metrics("randomised")


def check_return(case: Case, report: Report) -> None:
    """What the file earns in the training environment, beside the policy where there is one.

    Both play the same episodes, so their returns differ by rounding alone; yet a chaotic body
    amplifies it, so the two are held to agree within their intervals.
    """

    def play(player):
        env = case.make("evaluation", min(case.how.episodes, 64))
        result = evaluate(player, env, case.how.episodes)
        env.close()
        return result.metrics

    found = play(load_policy(case.path))
    report.metrics |= {f"training/{name}": metric for name, metric in found.items()}
    if case.policy is None:
        return
    ours, theirs = found["episode_return"], play(case.policy)["episode_return"]
    width = sum(0.5 * (m.ci95[1] - m.ci95[0]) if m.ci95 else 0.0 for m in (ours, theirs))
    report.checks.append(
        Check(
            name="training/return_difference",
            value=abs(ours.mean - theirs.mean),
            limit=max(width, 1e-3 * abs(theirs.mean)),
            unit="-",
        )
    )


def _mean_metric(values: np.ndarray, unit: str) -> Metric:
    ci95 = bootstrap(torch.from_numpy(values))
    return Metric(mean=float(values.mean()), ci95=ci95, n=len(values), unit=unit)
