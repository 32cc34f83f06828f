"""Data sets of our own: policies roll out in any task, or a learner's replay is taken as it is.

A *source* is what acts: `random`, uniform within the action bounds; a run folder, whose checkpoint
acts as in training; or a run's replay, everything its learner saw from its first step on (the
newest, where the buffer was smaller than the run). A mixture of sources is a data set like
D4RL's medium-expert.

Each of the N environments contributes the same number of steps, and the recording of its last
episode just stops. Waiting for N * k episodes to finish instead would favour short ones. The true
final observation of every episode is kept. A step that ended in a fault is left out: the episode
stops before it.

The same call gives the same data to the bit. The seeds stand in the metadata; no training and no
evaluation draws from them.

Reading order: `Source` -> `collect` -> `roll_out`, `read_replay` -> `from_grid`.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ctrl_rl import registry
from ctrl_rl.checkpoints import load_checkpoint
from ctrl_rl.commands.train import rebuild
from ctrl_rl.env import VecEnv
from ctrl_rl.making import make
from ctrl_rl.policy import check_fits, load_policy
from ctrl_rl.run_folder import find_checkpoint, read_config
from ctrl_rl.spec import Discrete, EnvSpec, strict
from offline.datasets import file_sha256
from offline.episodes import Episodes, concatenate, digest
from offline.scores import played_in

MOST_ENVS, LEAST_EPISODES = 32, 5

GROUP = "actor"
"""Observation group that is recorded: what a policy can measure."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What acts, and for which share of the data."""

    run: Path | None
    """Run folder; None for random actions."""
    checkpoint: str | None = None
    """"best", "last", a step number, or "replay"; None for best, or last without one."""
    share: float

    @classmethod
    def parse_all(cls, words: Sequence[str]) -> list["Source"]:
        """Sources from `random=0.3` or `runs/x:best=0.7`; without shares, equal ones.

        Raises:
            ValueError: no source, or shares that do not add up to 1.
        """
        found = []
        for word in words:
            name, equals, share = word.rpartition("=")
            if not equals:
                name, share = word, "nan"
            try:
                value = float(share)
            except ValueError:
                raise ValueError(f"{word}: {share!r} is no share; write SOURCE=0.5") from None
            run, colon, checkpoint = name.rpartition(":")
            if not colon:
                run, checkpoint = name, ""
            source = None if run == "random" else Path(run)
            which = checkpoint.removeprefix("step-") or None
            if source is None and which is not None:
                raise ValueError(f"{word}: random actions have no checkpoint {which!r}")
            found.append(cls(run=source, checkpoint=which, share=value))
        if not found:
            raise ValueError("name at least one source: random, or a run folder")
        if all(math.isnan(s.share) for s in found):
            equal = 1 / len(found)
            return [cls(run=s.run, checkpoint=s.checkpoint, share=equal) for s in found]
        total = sum(s.share for s in found)
        if not (abs(total - 1) < 1e-6 and all(s.share > 0 for s in found)):
            raise ValueError("give all sources a share above 0, 1 in sum, or none of them")
        return found


