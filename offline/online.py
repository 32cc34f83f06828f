"""From recorded data into the simulator: a learner goes on, with the update that it had.

Nothing changes but where minibatches come from: a share `data_share` of each is drawn from the
recorded data, the rest from a replay buffer of what the policy does now (half and half: Ball,
Smith, Kostrikov and Levine, "Efficient online reinforcement learning with offline data", ICML 2023,
arXiv:2302.02948). New rewards and observations go through what was done to the recorded ones.
Actions are drawn from the policy; one that has no noise of its own gets `exploration_noise`.

For the actor-critics of this package, `ALGOS`, of one seed. Step sizes that fall over a run fall
over both parts together: the learner is built with the sum of their updates.

Reading order: `OnlineConfig` -> `Mixture` -> `go_on`.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrl_rl import distributed
from ctrl_rl.buffers import ReplayBuffer, updates_due
from ctrl_rl.compiled import diverged
from ctrl_rl.env import VecEnv
from ctrl_rl.policy import Policy, check_same_shape
from ctrl_rl.rollout import Tally
from ctrl_rl.runs import Run
from ctrl_rl.td3 import METRICS as OF_THE_LOOP
from offline.collapse import Watch
from offline.networks import stream
from offline.training import Draws, Learner
from offline.transitions import Batch, Transitions

ALGOS = ("td3_bc", "iql", "cql", "awac", "edac")
"""Learners that go on: an actor that does what its critics value."""

LOG_EVERY = 1000
"""Env steps behind a row of the log; the run is asked for evaluation and checkpoint as often."""

_LOOP = ("replay/", "rollout/", "reward/", "task/", "eval/", "time/")
METRICS = {key: text for key, text in OF_THE_LOOP.items() if key.startswith(_LOOP)}
"""What this loop logs beside the learner's own figures."""


@dataclass(frozen=True, kw_only=True)
class OnlineConfig:
    """How a learner goes on in the simulator."""

    total_steps: int = 100_000
    """Length of training [env steps]."""
    warmup_steps: int = 1000
    """Steps without updates at the start [env steps]."""
    updates_per_step: float = 1.0
    """Updates per env step, whatever the number of environments."""
    data_share: float = 0.5
    """Share of a minibatch that is recorded data; 0 leaves them behind."""
    exploration_noise: float = 0.1
    """Deviation of actions from those of a policy without noise of its own [half ranges]."""
    renew_every: int = 50
    """Steps that the acting policy stays behind the learner at most [env steps]."""
    offline_run: str = ""
    """The run that this goes on from; for the record."""

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("total_steps", self.total_steps >= 1, "at least 1"),
            ("warmup_steps", self.warmup_steps >= 1, "at least 1"),
            ("updates_per_step", 0 < self.updates_per_step < math.inf, "positive"),
            ("data_share", 0 <= self.data_share <= 1, "in 0..1"),
            ("exploration_noise", 0 <= self.exploration_noise < math.inf, "0 or more"),
            ("renew_every", self.renew_every >= 1, "at least 1"),
        ):
            if not good:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}")

    @property
    def updates(self) -> int:
        """Updates of the whole run."""
        return updates_due(0, self.total_steps, self.warmup_steps, self.updates_per_step)


class Mixture:
    """Minibatches of recorded and of new transitions, recorded ones first.

    Args:
        data: what was recorded; says how new observations and rewards are to be seen.
        replay: what the policy does, raw, with the observation group "actor".
        batch_size: B.
        share: of recorded ones.
        generator: decides what is drawn.
    """

    def __init__(
        self,
        data: Transitions,
        replay: ReplayBuffer,
        batch_size: int,
        share: float,
        generator: torch.Generator,
    ) -> None:
        self.data, self.replay, self.generator = data, replay, generator
        self.recorded = round(share * batch_size)
        self.new = batch_size - self.recorded

    def earned(self, rows: int) -> tuple[Tensor, Tensor]:
        """Rewards (n,) of the first `rows` steps of all environments, as seen; and terminated."""
        drawn = ~self.replay.faulty[:rows]  # the others never are
        reward = self.data.reward_scale * self.replay.reward[:rows] + self.data.reward_shift
        return reward[drawn], self.replay.terminated[:rows][drawn]

    def draw(self) -> Batch:
        """A minibatch of one seed, (1, B, ...)."""
        parts = []
        if self.recorded:
            parts.append(self.data.batch(self.data.draw(self.recorded, [self.generator])))
        if self.new:
            found = self.replay.sample(self.new, self.generator, gamma=1.0)
            see = self.data.normalizer or (lambda obs: obs)
            reward = self.data.reward_scale * found.reward + self.data.reward_shift
            parts.append(
                Batch(
                    *(see(found.obs["actor"])[None], found.action[None], reward[None]),
                    *(see(found.next_obs["actor"])[None], 1 - found.discount[None]),
                )
            )
        if len(parts) == 1:
            return parts[0]
        return Batch(*(torch.cat(both, 1) for both in zip(*parts, strict=True)))


def acting_policy(learner: Learner, exploration_noise: float) -> Policy:
    """The policy as it explores: with its own noise, or with the given one where it has none."""
    section = learner.policy_section(0)
    if "noise_std" in section and not bool(section["noise_std"].any()):
        ranges = torch.tensor([dim.high - dim.low for dim in learner.spec.action])  # pyright: ignore
        section["noise_std"] = exploration_noise * ranges.to(section["noise_std"]) / 2
    return Policy.from_section(section)


