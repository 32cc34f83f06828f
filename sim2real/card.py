"""The card: what a policy file says about itself, so that a robot needs no other file.

It is JSON under the metadata key `ctrl_rl_card` of the ONNX file: the environment's spec in full
(observation terms, action scale and offset per joint, default pose, gains, limits, rates, IMU
frame, command ranges), where the policy comes from, and reference observations with the actions
they must give. Beside it stand the keys that other deployment programs look for.

Imports numpy and `ctrl_rl.spec` alone: a robot's computer reads this file.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ctrl_rl.spec import Discrete, EnvSpec, Robot, strict

KEY = "ctrl_rl_card"
"""Metadata key of the card in an ONNX file."""
FORMAT = 1
"""Raised when a reader of the old format would misread the new one."""
TOLERANCE = 1e-5
"""Largest accepted difference of an action, relative to max(1, |action|) [action units]."""

INPUT = "obs: observation group 'actor' as the environment gives it, not normalised (N, d) float32"
MEMORY = "; h_in (and c_in) (1, N, H): h_out (and c_out) of the step before, zero at first"
OUTPUT = "actions: as the environment's step takes them; joint target = offset + scale * action"


class CardError(ValueError):
    """A file that is no policy of ours, or does not fit this robot; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Everything a deployment must know."""

    spec: EnvSpec
    """The contract of the environment that trained the policy."""
    train_steps: int
    """Environment steps behind the weights."""
    version: str
    """ctrl-rl that wrote the file."""
    commit: str
    """Git commit of the training code, or "" where there was none."""
    task_config: dict
    """The task's configuration in training, as JSON values; {} for its defaults."""
    reference_obs: np.ndarray
    """Recorded observations (K, d) float32."""
    reference_actions: np.ndarray
    """What the policy answers to them, (K, A) float32 or (K,) int64 for `Discrete`."""
    recurrent: bool = False
    """The policy has memory: the reference observations are one episode's first, in order."""

    def to_json(self) -> str:
        """Text that `from_json` turns into an equal card; floats lose nothing."""
        data = {
            "format": FORMAT,
            "input": INPUT + (MEMORY if self.recurrent else ""),
            "output": OUTPUT,
            "recurrent": self.recurrent,
            "train_steps": self.train_steps,
            "version": self.version,
            "commit": self.commit,
            "task_config": strict(self.task_config),
            "spec": json.loads(self.spec.to_json()),
            "reference_obs": _to_lists(self.reference_obs),
            "reference_actions": _to_lists(self.reference_actions),
        }
        return json.dumps(data, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Card":
        """Inverse of `to_json`.

        Raises:
            CardError: damaged text, another format, or arrays that do not fit the spec.
        """
        try:
            data = json.loads(text)
            found = data["format"]
        except (ValueError, KeyError, TypeError):
            raise CardError("the card is damaged: it is no JSON object with a format") from None
        if type(found) is not int or found != FORMAT:  # True and 1.0 equal 1
            raise CardError(f"the card has format {found!r}, this program reads format {FORMAT!r}")
        try:
            spec = EnvSpec.from_dict(data["spec"])
            integers = isinstance(spec.action, Discrete)
            card = cls(
                spec=spec,
                train_steps=int(data["train_steps"]),
                version=str(data["version"]),
                commit=str(data["commit"]),
                task_config=dict(data["task_config"]),
                reference_obs=np.array(data["reference_obs"], np.float32),
                reference_actions=np.array(
                    data["reference_actions"], np.int64 if integers else np.float32
                ),
                recurrent=bool(data.get("recurrent", False)),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CardError(f"the card is damaged: {error}") from None
        rows = len(card.reference_obs)
        action_shape = (rows,) if integers else (rows, spec.action_size)
        if (
            rows == 0
            or card.reference_obs.shape != (rows, spec.obs_size())
            or card.reference_actions.shape != action_shape
        ):
            raise CardError("the card is damaged: reference arrays do not fit the spec")
        return card

    def check(self, policy: Callable[[np.ndarray], np.ndarray]) -> float:
        """Largest difference between `policy`'s answers and the reference actions.

        Args:
            policy: observations (K, d) float32 -> actions; of a policy with memory, one that has
                seen nothing yet: it is given (1, d) at a time.

        Raises:
            CardError: if it exceeds `TOLERANCE`.
        """
        if self.recurrent:
            answers = np.concatenate([policy(obs[None]) for obs in self.reference_obs])
        else:
            answers = policy(self.reference_obs)
        difference = action_difference(answers, self.reference_actions)
        if not difference <= TOLERANCE:
            raise CardError(
                f"the network's answers differ by {difference:.2g} from the card's reference "
                f"actions (at most {TOLERANCE:g}): graph and card are not of one export"
            )
        return difference

    def metadata(self) -> dict[str, str]:
        """All metadata of the ONNX file: the card and the keys that other programs read.

        These are mjlab's names (`joint_names`, `joint_stiffness`, ...), lists joined by commas and
        inner lists by semicolons. Programs that read them take every per-joint list in the order
        of `joint_names` and add the scaled action to `default_joint_pos`, so the joint keys are
        left out where that would be wrong.
        """
        spec, actor = self.spec, self.spec.obs["actor"]
        keys = {
            KEY: self.to_json(),
            "run_path": "",
            "observation_names": _join(t.name for t in actor),
            "observation_terms_scale": _join(_inner(t.scale) for t in actor),
            "observation_terms_clip": _join(_inner(t.clip or (-math.inf, math.inf)) for t in actor),
            "observation_terms_history_length": _join(str(t.history) for t in actor),
            "observation_terms_flatten_history_dim": _join("True" for _ in actor),
            "command_names": _join(c.name for c in spec.command),
        }
        if spec.robot is not None and not isinstance(spec.action, Discrete):
            order = tuple(d.name for d in spec.action)
            joints = {j.name: j for j in spec.robot.joints}
            default_order = tuple(joints)
            orders = {
                t.labels or default_order for t in actor if t.kind in ("joint_pos_rel", "joint_vel")
            }
            plain = all(
                d.name in joints and d.offset == joints[d.name].default_pos for d in spec.action
            )
            if plain and set(order) == set(joints) and orders <= {order}:
                keys |= {
                    "joint_names": _join(order),
                    "joint_stiffness": _join(repr(joints[n].kp) for n in order),
                    "joint_damping": _join(repr(joints[n].kd) for n in order),
                    "default_joint_pos": _join(repr(joints[n].default_pos) for n in order),
                    "action_scale": _join(repr(d.scale) for d in spec.action),
                }
        return keys


def action_difference(actions: np.ndarray, expected: np.ndarray) -> float:
    """Largest |difference| relative to max(1, |expected|); inf where shapes or kinds differ.

    Not a number counts as inf. Integers (`Discrete`) must be equal.
    """
    if actions.shape != expected.shape or actions.dtype != expected.dtype:
        return math.inf
    if actions.size == 0:
        return 0.0
    if np.issubdtype(expected.dtype, np.integer):
        return 0.0 if np.array_equal(actions, expected) else math.inf
    expected = expected.astype(np.float64)
    error = np.abs(actions - expected) / np.maximum(1.0, np.abs(expected))
    return float(np.where(np.isnan(error), math.inf, error).max())


def robot_of(spec: EnvSpec) -> Robot:
    """The robot behind a task. Raises CardError if it has none."""
    if spec.robot is None:
        raise CardError(f"{spec.task} has no robot: its policy drives no joints")
    return spec.robot


def match_joints(spec: EnvSpec, names: tuple[str, ...]) -> np.ndarray:
    """Where each of the card's joints stands among a robot's `names`.

    `values[..., order]` turns the robot's order into the card's.

    Raises:
        CardError: with the missing and the extra names.
    """
    wanted = [j.name for j in robot_of(spec).joints]
    missing = [n for n in wanted if n not in names]
    extra = [n for n in names if n not in wanted]
    if missing or extra or len(names) != len(wanted):
        raise CardError(
            f"the robot's joints are not those of {spec.task}; "
            f"missing: {', '.join(missing) or 'none'}; extra: {', '.join(extra) or 'none'}"
        )
    return np.array([names.index(n) for n in wanted], np.int64)


def _to_lists(array: np.ndarray) -> list:
    """Nested lists; float32 as the shortest decimals that read back to the same bits."""
    if array.ndim > 1:
        return [_to_lists(row) for row in array]
    if array.dtype == np.float32:
        return [float(str(x)) for x in array]
    return array.tolist()


def _join(items) -> str:
    return ",".join(items)


def _inner(values) -> str:
    return ";".join(repr(float(v)) for v in values)
