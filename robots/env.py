"""`TaskEnv`: the part of `step` that every task shares.

A task subclass says what is particular, in this order: configuration, observation terms, reward
terms, terminations, reset and randomisation. This class holds the episode counters, the keyed
randomness, observation assembly from the spec, faults, auto-reset and exact state.

Order in `step`: check action -> `apply_action` -> physics -> count -> reward terms ->
terminations -> `advance` (commands, pushes, memory) -> observation -> faults -> reset of ended
rows. So a reward is computed with the command that the policy saw, and the observation holds the
next one.
"""

import functools
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ctrl_rl import random
from ctrl_rl.env import Fault, Info, Obs, Step
from ctrl_rl.spec import Discrete, EnvSpec
from robots.observation import ObsGroup
from robots.sim import Rows, Sim

ALL = slice(None)

MODELS = Path(__file__).parent / "models"
"""Model files of this package."""


def _without_autograd(method):
    """No gradient is recorded, and state stays writable after a call under `inference_mode`."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class TaskEnv:
    """Base of the tasks; implements `ctrl_rl.env.VecEnv`.

    Args:
        config: the task's frozen configuration; None for its default.
        num_envs: N.
        backend: one of `backends`; None for the first.
        device: torch device of all tensors.
        seed: decides every draw.
        first_index: number of row 0, so that several ranks number their rows through.
        threads: simulator threads, 0 for all cores.
    """

    id: str
    """Task id with version."""
    Config: type
    """Frozen dataclass; `evaluation()` and `nominal()` give the variants of `ctrl_rl.evaluate`.

    With a field `staggered_start` that is true, the episodes that `reset` begins have a random
    number of steps behind them already, so that environments do not all end together.
    """
    backends: tuple[str, ...] = ("mujoco", "warp")
    presets: dict[str, dict] = {}
    """Algorithm -> configuration fields that suit this task on a CPU."""

    def __init__(
        self,
        config=None,
        *,
        num_envs: int,
        backend: str | None = None,
        device: str | torch.device = "cpu",
        seed: int = 0,
        first_index: int = 0,
        threads: int = 0,
    ) -> None:
        self.config = self.Config() if config is None else config
        self.backend = self.backends[0] if backend is None else backend
        if self.backend not in self.backends:
            raise ValueError(
                f"{self.id} does not run on backend {backend!r}; choose from "
                f"{', '.join(self.backends)}"
            )
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, not {num_envs}")
        self.num_envs = num_envs
        self.seed = seed
        self.sim = self.make_sim(self.backend, device, threads)
        self.device = self.sim.device
        self.spec = self.make_spec()
        n = num_envs
        self._renderer = self._held = None
        self.memory: dict[str, Tensor] = {}
        self.index = torch.arange(first_index, first_index + n, device=self.device)
        self.episode = self.remember("episode", torch.full((n,), -1, device=self.device))
        self.step_count = self.remember("step_count", self.episode * 0)
        self._cached_key: Tensor | None = None
        self._groups = {g: ObsGroup(self, g, terms) for g, terms in self.spec.obs.items()}
        self.prepare()
        self._obs = self.reset()

    # What a task provides -----------------------------------------------------------------

    def make_sim(self, backend: str, device, threads: int) -> Sim:
        """The simulator with N worlds."""
        raise NotImplementedError

    def make_spec(self) -> EnvSpec:
        """The contract."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Bind fields, `remember` memory, randomise what is fixed for a world's lifetime."""

    def begin(self, rows: Rows) -> None:
        """Write the initial state and memory of new episodes; the simulator was reset."""

    def refresh(self, rows: Rows) -> None:
        """Bring derived fields up to the state that `begin` wrote."""
        self.sim.forward(rows)

    def apply_action(self, action: Tensor) -> None:
        """Turn a finite action (N, A) into `sim.ctrl`."""
        raise NotImplementedError

    def reward_terms(self, action: Tensor) -> dict[str, Tensor]:
        """Weighted terms (N,) in the simulator's dtype; the reward is their sum."""
        raise NotImplementedError

    def terminations(self) -> dict[str, Tensor]:
        """Name -> (N,) bool."""
        return {}

    def advance(self, action: Tensor) -> None:
        """After rewards, before the observation: commands, pushes, memory."""

    def observe_terms(self, rows: Rows) -> dict[str, Tensor]:
        """Raw value of every observation term (n, size), clean, in the simulator's dtype."""
        raise NotImplementedError

    def metrics(self) -> dict[str, Tensor]:
        """Figures (N,) for the log, taken with the rewards."""
        return {}

    def reward_for(self, achieved: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """For groups "goal" and "achieved": see `ctrl_rl.env.GoalEnv`.

        `reward_terms` and `terminations` must agree with it; take their numbers from here, as
        float32, and they do to the bit.
        """
        raise NotImplementedError(f"{self.id} has no goals")

    def picture_file(self) -> Path:
        """MJCF that `frame` and the viewers draw, with the positions of `sim.qpos`."""
        raise NotImplementedError(f"{self.id} has no picture")

    # What a task uses -----------------------------------------------------------------------

    def remember(self, name: str, value: Tensor) -> Tensor:
        """Register a tensor (N, ...) as part of the exact state; write to it in place."""
        self.memory[name] = value
        return value

    def uniform(self, term: str, rows: Rows, size: int, low=0.0, high=1.0) -> Tensor:
        """Keyed uniform draw (n, size) for this episode and step, in the simulator's dtype."""
        draw = random.uniform(self._key[rows], term, size)
        return draw.mul_(high - low).add_(low).to(self.sim.dtype)

    def normal(self, term: str, rows: Rows, size: int) -> Tensor:
        """Keyed standard normal draw (n, size)."""
        return random.normal(self._key[rows], term, size).to(self.sim.dtype)

    def world_uniform(self, term: str, size: int, low=0.0, high=1.0) -> Tensor:
        """A draw (N, size) fixed for the lifetime of each world."""
        zero = torch.zeros_like(self.index)
        draw = random.uniform(random.key(self.seed, self.index, zero - 1, zero), term, size)
        return (low + (high - low) * draw).to(self.sim.dtype)

    # The contract ---------------------------------------------------------------------------

    @_without_autograd
    def reset(self) -> Obs:
        """Begin a new episode in every row."""
        self._begin(ALL, staggered=getattr(self.config, "staggered_start", False))
        self._obs = self._make_obs(ALL)
        return self.observe()

    def observe(self) -> Obs:
        """The current observation, a copy; reading it changes nothing."""
        return {g: value.clone() for g, value in self._obs.items()}

    @_without_autograd
    def step(self, action: Tensor) -> Step:
        """See `ctrl_rl.env.VecEnv.step`. Raises ValueError on a wrong shape or dtype."""
        action, bad_action = self._check_action(action)
        self.apply_action(action)
        self.sim.step(self.spec.decimation)
        self.step_count += 1
        self._cached_key = None

        terms = _snapshot(self.reward_terms(action))
        reward = functools.reduce(torch.add, terms.values()).float()  # in order, whatever N
        causes = self.terminations()
        terminated = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        for flag in causes.values():
            terminated |= flag
        metrics = _snapshot(self.metrics())
        self.advance(action)
        self._hold(ALL)
        next_obs = self._make_obs(ALL)

        faulty, faults = self._faults(bad_action, terms, reward, metrics, next_obs)
        if faults:
            terminated &= ~faulty
            reward = torch.where(faulty, 0.0, reward)
            terms = {k: torch.where(faulty, 0.0, v) for k, v in terms.items()}
            metrics = {k: torch.where(faulty, 0.0, v) for k, v in metrics.items()}
            next_obs = {
                g: torch.where(faulty[:, None], self._obs[g], value)
                for g, value in next_obs.items()
            }
        truncated = ((self.step_count >= self.spec.max_episode_steps) | faulty) & ~terminated
        ended = terminated | truncated
        obs = next_obs
        if ended.any():
            rows = ended.nonzero().flatten()
            self._begin(rows)
            obs = {g: value.clone() for g, value in next_obs.items()}
            for group, value in self._make_obs(rows).items():
                obs[group][rows] = value
        self._obs = {g: value.clone() for g, value in obs.items()}
        info = Info(reward_terms=terms, metrics=metrics, faults=faults)
        return Step(obs, reward, terminated, truncated, next_obs, info)

    def state_dict(self) -> dict:
        """Everything that decides the future."""
        return {
            "task": self.id,
            "seed": self.seed,
            "first_index": int(self.index[0]),
            "sim": self.sim.state_dict(),
            "memory": {k: v.clone() for k, v in self.memory.items()},
            "obs": {k: v.clone() for k, v in self._obs.items()},
        }

    @_without_autograd
    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken, with its seed and numbering.

        Raises:
            ValueError: the state is of another task, configuration or number of environments;
                nothing was changed.
        """
        if state["task"] != self.id:
            raise ValueError(f"the saved state is of {state['task']}, this is {self.id}")
        saved_num_envs = len(state["memory"]["episode"])
        if saved_num_envs != self.num_envs:
            raise ValueError(
                f"the saved state has {saved_num_envs} environments, this has {self.num_envs}"
            )
        shapes = {name: value.shape for name, value in self.memory.items()}
        if {name: value.shape for name, value in state["memory"].items()} != shapes:
            raise ValueError(f"the saved state is of {self.id} with another configuration")
        self.seed = state["seed"]
        self.index += state["first_index"] - self.index[0]
        self.sim.load_state_dict(state["sim"])
        for name, value in state["memory"].items():
            self.memory[name].copy_(value)
        self._obs = {k: v.to(self.device, copy=True) for k, v in state["obs"].items()}
        self._cached_key = None

    def get_rows(self, rows: Tensor) -> dict:
        """State of some rows."""
        return {
            "sim": self.sim.get_rows(rows),
            "memory": {k: v[rows].clone() for k, v in self.memory.items()},
            "obs": {k: v[rows].clone() for k, v in self._obs.items()},
        }

    @_without_autograd
    def set_rows(self, rows: Tensor, state: dict) -> None:
        """Rows continue as those that `get_rows` saw; later draws differ by row number."""
        self.sim.set_rows(rows, state["sim"])
        for name, value in state["memory"].items():
            self.memory[name][rows] = value
        self._obs = {k: v.clone() for k, v in self._obs.items()}
        for name, value in state["obs"].items():
            self._obs[name][rows] = value
        self._cached_key = None

    def hold_command(self, command: Tensor | None) -> None:
        """Let an operator command all rows, (C,) in the units of `spec.command`; None: not.

        What lies outside the range of training is clamped to it, as on the robot.

        Raises:
            ValueError: another number of commands, or one that is not finite.
        """
        if command is not None:
            dims = self.spec.command
            if command.shape != (len(dims),):
                raise ValueError(
                    f"{self.id} takes {len(dims)} commands, not {tuple(command.shape)}"
                )
            if not command.isfinite().all():
                raise ValueError(f"{self.id}: a command must be finite, not {command.tolist()}")
            low, high = (command.new_tensor([getattr(d, k) for d in dims]) for k in ("low", "high"))
            command = command.clamp(low, high)
        self._held = command

    def frame(self, row: int = 0) -> np.ndarray:
        """A picture of one world, (H, W, 3) uint8.

        Raises:
            ValueError: no picture can be made on this machine; the message names the remedy.
        """
        from robots import render

        if self._renderer is None:
            self._renderer = render.Renderer(render.picture_model(self.picture_file()))
        caption = ""
        if self.spec.command:
            for dim, value in zip(self.spec.command, self.memory["command"][row], strict=True):
                caption += f"{dim.name} {value:+.2f} {dim.unit}\n"
        return self._renderer.draw(self.sim.qpos[row].cpu().numpy(), caption)

    def open_viewer(self, keys: dict[str, str], web: bool = False, port: int = 8080):
        """A live view of one world, see `robots.viewer`.

        Args:
            keys: key -> what it does.
            web: in a browser; otherwise in a window.
            port: of the browser view.

        Raises:
            ValueError: it cannot be opened on this machine; the message names the way out.
        """
        from robots import viewer

        return viewer.open_viewer(self.picture_file(), keys, web, port)

    def close(self) -> None:
        """Free the simulator."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self.sim.close()

    # Inside -----------------------------------------------------------------------------------

    @property
    def _key(self) -> Tensor:
        """Hash (N,) of the present counters, made when something is drawn: many steps draw not."""
        if self._cached_key is None:
            self._cached_key = self._draw_key(ALL)
        return self._cached_key

    def _draw_key(self, rows: Rows) -> Tensor:
        return random.key(self.seed, self.index[rows], self.episode[rows], self.step_count[rows])

    def _hold(self, rows: Rows) -> None:
        """Put the operator's command in the place of the task's."""
        if self._held is not None:
            self.memory["command"][rows] = self._held.to(self.memory["command"])

    def _begin(self, rows: Rows, staggered: bool = False) -> None:
        self.episode[rows] += 1
        self.step_count[rows] = 0
        self._cached_key = None
        if staggered:
            age = self.uniform("stagger", rows, 1, 0, self.spec.max_episode_steps)
            self.step_count[rows] = age.flatten().long().clamp(max=self.spec.max_episode_steps - 1)
            self._cached_key = None
        self.sim.reset(rows)
        self.begin(rows)
        self._hold(rows)
        self.refresh(rows)
        for group in self._groups.values():
            group.begin(rows)

    def _make_obs(self, rows: Rows) -> Obs:
        terms = self.observe_terms(rows)
        return {name: group.assemble(terms, rows) for name, group in self._groups.items()}

    def _check_action(self, action: Tensor) -> tuple[Tensor, Tensor | None]:
        """The action with bad rows zeroed, and which rows were bad (None: none)."""
        if not isinstance(action, Tensor):
            raise ValueError(f"{self.id}: action must be a tensor, not a {type(action).__name__}")
        spec = self.spec.action
        if isinstance(spec, Discrete):
            if action.shape != (self.num_envs,) or action.dtype != torch.int64:
                raise ValueError(
                    f"{self.id}: action must be int64 ({self.num_envs},), "
                    f"not {action.dtype} {tuple(action.shape)}"
                )
            bad = (action < 0) | (action >= spec.n)
        else:
            if action.shape != (self.num_envs, len(spec)) or action.dtype != torch.float32:
                raise ValueError(
                    f"{self.id}: action must be float32 ({self.num_envs}, {len(spec)}), "
                    f"not {action.dtype} {tuple(action.shape)}"
                )
            if math.isfinite(action.sum()):  # one number tells that all is well
                return action, None
            bad = ~torch.isfinite(action)
        if not bad.any():
            return action, None
        return torch.where(bad, torch.zeros_like(action), action), bad

    def _faults(
        self, bad_action, terms, reward, metrics, next_obs
    ) -> tuple[Tensor, tuple[Fault, ...]]:
        """Rows that left the numbers, with one cause each."""
        total = reward.sum()
        for value in (*metrics.values(), *next_obs.values()):
            total = total + value.sum()
        if bad_action is None and torch.isfinite(total) & ~self.sim.faulty.any():
            return self.sim.faulty, ()  # one number tells that all is well, the usual case
        faulty = self.sim.faulty.clone()
        if bad_action is not None:
            faulty |= bad_action if bad_action.ndim == 1 else bad_action.any(1)
        for value in (reward, *metrics.values()):
            faulty |= ~torch.isfinite(value)
        for value in next_obs.values():
            faulty |= ~torch.isfinite(value).all(1)
        if not faulty.any():
            return faulty, ()
        faults = []
        for row in faulty.nonzero().flatten().tolist():
            faults.append(
                Fault(row, self._cause(row, bad_action, terms, reward, metrics, next_obs))
            )
        return faulty, tuple(faults)

    def _cause(self, row: int, bad_action, terms, reward, metrics, next_obs) -> str:
        if bad_action is not None and bad_action[row].any():
            dims = self.spec.action
            if isinstance(dims, Discrete):
                return "action: out of range"
            names = [dims[i].name for i in bad_action[row].nonzero().flatten()]
            return f"action: not finite in {', '.join(names)}"
        if self.sim.faulty[row]:
            return self.sim.fault_cause(row)
        for name, value in terms.items():
            if not torch.isfinite(value[row]):
                return f"reward: not finite in {name}"
        if not torch.isfinite(reward[row]):
            return "reward: not finite in the sum of terms"
        for group, value in next_obs.items():
            start = 0
            for term in self.spec.obs[group]:
                if not torch.isfinite(value[row, start : start + term.width]).all():
                    return f"observation: not finite in {group}/{term.name}"
                start += term.width
        name = next(k for k, v in metrics.items() if not torch.isfinite(v[row]))
        return f"metrics: not finite in {name}"


def _snapshot(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies: a task may return live state, which the reset of ended rows overwrites."""
    return dict(zip(values, torch.stack(tuple(values.values())), strict=True)) if values else {}
