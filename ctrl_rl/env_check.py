"""`check_env`: holds an environment to the contract of `ctrl_rl.env`, promise by promise.

Reading order: `CheckReport` -> `check_env` -> `_Subject` -> the checks -> `CHECKS`.
"""

import math
import random as python_random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctrl_rl.env import GoalEnv, Info, Obs, Step, VecEnv
from ctrl_rl.hindsight import with_goal
from ctrl_rl.spec import ActionDim, Discrete, EnvSpec


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What `check_env` found; `str` of it is meant to be read."""

    task: str
    passed: tuple[str, ...]
    """Names of checks, see `CHECKS`."""
    faults: tuple[str, ...]
    """One line each, "check: what is wrong and where"."""
    skipped: tuple[str, ...]
    """One line each, "check: why it could not be made"."""

    def __str__(self) -> str:
        """One line per fault and per check that could not be made."""
        counts = f"{len(self.passed)} checks passed, {len(self.faults)} faults"
        lines = [f"{self.task}: {counts}, {len(self.skipped)} not made"]
        lines += [f"  fault    {line}" for line in self.faults]
        lines += [f"  not made {line}" for line in self.skipped]
        return "\n".join(lines)


class ContractError(ValueError):
    """An environment breaks the contract; the message lists every fault."""

    def __init__(self, report: CheckReport) -> None:
        super().__init__(str(report))
        self.report = report


def check_env(
    make: "Callable[[int, int], VecEnv] | VecEnv",
    *,
    num_envs: int = 8,
    seed: int = 0,
    num_steps: int | None = None,
) -> CheckReport:
    """Hold an environment to the contract.

    Random actions play one roll-out; the checks look at it and replay parts of it in further
    environments. Everything is compared to the bit, but for the sum of reward terms.

    Args:
        make: `make(num_envs, seed)` builds an environment. Given an environment instead, only the
            roll-out itself can be checked; the report says what was not.
        num_envs: N of the roll-out, at least 4; ignored for an instance.
        seed: seed of environments and actions.
        num_steps: length of the roll-out; None for one whole episode and two steps, at least 30.

    Returns:
        The report, when there is no fault.

    Raises:
        ContractError: with the same report, when there is one.
    """
    if num_envs < 4:
        raise ValueError(f"check_env needs num_envs of at least 4, not {num_envs}")
    subject = _Subject(make, num_envs, seed)
    passed, faults, skipped = [], [], []
    wrong = ""  # why the rest cannot be checked
    try:
        for name, check in CHECKS.items():
            try:
                if wrong:
                    raise _NotPossible(wrong)
                if subject.make is None and name in NEED_MAKE:
                    raise _NotPossible("needs make(num_envs, seed), not an instance")
                if name == "shapes":
                    subject.play(num_steps)
                found = list(check(subject))
            except _NotPossible as reason:
                skipped.append(f"{name}: {reason}")
                continue
            except Exception as error:
                found = [f"{type(error).__name__} was raised: {error}"]
            faults += [f"{name}: {line}" for line in found]
            passed += [] if found else [name]
            if found and name in ("spec", "shapes"):
                wrong = f"{name} must be right first"
    finally:
        subject.close()
    report = CheckReport(
        task=subject.task, passed=tuple(passed), faults=tuple(faults), skipped=tuple(skipped)
    )
    if faults:
        raise ContractError(report)
    return report


Rows = slice | Tensor
ALL = slice(None)


class _NotPossible(Exception):
    """A check has nothing to look at; the message says why."""


class _Subject:
    """The environment under test and one recorded roll-out of it.

    `steps` are private copies on the CPU, taken when `step` returned; `returned` are the tensors
    themselves.
    """

    def __init__(self, make: Any, num_envs: int, seed: int) -> None:
        self.make = None if hasattr(make, "step") else make
        self.num_envs, self.seed = num_envs, seed
        self._open: list[VecEnv] = []
        self.env: VecEnv = make if self.make is None else self.fresh()
        if self.make is None:
            self.num_envs = self.env.spec.num_envs
        self.spec: EnvSpec = self.env.spec
        self.task = self.spec.task

    def fresh(self, num_envs: int | None = None, seed: int | None = None) -> VecEnv:
        """A new environment; by default equal to the first."""
        assert self.make is not None  # NEED_MAKE holds the checks that come here
        env = self.make(
            self.num_envs if num_envs is None else num_envs, self.seed if seed is None else seed
        )
        self._open.append(env)
        return env

    def close(self) -> None:
        """Close what `fresh` made; an instance stays open."""
        for env in self._open:
            env.close()

    def play(self, num_steps: int | None) -> None:
        """Record the roll-out."""
        count = max(self.spec.max_episode_steps + 2, 30) if num_steps is None else num_steps
        generator = torch.Generator().manual_seed(self.seed)
        self.actions = _random_actions(self.spec.action, count, self.num_envs, generator)
        self.start_returned = self.env.observe() if self.make else self.env.reset()
        self.start = _copy(self.start_returned)
        self.returned: list[Step] = []
        self.steps: list[Step] = []
        for t in range(count):
            step = self.act(self.env, t)
            self.returned.append(step)
            self.steps.append(_copy_step(step))
        self.ended = [bool((s.terminated | s.truncated).any()) for s in self.steps]

    @property
    def opening(self) -> int:
        """Number of steps to replay from the start, with the first end of an episode if near."""
        return min(self.window()[1], 60)

    def before(self, t: int) -> Obs:
        """Observation that the policy acted on in step `t`."""
        return self.steps[t - 1].obs if t else self.start

    def window(self) -> tuple[int, int]:
        """Steps to replay: 20 around the first end of an episode, but never from the start."""
        first = self.ended.index(True) if True in self.ended else 0
        start = min(max(3, first - 10), len(self.steps))
        return start, min(len(self.steps), start + 20)

    def act(self, env: VecEnv, t: int) -> Step:
        """Step with the recorded action `t`; the environment gets a copy."""
        return env.step(self.actions[t][: env.spec.num_envs].to(env.device, copy=True))

    def advance(self, env: VecEnv, start: int, stop: int) -> None:
        """Play the recorded actions `start` to `stop`."""
        for t in range(start, stop):
            self.act(env, t)

    def replay(self, env: VecEnv, start: int, stop: int, rows: Rows = ALL) -> str | None:
        """Play recorded actions; say where the steps first differ from the roll-out in `rows`."""
        for t in range(start, stop):
            text = _first_difference(_copy_step(self.act(env, t)), self.steps[t], rows)
            if text:
                return f"{text} of step {t}"
        return None


def _random_actions(
    action: tuple[ActionDim, ...] | Discrete, count: int, num_envs: int, generator
) -> Tensor:
    """(count, N, A) float32, uniform within the bounds, standard normal where they are infinite.

    Or (count, N) int64 for `Discrete`.
    """
    if isinstance(action, Discrete):
        return torch.randint(action.n, (count, num_envs), generator=generator)
    low, high = (torch.tensor([getattr(d, k) for d in action]) for k in ("low", "high"))
    shape = (count, num_envs, len(action))
    bounded = torch.isfinite(low) & torch.isfinite(high)
    uniform = torch.rand(shape, generator=generator)
    normal = torch.randn(shape, generator=generator).clamp(low, high)
    inside = torch.where(bounded, low, 0.0) + torch.where(bounded, high - low, 0.0) * uniform
    return torch.where(bounded, inside, normal)


def _copy(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Private copies on the CPU."""
    return {name: value.detach().to("cpu", copy=True) for name, value in values.items()}


