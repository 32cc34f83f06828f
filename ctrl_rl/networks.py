"""The networks that actors, critics and exported policies share."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctrl_rl import distributions
from ctrl_rl.spec import Discrete, EnvSpec

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


class GuidedMLP(nn.Module):
    """Two networks in a row: a guide names the next observation, the other the action to reach it.

    x -> execute([x | guide(x)]); parameters are those of two `MLP`s, `guide.*` and `execute.*`.
    They compute in the type of their weights, float64 in a policy: small differences of
    observations ask for large ones of actions, so that float32's rounding would show in the action.

    Args:
        guide_hidden: widths of the guide's hidden layers.
        sizes: width of the input x, the other network's hidden layers and the output.
        activation: a key of `ACTIVATIONS`.
        generator: source of the initial weights; None for torch's global one.
    """

    def __init__(
        self,
        guide_hidden: Sequence[int],
        sizes: Sequence[int],
        activation: str,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        width, *rest = sizes
        self.guide = MLP((width, *guide_hidden, width), activation, 1.0, generator)
        self.execute = MLP((2 * width, *rest), activation, 1.0, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(..., sizes[0]) to (..., sizes[-1]), of the same type."""
        y = x.to(self.guide.layers[0].weight.dtype)  # pyright: ignore
        return self.execute(torch.cat([y, self.guide(y)], -1)).to(x.dtype)


