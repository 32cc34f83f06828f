"""T steps of N environments, as on-policy algorithms learn from them; and figures of any steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrl_rl import distributed, explosion
from ctrl_rl.env import Fault, Obs, Step, VecEnv
from ctrl_rl.returns import episode_sums

Act = Callable[[Obs, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rollout:
    """T steps of N environments. `next_obs` is kept for the E rows that ended."""

    obs: Obs
    """group -> (T, N, d), raw"""
    head: Tensor
    """(T, N, A) output of the actor"""
    action: Tensor
    """(T, N, A), or (T, N) int64"""
    reward: Tensor
    """(T, N)"""
    terminated: Tensor
    """(T, N) bool"""
    truncated: Tensor
    """(T, N) bool"""
    last_obs: Obs
    """group -> (N, d), raw: what follows the last step"""
    ended_next_obs: Obs
    """group -> (E, d), raw: true successors, in the order of `ended.nonzero()`"""
    ended_faulty: Tensor
    """(E,) bool: the row ended by a fault, so that its successor was never seen"""
    faults: tuple[tuple[int, Fault], ...]
    """(t, fault) for each of them, t the step within the roll-out; of all ranks' environments"""
    reward_terms: dict[str, Tensor]
    """name -> (T, N): the weighted terms of `reward`, in the environment's order and dtype"""

    @property
    def ended(self) -> Tensor:
        """An episode ended at this step; (T, N) bool."""
        return self.terminated | self.truncated


@torch.no_grad()
def collect(
    act: Act, env: VecEnv, noise: Tensor, forget: Callable[[Tensor], None] | None = None
) -> tuple[Rollout, dict[str, float]]:
    """Act for T steps from the environment's current state.

    Args:
        act: `act(obs, noise (N, A)) -> head (N, A), action`.
        env: the training environment.
        noise: (T, N, A), what `act` draws its actions from.
        forget: of a policy with memory: told after each step which rows ended, (N,) bool, before
            it reads the first observation of their next episode.

    Returns:
        The roll-out, and the mean per step of each reward term and task figure; in a group of
        processes that of all their environments.
    """
    obs = env.observe()
    trace, ended_obs, faulty, terms, figures, faults = [], [], [], [], [], []
    for t, step_noise in enumerate(noise):
        head, action = act(obs, step_noise)
        step = env.step(action)
        trace.append((obs, head, action, step.reward, step.terminated, step.truncated))
        terms.append(step.info.reward_terms)
        figures.append(step.info.metrics)
        if forget is not None:
            forget(step.terminated | step.truncated)
        if step.next_obs is not step.obs:
            rows = (step.terminated | step.truncated).nonzero()[:, 0]
            ended_obs.append({g: x[rows] for g, x in step.next_obs.items()})
            bad = torch.tensor([f.row for f in step.info.faults], dtype=rows.dtype)
            faulty.append(torch.isin(rows, bad.to(rows.device)))
            faults += [(t, fault) for fault in step.info.faults]
        obs = step.obs
    seen, *rest = zip(*trace, strict=True)
    nothing = {g: x[:0] for g, x in obs.items()}
    rollout = Rollout(
        {g: torch.stack([o[g] for o in seen]) for g in obs},
        *(torch.stack(x) for x in rest),
        last_obs=obs,
        ended_next_obs={g: torch.cat([o[g] for o in (nothing, *ended_obs)]) for g in obs},
        ended_faulty=torch.cat([torch.zeros(0, dtype=torch.bool, device=env.device), *faulty]),
        faults=faults_of_all_ranks(faults, env.spec.num_envs),
        reward_terms={k: torch.stack([x[k] for x in terms]) for k in terms[0]},
    )
    metrics = {f"reward/{k}": x.mean().item() for k, x in rollout.reward_terms.items()}
    metrics |= {f"task/{k}": torch.stack([x[k] for x in figures]).mean().item() for k in figures[0]}
    return rollout, {**distributed.mean_figures(metrics), "rollout/faults": len(rollout.faults)}


def selected(columns: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Rows (B,) of each column (S, ...); one that stands there twice is copied once.

    `index_select` for a minibatch at a time: indexing, and columns shuffled as a whole, cost up to
    ten times as much on a CPU.
    """
    found: dict[int, Tensor] = {}
    for x in columns:
        if id(x) not in found:
            found[id(x)] = x.index_select(0, rows)
    return [found[id(x)] for x in columns]


def faults_of_all_ranks(
    faults: list[tuple[int, Fault]], num_envs: int
) -> tuple[tuple[int, Fault], ...]:
    """Faults of all ranks by step, rows numbered through; they are rare, and so is the exchange."""
    if not distributed.any_rank(bool(faults)):
        return ()
    found = [
        (t, fault._replace(row=fault.row + rank * num_envs))
        for rank, theirs in enumerate(distributed.gathered(faults))
        for t, fault in theirs
    ]
    return tuple(sorted(found, key=lambda entry: entry[0]))


def episode_figures(
    unfinished: Tensor, reward: Tensor, terminated: Tensor, ended: Tensor
) -> tuple[dict[str, float], Tensor]:
    """`rollout/` figures of the episodes that ended in T steps, of all ranks' environments.

    Args:
        unfinished: return and length so far (2, N) of the episodes that the first step continues.
        reward: (T, N).
        terminated: (T, N) bool.
        ended: (T, N) bool.

    Returns:
        Figures, of rewards alone if no episode ended; and `unfinished` after the last step.
    """
    size = distributed.largest(reward.abs().max().double()).item()
    figures = {explosion.REWARD: size}
    episodes, unfinished = episode_sums(unfinished, reward, ended)
    counts = torch.stack([ended.sum(), terminated.sum()]).to(episodes)
    sums = distributed.total(torch.cat([episodes.sum(1), counts]))
    returns, lengths, count, terminations = sums.tolist()
    if not count:
        return figures, unfinished
    figures |= {
        "rollout/episode_return": returns / count,
        "rollout/episode_length": lengths / count,
        "rollout/terminated": terminations / count,
    }
    return figures, unfinished


class Tally:
    """Figures of the steps since the last `flush`, for learners that log many steps at once.

    Args:
        num_envs: N.
        device: the environment's.
    """

    def __init__(self, num_envs: int, device: torch.device | str) -> None:
        self.unfinished = torch.zeros(2, num_envs, dtype=torch.float64, device=device)
        """Return and length so far of the episodes that go on; decides what is logged later."""
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._infos: list[dict[str, Tensor]] = []
        self._faults = 0

    def add(self, step: Step) -> None:
        """Count one step."""
        self._steps.append((step.reward, step.terminated, step.terminated | step.truncated))
        self._infos.append({f"reward/{k}": v for k, v in step.info.reward_terms.items()})
        self._infos[-1].update({f"task/{k}": v for k, v in step.info.metrics.items()})
        self._faults += len(step.info.faults)

    def flush(self) -> dict[str, float]:
        """Means of reward terms and task figures, and `rollout/` figures of ended episodes."""
        metrics = {
            key: torch.stack([info[key] for info in self._infos]).mean().item()
            for key in self._infos[0]
        }
        metrics = distributed.mean_figures(metrics)
        faults = distributed.total(torch.tensor(self._faults))
        metrics["rollout/faults"] = int(faults)
        reward, terminated, ended = (torch.stack(x) for x in zip(*self._steps, strict=True))
        episodes, self.unfinished = episode_figures(self.unfinished, reward, terminated, ended)
        metrics |= episodes
        self._steps, self._infos, self._faults = [], [], 0
        return metrics