def _copy_step(step: Step) -> Step:
    """A step of private copies on the CPU."""
    flags = _copy({"r": step.reward, "te": step.terminated, "tr": step.truncated})
    info = Info(
        reward_terms=_copy(step.info.reward_terms),
        metrics=_copy(step.info.metrics),
        faults=step.info.faults,
    )
    obs, next_obs = _copy(step.obs), _copy(step.next_obs)
    return Step(obs, flags["r"], flags["te"], flags["tr"], next_obs, info)


def _tensors(step: Step) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a step with its name."""
    for name in ("obs", "next_obs"):
        for group, value in getattr(step, name).items():
            yield f"{name}[{group!r}]", value
    for name in ("reward", "terminated", "truncated"):
        yield name, getattr(step, name)
    for kind in ("reward_terms", "metrics"):
        for name, value in getattr(step.info, kind).items():
            yield f"info.{kind}[{name!r}]", value


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise equality to the bit, NaN equal to NaN."""
    return (a == b) | ((a != a) & (b != b))


def _first_difference(a: Step, b: Step, rows: Rows = ALL) -> str | None:
    """Name, row and values of the first tensor in which steps differ in `rows`."""
    others = dict(_tensors(b))
    for name, value in _tensors(a):
        if name not in others:
            return f"{name} is new"
        ours, theirs = value[rows], others[name][rows]
        if ours.shape != theirs.shape:
            return f"{name} has shape {tuple(ours.shape)}, not {tuple(theirs.shape)},"
        differs = (~_same(ours, theirs)).nonzero()
        if len(differs):
            at = tuple(differs[0].tolist())
            row = torch.arange(len(value))[rows][at[0]].item()
            return f"{name} of row {row} is {ours[at].item():.9g}, not {theirs[at].item():.9g},"
    return None


