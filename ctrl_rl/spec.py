"""What an environment promises: observation terms, action, rates, the robot behind them.

Training builds its observation from these dataclasses and so does the program on the robot, so
that the two cannot drift apart. Standard library only: a robot's computer imports this file
without torch or MuJoCo.

Reading order: `KINDS` -> `ObsTerm` -> `ActionDim`, `Discrete` -> `Joint`, `Robot` -> `Mirror` ->
`EnvSpec` -> `spec_differences`.
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
    "phase": "(sin, cos) of a clock of `rate_hz`; (0, 0) while the operator says stand [-]",
    "signal": "any other measured value, handed over under the term's name",
}
"""Kinds an actor may see: each is implemented by the tasks and by `sim2real.observer`."""

PRIVILEGED = "privileged"
"""Kind of a term that only a simulator knows; it may stand in "critic" alone."""

HISTORY_FILLS = ("repeat", "zero")
FRAMES = ("b", "w", "joint", "-")


def _require(condition: bool, who: str, rule: str) -> None:
    """Raise ValueError unless the condition holds; comparisons with NaN do not hold."""
    if not condition:
        raise ValueError(f"{who}: {rule}")


def _distinct(names) -> bool:
    names = list(names)
    return len(set(names)) == len(names)


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
    run_on_s: float = 0.0
    """How long a "phase" clock runs on after the command became all zero [s], in whole steps: a
    walking robot brakes step by step before it stands."""
    constant: bool = False
    """True if an element may never change; else `check_env` reports it as dead."""

    def __post_init__(self) -> None:
        who = f"observation term {self.name!r}"
        known = (*KINDS, PRIVILEGED)
        _require(self.kind in known, who, f"unknown kind {self.kind!r}; known: {', '.join(known)}")
        _require(self.size >= 1, who, "size must be at least 1")
        _require(self.frame in FRAMES, who, f"frame must be one of {', '.join(FRAMES)}")
        _require(len(self.scale) in (1, self.size), who, f"scale needs 1 or {self.size} values")
        _require(all(map(math.isfinite, self.scale)), who, "scale must be finite")
        _require(len(self.labels) in (0, self.size), who, f"labels need {self.size} names")
        _require(_distinct(self.labels), who, "a label stands twice")
        low, high = self.clip or (0.0, 0.0)
        _require(low <= high, who, "clip must be (low, high)")
        _require(0 <= self.noise < math.inf, who, "noise must be finite and not negative")
        least, most = self.delay
        _require(0 <= least <= most, who, "delay must be 0 <= least <= most")
        _require(self.history >= 1, who, "history must be at least 1")
        _require(
            self.history_fill in HISTORY_FILLS,
            who,
            f"history_fill must be one of {', '.join(HISTORY_FILLS)}",
        )
        if self.kind == "phase":
            _require(self.size == 2, who, "a phase has size 2")
            _require(0 < self.rate_hz < math.inf, who, "rate_hz of a phase must be positive")
            _require(0 <= self.run_on_s < math.inf, who, "run_on_s must not be negative")

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

    def __post_init__(self) -> None:
        who = f"action {self.name!r}"
        _require(self.low < self.high, who, "low must be below high")
        _require(math.isfinite(self.scale) and self.scale != 0, who, "scale must be a number")
        _require(math.isfinite(self.offset), who, "offset must be finite")


@dataclass(frozen=True, kw_only=True)
class Discrete:
    """A choice among `n` actions, sent as int64 (N,)."""

    n: int

    def __post_init__(self) -> None:
        _require(self.n >= 1, "discrete action", "n must be at least 1")


@dataclass(frozen=True, kw_only=True)
class CommandDim:
    """One element of the operator's command and the range it was trained on."""

    name: str
    unit: str
    low: float
    high: float

    def __post_init__(self) -> None:
        _require(self.low <= self.high, f"command {self.name!r}", "low must not be above high")


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

    def __post_init__(self) -> None:
        who = f"joint {self.name!r}"
        _require(math.isfinite(self.default_pos), who, "default_pos must be finite")
        _require(0 <= self.kp < math.inf, who, "kp must be finite and not negative")
        _require(0 <= self.kd < math.inf, who, "kd must be finite and not negative")
        _require(self.effort_limit > 0, who, "effort_limit must be positive")
        _require(self.velocity_limit > 0, who, "velocity_limit must be positive")
        _require(self.pos_low < self.pos_high, who, "pos_low must be below pos_high")


