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

Reading order: `sim2real.thresholds` -> `Report`, `Case` -> `verify` -> the parts as above, with
`sim2real.plain_mujoco` for the single robots and `sim2real.tracking` for the velocity errors.
"""

import math
import time
from collections.abc import Callable
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
from ctrl_rl.spec import EnvSpec, spec_differences
from sim2real.card import TOLERANCE, Card, CardError, action_difference
from sim2real.observer import Reading
from sim2real.plain_mujoco import Robots, Sensors
from sim2real.runtime import Controller, Network, load
from sim2real.safety import Guard, Limits
from sim2real.thresholds import Procedure, Thresholds
from sim2real.tracking import AXES, Tracking

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
