"""T steps of N environments, as on-policy algorithms learn from them.

Reading order: `Rollout` -> `collect`; for policies with memory: `forget`, `Pieces`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrl_rl.env import Fault, Obs, VecEnv

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
    """(t, fault) for each of them, t the step within the roll-out"""
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
        The roll-out, and the mean per step of each reward term and task figure.
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
        faults=tuple(faults),
        reward_terms={k: torch.stack([x[k] for x in terms]) for k in terms[0]},
    )
    metrics = {f"reward/{k}": x.mean().item() for k, x in rollout.reward_terms.items()}
    metrics |= {f"task/{k}": torch.stack([x[k] for x in figures]).mean().item() for k in figures[0]}
    return rollout, {**metrics, "rollout/faults": len(faults)}


def forget(state: Tensor, ended: Tensor) -> Tensor:
    """The state with zeros in rows that ended.

    Args:
        state: (C, N, H).
        ended: flags (N,), bool or 0 and 1 in any dtype; never row numbers.
    """
    return torch.where(ended.bool()[:, None], 0.0, state)


@dataclass(frozen=True)
class Pieces:
    """A roll-out cut where episodes ended: P pieces, each of one row and one episode.

    The S = T N samples come in the order that `RecurrentNet.replay` reads: first steps of all
    pieces, then second steps of those that have one, ..., the longest piece first.
    """

    t: Tensor
    """(S,) step of each sample in the roll-out"""
    row: Tensor
    """(S,) row of each sample"""
    batch_sizes: Tensor
    """How many pieces have a k-th step, int64 on the CPU"""
    first: Tensor
    """(P,) step each piece begins at; 0: it goes on from the roll-out before"""
    last: Tensor
    """(P,) step each piece ends at"""
    owner: Tensor
    """(P,) row of each piece"""

    @classmethod
    def of(cls, ended: Tensor) -> "Pieces":
        """Cut after every step at which a row ended; `ended` is (T, N) bool."""
        num_steps, num_rows = ended.shape
        begins = torch.ones_like(ended)
        begins[1:] = ended[:-1]
        place = begins.T.flatten().nonzero()[:, 0]  # row by row: row * T + step
        length = torch.diff(place, append=place.new_tensor([num_steps * num_rows]))
        length, order = length.sort(descending=True, stable=True)
        place = place[order]
        step = torch.arange(int(length[0]), device=ended.device)[:, None]
        exists = step < length
        sample = (place + step)[exists]
        return cls(
            t=sample % num_steps,
            row=sample // num_steps,
            batch_sizes=exists.sum(1).cpu(),
            first=place % num_steps,
            last=place % num_steps + length - 1,
            owner=place // num_steps,
        )

    def start(self, state: Tensor) -> Tensor:
        """State before each piece (C, P, H): that of its row at the roll-out's start, or zero."""
        return forget(state[:, self.owner], self.first > 0)