def _columns(spec: EnvSpec, group: str) -> Iterator[tuple[str, bool]]:
    """Name of each column of a group, and whether it may be constant."""
    for term in spec.obs[group]:
        for frame in range(term.history):
            for i in range(term.size):
                label = term.labels[i] if term.labels else str(i)
                age = f", {term.history - 1 - frame} frames old" if term.history > 1 else ""
                yield f"{group}/{term.name}[{label}]{age}", term.constant


# The checks -----------------------------------------------------------------------------------
# Each yields one line per fault.


def _check_spec(s: _Subject) -> Iterator[str]:
    """The spec survives JSON and counts the environments that were asked for."""
    if EnvSpec.from_json(s.spec.to_json()) != s.spec:
        yield "from_json(to_json()) is another spec"
    if s.spec.num_envs != s.num_envs:
        yield f"num_envs is {s.spec.num_envs}, asked for {s.num_envs}"


def _check_shapes(s: _Subject) -> Iterator[str]:
    """Shapes, dtypes and device of everything returned are those of the spec."""
    n, where = s.num_envs, torch.device(s.env.device).type
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        f"{kind}[{group!r}]": ((n, s.spec.obs_size(group)), torch.float32)
        for kind in ("obs", "next_obs")
        for group in s.spec.obs
    }
    expected["reward"] = (n,), torch.float32
    expected["terminated"] = expected["truncated"] = (n,), torch.bool
    start = {f"obs[{group!r}]": value for group, value in s.start_returned.items()}
    for t, found in [(-1, start), *((t, dict(_tensors(x))) for t, x in enumerate(s.returned))]:
        wanted = {k: v for k, v in expected.items() if t >= 0 or k.startswith("obs")}
        when = f"in step {t}" if t >= 0 else "at the start"
        lines = [f"{name} is missing {when}" for name in wanted if name not in found]
        for name, value in found.items():
            shape, dtype = wanted.get(name, ((n,), value.dtype))
            if name not in wanted and not name.startswith("info"):
                lines.append(f"{name} {when} is not in the spec")
            elif tuple(value.shape) != shape or value.dtype != dtype:
                lines.append(
                    f"{name} {when} is {tuple(value.shape)} {value.dtype}, not {shape} {dtype}"
                )
            elif value.device.type != where:
                lines.append(f"{name} {when} is on {value.device}, not on {where}")
        if lines:
            yield from lines
            return  # every later step would repeat it


def _check_finite(s: _Subject) -> Iterator[str]:
    """Observations, rewards and figures are finite."""
    for t, step in enumerate(s.steps):
        for name, value in _tensors(step):
            if value.is_floating_point() and not torch.isfinite(value).all():
                yield f"{name} is not finite in step {t}"
                return


def _check_flags(s: _Subject) -> Iterator[str]:
    """Never terminated and truncated at once; no episode is longer than the spec allows."""
    both = [t for t, x in enumerate(s.steps) if (x.terminated & x.truncated).any()]
    if both:
        yield f"terminated and truncated at once in step {both[0]}"
    age = torch.zeros(s.num_envs, dtype=torch.int64)
    for t, step in enumerate(s.steps):
        age += 1
        ended = step.terminated | step.truncated
        late = (age >= s.spec.max_episode_steps) & ~ended
        if late.any():
            row = int(late.nonzero()[0])
            yield (
                f"row {row} goes on after {age[row]} steps in step {t}; "
                f"max_episode_steps is {s.spec.max_episode_steps}"
            )
            return
        age[ended] = 0