@dataclass(frozen=True, kw_only=True)
class Robot:
    """The machine behind a task, as far as a deployment must know it."""

    name: str
    joints: tuple[Joint, ...]
    imu_body: str
    imu_quat: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    """Rotation from IMU frame to base frame, wxyz."""

    def __post_init__(self) -> None:
        who = f"robot {self.name!r}"
        _require(_distinct(j.name for j in self.joints), who, "a joint's name stands twice")
        length = math.hypot(*self.imu_quat)
        unit = len(self.imu_quat) == 4 and abs(length - 1) < 1e-6
        _require(unit, who, "imu_quat must be wxyz of length 1")


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """How observation and action look in a mirror that does not change the task.

    An element is named by its label, or by its number where there are no labels. In the place of
    each element stands the one that it takes its value from, with a minus if the sign turns:
    ("-FL_hip_joint", "FL_thigh_joint", ...) at the places of the right leg, or ("0", "-1", "2")
    for a vector in a body frame that swaps left and right.
    """

    terms: dict[str, tuple[str, ...]]
    """Name of an observation term -> `size` elements; of every term of "actor" and "critic"."""
    action: tuple[str, ...]


_PLAIN = "without noise, delay and history, and in 'goal' and 'achieved' without scale and clip"


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
    mirror: Mirror | None = None
    """For a task with a mirror symmetry, see `mirrored`."""
    history: tuple[str, ...] = field(default=())
    """What changed with each version of the task."""

    def __post_init__(self) -> None:
        who = self.task
        _require("actor" in self.obs, who, "observation group 'actor' is missing")
        for group, terms in self.obs.items():
            _require(bool(terms), who, f"observation group {group!r} has no terms")
            names = [t.name for t in terms]
            _require(_distinct(names), who, f"a name stands twice in group {group!r}: {names}")
            measured = all(t.kind != PRIVILEGED for t in terms)
            _require(
                measured or group in ("critic", "achieved"),
                who,
                f"a privileged term stands in group {group!r}",
            )
        if "goal" in self.obs or "achieved" in self.obs:
            self._check_goals()
        if not isinstance(self.action, Discrete):
            _require(bool(self.action), who, "the action has no elements")
            _require(_distinct(a.name for a in self.action), who, "an action's name stands twice")
        _require(_distinct(c.name for c in self.command), who, "a command's name stands twice")
        _require(self.num_envs >= 1, who, "num_envs must be at least 1")
        _require(self.max_episode_steps >= 1, who, "max_episode_steps must be at least 1")
        _require(0 < self.physics_dt < math.inf, who, "physics_dt must be positive")
        ratio = self.step_dt / self.physics_dt
        _require(
            ratio > 0.5 and abs(ratio - round(ratio)) <= 1e-6,
            who,
            f"step_dt {self.step_dt} is not a multiple of physics_dt {self.physics_dt}",
        )
        if self.mirror is not None:
            for name in ("action", *{"actor", "critic"} & set(self.obs)):
                self.mirrored(name)

    def _check_goals(self) -> None:
        """Goal and achieved are raw and of one size; the policy's goal is a function of them."""
        who = self.task
        both = "goal" in self.obs and "achieved" in self.obs
        _require(both, who, "observation groups 'goal' and 'achieved' come together")
        sizes = self.obs_size("goal"), self.obs_size("achieved")
        _require(sizes[0] == sizes[1], who, f"'goal' has {sizes[0]} columns, 'achieved' {sizes[1]}")
        for group in ("goal", "achieved", "actor", self.critic_group):
            known = {term.name: term for term in self.obs[group]}
            for term in self.obs[group if group == "achieved" else "goal"]:
                found = known.get(term.name)
                where = f"{term.name!r} in group {group!r}"
                _require(found is not None, who, f"the goal's term {where} is missing")
                assert found is not None
                plain = (found.noise, found.delay, found.history) == (0, (0, 0), 1)
                if group in ("goal", "achieved"):
                    plain = plain and set(found.scale) == {1.0} and found.clip is None
                _require(found.size == term.size and plain, who, f"{where} must be {_PLAIN}")

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

    def mirrored(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Columns and signs of an observation group, or of "action", in the mirror.

        The mirror image of x is `sign * x[:, column]`, and its own mirror image is x.

        Raises:
            ValueError: the task has no mirror, or one that does not fit; the message says where.
        """
        who = f"{self.task}: mirror"
        if self.mirror is None:
            raise ValueError(f"{self.task} does not say how it looks in a mirror")
        if name == "action":
            _require(not isinstance(self.action, Discrete), who, "a discrete action has none")
            names = [dim.name for dim in self.action]  # pyright: ignore
            column, sign = _signed(f"{who} of the action", self.mirror.action, names)
            for i, (j, s) in enumerate(zip(column, sign, strict=True)):
                a, b = self.action[i], self.action[j]  # pyright: ignore
                bounds = (b.low, b.high) if s > 0 else (-b.high, -b.low)
                same = (a.low, a.high, a.scale, a.offset) == (*bounds, b.scale, s * b.offset)
                _require(same, who, f"{a.name!r} and {b.name!r} differ in bounds, scale or offset")
            return column, sign
        columns: list[int] = []
        signs: list[int] = []
        for term in self.obs[name]:
            _require(term.name in self.mirror.terms, who, f"nothing is said of {term.name!r}")
            names = list(term.labels) or [str(i) for i in range(term.size)]
            column, sign = _signed(f"{who} of {term.name!r}", self.mirror.terms[term.name], names)
            scale = term.scale * (term.size // len(term.scale))
            same = all(scale[i] == scale[j] for i, j in enumerate(column))
            _require(same, who, f"elements of {term.name!r} that change places differ in scale")
            low, high = term.clip or (0.0, 0.0)
            _require(min(sign) > 0 or low == -high, who, f"the clip of {term.name!r} has a side")
            for _ in range(term.history):
                start = len(columns)
                columns += [start + j for j in column]
                signs += sign
        return tuple(columns), tuple(signs)

    def to_json(self) -> str:
        """Text that `from_json` turns into an equal object."""
        return json.dumps(strict(asdict(self)), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "EnvSpec":
        """Inverse of `to_json`.

        Raises:
            ValueError: no JSON, a missing or unknown key, or a value that breaks a rule above.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not an environment spec: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict) -> "EnvSpec":
        """Rebuild from decoded JSON; raises as `from_json`."""
        try:
            return _build_spec(data)
        except KeyError as error:
            raise ValueError(f"not an environment spec: {error} is missing") from None
        except (AttributeError, TypeError) as error:
            raise ValueError(f"not an environment spec: {error}") from None


