"""What an environment promises: observation terms, action, rates, the robot behind them.

Training builds its observation from these dataclasses and so does the program on the robot, so
that the two cannot drift apart. Standard library only: a robot's computer imports this file
without torch or MuJoCo.

Reading order: `KINDS` -> `ObsTerm` -> `ActionDim`, `Discrete` -> `Joint`, `Robot` -> `EnvSpec`.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields

KINDS: dict[str, str] = {
    "base_ang_vel_b": "angular velocity of the base in its own frame [rad/s], a gyroscope",
    "projected_gravity_b": "unit vector of gravity in the base frame [-]; upright is (0, 0, -1)",
    "joint_pos_rel": "joint position minus default position [rad], by joint name",
    "joint_vel": "joint velocity [rad/s], by joint name",
    "prev_action": "the action of the step before, as `step` took it [-]; zero at a reset",
    "command": "what the operator asks for, by command name",
    "phase": "(sin, cos) of a clock of `rate_hz`; (0, 0) while the command is all zero [-]",
    "signal": "any other measured value, handed over under the term's name",
}
"""Kinds an actor may see: each is implemented by the tasks and by `sim2real.runtime`."""

PRIVILEGED = "privileged"
"""Kind of a term that only a simulator knows; it may stand in "critic" alone."""

HISTORY_FILLS = ("repeat", "zero")


@dataclass(frozen=True, kw_only=True)
class ObsTerm:
    """One named block of an observation group.

    A raw value (size,) passes noise -> clip -> scale -> delay -> history; with `history` H the
    block is H frames flat, oldest first.
    """

    name: str
    kind: str
    """One of `KINDS`, or `PRIVILEGED` in "critic"."""
    size: int
    """Elements of one frame."""
    unit: str = "-"
    """Unit of the raw value."""
    frame: str = "-"
    """"b" body, "w" world, "joint", or "-"."""
    labels: tuple[str, ...] = ()
    """Name of each element: joint names, command names. Order goes by these names."""
    scale: tuple[float, ...] = (1.0,)
    """Factor after clipping, one or one per element."""
    clip: tuple[float, float] | None = None
    """Bounds of the raw value [unit]."""
    noise: float = 0.0
    """Half-width of uniform noise on the raw value [unit]; training only."""
    delay: tuple[int, int] = (0, 0)
    """Least and most delay, drawn per episode [steps]; training only."""
    history: int = 1
    """Frames H in the observation."""
    history_fill: str = "repeat"
    """Frames before the episode began: "repeat" the first frame, or "zero"."""
    rate_hz: float = 0.0
    """Clock of a "phase" term [Hz]."""
    constant: bool = False
    """True if an element may never change; else `check_env` reports it as dead."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS and self.kind != PRIVILEGED:
            raise ValueError(
                f"observation term {self.name!r}: unknown kind {self.kind!r}; "
                f"known: {', '.join((*KINDS, PRIVILEGED))}"
            )
        if len(self.scale) not in (1, self.size):
            raise ValueError(f"observation term {self.name!r}: scale needs 1 or {self.size} values")
        if self.labels and len(self.labels) != self.size:
            raise ValueError(f"observation term {self.name!r}: labels need {self.size} names")
        if self.history < 1 or self.history_fill not in HISTORY_FILLS:
            raise ValueError(
                f"observation term {self.name!r}: history must be at least 1 "
                f"and history_fill one of {HISTORY_FILLS}"
            )
        if not 0 <= self.delay[0] <= self.delay[1]:
            raise ValueError(f"observation term {self.name!r}: delay must be 0 <= least <= most")

    @property
    def width(self) -> int:
        """Elements in the observation, history included."""
        return self.size * self.history


@dataclass(frozen=True, kw_only=True)
class ActionDim:
    """One element of a continuous action.

    A joint's position target is `offset + scale * action` [rad]; environment and runtime apply
    it, never the network. Infinite bounds are allowed.
    """

    name: str
    low: float = -math.inf
    high: float = math.inf
    unit: str = "-"
    scale: float = 1.0
    """Target units per action unit, e.g. [rad]."""
    offset: float = 0.0
    """Target at action zero, e.g. [rad]."""


@dataclass(frozen=True, kw_only=True)
class Discrete:
    """A choice among `n` actions, sent as int64 (N,)."""

    n: int