def _check_next_obs(s: _Subject) -> Iterator[str]:
    """`next_obs` equals `obs` where no episode ended, and is the last observation where one did.

    The last observation is neither the first of the next episode, nor the one before the action,
    nor zero, nor further away from the one before than three times any other step went.
    """
    most: dict[str, Tensor] = {}
    ends: list[tuple[int, Tensor]] = []
    for t, step in enumerate(s.steps):
        ended = step.terminated | step.truncated
        for group, value in step.next_obs.items():
            if not _same(value, step.obs[group])[~ended].all():
                yield f"next_obs[{group!r}] differs from obs in step {t} in a row that goes on"
                return
            move = (value - s.before(t)[group]).abs()[~ended]
            if len(move):
                move = move.amax(0)
                most[group] = torch.maximum(most.get(group, move), move)
        if ended.any():
            ends.append((t, ended))
    if not ends:
        raise _NotPossible(f"no episode ended in {len(s.steps)} steps")
    for group in s.spec.obs:
        last = torch.cat([s.steps[t].next_obs[group][rows] for t, rows in ends])
        new = torch.cat([s.steps[t].obs[group][rows] for t, rows in ends])
        old = torch.cat([s.before(t)[group][rows] for t, rows in ends])
        where = f"next_obs[{group!r}] of rows that ended is"
        if _same(last, new).all(1).any():
            yield f"{where} the first observation of the next episode"
        elif _same(last, old).all(1).any() and most.get(group, new).any():
            yield f"{where} the observation before the action"
        elif (last == 0).all(1).any():
            yield f"{where} zero"
        elif group in most:
            leap = ((last - old).abs() / (3 * most[group] + 1e-6)).amax(1)
            if leap.median() > 1:
                yield (
                    f"{where} {3 * leap.median():.2g} times as far from the observation before "
                    "as any other step went"
                )


def _check_aliasing(s: _Subject) -> Iterator[str]:
    """A returned tensor is never written later, and the caller may write to it."""
    for t, (returned, copy) in enumerate(zip(s.returned, s.steps, strict=True)):
        text = _first_difference(_copy_step(returned), copy)
        if text:
            yield f"a tensor that step {t} returned was written later: {text.rstrip(',')}"
            break
        ended = (returned.terminated | returned.truncated).any()
        for group, value in returned.obs.items():
            if ended and value.data_ptr() == returned.next_obs[group].data_ptr():
                yield f"obs[{group!r}] and next_obs[{group!r}] of step {t} share memory"
                return
    step = s.act(s.env, 0)
    before = _copy(step.obs)
    for value in (*step.obs.values(), *s.env.observe().values()):
        value.fill_(12345.0)
    for group, value in s.env.observe().items():
        if not _same(value.cpu(), before[group]).all():
            yield f"writing to a returned obs[{group!r}] changed what observe() gives"


def _check_dead(s: _Subject) -> Iterator[str]:
    """No observation element is constant over all rows and steps, unless its term says so."""
    for group in s.spec.obs:
        every = torch.cat([s.start[group]] + [x.next_obs[group] for x in s.steps])
        constant = (every == every[0]).all(0)
        for (name, allowed), dead in zip(_columns(s.spec, group), constant, strict=True):
            if dead and not allowed:
                yield f"{name} is always {every[0, list(constant).index(dead)]:.6g}"


def _check_starts(s: _Subject) -> Iterator[str]:
    """Every environment begins differently, and so does every episode and every seed."""
    first = torch.cat(list(s.start.values()), 1)
    if len(first.unique(dim=0)) < s.num_envs:
        yield "two environments begin with the same observation"
    again = torch.cat([v.cpu() for v in s.env.reset().values()], 1)
    if _same(first, again).all(1).any():
        yield "an environment begins its next episode with the same observation"
    if s.make is not None:
        other = torch.cat([v.cpu() for v in s.fresh(seed=s.seed + 1).observe().values()], 1)
        if _same(first, other).all(1).any():
            yield f"seeds {s.seed} and {s.seed + 1} begin with the same observation"


def _check_reward(s: _Subject) -> Iterator[str]:
    """The reward is the sum of `info.reward_terms`, to 1e-6 of their magnitude."""
    for t, step in enumerate(s.steps):
        terms = list(step.info.reward_terms.values())
        if not terms:
            yield f"info.reward_terms is empty in step {t}"
            return
        stacked = torch.stack([term.double() for term in terms])
        error = (stacked.sum(0) - step.reward.double()).abs()
        if (error > 1e-6 * (1 + stacked.abs().sum(0))).any():
            row = int(error.argmax())
            yield (
                f"row {row} of step {t} has reward {step.reward[row]:.9g}, "
                f"its terms sum to {stacked.sum(0)[row]:.9g}"
            )
            return


