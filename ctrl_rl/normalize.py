"""Observation statistics that do not drift, overflow or get poisoned."""

import torch
from torch import Tensor, nn

from ctrl_rl import distributed


class Normalizer(nn.Module):
    """Running mean and variance per column, and the map (x - mean) / sqrt(var + epsilon), clipped.

    Statistics are float64 and change in `update` alone: a roll-out and the update that learns
    from it see the same numbers. Before the first update the map only clips.

    Args:
        size: columns d.
        clip: bound of the output [-].
        epsilon: added to the variance, so that a constant column gives 0.
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    _shift: Tensor
    _scale: Tensor

    def __init__(self, size: int, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.clip, self.epsilon = clip, epsilon
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("_shift", torch.zeros(size), persistent=False)
        self.register_buffer("_scale", torch.ones(size), persistent=False)
        self.register_load_state_dict_post_hook(lambda module, _: module._refresh())

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) float32, normalised and clipped."""
        # In place on the difference: fresh memory costs more than the arithmetic.
        return (x - self._shift).mul_(self._scale).clamp_(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Take in a batch of rows (B, d); rows with a NaN or an infinity are left out.

        Mean and sum of squares of the batch merge with the old ones exactly (Chan, Golub, LeVeque,
        "Updating formulae and a pairwise algorithm for computing sample variances", 1979), so the
        result does not depend on how rows are cut into batches, but for rounding. In a group of
        processes the batch is the rows of all of them: see `ctrl_rl.distributed`.
        """
        if not x.sum().isfinite():  # a sum can only overflow where a row is worth the closer look
            x = x[x.isfinite().all(1)]
        x = x.to(torch.float64, copy=True)
        batch_mean = x.mean(0)
        batch_squares = x.sub_(batch_mean).square_().sum(0)
        rows, batch_mean, batch_squares = distributed.merged(x.shape[0], batch_mean, batch_squares)
        if rows == 0:
            return
        delta = batch_mean - self.mean
        total = self.count + rows
        squares = self.var * self.count + batch_squares + delta.square() * self.count * rows / total
        self.mean += delta * rows / total
        self.var.copy_(squares / total)
        self.count.copy_(total)
        self._refresh()

    def section(self) -> dict:
        """Statistics as they stand in a policy section."""
        return {
            "mean": self.mean.clone(),
            "var": self.var.clone(),
            "count": self.count.clone(),
            "clip": self.clip,
            "epsilon": self.epsilon,
        }

    def _refresh(self) -> None:
        """Float32 copies for `forward`."""
        self._shift.copy_(self.mean)
        self._scale.copy_((self.var + self.epsilon).rsqrt())