def collect(
    task: str,
    sources: Sequence[Source],
    steps: int,
    *,
    num_envs: int | None = None,
    seed: int = 0,
    deterministic: bool = False,
    backend: str | None = None,
    device: str = "cpu",
    threads: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> Episodes:
    """Record a mixture of sources in one task.

    Args:
        task: task id.
        sources: who acts; each contributes its share of the steps, one after another.
        steps: T, about: a fault costs a step.
        num_envs: environments side by side; None for so many, at most `MOST_ENVS`, that each
            gets `LEAST_EPISODES` whole episodes of a source.
        seed: decides starts, randomisation, and sampled actions.
        deterministic: policies play their mean action; otherwise they sample as in training.
        backend: simulator; None for the task's first.
        device: torch device of the environments.
        threads: simulator threads, 0 for all cores.
        progress: takes a line of text after each source.

    Returns:
        Episodes with metadata: task, simulator, seed, sources, action_bounds, digest; `task_config`
        with the settings of the task that are not its own, where the runs had such. Of each source
        it gives the mean return of the episodes that ended.

    Raises:
        ValueError: a source that does not fit the task, a task with discrete or, for random
            actions, unbounded ones; a replay with fewer steps than its share.
    """
    counts = [round(steps * s.share) for s in sources]
    counts[-1] = steps - sum(counts[:-1])
    if min(counts) < 1:
        raise ValueError(f"{steps} steps are too few for {len(sources)} sources")
    trained_in = _task_config(task, sources)
    config = trained_in.evaluation()
    parts, described = [], []
    for i, (source, count) in enumerate(zip(sources, counts, strict=True)):
        source_seed = _source_seed(seed, i)
        env = make(
            task,
            min(num_envs or _enough_envs(task, config, min(counts)), count),
            backend=backend,
            device=device,
            seed=source_seed,
            threads=threads,
            config=config,
        )
        try:
            spec = env.spec
            low, high = _bounds(spec)
            if source.checkpoint == "replay":
                part, about = read_replay(source, spec, count, source_seed)
            else:
                act, receive, about = _actor(source, env, source_seed, deterministic)
                part, faults = roll_out(env, act, count, receive)
                about |= {"num_envs": spec.num_envs, "faults": faults}
        finally:
            env.close()
        about |= {"steps": part.num_steps, "episodes": part.num_episodes, "seed": source_seed}
        about["mean_return"] = float(part.finished_returns().mean())
        described.append(about)
        parts.append(part)
        progress(
            f"{about['source']}: {part.num_steps} steps, {part.num_episodes} episodes, "
            f"mean return {about['mean_return']:.5g}"
        )
    episodes = concatenate(parts)
    plain = lambda bound: [v if math.isfinite(v) else None for v in bound]  # noqa: E731
    episodes.metadata.update(
        task=task,
        **_changed(task, trained_in),
        simulator=played_in(task, backend),
        seed=seed,
        deterministic=deterministic,
        sources=described,
        steps=episodes.num_steps,
        episodes=episodes.num_episodes,
        action_bounds=[plain(low), plain(high)],
        obs=[[term.name, term.width] for term in spec.obs[GROUP]],
        digest=digest(episodes),
    )
    return episodes


def roll_out(
    env: VecEnv,
    act: Callable[[dict, torch.Tensor | None], torch.Tensor],
    steps: int,
    receive: Callable[[torch.Tensor], None] | None = None,
) -> tuple[Episodes, int]:
    """Let a policy act until `steps` steps are recorded.

    Args:
        env: N environments; they are reset first.
        act: (observation, rows whose episode has just ended or None) -> action (N, A).
        steps: T, spread evenly over the environments.
        receive: is told the reward (N,) of each step, before `act` hears which rows ended.

    Returns:
        Episodes, and the number of steps that were left out because of a fault.
    """
    n = env.spec.num_envs
    budget = np.full(n, steps // n)
    budget[: steps % n] += 1
    longest = int(budget.max())
    d, a = env.spec.obs_size(GROUP), env.spec.action_size
    obs, following = (np.empty((longest, n, d), np.float32) for _ in range(2))
    action = np.empty((longest, n, a), np.float32)
    reward = np.empty((longest, n), np.float32)
    terminated, ended, faulty = (np.zeros((longest, n), bool) for _ in range(3))
    now, rows = env.reset(), None
    for t in range(longest):
        sent = act(now, rows)
        step = env.step(sent.to(env.device))
        if receive is not None:
            receive(step.reward)
        obs[t], action[t] = now[GROUP].cpu().numpy(), sent.cpu().numpy()
        reward[t] = step.reward.cpu().numpy()
        following[t] = step.next_obs[GROUP].cpu().numpy()
        terminated[t] = step.terminated.cpu().numpy()
        ended[t] = (step.terminated | step.truncated).cpu().numpy()
        faulty[t, [fault.row for fault in step.info.faults]] = True
        found = ended[t].nonzero()[0]
        rows = torch.from_numpy(found) if len(found) else None
        now = step.obs
    faulty |= (recorded := np.arange(longest)[:, None] >= budget)
    lost = int((faulty & ~recorded).sum())
    return from_grid(obs, action, reward, terminated, ended, faulty, following), lost


def from_grid(
    obs: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
    ended: np.ndarray,
    left_out: np.ndarray,
    following: np.ndarray,
) -> Episodes:
    """Episodes out of T steps of N environments, environment by environment.

    Args:
        obs: (T, N, d) what was acted on.
        action: (T, N, A)
        reward: (T, N)
        terminated: (T, N) bool
        ended: (T, N) bool, terminated or truncated.
        left_out: (T, N) bool, steps to leave out; an episode stops before them.
        following: (T, N, d) true successors.

    Raises:
        ValueError: every step is left out.
    """
    flat = lambda x: np.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])  # noqa: E731
    keep = ~flat(left_out)
    if not keep.any():
        raise ValueError("no step was recorded: every one ended in a fault")
    goes_on = np.zeros_like(left_out)
    goes_on[:-1] = ~ended[:-1] & ~left_out[1:]
    last = ~flat(goes_on)[keep]
    at = np.flatnonzero(last)
    obs, following = flat(obs)[keep], flat(following)[keep]
    whole = np.empty((len(obs) + len(at), obs.shape[1]), np.float32)
    lengths = np.diff(at, prepend=-1).astype(np.int64)
    whole[np.arange(len(obs)) + np.repeat(np.arange(len(at)), lengths)] = obs
    whole[at + np.arange(len(at)) + 1] = following[at]
    terminated, ended = flat(terminated)[keep][at], flat(ended)[keep][at]
    return Episodes(
        obs=whole,
        action=np.ascontiguousarray(flat(action)[keep]),
        reward=flat(reward)[keep],
        lengths=lengths,
        terminated=terminated,
        truncated=ended & ~terminated,
        final_known=np.ones(len(at), bool),
    )