def _check_goals(s: _Subject) -> Iterator[str]:
    """Where there are goals, `reward_for` gives reward and end of a step; policies see theirs."""
    if "goal" not in s.spec.obs:
        return
    env: GoalEnv = s.env  # pyright: ignore[reportAssignmentType]
    for t, step in enumerate(s.steps):
        before = s.before(t)
        goal, achieved = before["goal"], step.next_obs["achieved"]
        healthy = torch.ones(s.num_envs, dtype=torch.bool)
        healthy[[fault.row for fault in step.info.faults]] = False
        found = env.reward_for(achieved.to(env.device), goal.to(env.device))
        for name, value in zip(("reward", "terminated"), found, strict=True):
            given = getattr(step, name)
            if value.shape != given.shape or value.dtype != given.dtype:
                yield f"reward_for gives {name} as {tuple(value.shape)} {value.dtype}"
                return
            off = (value.cpu().double() - given.double()).abs() > 1e-6 * (1 + given.double().abs())
            if (off & healthy).any():
                row = int((off & healthy).nonzero()[0])
                yield (
                    f"row {row} of step {t} has {name} {given[row].item():.9g}, "
                    f"reward_for gives {value[row].item():.9g}"
                )
                return
        for group in ("actor", s.spec.critic_group):
            if not torch.equal(with_goal(s.spec, group, before[group], goal), before[group]):
                yield f"the goal in obs[{group!r}] before step {t} is not that of obs['goal']"
                return


def _check_determinism(s: _Subject) -> Iterator[str]:
    """The same seed and actions give the same bits, whoever else draws from global generators.

    The caller's action buffer is overwritten after each step: an environment that keeps a
    reference to it is found here.
    """
    env = s.fresh()
    for t, action in enumerate(s.actions[: s.opening]):
        buffer = action.to(env.device, copy=True)
        step = _copy_step(env.step(buffer))
        if not _same(buffer.cpu(), action).all():
            yield f"step {t} wrote to the action it was given"
            return
        buffer.zero_()
        _ = torch.rand(1), np.random.rand(), python_random.random()  # someone else's draws
        text = _first_difference(step, s.steps[t])
        if text:
            yield f"in a second run {text} of step {t}"
            return


def _check_num_envs(s: _Subject) -> Iterator[str]:
    """Row i of half as many environments is row i of all of them."""
    half = s.num_envs // 2
    env = s.fresh(num_envs=half)
    for group, value in env.observe().items():
        if not _same(value.cpu(), s.start[group][:half]).all():
            yield f"the start of obs[{group!r}] depends on num_envs"
            return
    text = s.replay(env, 0, s.opening, slice(0, half))
    if text:
        yield f"with num_envs {half} instead of {s.num_envs}, {text}"


def _check_observe(s: _Subject) -> Iterator[str]:
    """`observe` gives the last `obs` and changes nothing, however often it is called."""
    env = s.fresh()
    for t in range(s.opening):
        for value in (env.observe(), env.observe()):
            for group, tensor in value.items():
                if not _same(tensor.cpu(), s.before(t)[group]).all():
                    yield f"observe()[{group!r}] before step {t} is not the observation of the row"
                    return
        text = _first_difference(_copy_step(s.act(env, t)), s.steps[t])
        if text:
            yield f"after calls of observe(), {text} of step {t}"
            return


def _check_state(s: _Subject) -> Iterator[str]:
    """A saved state continues to the bit, in the same environment and in one of another seed."""
    start, stop = s.window()
    env = s.fresh()
    s.advance(env, 0, start)
    state = env.state_dict()
    yield from (f"state_dict holds {text}" for text in _foreign(state, "state"))
    s.advance(env, start, stop)
    for target, name in ((env, "the same environment"), (s.fresh(seed=s.seed + 1), "a new one")):
        target.load_state_dict(state)
        for group, value in target.observe().items():
            if not _same(value.cpu(), s.before(start)[group]).all():
                yield f"loaded into {name}, observe()[{group!r}] is not the one that was saved"
                return
        text = s.replay(target, start, stop)
        if text:
            yield f"loaded into {name}, {text}"
            return


