"""T steps of N environments, as on-policy algorithms learn from them; and figures of any steps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """(t, fault) for each of them, t the step within the roll-out"""

    @property
    def ended(self) -> Tensor:
        """An episode ended at this step; (T, N) bool."""
        return self.terminated | self.truncated


@torch.no_grad()
def collect(act: Act, env: VecEnv, noise: Tensor) -> tuple[Rollout, dict[str, float]]:
    """Act for T steps from the environment's current state.

    Args:
        act: `act(obs, noise (N, A)) -> head (N, A), action`.
        env: the training environment.
        noise: (T, N, A), what `act` draws its actions from.

    Returns:
        The roll-out, and the mean per step of each reward term and task figure.
    """
    obs = env.observe()
    trace, ended_obs, faulty, infos, faults = [], [], [], [], []
    for t, step_noise in enumerate(noise):
        head, action = act(obs, step_noise)
        step = env.step(action)
        trace.append((obs, head, action, step.reward, step.terminated, step.truncated))
        infos.append({f"reward/{k}": v for k, v in step.info.reward_terms.items()})
        infos[-1].update({f"task/{k}": v for k, v in step.info.metrics.items()})
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
    )
    metrics = {k: torch.stack([i[k] for i in infos]).mean().item() for k in infos[0]}
    return rollout, {**metrics, "rollout/faults": len(faults)}


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
        metrics["rollout/faults"] = self._faults
        reward, terminated, ended = (torch.stack(x) for x in zip(*self._steps, strict=True))
        episodes, self.unfinished = episode_sums(self.unfinished, reward, ended)
        if episodes.shape[1]:
            mean_return, mean_length = episodes.mean(1).tolist()
            metrics["rollout/episode_return"] = mean_return
            metrics["rollout/episode_length"] = mean_length
            metrics["rollout/terminated"] = terminated.sum().item() / episodes.shape[1]
        self._steps, self._infos, self._faults = [], [], 0
        return metrics
