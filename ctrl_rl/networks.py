"""The multilayer perceptron that actors, critics and exported policies share."""

import itertools
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

ACTIVATIONS = {
    "elu": partial(nn.functional.elu, inplace=True),  # its backward then reads the result: no exp
    "relu": nn.functional.relu,
    "tanh": torch.tanh,
}


class MLP(nn.Module):
    """Linear layers with an activation between them, none after the last.

    Parameters are named `layers.{i}.weight` (out, in) and `layers.{i}.bias` (out,). Weights start
    orthogonal with gain sqrt(2), biases at zero (Andrychowicz et al., arXiv:2006.05990, C.57).

    Args:
        sizes: width of the input, the hidden layers and the output.
        activation: a key of `ACTIVATIONS`.
        last_gain: gain of the last layer; small for an actor, whose first actions are then close
            to zero whatever it sees.
        generator: source of the initial weights; None for torch's global one.

    Raises:
        ValueError: an unknown activation, or fewer than two sizes.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str,
        last_gain: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
        if len(sizes) < 2:
            raise ValueError(f"a network needs an input and an output size, not {list(sizes)}")
        self.activation = ACTIVATIONS[activation]
        self.layers = nn.ModuleList()
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            layer: nn.Linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out)  # pyright: ignore
            gain = math.sqrt(2) if i < len(sizes) - 2 else last_gain
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            nn.init.zeros_(layer.bias)
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        """(..., sizes[0]) to (..., sizes[-1])."""
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)
