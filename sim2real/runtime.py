"""Runs a policy file on a robot: raw sensor readings and a command in, joint targets out.

Everything it knows comes from the file's card, so training and deployment cannot drift apart.
Needs numpy, onnxruntime and `ctrl_rl.spec`; neither torch nor MuJoCo.

The same code serves one robot or N at once (leading axis), so that `ctrl-rl verify` tests exactly
what a robot runs. Joints are named once, by `joint_names` of the robot; all arrays of a robot are
in that order, and the card's order is looked up by name.

Reading order: `JointCommand`, `Hardware` -> `load` -> `sim2real.observer` -> `Controller` -> `run`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import onnxruntime

from ctrl_rl.spec import Discrete
from sim2real.card import KEY, Card, CardError
from sim2real.observer import Observer, Reading, default_pos

if TYPE_CHECKING:
    from sim2real.safety import Guard


@dataclass(frozen=True, kw_only=True)
class JointCommand:
    """Targets of the joints' position controllers: torque = kp (pos - q) - kd dq."""

    pos: np.ndarray
    """(N, J) [rad], in the robot's joint order."""
    kp: np.ndarray
    """(N, J) [N·m/rad]"""
    kd: np.ndarray
    """(N, J) [N·m·s/rad]"""


class Hardware(Protocol):
    """One robot. Implement these four for a new machine; `sim2real.mock` is an example."""

    joint_names: tuple[str, ...]
    """Order of every joint array read and written."""

    def read(self) -> Reading:
        """The newest reading, without waiting for the next."""
        ...

    def write(self, command: JointCommand) -> None:
        """Send one command; arrays (1, J)."""
        ...

    def close(self) -> None:
        """Leave the robot in a safe state."""
        ...


def load(path: str | Path) -> "tuple[Network, Card]":
    """Open a policy file and check it against its own card.

    Returns:
        The network, observations (N, d) float32 -> actions, and the card.

    Raises:
        CardError: no such file, damaged, foreign, another format, inputs or outputs that this
            runtime does not serve, or answers other than the card's reference actions.
    """
    path = Path(path)
    if not path.is_file():
        raise CardError(f"{path}: no such file")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # a small network
    options.log_severity_level = 4  # errors come as exceptions
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's classes share no base
        reason = str(error).strip().splitlines()[0]
        raise CardError(f"{path}: no readable ONNX file ({reason})") from None
    text = session.get_modelmeta().custom_metadata_map.get(KEY)
    if text is None:
        raise CardError(
            f"{path}: an ONNX file without the metadata key {KEY!r}; "
            f"`ctrl-rl export` writes policy files"
        )
    try:
        card = Card.from_json(text)
        network = Network(session, card)
        card.check(network)
        network.reset()
    except CardError as error:
        raise CardError(f"{path}: {error}") from None
    except Exception as error:  # of onnxruntime: an input of another type, a node that fails
        reason = str(error).strip().splitlines()[0]
        raise CardError(f"{path}: the graph does not run on the card's data ({reason})") from None
    return network, card


