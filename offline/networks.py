"""Networks of several seeds and several members as one: each layer is one batched product.

A job trains S seeds side by side; an ensemble has E members for each. Their weights lie together,
seed by seed, so that a layer costs one call whatever S and E are, and no seed touches another:
gradients of a sum over seeds are each seed's own. Initial weights of a seed come from a generator
of its own, and are those that it has alone.

Tensors: seeds first, then members: inputs (S, B, in) or (S, E, B, in), outputs (S, E, B, out).

Reading order: `StackedMLP` -> `StackedQ` -> `StackedActor` -> `stream`, `normal`, `dropout_masks`.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrl_rl.distributions import squash, unit_scaled
from ctrl_rl.networks import ACTIVATIONS, MLP


class StackedMLP(nn.Module):
    """S times E multilayer perceptrons of one shape.

    Parameters are named `layers.{i}.weight` (S E, in, out) and `layers.{i}.bias` (S E, 1, out), row
    s E + e for member e of seed s, and start as independent `ctrl_rl.networks.MLP`s do.

    Args:
        members: E.
        sizes: width of the input, the hidden layers and the output.
        activation: a key of `ctrl_rl.networks.ACTIVATIONS`.
        generators: source of the initial weights of each seed, on the CPU; S of them.
        last_gain: gain of the last layer.
        layer_norm: shift and scale the input of each activation to mean 0 and deviation 1 over the
            layer (Ba et al., arXiv:1607.06450), without parameters of its own.

    Raises:
        ValueError: an unknown activation, or fewer than two sizes.
    """

    def __init__(
        self,
        members: int,
        sizes: Sequence[int],
        activation: str,
        generators: Sequence[torch.Generator],
        last_gain: float = 1.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.seeds, self.members, self.layer_norm = len(generators), members, layer_norm
        parts = [MLP(sizes, activation, last_gain, g) for g in generators for _ in range(members)]
        self.activation = ACTIVATIONS[activation]
        self.layers: Any = nn.ModuleList()
        for same_layer in zip(*(part.layers for part in parts), strict=True):
            layer: Any = nn.Module()
            layer.weight = nn.Parameter(torch.stack([x.weight.detach().T for x in same_layer]))
            layer.bias = nn.Parameter(torch.stack([x.bias.detach()[None] for x in same_layer]))
            self.layers.append(layer)

    def forward(
        self, x: Tensor, members: int | None = None, masks: Sequence[Tensor] = ()
    ) -> Tensor:
        """(S, B, in), the same for all members, or (S, E, B, in), to (S, E, B, out).

        With `members` the first so many of them alone are asked, which take their place as E.
        `masks`, one (S E, B, width) for each hidden layer, multiply what comes out of it.
        """
        count = self.members if members is None else members
        if x.ndim == 3:
            x = x[:, None].expand(-1, count, -1, -1)
        x = x.reshape(self.seeds * count, *x.shape[2:])
        *hidden, last = self.layers
        for i, layer in enumerate(hidden):
            x = torch.baddbmm(self._first(layer.bias, count), x, self._first(layer.weight, count))
            x = self.activation(nn.functional.layer_norm(x, x.shape[-1:]) if self.layer_norm else x)
            x = x * masks[i] if masks else x
        weight, bias = self._first(last.weight, count), self._first(last.bias, count)
        if weight.shape[2] == 1:  # batched products are slow for a single column
            x = (x * weight.transpose(1, 2)).sum(2, keepdim=True) + bias
        else:
            x = torch.baddbmm(bias, x, weight)
        return x.view(self.seeds, count, *x.shape[1:])

    def _first(self, parameter: Tensor, members: int) -> Tensor:
        """Rows of the first members of each seed."""
        if members == self.members:
            return parameter
        parts = parameter.view(self.seeds, self.members, *parameter.shape[1:])
        return parts[:, :members].flatten(0, 1)

    def weights_of(self, seed: int, member: int = 0) -> dict[str, Tensor]:
        """Copies of one network's weights, as `ctrl_rl.networks.MLP` names them.

        Args:
            seed: its place in the job, 0..S-1.
            member: 0..E-1.
        """
        row, found = seed * self.members + member, {}
        for i, layer in enumerate(self.layers):
            found[f"layers.{i}.weight"] = layer.weight[row].detach().T.contiguous()
            found[f"layers.{i}.bias"] = layer.bias[row, 0].detach().clone()
        return found


class StackedQ(nn.Module):
    """Action values of an observation and an action, which enters scaled to -1..1.

    Args:
        members: E; 2 for a twin critic.
        obs_size: columns of the observation.
        low: (A,) finite bounds of the action, in its units.
        high: (A,)
        hidden: widths of the hidden layers.
        activation: a key of `ctrl_rl.networks.ACTIVATIONS`.
        generators: source of the initial weights of each seed.
        layer_norm: as in `StackedMLP`.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        members: int,
        obs_size: int,
        low: Tensor,
        high: Tensor,
        hidden: Sequence[int],
        activation: str,
        generators: Sequence[torch.Generator],
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = (obs_size + len(low), *hidden, 1)
        self.net = StackedMLP(members, sizes, activation, generators, 1.0, layer_norm)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def forward(self, obs: Tensor, action: Tensor, members: int | None = None) -> Tensor:
        """(S, B, d) and (S, B, A) in action units to (S, E, B), or of the first `members`."""
        scaled = unit_scaled(action, self.low, self.high)
        return self.net(torch.cat([obs, scaled], -1), members)[..., 0]


