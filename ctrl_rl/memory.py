"""Networks with memory, and the pieces of a roll-out that they learn from.

Reading order: `RecurrentNet` -> `forget` -> `Pieces`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ctrl_rl.networks import MLP

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