def go_on(
    config: OnlineConfig,
    learner: Learner,
    data: Transitions,
    env: VecEnv,
    run: Run | None = None,
    evaluate: Callable[[Policy], dict[str, float]] | None = None,
) -> Run:
    """Train in an environment from where a learner stands, or go on where `run` stopped.

    Args:
        config: settings.
        learner: of `ALGOS` and one seed, as it came from its data.
        data: what it was learned from, normalised and transformed as then.
        env: the training environment.
        run: where to log and save, a `ctrl_rl.Run`; None keeps the log in memory.
        evaluate: `evaluate(policy) -> {key: figure}`, called when the run says that it is due.

    Returns:
        The run; its `rows` hold what was logged.

    Raises:
        Diverged: a figure is not finite, or the critics collapse and `monitor` is to stop then; the
            last checkpoint stands.
        ValueError: learner and environment do not fit.
    """
    distributed.refuse_group("offline learning")
    if learner.name not in ALGOS or len(learner.seeds) != 1:
        raise ValueError(
            f"{len(learner.seeds)} seeds of {learner.name}: one seed of {', '.join(ALGOS)} goes on"
        )
    check_same_shape(learner.spec, env.spec, ("actor",))
    run = Run() if run is None else run
    num_envs, seed = env.spec.num_envs, learner.seeds[0]
    sizes = {"actor": env.spec.obs_size()}
    capacity = max(config.total_steps, num_envs)
    replay = ReplayBuffer(capacity, num_envs, sizes, env.spec.action_size, data.device)
    generator, noise = stream(seed, "online", data.device), stream(seed, "acting", data.device)
    mixture = Mixture(data, replay, learner.config.batch_size, config.data_share, generator)
    tally = Tally(num_envs, env.device)
    own = {k: v for k, v in learner.metrics.items() if not k.startswith(_LOOP)}
    name = f"{learner.name}_online"
    size = replay.nbytes_after(config.total_steps)
    fixed_length = getattr(learner, "fixed_length", False)
    run.start({**own, **METRICS}, config, env, name, size, fixed_length)
    watch = Watch(learner, data)
    progress = _Progress(learner, watch, tally, Draws(generator, noise))
    step = run.resume(learner=progress, env=env, replay=replay)
    obs = env.observe()
    while step < config.total_steps and not run.stopping(step):
        began, update_s, stats, first = time.perf_counter(), 0.0, [], step
        actor, renewed = acting_policy(learner, config.exploration_noise), step
        while step < min(first + LOG_EVERY, config.total_steps):
            if step - renewed >= config.renew_every:
                actor, renewed = acting_policy(learner, config.exploration_noise), step
            action = actor.sample(obs, noise).to(env.device)
            result = env.step(action)
            replay.add(obs, action, result)
            tally.add(result)
            obs, step = result.obs, step + num_envs
            for fault in result.info.faults:
                run.report_fault(step, fault)
            stepped = time.perf_counter()
            due = (step - num_envs, step, config.warmup_steps, config.updates_per_step)
            stats += [learner.update(mixture.draw()) for _ in range(updates_due(*due))]
            update_s += time.perf_counter() - stepped
        figures = {**tally.flush(), "replay/size": len(replay)}
        if stats:
            updates = updates_due(0, step, config.warmup_steps, config.updates_per_step)
            figures |= _figures(learner, torch.stack(stats).mean(0)[:, 0], step)
            watch.widen(*mixture.earned(step // num_envs))
            figures |= watch.check(updates, step >= config.total_steps)[0]
            figures["time/updates_per_s"] = len(stats) / update_s
        wall_s = time.perf_counter() - began
        figures["time/collect_s"], figures["time/update_s"] = wall_s - update_s, update_s
        figures["time/env_steps_per_s"] = (step - first) / wall_s
        run.log(step, figures)
        if run.due("eval", step) and evaluate is not None:
            run.log(step, evaluate(Policy.from_section(learner.policy_section(0))))
        if run.due("checkpoint", step):
            section, state = learner.policy_section(0), progress.state_dict()
            run.save(step, section, state, env.state_dict(), replay.state_dict())
    run.finish()
    return run


class _Progress:
    """What goes on beside environments and replay, as one part of a checkpoint."""

    def __init__(self, learner: Learner, watch: Watch, tally: Tally, draws: Draws) -> None:
        self._learner, self._watch, self._tally, self._draws = learner, watch, tally, draws

    def state_dict(self) -> dict:
        """As `load_state_dict` takes it."""
        return {
            "learner": self._learner.state_dict(),
            "watch": self._watch.state_dict(),
            "unfinished": self._tally.unfinished,
            **self._draws.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where `state_dict` was taken."""
        self._learner.load_state_dict(state["learner"])
        self._watch.load_state_dict(state["watch"])
        self._tally.unfinished = state["unfinished"].to(self._tally.unfinished.device)
        self._draws.load_state_dict(state)


def longer(config, updates: int):
    """A learner's settings for so many more updates."""
    return dataclasses.replace(config, total_steps=config.total_steps + updates)


def _figures(learner: Learner, means: Tensor, step: int) -> dict[str, float]:
    """The means (K,) of what the updates returned, by name."""
    found = dict(zip(learner.stats, means.tolist(), strict=True))
    for key, value in found.items():
        if not math.isfinite(value):
            raise diverged(step, f"{key} is {value}")
    return found
