"""Decision Transformer: actions by the return that is asked for, one file.

Paper: Chen, Lu, Rajeswaran, Lee, Grover, Laskin, Abbeel, Srinivas and Mordatch, "Decision
transformer: reinforcement learning via sequence modeling", NeurIPS 2021, arXiv:2106.01345; details
after CORL's code (Tarasov et al., 2022, arXiv:2210.07105).

A causal transformer reads the last K steps as tokens R_1, s_1, a_1, R_2, s_2, a_2, ..., where R_t
is the sum of rewards from step t to the episode's end, and says at each s_t what the data did:

    L = mean |pi(R_1, s_1, a_1, ..., R_t, s_t) - a_t|^2          over the steps t of all sequences

Played, it is told a return R_1 to reach, and R_(t+1) = R_t - r_t. No value is learned; what is good
is what was asked for. Sequences begin at a step drawn uniformly; where the episode ends, so does
the sequence.

Deviations from CORL's code, each with its reason:

1. No dropout: every random number of an update comes from a generator of the seed's own, and masks
   for all layers would cost more than the layers.
2. No weight decay: 1e-4 of a step size of 1e-4 changes a weight by a thousandth in 100,000 updates.
   Gradients are not clipped: one norm over all seeds of a job would tie them together.
3. Actions are scaled to -1..1, inside and in L.
4. Attention has no biases. The age of an episode beyond the longest of the data is read as that.

Tensors: seeds first, sequences (S, B, K, ...), tokens (S, B, 3 K, width).
`docs/algorithms/decision_transformer.md` explains every logged key.

Reading order: `METRICS` -> `DecisionTransformerConfig` -> `Sequences` -> `StackedTransformer` ->
`DecisionTransformer` -> `train` -> `ReturnPolicy`.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ctrl_rl.compiled import MinibatchStep
from ctrl_rl.env import Obs
from ctrl_rl.networks import action_bounds
from ctrl_rl.normalize import Normalizer
from ctrl_rl.policy import read_group
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec
from offline import training
from offline.networks import stream
from offline.settings import check_settings
from offline.training import Evaluate, fit
from offline.transitions import Transitions

METRICS: dict[str, str] = {
    "loss/actor": "L, mean over the updates since the last row, actions scaled to -1..1",
    "gradient/actor": "Euclidean norm of its gradient",
    **training.METRICS,
}
"""Every key that is logged; an unknown key is an error."""

STATS = ("gradient/actor", "loss/actor")
"""What `DecisionTransformer.update` reports."""

_GYM = {"normalize_obs": True, "batch_size": 4096, "learning_rate": 8e-4}
_UNSCALED = {**_GYM, "return_scale": 1.0}

PRESETS: dict[str, dict] = {
    **{
        f"{body}-{kind}-v2": {**_GYM, "target_return": target, "total_steps": 100_000}
        for body, target in (("halfcheetah", 12_000.0), ("hopper", 3600.0), ("walker2d", 5000.0))
        for kind in ("medium", "medium-replay", "medium-expert")
    },
    "gym": {**_GYM, "total_steps": 100_000},
    "maze2d": {**_UNSCALED, "target_return": 280.0},
    "antmaze": {"normalize_obs": True, "return_scale": 1.0, "target_return": 1.0},
    **{
        f"{task}-{kind}-v1": {**_UNSCALED, "target_return": target}
        for task, target in (
            ("pen", 3100.0), ("door", 2900.0), ("hammer", 12_800.0), ("relocate", 4300.0)
        )
        for kind in ("human", "cloned", "expert")
    },
    "adroit": _UNSCALED,
}  # fmt: skip
"""D4RL's data set, or else its family -> settings of `ctrl-rl offline train` other than its
defaults: CORL's, of whose target returns the largest, which is the one that CORL prints."""