def _signed(who: str, elements: tuple[str, ...], names: list[str]):
    """Columns and signs of a signed permutation of `names` that undoes itself."""
    _require(len(elements) == len(names), who, f"needs {len(names)} elements")
    bare = [e.removeprefix("-") for e in elements]
    unknown = sorted(set(bare) - set(names))
    _require(not unknown, who, f"no element is called {', '.join(unknown)}")
    column = tuple(names.index(e) for e in bare)
    sign = tuple(-1 if e.startswith("-") else 1 for e in elements)
    back = all(column[j] == i and sign[j] == sign[i] for i, j in enumerate(column))
    _require(back, who, "twice mirrored is not the same again")
    return column, sign


def spec_differences(a: EnvSpec, b: EnvSpec) -> list[str]:
    """Where two specs would make a robot behave differently, one line each.

    Compared: task, what the actor sees, action, policy rate, robot, command. Noise and delay of
    terms belong to training alone, and so do episode length and number of environments.
    """
    return list(_differences("", _deployed(a), _deployed(b)))


def _deployed(spec: EnvSpec) -> dict:
    data = asdict(spec)
    return {
        "task": spec.task,
        "obs": {t.name: _without_training(t) for t in spec.obs["actor"]},
        "obs order": [t.name for t in spec.obs["actor"]],
        **{k: data[k] for k in ("action", "step_dt", "robot", "command")},
    }


def _without_training(term: ObsTerm) -> dict:
    data = asdict(term)
    del data["noise"], data["delay"], data["constant"]
    return data


def _differences(path: str, a, b):
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _differences(f"{path}.{key}".lstrip("."), a.get(key), b.get(key))
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            name = x.get("name", k) if isinstance(x, dict) else k
            yield from _differences(f"{path}[{name}]", x, y)
    elif a != b:
        yield f"{path}: {_brief(a)} and {_brief(b)}"


def _brief(value) -> str:
    """A value in a line: what has a name goes by it."""
    if isinstance(value, dict):
        return str(value.get("name", value))
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_brief, value))})"
    return "nothing" if value is None else str(value)


def _build_spec(data: dict) -> EnvSpec:
    """Lists become tuples, dicts the classes above."""
    data = {**data}
    data["obs"] = {g: tuple(_build(ObsTerm, t) for t in ts) for g, ts in data["obs"].items()}
    action = data["action"]
    data["action"] = (
        _build(Discrete, action)
        if isinstance(action, dict)
        else tuple(_build(ActionDim, a) for a in action)
    )
    data["command"] = tuple(_build(CommandDim, c) for c in data.get("command", ()))
    data["history"] = tuple(data.get("history", ()))
    if data.get("mirror") is not None:
        mirror = _build(Mirror, data["mirror"])
        terms = {name: tuple(elements) for name, elements in mirror.terms.items()}
        data["mirror"] = Mirror(terms=terms, action=mirror.action)
    if data.get("robot") is not None:
        robot = {**data["robot"]}
        robot["joints"] = tuple(_build(Joint, j) for j in robot["joints"])
        data["robot"] = _build(Robot, robot)
    return _build(EnvSpec, data)


def strict(value):
    """A value for JSON, which has no infinite numbers: they become "inf" and "-inf"."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
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
    """Lists become tuples, and "inf" a number where the field holds numbers."""
    if isinstance(value, list):
        return tuple(_decode(v, annotation) for v in value)
    if value in ("inf", "-inf") and "float" in str(annotation):
        return float(value)
    return value
