"""Observation terms to the tensor that a policy reads, in training.

A robot does the same from its sensors: `sim2real.observer`.
"""

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ctrl_rl.spec import ObsTerm
from robots.sim import Rows

if TYPE_CHECKING:
    from robots.env import TaskEnv


class ObsGroup:
    """One observation group: raw terms to the (N, d) float32 tensor, as `ObsTerm` says."""

    def __init__(self, env: "TaskEnv", name: str, terms: tuple[ObsTerm, ...]) -> None:
        self.env, self.name, self.terms = env, name, terms
        dtype, device = env.sim.dtype, env.device
        per_term = lambda f: torch.tensor(  # noqa: E731
            [x for t in terms for x in f(t)], dtype=dtype, device=device
        )
        self.scale = per_term(lambda t: t.scale if len(t.scale) == t.size else t.scale * t.size)
        self.scales = bool((self.scale != 1).any())
        clip = [(-torch.inf, torch.inf) if t.clip is None else t.clip for t in terms]
        self.low = per_term(lambda t: [clip[terms.index(t)][0]] * t.size)
        self.high = per_term(lambda t: [clip[terms.index(t)][1]] * t.size)
        self.clips = any(t.clip is not None for t in terms)
        noise = per_term(lambda t: [t.noise] * t.size)
        self.noisy = noise.nonzero().flatten()
        self.noise = noise[self.noisy]
        self.stacked = any(t.history > 1 or t.delay[1] > 0 for t in terms)
        if self.stacked:
            self._make_buffers()

    def assemble(self, raw: dict[str, Tensor], rows: Rows) -> Tensor:
        """noise -> clip -> scale -> delay -> history, (n, d) float32."""
        for t in self.terms:
            found = tuple(raw[t.name].shape) if t.name in raw else "nothing"
            if found == "nothing" or found[1:] != (t.size,):
                raise ValueError(
                    f"{self.env.id}: observe_terms gives {found} for {t.name!r}, "
                    f"the spec says (rows, {t.size})"
                )
        x = torch.cat([raw[t.name] for t in self.terms], 1)
        if len(self.noisy):
            draw = self.env.uniform(f"noise/{self.name}", rows, len(self.noisy), -1.0, 1.0)
            x[:, self.noisy] += draw * self.noise
        if self.clips:
            x = torch.clamp(x, self.low, self.high)
        x = (x * self.scale if self.scales else x).float()
        return self._stack(x, rows) if self.stacked else x

    def begin(self, rows: Rows) -> None:
        """Forget the frames of the episode before."""
        if self.stacked:
            self.fresh[rows] = True
            lag = self.env.uniform(f"delay/{self.name}", rows, len(self.terms))
            low = torch.tensor([t.delay[0] for t in self.terms], device=lag.device)
            high = torch.tensor([t.delay[1] for t in self.terms], device=lag.device)
            self.lag[rows] = (low + (lag * (high - low + 1)).long()).clamp(max=high)

    def _make_buffers(self) -> None:
        env, n = self.env, self.env.num_envs
        depth = max(t.history + t.delay[1] for t in self.terms)
        repeats = [t.history_fill == "repeat" for t in self.terms for _ in range(t.size)]
        self.repeats = torch.tensor(repeats, dtype=torch.float32, device=env.device)
        size = len(repeats)
        self.frames = env.remember(
            f"obs/{self.name}/frames", torch.zeros(n, depth, size, device=env.device)
        )
        self.fresh = env.remember(
            f"obs/{self.name}/fresh", torch.ones(n, dtype=torch.bool, device=env.device)
        )
        self.lag = env.remember(
            f"obs/{self.name}/lag",
            torch.zeros(n, len(self.terms), dtype=torch.int64, device=env.device),
        )

    def _stack(self, x: Tensor, rows: Rows) -> Tensor:
        """Push one frame (newest last) and read every term's delayed history, oldest first."""
        before_first = (x * self.repeats)[:, None]
        frames = torch.roll(self.frames[rows], -1, 1)
        frames = torch.where(self.fresh[rows, None, None], before_first, frames)
        frames[:, -1] = x
        self.frames[rows] = frames
        self.fresh[rows] = False
        depth, out, start = frames.shape[1], [], 0
        for k, term in enumerate(self.terms):
            lag = self.lag[rows][:, k, None]
            at = depth - term.history + torch.arange(term.history, device=x.device) - lag
            block = frames[:, :, start : start + term.size]
            out.append(block.gather(1, at[:, :, None].expand(-1, -1, term.size)).flatten(1))
            start += term.size
        return torch.cat(out, 1)


def nominal_terms(terms: tuple[ObsTerm, ...]) -> tuple[ObsTerm, ...]:
    """The same terms without noise and delay."""
    return tuple(dataclasses.replace(t, noise=0.0, delay=(0, 0)) for t in terms)