@dataclass(frozen=True, kw_only=True)
class CommandDim:
    """One element of the operator's command and the range it was trained on."""

    name: str
    unit: str
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Joint:
    """An actuated joint, in the order of `Robot.joints`."""

    name: str
    default_pos: float
    """[rad]"""
    kp: float
    """Position gain [N·m/rad]."""
    kd: float
    """Damping gain [N·m·s/rad]."""
    effort_limit: float
    """[N·m]"""
    velocity_limit: float
    """[rad/s]"""
    pos_low: float
    """[rad]"""
    pos_high: float
    """[rad]"""


@dataclass(frozen=True, kw_only=True)
class Robot:
    """The machine behind a task, as far as a deployment must know it."""

    name: str
    joints: tuple[Joint, ...]
    imu_body: str
    imu_quat: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    """Rotation from IMU frame to base frame, wxyz."""


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """The whole contract of one vectorised environment."""

    task: str
    """Id with version, e.g. "Go1-Velocity-Flat-v0"."""
    num_envs: int
    obs: dict[str, tuple[ObsTerm, ...]]
    """Group -> terms in order. "actor" is required."""
    action: tuple[ActionDim, ...] | Discrete
    physics_dt: float
    """One physics step [s]."""
    step_dt: float
    """One `step`, that is one policy call [s]."""
    max_episode_steps: int
    command: tuple[CommandDim, ...] = ()
    robot: Robot | None = None
    history: tuple[str, ...] = field(default=())
    """What changed with each version of the task."""

    def __post_init__(self) -> None:
        if "actor" not in self.obs:
            raise ValueError(f"{self.task}: observation group 'actor' is missing")
        for group, terms in self.obs.items():
            names = [t.name for t in terms]
            if len(set(names)) != len(names):
                raise ValueError(f"{self.task}: a name stands twice in group {group!r}: {names}")
            if group != "critic" and any(t.kind == PRIVILEGED for t in terms):
                raise ValueError(f"{self.task}: a privileged term stands in group {group!r}")
        ratio = self.step_dt / self.physics_dt
        if ratio < 1 or abs(ratio - round(ratio)) > 1e-6:
            raise ValueError(
                f"{self.task}: step_dt {self.step_dt} is not a multiple of "
                f"physics_dt {self.physics_dt}"
            )

    @property
    def decimation(self) -> int:
        """Physics steps per `step`."""
        return round(self.step_dt / self.physics_dt)

    @property
    def critic_group(self) -> str:
        """Group the critic reads: "critic", or "actor" where there is none."""
        return "critic" if "critic" in self.obs else "actor"

    def obs_size(self, group: str = "actor") -> int:
        """Columns of `obs[group]`."""
        return sum(t.width for t in self.obs[group])

    @property
    def action_size(self) -> int:
        """Columns of a continuous action, or the number of discrete choices."""
        return self.action.n if isinstance(self.action, Discrete) else len(self.action)

    def to_json(self) -> str:
        """Text that `from_json` turns into an equal object."""
        return json.dumps(_encode(asdict(self)), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "EnvSpec":
        """Inverse of `to_json`. Raises ValueError on a missing or unknown key."""
        try:
            return cls.from_dict(json.loads(text))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an environment spec: {error}") from None

    @classmethod
    def from_dict(cls, data: dict) -> "EnvSpec":
        """Rebuild from decoded JSON: lists become tuples, dicts the classes above."""
        data = dict(data)
        data["obs"] = {g: tuple(_build(ObsTerm, t) for t in ts) for g, ts in data["obs"].items()}
        action = data["action"]
        data["action"] = (
            _build(Discrete, action)
            if isinstance(action, dict)
            else tuple(_build(ActionDim, a) for a in action)
        )
        data["command"] = tuple(_build(CommandDim, c) for c in data.get("command", ()))
        data["history"] = tuple(data.get("history", ()))
        if data.get("robot") is not None:
            robot = dict(data["robot"])
            robot["joints"] = tuple(_build(Joint, j) for j in robot["joints"])
            data["robot"] = _build(Robot, robot)
        return _build(cls, data)


def _encode(value):
    """Infinite floats become "inf"/"-inf": strict JSON has none."""
    if isinstance(value, dict):
        return {k: _encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _build(cls, data: dict):
    """An instance of dataclass `cls` from decoded JSON; unknown keys are refused."""
    known = {f.name: f.type for f in fields(cls)}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(f"{cls.__name__}: unknown key(s) {', '.join(unknown)}")
    return cls(**{k: _decode(v, known[k]) for k, v in data.items()})


def _decode(value, annotation):
    if isinstance(value, list):
        return tuple(value)
    if annotation is float and value in ("inf", "-inf"):
        return float(value)
    return value