@dataclass(frozen=True, kw_only=True)
class DecisionTransformerConfig:
    """Settings of the Decision Transformer; CORL's, with the paper's minibatch."""

    total_steps: int = 100_000
    """Length of training [updates]."""
    batch_size: int = 64
    """Sequences per update and seed."""
    learning_rate: float = 1e-4
    """Adam's step size, once it is warm."""
    warmup_steps: int = 10_000
    """Updates over which the step size rises from 0."""
    context: int = 20
    """K, steps that an action may depend on."""
    width: int = 128
    """Numbers per token."""
    layers: int = 3
    """Blocks of attention and perceptron."""
    heads: int = 1
    """Attention heads; they divide the width."""
    return_scale: float = 1000.0
    """Returns are divided by this [reward]."""
    target_return: float | None = None
    """Return that the policy asks for [reward]; None for the largest of the data's episodes."""

    def __post_init__(self) -> None:
        at_least_one = ("context", "width", "layers", "heads")
        target, divides = self.target_return, self.heads >= 1 and self.width % self.heads == 0
        check_settings(
            self,
            *((name, getattr(self, name) >= 1, "at least 1") for name in at_least_one),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("heads", divides, f"a divisor of width {self.width}"),
            ("return_scale", 0 < self.return_scale < math.inf, "positive"),
            ("target_return", target is None or math.isfinite(target), "a number or None"),
        )


class SequenceBatch(NamedTuple):
    """B sequences of K steps for each of S seeds."""

    obs: Tensor
    """(S, B, K, d)"""
    action: Tensor
    """(S, B, K, A), as in the file"""
    to_go: Tensor
    """(S, B, K), sum of the file's rewards from this step to the end of its episode"""
    step: Tensor
    """(S, B, K) int64, age of the episode"""
    known: Tensor
    """(S, B, K) float32: 0 behind the end of the episode, where the others mean nothing"""


class Sequences(Transitions):
    """Recorded episodes as sequences; every step is one's beginning.

    Args:
        data: transitions; those it dropped count, too, for a sequence needs no successor.
        context: K.
    """

    def __init__(self, data: Transitions, context: int) -> None:
        d, a, device = data.obs_size, data.action_size, data.device
        rows = torch.arange(len(data.rows), device=device)
        episode = torch.searchsorted(data.starts, rows, right=True) - 1
        self.step = rows - data.starts[episode]
        self.left = data.lengths[episode] - self.step  # steps from here; 0 in the last row
        reward = data.raw_reward(data.rows[:, d + a].double()) * (self.left > 0)
        before = reward.cumsum(0) - reward
        last = data.starts + data.lengths
        self.to_go = (before[last][episode] - before).float()
        index = rows[self.left > 0]
        super().__init__(
            *(data.rows, index, d, a, data.starts, data.lengths),
            normalizer=data.normalizer,
            reward_scale=data.reward_scale,
            reward_shift=data.reward_shift,
            report=data.report | {"transitions": len(index), "dropped_at_timeouts": 0,
                                  "dropped_unknown_successor": 0},
        )  # fmt: skip
        self.ahead = torch.arange(context, device=device)

    @property
    def largest_return(self) -> float:
        """Of all episodes [reward]."""
        return float(self.to_go[self.starts].max())

    def batch(self, index: Tensor) -> Any:
        """The sequences that begin at rows `index` (S, B), as `SequenceBatch`."""
        known = self.ahead < self.left[index][..., None]
        row = index[..., None] + torch.minimum(self.ahead, self.left[index][..., None])
        found = self.rows.index_select(0, row.flatten()).view(*row.shape, -1)
        obs, action = found[..., : self.obs_size], found[..., self.obs_size : -2]
        return SequenceBatch(obs, action, self.to_go[row], self.step[row], known.float())


# Networks -----------------------------------------------------------------------------------