def read_replay(
    source: Source, spec: EnvSpec, steps: int, seed: int
) -> tuple[Episodes, dict[str, Any]]:
    """Episodes that a run's learner saw, out of the replay that its last.pt names.

    Where it holds more steps than are wanted, whole episodes are drawn by `seed`, and the last one
    is cut; they stay in order.

    Raises:
        ValueError: the run has no replay, or one in parts; it is of another task, or holds too few
            steps.
    """
    assert source.run is not None
    config = read_config(source.run)
    path = find_checkpoint(source.run, "last")
    last = load_checkpoint(path, {"step": int, "policy": dict})
    name = last.get("replay")
    if not isinstance(name, str):
        raise ValueError(f"{path} names no replay: {config['algo']} has none, or did not save it")
    check_fits(load_policy(path), spec)
    path = path.with_name(Path(name).name)
    if any(path.parent.glob(f"{path.stem}-rank*.pt")):
        raise ValueError(f"{source.run} was trained by several processes: its replay is in parts")
    state = load_checkpoint(path, {"replay": dict})["replay"]
    try:
        grids = {key: value.numpy() for key, value in state["grids"].items()}
        filled, frames = state["filled"], state["num_slots"] + 1
        order = np.arange(state["slot"] - filled, state["slot"]) % frames
        after = (order + 1) % frames
        ended, d = grids["ended"][order], spec.obs_size(GROUP)
        obs = grids["obs"][..., :d]  # the actor's group stands first
        kept = state["kept"].numpy()[:, :d]
        successor = kept[grids["_successor"][order]]
        following = np.where(ended[..., None], successor, obs[after])
        whole = from_grid(
            obs[order],
            grids["action"][order],
            grids["reward"][order],
            grids["terminated"][order],
            ended,
            grids["faulty"][order],
            following,
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from None
    if whole.num_steps < steps:
        raise ValueError(f"{path} holds {whole.num_steps} steps, its share is {steps}")
    about = {
        "source": f"{source.run}:replay",
        "algo": config["algo"],
        "env_steps": last["step"],
        "sha256": file_sha256(path),
    }
    return _some_steps(whole, steps, seed), about


def _some_steps(episodes: Episodes, steps: int, seed: int) -> Episodes:
    """Whole episodes by `seed` with `steps` steps in all; the last one drawn is cut."""
    if episodes.num_steps == steps:
        return episodes
    drawn = np.random.default_rng(seed).permutation(episodes.num_episodes)
    total = np.cumsum(episodes.lengths[drawn])
    count = int(np.searchsorted(total, steps)) + 1
    surplus = int(total[count - 1] - steps)
    chosen = np.sort(drawn[:count])
    cut = int(np.searchsorted(chosen, drawn[count - 1]))
    found = episodes.select(chosen)
    if surplus == 0:
        return found
    length = int(found.lengths[cut]) - surplus
    step, row = int(found.step_starts[cut]) + length, int(found.obs_starts[cut]) + length + 1
    lengths, ends = found.lengths.copy(), np.arange(count) != cut
    lengths[cut] = length
    return Episodes(
        obs=np.delete(found.obs, slice(row, row + surplus), 0),
        action=np.delete(found.action, slice(step, step + surplus), 0),
        reward=np.delete(found.reward, slice(step, step + surplus)),
        lengths=lengths,
        terminated=found.terminated & ends,
        truncated=found.truncated & ends,
        final_known=found.final_known,
    )


def _actor(
    source: Source, env: VecEnv, seed: int, deterministic: bool
) -> tuple[
    Callable[[dict, torch.Tensor | None], torch.Tensor],
    Callable[[torch.Tensor], None] | None,
    dict[str, Any],
]:
    """What acts, what is told its rewards, and what to say about it."""
    spec = env.spec
    generator = torch.Generator().manual_seed(seed)
    if source.run is None:
        low, high = (torch.tensor(bound, dtype=torch.float32) for bound in _bounds(spec))
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise ValueError(f"{spec.task} has unbounded actions: nothing is uniform on them")

        def act(obs: dict, ended: torch.Tensor | None) -> torch.Tensor:
            return torch.lerp(low, high, torch.rand((spec.num_envs, len(low)), generator=generator))

        return act, None, {"source": "random"}
    path = find_checkpoint(source.run, source.checkpoint)
    policy = load_policy(path)
    check_fits(policy, spec)
    generator = torch.Generator(policy.device).manual_seed(seed)
    policy.reset()

    def act(obs: dict, ended: torch.Tensor | None) -> torch.Tensor:
        if ended is not None:
            policy.reset(ended)
        return policy(obs) if deterministic else policy.sample(obs, generator)

    config = read_config(source.run)
    unit = "updates" if "data" in config else "env_steps"  # what a run on recorded data counts
    about = {
        "source": f"{source.run}:{path.stem}",
        "algo": config["algo"],
        unit: load_checkpoint(path, {"step": int})["step"],
        "sha256": file_sha256(path),
    }
    return act, getattr(policy, "receive", None), about


def _enough_envs(task: str, config, steps: int) -> int:
    """N such that the recordings that just stop are few beside whole episodes."""
    env = make(task, 1, config=config, threads=1)
    longest = env.spec.max_episode_steps
    env.close()
    return max(min(MOST_ENVS, steps // (LEAST_EPISODES * longest)), 1)


def _bounds(spec: EnvSpec) -> tuple[list[float], list[float]]:
    """Lowest and highest action, (A,) each."""
    if isinstance(spec.action, Discrete):
        raise ValueError(f"{spec.task} has discrete actions; only continuous ones are recorded")
    return [dim.low for dim in spec.action], [dim.high for dim in spec.action]


def _source_seed(seed: int, i: int) -> int:
    """Of the i-th source.

    A draw of its own for each pair, so that no two sources of any two collections play the same
    episodes, and neither training nor evaluation has seen them.
    """
    drawn = hashlib.blake2b(f"collect:{seed}:{i}".encode(), digest_size=4).digest()
    return int.from_bytes(drawn, "big") >> 1


def _task_config(task: str, sources: Sequence[Source]):
    """The configuration that the runs were trained with; the task's default for random actions.

    Raises:
        ValueError: runs of another task, or of other configurations of it.
    """
    task_class = registry.load("tasks", task)
    config, first = None, None
    for source in sources:
        if source.run is None:
            continue
        saved = read_config(source.run)
        if saved["task"] != task:
            raise ValueError(f"{source.run} was trained in {saved['task']}, not in {task}")
        found = rebuild(task_class.Config, saved["task_config"], source.run / "config.json")
        if first is not None and found != config:
            raise ValueError(
                f"{source.run} and {first} were trained in other settings of {task}: their steps "
                "belong in two data sets"
            )
        config, first = found, source.run
    return task_class.Config() if config is None else config


def _changed(task: str, config: Any) -> dict[str, Any]:
    """`task_config` for the metadata: settings other than the task's own; empty for none."""
    own = dataclasses.asdict(registry.load("tasks", task).Config())
    found = {k: v for k, v in dataclasses.asdict(config).items() if v != own[k]}
    return {"task_config": strict(found)} if found else {}
