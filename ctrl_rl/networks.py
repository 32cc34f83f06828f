"""The networks that actors, critics and exported policies share: `MLP`, `RecurrentNet`."""

import itertools
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

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


CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}


class RecurrentNet(nn.Module):
    """A recurrent layer, then an `MLP`: what was seen before reaches the output through a state.

    The state is (C, N, H): h of a GRU (C = 1; Cho et al., EMNLP 2014, arXiv:1406.1078), h and c of
    an LSTM (C = 2; Hochreiter and Schmidhuber, Neural Computation 9(8), 1997). At the start of an
    episode it is zero.

    Each gate's weights start orthogonal, biases at zero, but for the LSTM's forget gate: 1, so that
    it remembers from the start (Jozefowicz et al., ICML 2015).

    Args:
        cell: a key of `CELLS`.
        memory_size: H.
        sizes: width of the input, of the MLP's hidden layers and of the output.
        activation: see `MLP`, as the two that follow.
        last_gain: gain of the last layer.
        generator: source of the initial weights; None for torch's global one.

    Raises:
        ValueError: an unknown cell or activation.
    """

    def __init__(
        self,
        cell: str,
        memory_size: int,
        sizes: Sequence[int],
        activation: str,
        last_gain: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if cell not in CELLS:
            raise ValueError(f"unknown cell {cell!r}; known: {', '.join(CELLS)}")
        self.num_states = 2 if cell == "lstm" else 1
        """C"""
        width, *rest = sizes
        self.memory = CELLS[cell](width, memory_size, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in self.memory.named_parameters():
                if name.startswith("bias"):
                    parameter.zero_()
                    continue
                for gate in parameter.split(memory_size):
                    nn.init.orthogonal_(gate, generator=generator)
            if cell == "lstm":  # its gates stand in the order input, forget, cell, output
                self.memory.bias_ih_l0[memory_size : 2 * memory_size] = 1.0
        self.mlp = MLP((memory_size, *rest), activation, last_gain, generator)

    def start(self, num_rows: int, device: torch.device | str = "cpu") -> Tensor:
        """The state at the start of an episode, (C, num_rows, H)."""
        return torch.zeros(self.num_states, num_rows, self.memory.hidden_size, device=device)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step: x (N, d) and the state before it to the output and the state after it."""
        out, after = self.memory(x[None], self._given(state))
        return self.mlp(out[0]), self._taken(after)

    def replay(self, x: Tensor, batch_sizes: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Sequences of unequal length at once; equal to `forward` step by step, but for rounding.

        Args:
            x: (S, d), first steps of all P sequences, then second steps of those that have one,
                and so on, the longest sequence first.
            batch_sizes: how many sequences have a k-th step, int64 on the CPU.
            state: before the first steps (C, P, H).

        Returns:
            The output in the order of x, and the state after each sequence's last step (C, P, H).
        """
        out, after = self.memory(PackedSequence(x, batch_sizes), self._given(state))
        return self.mlp(out.data), self._taken(after)

    def _given(self, state: Tensor):
        """The state as torch's layer takes it."""
        return state if self.num_states == 1 else (state[:1], state[1:])

    def _taken(self, state) -> Tensor:
        return state if self.num_states == 1 else torch.cat(state)