class Network:
    """The file's graph as a function of the observation.

    Of a recurrent policy it keeps the state of each row, zero until the first call and after
    `reset`. It refuses a graph that needs anything else.

    Args:
        session: onnxruntime's session.
        card: from the same file.

    Raises:
        CardError: inputs other than `obs` and the states of a recurrent policy, outputs other than
            `actions` and the states after it, or other sizes.
    """

    def __init__(self, session: onnxruntime.InferenceSession, card: Card) -> None:
        self._session, self._card = session, card
        inputs, outputs = session.get_inputs(), session.get_outputs()
        names = [i.name for i in inputs], [o.name for o in outputs]
        known = STATES if card.recurrent else ((),)
        fitting = [
            states
            for states in known
            if names == (["obs", *_named(states, "in")], ["actions", *_named(states, "out")])
        ]
        if not fitting:
            wanted = "obs, h_in (and c_in) -> actions, h_out (and c_out)"
            raise CardError(
                f"the graph has inputs and outputs {names}, not "
                f"{wanted if card.recurrent else 'obs -> actions'}; a recurrent policy run "
                "without its state would answer wrongly"
            )
        spec = card.spec
        if inputs[0].shape[1:] != [spec.obs_size()] or isinstance(inputs[0].shape[0], int):
            raise CardError(
                f"the graph's obs is {inputs[0].shape}, the card's is (N, {spec.obs_size()})"
            )
        (states,) = fitting
        self._sizes = [i.shape[2:] for i in inputs[1:]]
        for value in (*inputs[1:], *outputs[1:]):
            one, rows, *size = value.shape
            if one != 1 or isinstance(rows, int) or size != self._sizes[0]:
                raise CardError(f"the graph's {value.name} is {value.shape}, not (1, N, H)")
        self._inputs = _named(states, "in")
        self._outputs = ["actions", *_named(states, "out")]
        self._state: list[np.ndarray] | None = None

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Actions for observations (N, d) float32: (N, A) float32, or (N,) int64.

        Raises:
            ValueError: of a recurrent policy, another N than since `reset`.
        """
        if self._state is None:
            self._state = [np.zeros((1, len(obs), *size), np.float32) for size in self._sizes]
        if self._state and self._state[0].shape[1] != len(obs):
            raise ValueError(
                f"the policy remembers {self._state[0].shape[1]} rows, the observation has "
                f"{len(obs)}; reset() begins anew"
            )
        feeds = {"obs": obs, **dict(zip(self._inputs, self._state, strict=True))}
        action, *self._state = map(np.asarray, self._session.run(self._outputs, feeds))
        return action

    def reset(self, rows=None) -> None:
        """Zero the state of some rows; None: of all, however many come next."""
        if rows is None:
            self._state = None
        elif self._state is not None:
            self._state = [state.copy() for state in self._state]  # onnxruntime's own memory
            for state in self._state:
                state[:, rows] = 0.0

    def fresh(self) -> "Network":
        """The same graph with a memory of its own."""
        return Network(self._session, self._card)


STATES = (("h",), ("h", "c"))
"""What a GRU and an LSTM remember; each has an input and an output of the graph."""


def _named(states: tuple[str, ...], side: str) -> list[str]:
    return [f"{state}_{side}" for state in states]


class Controller:
    """Observation, network and joint targets: one call per policy step.

    Args:
        network: observations (N, d) float32 -> actions, as `load` gives it; the controller runs
            it with a memory of its own.
        card: from the same file.
        joint_names: the robot's joint order; empty for a task without a robot.
        num_robots: N.

    Raises:
        CardError: joints that do not match.
    """

    def __init__(
        self,
        network: Callable[[np.ndarray], np.ndarray],
        card: Card,
        joint_names: tuple[str, ...] = (),
        num_robots: int = 1,
    ) -> None:
        self.network = network.fresh() if isinstance(network, Network) else network
        self.card, self.spec = card, card.spec
        self.observer = Observer(card.spec, joint_names, num_robots)
        width = 1 if isinstance(card.spec.action, Discrete) else card.spec.action_size
        self.prev_action = np.zeros((num_robots, width))
        """The network's last answer (N, A)."""
        self.obs = np.zeros((num_robots, card.spec.obs_size()), np.float32)
        """The observation it was given (N, d)."""
        self.default_pos = default_pos(card.spec, joint_names)
        """(J,) [rad], in the robot's order."""
        if card.spec.robot is not None:
            self._bind_action(joint_names)

    def reset(self, rows=slice(None)) -> None:
        """Begin anew for some robots: previous action, clock, history, memory of the policy."""
        self.prev_action[rows] = 0.0
        self.observer.reset(rows)
        if isinstance(self.network, Network):
            self.network.reset(rows)

    def act(self, reading: Reading, command) -> np.ndarray:
        """Actions (N, A) float32, or (N,) int64 for a discrete task."""
        self.obs = self.observer.build(reading, command, self.prev_action)
        action = self.network(self.obs)
        self.prev_action = action.reshape(self.prev_action.shape)
        return action

    def targets(self, action: np.ndarray) -> np.ndarray:
        """Joint position targets (N, J) [rad] in the robot's order: offset + scale * action.

        Joints that no action drives stay at their default.
        """
        pos = np.tile(self.default_pos, (len(action), 1))
        pos[:, self._drives] = self._offset + self._scale * action
        return pos

    def step(self, reading: Reading, command) -> np.ndarray:
        """Joint targets (N, J) [rad] for the reading."""
        return self.targets(self.act(reading, command))

    def _bind_action(self, joint_names: tuple[str, ...]) -> None:
        if isinstance(self.spec.action, Discrete):
            raise CardError(f"{self.spec.task}: a choice among actions drives no joints")
        unknown = [d.name for d in self.spec.action if d.name not in joint_names]
        if unknown:
            raise CardError(f"action for joints that the robot lacks: {', '.join(unknown)}")
        self._drives = np.array([joint_names.index(d.name) for d in self.spec.action])
        self._scale = np.array([d.scale for d in self.spec.action])
        self._offset = np.array([d.offset for d in self.spec.action])


