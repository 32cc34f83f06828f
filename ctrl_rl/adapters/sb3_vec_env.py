"""Our environments as stable-baselines3's `VecEnv`; reached through `ctrl_rl.adapters.sb3.vec_env`.

What a learner of that library gets, per step and in numpy:

    observations  (N, d) float32, the group "actor"; of the new episode in rows that ended
    rewards       (N,) float32
    dones         (N,) bool, terminated or truncated
    infos[i]      "TimeLimit.truncated" in every row: cut, so that the value goes on; in rows that
                  ended also "terminal_observation" (d,), the true successor of the action, and
                  "episode": {"r": return, "l": steps, "t": seconds since the start}, as its
                  `Monitor` gives it; "fault": cause, in a row whose world left the numbers

It does not know a second observation for the critic: the group "critic" is left out.
"""

import math
import time
from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from ctrl_rl import env as contract
from ctrl_rl.spec import Discrete, EnvSpec


class TaskVecEnv(VecEnv):
    """N rows of one of our environments; see the module's docstring.

    Args:
        env: as `ctrl_rl.make` gives it; it is reset by `reset`, closed by `close`.
        action_bound: bound of the elements of the action that have none, in their own units.

    Raises:
        ValueError: the action has no bounds and `action_bound` is not given, or not positive.
    """

    def __init__(self, env: contract.VecEnv, action_bound: float | None = None) -> None:
        self.env = env
        shape = (env.spec.obs_size("actor"),)
        self._draws = hasattr(env, "frame")
        super().__init__(
            env.spec.num_envs,
            spaces.Box(-np.inf, np.inf, shape, np.float32),
            action_space(env.spec, action_bound),
        )
        self.metadata["render_fps"] = max(1, round(1 / env.spec.step_dt))  # pyright: ignore
        self._start = env.state_dict()
        self._started_at = time.time()
        self._action = torch.empty(0)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)

    def reset(self) -> np.ndarray:
        """Begin a new episode in every row; after `seed`, from the start of that seed's numbers.

        Raises:
            ValueError: options were set: our environments take none.
        """
        if any(self._options):
            raise ValueError("options: an environment of ctrl-rl takes none; set its config")
        seed = self._seeds[0]
        if seed is not None:
            if "seed" not in self._start:
                raise ValueError("the environment takes its seed when it is made, not later")
            self.env.load_state_dict({**self._start, "seed": int(seed)})
        self._reset_seeds()
        self._reset_options()
        self._returns[:] = 0.0
        self._lengths[:] = 0
        return _numpy(self.env.reset()["actor"])

    def step_async(self, actions: np.ndarray) -> None:
        """Keep a copy (N, A) or (N,) of the actions for `step_wait`."""
        kind = torch.int64 if isinstance(self.action_space, spaces.Discrete) else torch.float32
        self._action = torch.tensor(np.asarray(actions), dtype=kind, device=self.env.device)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict]]:
        """Step all rows. Raises ValueError where the action has another shape."""
        step = self.env.step(self._action)
        reward, truncated = _numpy(step.reward), _numpy(step.truncated)
        ended = _numpy(step.terminated) | truncated
        self._returns += reward
        self._lengths += 1
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": cut} for cut in truncated.tolist()]
        for fault in step.info.faults:
            infos[fault.row]["fault"] = fault.cause
        if ended.any():
            rows = ended.nonzero()[0]
            final = _numpy(step.next_obs["actor"][torch.from_numpy(rows).to(self.env.device)])
            seconds = round(time.time() - self._started_at, 6)
            for row, obs in zip(rows.tolist(), final, strict=True):
                infos[row]["terminal_observation"] = obs.copy()
                infos[row]["episode"] = {
                    "r": round(float(self._returns[row]), 6),
                    "l": int(self._lengths[row]),
                    "t": seconds,
                }
            self._returns[rows] = 0.0
            self._lengths[rows] = 0
        return _numpy(step.obs["actor"]), reward, ended, infos

    def close(self) -> None:
        """Free the simulator."""
        self.env.close()

    def get_images(self) -> list[np.ndarray]:
        """A picture (H, W, 3) uint8 of each row."""
        return [self.env.frame(row) for row in range(self.num_envs)]  # pyright: ignore

    # The rows share one environment object: what is asked of one is asked of all -------------

    def get_attr(self, attr_name: str, indices=None) -> list[Any]:
        """The environment's attribute, once per row asked for."""
        if attr_name == "render_mode":
            value = "rgb_array" if self._draws else None
        else:
            value = getattr(self.env, attr_name)
        return [value] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices=None) -> None:
        """Set an attribute of the environment.

        Raises:
            ValueError: for some rows only.
        """
        self._check_all(indices, f"set {attr_name}")
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *method_args, indices=None, **method_kwargs) -> list:
        """Call a method of the environment once; its result, once per row.

        Raises:
            ValueError: for some rows only.
        """
        self._check_all(indices, f"call {method_name}")
        result = getattr(self.env, method_name)(*method_args, **method_kwargs)
        return [result] * self.num_envs

    def env_is_wrapped(self, wrapper_class: type[gymnasium.Wrapper], indices=None) -> list[bool]:
        """True for `Monitor` alone, whose episode figures stand in the infos."""
        rows = len(list(self._get_indices(indices)))
        return [issubclass(wrapper_class, Monitor)] * rows

    def _check_all(self, indices: int | Iterable[int] | None, what: str) -> None:
        if set(self._get_indices(indices)) != set(range(self.num_envs)):
            raise ValueError(f"cannot {what} for some rows: they share one environment")


def action_space(spec: EnvSpec, action_bound: float | None = None) -> spaces.Space:
    """The action as a gymnasium space with finite bounds, which stable-baselines3 asks for.

    Args:
        spec: of the environment.
        action_bound: b; elements without bounds lie in (-b, b).

    Raises:
        ValueError: an element has no bounds and b is not given, or b is not a positive number.
    """
    if isinstance(spec.action, Discrete):
        return spaces.Discrete(spec.action.n)
    if action_bound is not None and not 0 < action_bound < math.inf:
        raise ValueError(f"action_bound must be a positive number, not {action_bound}")
    free = [d.name for d in spec.action if not (math.isfinite(d.low) and math.isfinite(d.high))]
    if free and action_bound is None:
        raise ValueError(
            f"{spec.task}: the action has no bounds in {', '.join(free)}, and stable-baselines3 "
            "needs some; give action_bound"
        )
    bound = action_bound or 0.0
    low = [d.low if math.isfinite(d.low) else -bound for d in spec.action]
    high = [d.high if math.isfinite(d.high) else bound for d in spec.action]
    for dim, least, most in zip(spec.action, low, high, strict=True):
        if not least < most:
            raise ValueError(f"action_bound {bound} leaves {dim.name} no room: {least} to {most}")
    return spaces.Box(np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32)


def _numpy(value: torch.Tensor) -> np.ndarray:
    """A copy of its own memory: callers write into what they get."""
    return value.detach().cpu().numpy().copy()