def _foreign(value, path: str) -> Iterator[str]:
    """Whatever a checkpoint may not hold."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _foreign(v, f"{path}[{k!r}]")
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from _foreign(v, f"{path}[{i}]")
    elif value is not None and not isinstance(value, (Tensor, str, int, float, bool)):
        yield f"a {type(value).__name__} at {path}"


def _check_rows(s: _Subject) -> Iterator[str]:
    """Rows put back by `set_rows` continue to the bit, others never notice; copies look alike."""
    start, stop = s.window()
    half = (stop - start) // 2
    if half == 0:
        raise _NotPossible("the roll-out is too short")
    rows, others = torch.tensor([1, 2]), torch.tensor([0, *range(3, s.num_envs)])
    env = s.fresh()
    s.advance(env, 0, start)
    saved = env.get_rows(rows.to(env.device))
    s.advance(env, start, start + half)
    env.set_rows(rows.to(env.device), saved)
    for t in range(start, start + half):
        # `rows` live through step t for the second time, the others through step t + half.
        action = s.actions[t + half].clone()
        action[rows] = s.actions[t][rows]
        step = _copy_step(env.step(action.to(env.device)))
        text = _first_difference(step, s.steps[t], rows)
        if text:
            yield f"rows put back: {text} of step {t}"
            return
        text = _first_difference(step, s.steps[t + half], others)
        if text:
            yield f"set_rows of other rows: {text} of step {t + half}"
            return
    for target in ([3, 0], [1, 2]):
        env.set_rows(torch.tensor(target, device=env.device), saved)
    for group, value in env.observe().items():
        if not _same(value[[3, 0]], value[[1, 2]]).all():
            yield f"a copied row has another obs[{group!r}]"


def _check_refusal(s: _Subject) -> Iterator[str]:
    """An action of a wrong shape or dtype raises ValueError and changes nothing."""
    env, good = s.fresh(), s.actions[0].to(s.env.device, copy=True)
    wrong = {
        "one row too many": torch.cat([good, good[:1]]),
        "one column too many": torch.stack([good, good], -1).flatten(1),
        "another dtype": good.double(),
    }
    for name, action in wrong.items():
        try:
            env.step(action)
        except ValueError:
            continue
        except Exception as error:
            yield f"an action with {name} raises {type(error).__name__}, not ValueError"
        else:
            yield f"an action with {name} was taken"
        return
    text = s.replay(env, 0, 1)
    if text:
        yield f"after a refused action, {text}"


def _check_faults(s: _Subject) -> Iterator[str]:
    """A row with a bad action is truncated with reward 0, a cause and a reset; no other notices.

    Its `next_obs` is the last healthy observation.
    """
    going = [~(x.terminated | x.truncated) for x in s.steps]
    places = [
        (t, int(row))
        for t in range(1, min(50, len(going) - 2))
        for row in (going[t] & going[t - 1] & going[t + 1]).nonzero()
    ]
    if not places:
        raise _NotPossible("no episode lasts for three steps")
    t, row = places[0]
    env = s.fresh()
    s.advance(env, 0, t)
    action = s.actions[t].clone()
    action[row] = s.spec.action.n if isinstance(s.spec.action, Discrete) else math.nan
    step = _copy_step(env.step(action.to(env.device)))
    if not step.truncated[row] or step.terminated[row]:
        yield "the row is not truncated"
    if step.reward[row] != 0:
        yield f"the row has reward {step.reward[row]:.6g}, not 0"
    if [f.row for f in step.info.faults] != [row] or not step.info.faults[0].cause.strip():
        yield f"info.faults is {step.info.faults}, not row {row} with a cause"
    for group in s.spec.obs:
        if not _same(step.next_obs[group][row], s.before(t)[group][row]).all():
            yield f"next_obs[{group!r}] of the row is not its last healthy observation"
        if not torch.isfinite(step.obs[group][row]).all():
            yield f"obs[{group!r}] of the row is not finite after its reset"
    others = torch.arange(s.num_envs) != row
    text = _first_difference(step, s.steps[t], others)
    text = text or s.replay(env, t + 1, t + 2, others)
    if text:
        yield f"another row noticed: {text}"


CHECKS: dict[str, Callable[[_Subject], Iterator[str]]] = {
    "spec": _check_spec,
    "shapes": _check_shapes,
    "finite": _check_finite,
    "flags": _check_flags,
    "next_obs": _check_next_obs,
    "dead": _check_dead,
    "reward": _check_reward,
    "goals": _check_goals,
    "aliasing": _check_aliasing,
    "starts": _check_starts,
    "determinism": _check_determinism,
    "num_envs": _check_num_envs,
    "observe": _check_observe,
    "state": _check_state,
    "rows": _check_rows,
    "refusal": _check_refusal,
    "faults": _check_faults,
}
"""What `check_env` checks, in order; the first line of each docstring says what is promised."""

NEED_MAKE = ("determinism", "num_envs", "observe", "state", "rows", "refusal", "faults")
"""Checks that need a second environment."""
