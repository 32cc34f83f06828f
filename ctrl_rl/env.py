"""The environment contract: what `step` takes and gives; `ctrl_rl.env_check` holds it.

Batched torch tensors on `env.device`, N environments in one object, same-step auto-reset. `obs` is
what the policy acts on next; `next_obs` is the true successor of the action and differs from
`obs` only in rows that ended. Learners bootstrap from `next_obs` where not terminated and cut
where `terminated | truncated`: there is no other place for a final observation.

Reading order: `Step` -> `VecEnv` -> `GoalEnv`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor, device

from ctrl_rl.spec import EnvSpec

Obs = dict[str, Tensor]
"""Group -> (N, d) float32. "actor": what the robot can measure; "critic": complete critic input;
"goal" and "achieved" in a task with goals: what is wanted and what is so, in the same numbers."""


class Fault(NamedTuple):
    """A world that left the numbers; its row was truncated with reward 0 and reset."""

    row: int
    cause: str
    """One line that names the field or term, e.g. "action: NaN in FR_hip_joint"."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """For logging only; no learner reads it."""

    reward_terms: dict[str, Tensor] = field(default_factory=dict)
    """Weighted terms (N,), whose sum is the reward."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Per-environment figures (N,), e.g. a tracking error."""
    faults: tuple[Fault, ...] = ()


class Step(NamedTuple):
    """What `step` gives. All tensors are fresh and never written later."""

    obs: Obs
    reward: Tensor
    """(N,) float32"""
    terminated: Tensor
    """(N,) bool: the episode ended by its own rules; the value after it is zero."""
    truncated: Tensor
    """(N,) bool: it was cut (time limit, fault); the value goes on. Never with `terminated`."""
    next_obs: Obs
    """True successor; the same object as `obs` when no row ended."""
    info: Info


class VecEnv(Protocol):
    """N environments behind one `step`."""

    spec: EnvSpec
    device: device

    def reset(self) -> Obs:
        """Begin a new episode in every row."""
        ...

    def observe(self) -> Obs:
        """The current observation; reading it changes nothing."""
        ...

    def step(self, action: Tensor) -> Step:
        """Advance by `spec.step_dt`. `action` is (N, A) float32, or (N,) int64 for `Discrete`."""
        ...

    def state_dict(self) -> dict:
        """Everything that decides the future; tensors, numbers and strings only."""
        ...

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        ...

    def get_rows(self, rows: Tensor) -> dict:
        """State of some rows, to be written elsewhere by `set_rows`."""
        ...

    def set_rows(self, rows: Tensor, state: dict) -> None:
        """Copy worlds: rows continue as those that `get_rows` saw."""
        ...

    def close(self) -> None:
        """Free threads and buffers."""
        ...


class GoalEnv(VecEnv, Protocol):
    """A task with goals: reward and termination are functions of what was achieved and the goal.

    The goal stands in "actor" and "critic" too, under the names of its terms, and no other term
    there depends on it: so that a transition can be read as if the goal had been another one.
    """

    def reward_for(self, achieved: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """Reward (B,) float32 and terminated (B,) bool of steps that led to `achieved` (B, G).

        Args:
            achieved: group "achieved" of the step's `next_obs`.
            goal: group "goal" (B, G) of the observation that the policy acted on.
        """
        ...