class StackedTransformer(nn.Module):
    """S causal transformers side by side; see the module.

    Weights are normal with deviation 0.02, biases zero (code of the paper). All parameters have the
    seed as their first dimension.

    Args:
        obs_size: d.
        action_size: A.
        ages: episodes' ages that are told apart.
        config: sizes.
        generators: source of the initial weights of each seed; S of them.
    """

    def __init__(
        self,
        obs_size: int,
        action_size: int,
        ages: int,
        config: DecisionTransformerConfig,
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__()
        w, self.heads, self.depth, self.ages = config.width, config.heads, config.layers, ages
        shapes = {"obs": (obs_size, w), "action": (action_size, w), "to_go": (1, w)}
        for i in range(self.depth):
            shapes |= {f"attend{i}": (w, 3 * w), f"merge{i}": (w, w)}
            shapes |= {f"widen{i}": (w, 4 * w), f"narrow{i}": (4 * w, w)}
        shapes |= {"head": (w, action_size)}
        draw = lambda *shape: nn.Parameter(  # noqa: E731
            torch.stack([0.02 * torch.randn(shape, generator=g) for g in generators])
        )
        seeds = len(generators)
        self.age = draw(ages, w)
        self.weight = nn.ParameterDict({name: draw(*shape) for name, shape in shapes.items()})
        # No bias in front of attention: one of all keys alike has no effect.
        biased = {n: shape for n, shape in shapes.items() if not n.startswith("attend")}
        self.bias = nn.ParameterDict(
            {n: nn.Parameter(torch.zeros(seeds, 1, shape[1])) for n, shape in biased.items()}
        )
        norms = ["tokens", "out", *(f"{part}{i}" for i in range(self.depth) for part in "ab")]
        self.gain = nn.ParameterDict({n: nn.Parameter(torch.ones(seeds, 1, w)) for n in norms})
        self.shift = nn.ParameterDict({n: nn.Parameter(torch.zeros(seeds, 1, w)) for n in norms})

    def forward(self, obs: Tensor, action: Tensor, to_go: Tensor, step: Tensor) -> Tensor:
        """Actions (S, B, K, A) within -1..1 for each step.

        Args:
            obs: (S, B, K, d), normalised if the data is.
            action: (S, B, K, A), scaled to -1..1; that of a step is not seen by its own answer.
            to_go: (S, B, K), divided by `return_scale`.
            step: (S, B, K) int64.
        """
        s, b, k, _ = obs.shape
        seed = torch.arange(s, device=obs.device)[:, None, None]
        age = self.age[seed, step.clamp(max=self.ages - 1)]
        parts = (self._linear("to_go", to_go[..., None]), self._linear("obs", obs),
                 self._linear("action", action))  # fmt: skip
        x = torch.stack([part + age for part in parts], 3).flatten(2, 3)
        x = self._norm("tokens", x)
        for i in range(self.depth):
            query, key, value = (
                part.unflatten(-1, (self.heads, -1)).transpose(2, 3)
                for part in self._linear(f"attend{i}", self._norm(f"a{i}", x)).chunk(3, -1)
            )
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self._linear(f"merge{i}", seen.transpose(2, 3).flatten(3))
            wide = functional.gelu(self._linear(f"widen{i}", self._norm(f"b{i}", x)))
            x = x + self._linear(f"narrow{i}", wide)
        at_obs = self._norm("out", x).view(s, b, k, 3, -1)[:, :, :, 1]
        return torch.tanh(self._linear("head", at_obs))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """One layer on the last dimension of (S, ..., in)."""
        flat = torch.bmm(x.flatten(1, -2), self.weight[name])
        if name in self.bias:
            flat = flat + self.bias[name]
        return flat.view(*x.shape[:-1], -1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """Layer normalisation of (S, B, L, width) with the seed's own gain and shift."""
        x = functional.layer_norm(x, x.shape[-1:])
        return x * self.gain[name][:, None] + self.shift[name][:, None]


def sequence_loss(action: Tensor, data_action: Tensor, known: Tensor) -> Tensor:
    """L (S,) from actions (S, B, K, A), scaled to -1..1, over the known steps (S, B, K)."""
    error = (action - data_action).square().mean(3)
    return (error * known).sum((1, 2)) / known.sum((1, 2))


# The learner --------------------------------------------------------------------------------


class DecisionTransformer:
    """Transformers and optimiser of S seeds; no data inside.

    Args:
        config: settings.
        data: what will be learned from: its sizes, lengths, largest return, device and normaliser.
        spec: what the policy reads and gives.
        seeds: decide initial weights; S of them, learned side by side.

    Raises:
        ValueError: the spec's actions are discrete or unbounded.
    """

    name, metrics, stats = "decision_transformer", METRICS, STATS

    def __init__(
        self,
        config: DecisionTransformerConfig,
        data: Sequences,
        spec: EnvSpec,
        seeds: Sequence[int] = (0,),
    ) -> None:
        self.config, self.spec, self.seeds = config, spec, tuple(seeds)
        self.device, self.normalizer = data.device, data.normalizer
        low, high = (x.to(self.device) for x in action_bounds(spec, self.name))
        self.middle, self.half_range = (high + low) / 2, (high - low) / 2
        self.target = data.largest_return if config.target_return is None else config.target_return
        start = [stream(seed, "weights") for seed in seeds]
        sizes = data.obs_size, data.action_size, int(data.lengths.max())
        self.net = StackedTransformer(*sizes, config, start).to(self.device)
        self.net_step = MinibatchStep(
            *(self.net, self._objective, config.learning_rate, None, None, False, 1e-8),
            check_each=False,
        )
        self.updates = 0

    def update(self, batch: Any) -> Tensor:
        """One step on a `SequenceBatch`; figures (K, S) named by `STATS`."""
        self.updates += 1
        warm = min(1.0, self.updates / max(self.config.warmup_steps, 1))
        self.net_step.learning_rate.fill_(self.config.learning_rate * warm)
        return self.net_step(*batch)

    def policy_section(self, seed: int) -> dict:
        """What `ReturnPolicy` plays, in tensors and plain values."""
        config = self.config
        return {
            "format": 1,
            "kind": self.name,
            "spec": self.spec.to_json(),
            "group": "actor",
            "sizes": {n: getattr(config, n) for n in ("context", "width", "layers", "heads")},
            "return_scale": config.return_scale,
            "target_return": self.target,
            "normalizer": None if self.normalizer is None else self.normalizer.section(),
            "weights": {k: v[seed].detach().clone() for k, v in self.net.state_dict().items()},
        }

    @property
    def policy_class(self) -> type:
        """What plays the section."""
        return ReturnPolicy

    def state_dict(self) -> dict:
        """Everything that decides the future of training but what is drawn, as a copy."""
        parts = {"net": self.net.state_dict(), "net_step": self.net_step.state_dict()}
        return deepcopy({**parts, "updates": self.updates})

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.net.load_state_dict(state["net"])
        self.net_step.load_state_dict(state["net_step"])
        self.updates = state["updates"]

    def _objective(self, net, obs, action, to_go, step, known):
        """L of a minibatch; no other figure."""
        scaled = (action - self.middle) / self.half_range
        found = net(obs, scaled, to_go / self.config.return_scale, step)
        loss = sequence_loss(found, scaled, known)
        return loss, loss.detach()[None][:0]


def train(
    config: DecisionTransformerConfig,
    data: Transitions,
    spec: EnvSpec,
    seeds: Sequence[int] = (0,),
    run: Run | None = None,
    evaluate: Evaluate | None = None,
) -> Run:
    """Train on recorded episodes, or go on where `run` stopped; see `offline.training.fit`."""
    sequences = Sequences(data, config.context)
    return fit(DecisionTransformer(config, sequences, spec, seeds), sequences, run, evaluate)


# Playing ------------------------------------------------------------------------------------


class ReturnPolicy:
    """Plays a transformer for a return; it has the calls of `ctrl_rl.policy.Policy`.

    It remembers the last K steps of each row. `receive` is told the rewards, by which the return
    that is still to reach falls; `ctrl_rl.evaluate` does so. Where nobody does, it stays.

    Attributes:
        spec: the environment it was trained on.
        group: the observation group it reads.
        target_return: what it asks for from the next `reset` on [reward].

    Raises:
        ValueError: something is missing, not finite or does not fit.
    """

    def __init__(self, section: dict, device: str | torch.device | None = None) -> None:
        keys = ("format", "kind", "spec", "group", "sizes", "return_scale", "target_return",
                "normalizer", "weights")  # fmt: skip
        if missing := [key for key in keys if key not in section]:
            raise ValueError(f"the policy section lacks {', '.join(missing)}")
        if (section["format"], section["kind"]) != (1, DecisionTransformer.name):
            raise ValueError(f"the policy section is no {DecisionTransformer.name} of format 1")
        for name, value in section["weights"].items():
            if not bool(value.isfinite().all()):
                raise ValueError(f"policy weight {name} is not finite")
        self._section = section
        self.spec = EnvSpec.from_json(section["spec"])
        self.group = section["group"]
        self.device = torch.device(device or section["weights"]["age"].device)
        self.target_return, self.return_scale = section["target_return"], section["return_scale"]
        width = self.spec.obs_size(self.group)
        self.normalizer = None
        if saved := section["normalizer"]:
            self.normalizer = Normalizer(width, saved["clip"], saved["epsilon"])
            self.normalizer.load_state_dict({k: saved[k] for k in ("mean", "var", "count")})
            self.normalizer.to(self.device)
        low, high = (x.to(self.device) for x in action_bounds(self.spec, DecisionTransformer.name))
        self.low, self.high = low, high
        config = DecisionTransformerConfig(**section["sizes"])
        self.context, ages = config.context, len(section["weights"]["age"])
        sizes = width, self.spec.action_size, ages
        self.net = StackedTransformer(*sizes, config, [torch.Generator()])
        try:
            self.net.load_state_dict({k: v[None] for k, v in section["weights"].items()})
        except RuntimeError as error:
            text = " ".join(str(error).split())[:200]
            raise ValueError(f"weights of the transformer do not fit: {text}") from None
        self.net.to(self.device).eval().requires_grad_(False)
        self._count: Tensor | None = None

    @classmethod
    def from_section(cls, section: dict, device=None) -> "ReturnPolicy":
        """As `ctrl_rl.policy.Policy.from_section`."""
        return cls(section, device)

    def section(self) -> dict:
        """The section this was built from."""
        return self._section

    @torch.no_grad()
    def __call__(self, obs: Obs | Tensor) -> Tensor:
        """Actions (N, A) for observations (N, d), or for a dict that holds them.

        Raises:
            ValueError: group or width is not what it was trained on, or N is not that of the
                observations before.
        """
        x = read_group(obs, self.spec, self.group).to(self.device)
        if self._count is None:
            self._begin(len(x))
        assert self._count is not None
        if len(self._count) != len(x):
            raise ValueError(
                f"the policy remembers {len(self._count)} rows, the observation has {len(x)}; "
                "policy.reset() begins anew"
            )
        full = self._count == self.context
        for memory in (self._obs, self._action, self._to_go, self._step):
            memory[full] = memory[full].roll(-1, 1)
        self._count += (~full).long()
        rows, last = torch.arange(len(x), device=self.device), self._count - 1
        self._obs[rows, last] = x if self.normalizer is None else self.normalizer(x)
        self._action[rows, last] = 0.0
        self._to_go[rows, last] = self._left / self.return_scale
        self._step[rows, last] = self._age
        self._age += 1
        memories = self._obs, self._action, self._to_go, self._step
        scaled = self.net(*(memory[None] for memory in memories))[0][rows, last]
        self._action[rows, last] = scaled
        middle, half_range = (self.high + self.low) / 2, (self.high - self.low) / 2
        return torch.clamp(middle + half_range * scaled, self.low, self.high)

    def sample(self, obs: Obs | Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The same: there is no noise to sample."""
        return self(obs)

    def receive(self, reward: Tensor) -> None:
        """Rewards (N,) of the step that followed: what is left to reach falls by them."""
        if self._count is not None:
            self._left -= reward.to(self.device)

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget rows whose episode ended; None for all, however many come next.

        Args:
            rows: bool flags (N,), or row numbers.
        """
        if rows is None or self._count is None:
            self._count = None
            return
        rows = rows.to(self.device)
        self._count[rows] = 0
        self._age[rows] = 0
        self._left[rows] = self.target_return

    def _begin(self, num_rows: int) -> None:
        """Nothing is remembered of so many rows."""
        shape, device = (num_rows, self.context), self.device
        self._obs = torch.zeros(*shape, self.spec.obs_size(self.group), device=device)
        self._action = torch.zeros(*shape, self.spec.action_size, device=device)
        self._to_go = torch.zeros(shape, device=device)
        self._step = torch.zeros(shape, dtype=torch.int64, device=device)
        self._count = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._age = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._left = torch.full((num_rows,), float(self.target_return), device=device)
