"""A small temporal U-Net: the network that removes noise from plans.

After Janner et al., "Planning with diffusion for flexible behavior synthesis", ICML 2022
(arXiv:2205.09991, appendix C), with one residual block per level where they have two, so that a
CPU can pay for it. Convolutions run along the steps of the plan; the condition (diffusion step, and
a task's vector where there is one) is added within every block.

Reading order: `TemporalUNet` -> `Block`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

GROUPS = 8
"""Of channels, that are normalised together; divides every width."""


class TemporalUNet(nn.Module):
    """Noisy plans (B, H, D) at diffusion steps (B,) to plans of the same shape.

    Args:
        columns: D.
        width: channels of the first level, a multiple of 8.
        multipliers: channels of each level over `width`; each level after the first halves H.
        kernel: steps under a convolution, odd.
        context_size: Z, length of the vector that conditions the plan; 0 for none.
        seed: decides the initial weights.
    """

    def __init__(
        self,
        columns: int,
        width: int,
        multipliers: Sequence[int],
        kernel: int,
        context_size: int,
        seed: int,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # initial weights of layers use the global one
            torch.manual_seed(seed)
            self._build(columns, width, multipliers, kernel, context_size)

    def _build(self, columns, width, multipliers, kernel, context_size) -> None:
        self.width = width
        self.time = nn.Sequential(
            nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width)
        )
        self.context = None
        if context_size:
            self.context = nn.Sequential(
                nn.Linear(context_size, 4 * width), nn.Mish(), nn.Linear(4 * width, width)
            )
        condition = width * (2 if context_size else 1)
        sizes = [width * m for m in multipliers]
        block = lambda i, o: Block(i, o, condition, kernel)  # noqa: E731
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        for fan_in, fan_out in zip([columns, *sizes], sizes, strict=False):
            self.down.append(block(fan_in, fan_out))
            last = len(self.down) == len(sizes)
            self.shrink.append(
                nn.Identity() if last else nn.Conv1d(fan_out, fan_out, 3, stride=2, padding=1)
            )
        self.middle = block(sizes[-1], sizes[-1])
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for size, after in zip(reversed(sizes), [*reversed(sizes[:-1]), None], strict=True):
            self.up.append(block(2 * size, after or size))
            self.grow.append(
                nn.ConvTranspose1d(after, after, 4, stride=2, padding=1) if after else nn.Identity()
            )
        self.last = nn.Sequential(*_convolution(width, width, kernel), nn.Conv1d(width, columns, 1))

    def forward(
        self, x: Tensor, k: Tensor, z: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """The network's output (B, H, D).

        Args:
            x: noisy plans (B, H, D).
            k: diffusion step of each (B,).
            z: context of each (B, Z); where the network has one.
            keep: (B,) 1, or 0 for plans that must do without their context; None keeps all.
        """
        condition = self.time(step_embedding(k, self.width))
        if self.context is not None:
            assert z is not None
            known = self.context(z)
            if keep is not None:
                known = known * keep[:, None]
            condition = torch.cat([condition, known], 1)
        x, skips = x.transpose(1, 2), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, condition)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x, condition)
        for block, grow in zip(self.up, self.grow, strict=True):
            x = grow(block(torch.cat([x, skips.pop()], 1), condition))
        return self.last(x).transpose(1, 2)


class Block(nn.Module):
    """Two convolutions, the condition between them, and a way around."""

    def __init__(self, fan_in: int, fan_out: int, condition: int, kernel: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*_convolution(fan_in, fan_out, kernel))
        self.condition = nn.Sequential(nn.Mish(), nn.Linear(condition, fan_out))
        self.second = nn.Sequential(*_convolution(fan_out, fan_out, kernel))
        self.around = nn.Identity() if fan_in == fan_out else nn.Conv1d(fan_in, fan_out, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(B, in, H) to (B, out, H)."""
        hidden = self.first(x) + self.condition(condition)[:, :, None]
        return self.second(hidden) + self.around(x)


def _convolution(fan_in: int, fan_out: int, kernel: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv1d(fan_in, fan_out, kernel, padding=kernel // 2),
        nn.GroupNorm(GROUPS, fan_out),
        nn.Mish(),
    )


def step_embedding(k: Tensor, width: int) -> Tensor:
    """Sines and cosines (B, width) of k at wavelengths from 2 pi to 20,000 pi.

    Vaswani et al., "Attention is all you need", 2017, section 3.5.
    """
    half = width // 2
    rate = torch.exp(torch.arange(half, device=k.device) * -(math.log(10_000) / (half - 1)))
    angle = k[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], 1)