class EnsembleMLP(nn.Module):
    """E networks of one shape on the same input, each layer one batched product.

    Parameters are named `layers.{i}.weight` (E, in, out) and `layers.{i}.bias` (E, 1, out) and
    start as E independent `MLP`s do.

    Args:
        count: E.
        sizes: width of the input, the hidden layers and the output.
        activation: a key of `ACTIVATIONS`.
        last_gain: gain of the last layer.
        generator: source of the initial weights; None for torch's global one.
        layer_norm: shift and scale the input of each activation to mean 0 and deviation 1 over the
            layer (Ba et al., arXiv:1607.06450), without parameters of its own.

    Raises:
        ValueError: an unknown activation, or fewer than two sizes.
    """

    def __init__(
        self,
        count: int,
        sizes: Sequence[int],
        activation: str,
        last_gain: float = 1.0,
        generator: torch.Generator | None = None,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.layer_norm = layer_norm
        members = [MLP(sizes, activation, last_gain, generator) for _ in range(count)]
        self.activation = ACTIVATIONS[activation]
        self.layers: Any = nn.ModuleList()
        for same_layer in zip(*(member.layers for member in members), strict=True):
            layer: Any = nn.Module()
            layer.weight = nn.Parameter(torch.stack([x.weight.detach().T for x in same_layer]))
            layer.bias = nn.Parameter(torch.stack([x.bias.detach()[None] for x in same_layer]))
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        """(B, sizes[0]) to (E, B, sizes[-1])."""
        *hidden, last = self.layers
        x = x.expand(last.bias.shape[0], -1, -1)
        for layer in hidden:
            x = torch.baddbmm(layer.bias, x, layer.weight)
            x = self.activation(nn.functional.layer_norm(x, x.shape[-1:]) if self.layer_norm else x)
        return torch.baddbmm(last.bias, x, last.weight)


class QEnsemble(nn.Module):
    """E action values of an observation and an action, which enters scaled to -1..1.

    Args:
        count: E; 2 for a twin critic.
        obs_size: columns of the observation.
        low: (A,) finite bounds of the action, in its units.
        high: (A,)
        hidden: widths of the hidden layers.
        activation: a key of `ACTIVATIONS`.
        generator: source of the initial weights.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        count: int,
        obs_size: int,
        low: Tensor,
        high: Tensor,
        hidden: Sequence[int],
        activation: str,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        sizes = (obs_size + len(low), *hidden, 1)
        self.net = EnsembleMLP(count, sizes, activation, 1.0, generator)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """(B, d) and (B, A) in action units to (E, B)."""
        scaled = distributions.unit_scaled(action, self.low, self.high)
        return self.net(torch.cat([obs, scaled], 1))[..., 0]


class DeterministicActor(nn.Module):
    """A network whose output is squashed to the bounds of the action.

    Args:
        obs_size: columns of the observation.
        low: (A,) finite bounds of the action, in its units.
        high: (A,)
        hidden: widths of the hidden layers.
        activation: a key of `ACTIVATIONS`.
        generator: source of the initial weights.
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
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.net = MLP((obs_size, *hidden, len(low)), activation, 0.01, generator)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        """(B, d) to (B, A) in action units."""
        return distributions.squash(self.net(obs), self.low, self.high)


class PolicyHead(nn.Module):
    """Makes the distribution of actions from an actor's output.

    Args:
        spec: the environment's contract.
        initial_std: standard deviation of a continuous action at the start [action units].
    """

    low: Tensor
    high: Tensor

    def __init__(self, spec: EnvSpec, initial_std: float) -> None:
        super().__init__()
        self.discrete = isinstance(spec.action, Discrete)
        self.bounded = False
        if not isinstance(spec.action, Discrete):
            self.log_std = nn.Parameter(torch.full((spec.action_size,), math.log(initial_std)))
            low, high = ([getattr(d, side) for d in spec.action] for side in ("low", "high"))
            self.bounded = any(map(math.isfinite, low + high))
            self.register_buffer("low", torch.tensor(low), persistent=False)
            self.register_buffer("high", torch.tensor(high), persistent=False)

    def forward(self, head: Tensor):
        """The policy from the actor's output (..., A): a mean, or logits."""
        if self.discrete:
            return distributions.Categorical(head)
        if self.bounded:
            return distributions.ClippedGaussian(head, self.log_std, self.low, self.high)
        return distributions.DiagGaussian(head, self.log_std)


def action_bounds(
    spec: EnvSpec, learner: str, action_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """Bounds (A,) that a learner squashes its actions to, in action units.

    Args:
        spec: the environment's contract.
        learner: its name, for the error.
        action_bound: stands in for infinite bounds, as -action_bound and action_bound.

    Raises:
        ValueError: the task's actions are discrete; one has no bound and `action_bound` is None;
            `action_bound` has no effect, or leaves an action no room.
    """
    if isinstance(spec.action, Discrete):
        raise ValueError(f"{learner} needs continuous actions; {spec.task} has {spec.action.n} "
                         "choices: use ppo")  # fmt: skip
    unbounded = [
        d.name for d in spec.action if not (math.isfinite(d.low) and math.isfinite(d.high))
    ]
    if unbounded and action_bound is None:
        raise ValueError(
            f"{learner} squashes actions to their bounds, and {spec.task} gives none for "
            f"{', '.join(unbounded)}: use ppo, or fast_sac with action_bound"
        )
    if action_bound is not None and not unbounded:
        raise ValueError(f"leave action_bound out: {spec.task} bounds its actions itself")
    stand_in = 0.0 if action_bound is None else action_bound
    low, high = (
        torch.tensor([x if math.isfinite(x) else side * stand_in for x in ends])
        for side, ends in ((-1, [d.low for d in spec.action]), (1, [d.high for d in spec.action]))
    )
    if not bool((low < high).all()):
        raise ValueError(f"action_bound {action_bound} leaves an action of {spec.task} no room")
    return low, high


def entropy_target(given: float | None, low: Tensor, high: Tensor) -> float:
    """Target entropy of squashed actions, in action units [nat].

    Args:
        given: that of actions scaled to -1..1; None for minus the number of dimensions.
        low: bounds (A,), in action units.
        high: likewise.

    Raises:
        ValueError: no such action has as much; a temperature would grow without end.
    """
    most = len(low) * math.log(2)  # of the uniform density 1/2
    if given is not None and given >= most:
        raise ValueError(
            f"target_entropy must be below {most:.4g}, which no action exceeds (log 2 for each "
            f"dimension, scaled to -1..1), not {given!r}"
        )
    target = -float(len(low)) if given is None else given
    return target + ((high - low) / 2).log().sum().item()
