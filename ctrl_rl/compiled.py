"""One optimiser step on a minibatch: flat gradient -> finite check -> clip -> Adam."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Diverged(RuntimeError):
    """Loss or gradient is not a finite number; the weights are still those of the step before."""


Objective = Callable[..., tuple[Tensor, Tensor]]
"""`objective(module, *batch) -> (loss (), stats (K,))`, a pure function of its tensors."""


class MinibatchStep:
    """Owns the weights as one flat vector, and Adam over it.

    The parameters of `module` become views of the vector, so that clipping and Adam are one
    operation each whatever the number of layers.

    Args:
        module: the networks to train.
        objective: see `Objective`.
        learning_rate: initial step size; `learning_rate` is a tensor and may be written later.
        max_grad_norm: the gradient is scaled down to this Euclidean norm.
    """

    def __init__(
        self, module: nn.Module, objective: Objective, learning_rate: float, max_grad_norm: float
    ) -> None:
        self.module, self.objective, self.max_grad_norm = module, objective, max_grad_norm
        self.parameters = tuple(module.parameters())
        self.flat = _flatten(self.parameters)
        self.optimizer = torch.optim.Adam(
            [self.flat], lr=torch.tensor(learning_rate), eps=1e-5, fused=True
        )

    @property
    def learning_rate(self) -> Tensor:
        """() float32, on the CPU; write to it in place."""
        return self.optimizer.param_groups[0]["lr"]

    def __call__(self, *batch: Tensor) -> Tensor:
        """Take one step.

        Returns:
            stats of the objective (K,), with the gradient's norm before clipping appended.

        Raises:
            Diverged: loss or gradient is not finite; nothing was changed.
        """
        loss, stats = self.objective(self.module, *batch)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.parameters)])
        norm = torch.linalg.vector_norm(gradient)
        if not torch.isfinite(norm + loss.detach()):
            raise Diverged(f"loss {loss.item():.4g}, gradient norm {norm.item():.4g}")
        self.flat.grad = gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        return torch.cat([stats, norm[None]])


def _flatten(parameters: tuple[nn.Parameter, ...]) -> nn.Parameter:
    """One vector that holds all parameters, which become views of it."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    return nn.Parameter(flat)