class StackedActor(nn.Module):
    """Deterministic policies, or the means of normal ones, squashed to the action's bounds.

    Args:
        obs_size: columns of the observation.
        low: (A,) finite bounds of the action, in its units.
        high: (A,)
        hidden: widths of the hidden layers.
        activation: a key of `ctrl_rl.networks.ACTIVATIONS`.
        generators: source of the initial weights of each seed.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        obs_size: int,
        low: Tensor,
        high: Tensor,
        hidden: Sequence[int],
        activation: str,
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__()
        self.hidden, self.activation = tuple(hidden), activation
        sizes = (obs_size, *hidden, len(low))
        self.net = StackedMLP(1, sizes, activation, generators, 0.01)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def forward(self, obs: Tensor, masks: Sequence[Tensor] = ()) -> Tensor:
        """(S, B, d) to (S, B, A) in action units; `masks` as in `StackedMLP.forward`."""
        return squash(self.net(obs, masks=masks)[:, 0], self.low, self.high)

    def section(self, seed: int, noise_std: Tensor, spec, normalizer) -> dict:
        """One seed's policy as `ctrl_rl.policy.Policy.from_section` reads it.

        Args:
            seed: its place in the job.
            noise_std: (A,) deviation of a sampled action from the deterministic one, in its units.
            spec: the contract of the environment it acts in.
            normalizer: of `Transitions`: what was done to the observations.
        """
        return {
            "format": 1,
            "kind": "deterministic_mlp",
            "spec": spec.to_json(),
            "group": "actor",
            "hidden": list(self.hidden),
            "activation": self.activation,
            "normalizer": None if normalizer is None else normalizer.section(),
            "bound": "tanh",
            "weights": self.net.weights_of(seed),
            "noise_std": noise_std.detach().clone(),
        }


def stream(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A seed's generator for one purpose; no two pairs of seed and name share a stream."""
    digest = hashlib.blake2b(f"{name}:{seed}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def normal(generators: Sequence[torch.Generator], *shape: int) -> Tensor:
    """Standard normal (S, *shape), each seed's part from its own generator."""
    return torch.stack([torch.randn(shape, generator=g, device=g.device) for g in generators])


def uniform(generators: Sequence[torch.Generator], *shape: int) -> Tensor:
    """Uniform in 0..1 (S, *shape), each seed's part from its own generator."""
    return torch.stack([torch.rand(shape, generator=g, device=g.device) for g in generators])


def dropout_masks(
    generators: Sequence[torch.Generator], share: float, batch: int, widths: Sequence[int]
) -> list[Tensor]:
    """Masks (S, B, width) of a network's hidden layers, each seed's from its own generator.

    An entry is 0 with probability `share` and 1 / (1 - share) otherwise (Srivastava et al.,
    Dropout, JMLR 15, 2014, inverted). None where the share is 0.
    """
    if share == 0:
        return []
    drawn = uniform(generators, batch, sum(widths))
    return list(((drawn >= share) / (1 - share)).split(list(widths), 2))