@dataclass(frozen=True, kw_only=True)
class LoopReport:
    """How well the loop kept its time; arrays have one element per step [s]."""

    step_dt: float
    """Wanted period [s]."""
    begin: np.ndarray
    """When each step began, after the first."""
    compute: np.ndarray
    """From before `read` to after `write`."""
    late: np.ndarray
    """Begin of each step after its due time."""
    skipped: int
    """Ticks that passed while a step was still busy."""
    stopped: str | None
    """Why the guard stopped the robot, if it did."""

    def __str__(self) -> str:
        if not len(self.begin):
            return f"steps           0\nsafety          {self.stopped or 'never stopped the robot'}"
        period = np.diff(self.begin) if len(self.begin) > 1 else np.array([math.nan])
        ms = lambda x: f"{1e3 * x:.3f} ms"  # noqa: E731
        return "\n".join(
            (
                f"steps           {len(self.begin)}, skipped {self.skipped}",
                f"period          {ms(period.mean())} mean (wanted {ms(self.step_dt)}), "
                f"{ms(period.min())} to {ms(period.max())}",
                f"jitter          {ms(period.std())} standard deviation, late by "
                f"{ms(np.median(self.late))} median, {ms(np.percentile(self.late, 99))} p99",
                f"loop time       {ms(np.median(self.compute))} median, "
                f"{ms(np.percentile(self.compute, 99))} p99, {ms(self.compute.max())} max",
                f"safety          {self.stopped or 'never stopped the robot'}",
            )
        )


def run(
    hardware: Hardware,
    controller: Controller,
    guard: "Guard",
    command: Callable[[float], np.ndarray],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> LoopReport:
    """Run the policy at its own rate; the robot is damped when this returns or raises.

    A tick that was missed is skipped and never made up for: the policy's clock counts steps, as in
    training, and the guard stops a loop that misses too many. While the guard brings the robot
    softly to its default pose or has stopped it, the policy waits and begins anew afterwards.
    Ctrl-C ends the loop as `seconds` does.

    Args:
        hardware: the robot.
        controller: made with the robot's `joint_names`, for one robot.
        guard: every command passes through it; made with the same names.
        command: time since start [s] -> what the operator asks for (C,).
        seconds: how long; math.inf until Ctrl-C.
        clock: monotonic time [s], the clock of `Reading.time`.
        sleep: waits [s].
    """
    period = controller.spec.step_dt
    steps: list[tuple[float, float, float]] = []  # begin, compute, late
    skipped = tick = 0
    start = clock()
    try:
        while tick * period < seconds:
            now = clock()
            reading, asked = hardware.read(), None
            if guard.starting[0] or guard.stopped[0]:
                controller.reset()
                wanted = controller.default_pos[None]
            else:
                asked = command(now - start)
                wanted = controller.step(reading, asked)
            hardware.write(guard.check(wanted, reading, clock(), asked))
            end = clock()
            steps.append((now, end - now, now - start - tick * period))
            following = max(tick + 1, math.ceil((end - start) / period))
            skipped += following - tick - 1
            tick = following
            sleep(max(0.0, start + tick * period - clock()))
    except KeyboardInterrupt:
        pass  # the operator has seen enough; the report is still wanted
    finally:
        stopped = guard.causes[0]
        guard.stop("the control loop ended")
        hardware.write(guard.damping())
    begin, compute, late = np.reshape(steps, (-1, 3)).T
    return LoopReport(
        step_dt=period,
        begin=begin,
        compute=compute,
        late=late,
        skipped=skipped,
        stopped=stopped,
    )
