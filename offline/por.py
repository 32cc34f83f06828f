"""POR: policy-guided offline RL, one file.

Paper: Xu, Jiang, Li and Zhan, "A policy-guided imitation approach for offline reinforcement
learning", NeurIPS 2022, arXiv:2210.08323; details after the authors' code (ryanxhr/POR, e692bb3).

The policy is two: a guide g(s'|s) says where to go, an execute policy pi(a|s, s') how. No value of
an action is ever learned. In each update, in this order:

    y     = r + gamma [not terminated] min_j Vbar_j(s')
    L_V   = 1/2 sum_j mean |expectile - [u_j < 0]| u_j^2,                u_j = y - V_j(s)
    Vbar <- (1 - polyak) Vbar + polyak V
    "residual":
    L_g   = -mean min(exp(alpha (y - min_j V_j(s))), 100) log g(s'|s),           V of after L_V
    "value_gradient":
    L_g   = -lambda mean V(s~) - mean log b(s~|s),    s~ drawn from g(.|s),  V = min_j V_j,
            lambda = alpha / mean |V(s~)|, a constant of the gradient
    L_pi  = -mean log pi(a|s, s')                               on all data, with the true s'

b is a behaviour guide: with "value_gradient" the first `behavior_share` of all updates minimise
L_b = -mean log b(s'|s) and nothing else; then it is frozen. Step sizes of g and pi fall to 0 along
half a cosine over the other updates. g, b and pi are normals with linear means and deviations that
do not depend on their input. The policy acts by the means, pi(s, g(s)), asked anew at each step.

Because only pi sees actions, data of any quality helps it, and a new task needs a new guide alone:
`execute_from` keeps the execute policy of another run and trains value and guide.

Deviations from the source, each with its reason:

1. Actions are scaled to -1..1 for the density and clipped to their bounds when played; the source
   has actions like this and leaves the clipping to the environment.
2. Layer normalisation of V has no parameters of its own and stands before each activation. Weights
   start orthogonal.
3. The source trains b in a run of its own, of 1e6 updates like the main one. Here both are one run,
   of 2e6 with `behavior_share` 0.5.
4. Where the data does not hold the observation that an episode ended in, as AntMaze's does not, the
   last transition counts in L_V alone: the other losses would learn to stay in the goal.

Tensors: seeds first, minibatch (S, B, ...), values (S, 2, B). `docs/algorithms/por.md` explains
every logged key.

Reading order: `METRICS` -> `PRESETS` -> `PORConfig` -> losses -> `StackedNormal` ->
`POR` -> `train`.
"""

import math
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ctrl_rl.compiled import MakeOptimizer
from ctrl_rl.networks import action_bounds
from ctrl_rl.policy import check_same_shape, load_policy
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec
from offline import training
from offline.adamo import AdamOConfig
from offline.networks import StackedMLP, normal, stream
from offline.settings import check_settings, minibatch_step, value_optimizer
from offline.training import Evaluate, fit
from offline.transitions import Batch, Transitions

METRICS: dict[str, str] = {
    "loss/value": "L_V, mean over the updates since the last row [reward^2]",
    "loss/guide": "L_g, likewise; 0 while the behaviour guide learns",
    "loss/execute": "L_pi, likewise [nat]; likewise",
    "loss/behavior": "L_b, likewise [nat]; 0 with variant residual",
    "value/v": "mean V_j(s) on the minibatches [reward]",
    "guide/weight": "mean weight of a transition in L_g, or lambda with value_gradient",
    "gradient/value": "Euclidean norm of L_V's gradient",
    "gradient/guide": "Euclidean norm of L_g's gradient",
    "gradient/execute": "Euclidean norm of L_pi's gradient; 0 with execute_from",
    "gradient/behavior": "Euclidean norm of L_b's gradient",
    **training.METRICS,
}
"""Every key that is logged; an unknown key is an error."""

STATS = (
    *("value/v", "gradient/value", "loss/value"),
    *("guide/weight", "gradient/guide", "loss/guide"),
    *("gradient/execute", "loss/execute"),
    *("gradient/behavior", "loss/behavior"),
)
"""What `POR.update` reports."""

VARIANTS = ("residual", "value_gradient")

LARGEST_WEIGHT = 100.0
"""Bound of a transition's weight in L_g (authors' code)."""

LOG_STD_RANGE = (-5.0, 2.0)
"""Bounds of the normals' log_std (authors' code)."""

SOURCE_EXECUTE_HIDDEN = (1024, 1024)
"""Hidden layers of the execute policy in the authors' code."""

_HOPPER = {"variant": "value_gradient", "total_steps": 2_000_000, "expectile": 0.7}
_ANTMAZE = {"reward": "antmaze", "expectile": 0.9, "alpha": 10.0, "layer_norm": False}

PRESETS: dict[str, dict] = {
    "gym": {"reward": "locomotion"},
    "antmaze": _ANTMAZE,
    **{
        f"hopper-{kind}-v2": {"reward": "locomotion", **_HOPPER, "alpha": 50.0, "layer_norm": False}
        for kind in ("medium", "medium-replay")
    },
    "hopper-medium-expert-v2": {"reward": "locomotion", **_HOPPER, "alpha": 5.0},
    **{
        f"antmaze-{maze}-{kind}-v2": {**_ANTMAZE, "learning_rate": 1e-4}
        for maze in ("medium", "large")
        for kind in ("play", "diverse")
    },
}
"""D4RL's data set, or else its family -> settings of `ctrl-rl offline train` other than its
defaults: the authors' (README of their code at e692bb3). HalfCheetah's and Walker2d's are the
defaults; observations are as in the file."""


@dataclass(frozen=True, kw_only=True)
class PORConfig:
    """Settings of POR; the source's for HalfCheetah and Walker2d."""

    total_steps: int = 1_000_000
    """Length of training [updates]."""
    batch_size: int = 256
    """Transitions per update and seed."""
    learning_rate: float = 1e-3
    """Adam's step size for guide and execute policy at the start."""
    value_learning_rate: float = 1e-4
    """Adam's step size for V and for the behaviour guide."""
    gamma: float = 0.99
    """Discount per step."""
    polyak: float = 0.005
    """Share of V that its target takes on."""
    variant: str = "residual"
    """How the guide learns: "residual" or "value_gradient"."""
    expectile: float = 0.5
    """Which expectile of y over the data V is; above 0.5 luck passes for skill."""
    alpha: float = 3.0
    """Factor of the residual in a weight [1/reward], or the size of lambda's term [-]."""
    behavior_share: float = 0.5
    """Share of all updates, the first ones, that fit the behaviour guide; of "value_gradient"."""
    layer_norm: bool = True
    """Normalise the hidden layers of V."""
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers of V and the guides."""
    execute_hidden: tuple[int, ...] = SOURCE_EXECUTE_HIDDEN
    """Those of the execute policy; 256-256 on a CPU, where an update then does a fifth of the work,
    which the run's record says."""
    activation: str = "relu"
    """"elu", "relu" or "tanh"."""
    execute_from: str = ""
    """A run of POR whose execute policy is kept and not trained; "" trains one."""
    optimizer: str = "adam"
    """That of V: "adam", or "adamo" with the settings in `adamo`."""
    adamo: AdamOConfig = AdamOConfig()
    """Settings of `offline.adamo`; without effect where `optimizer` is "adam"."""
    compile: str = "auto"
    """"on", "off", or "auto": compile the update if the run is long enough to gain from it."""

    def __post_init__(self) -> None:
        rate, widths = self.value_learning_rate, self.execute_hidden
        check_settings(
            self,
            ("value_learning_rate", 0 < rate < math.inf, "positive"),
            ("variant", self.variant in VARIANTS, f"one of {', '.join(VARIANTS)}"),
            ("expectile", 0 < self.expectile < 1, "above 0 and below 1"),
            ("alpha", 0 <= self.alpha < math.inf, "0 or more"),
            ("behavior_share", 0 < self.behavior_share < 1, "above 0 and below 1"),
            ("execute_hidden", bool(widths) and min(widths) >= 1, "positive widths"),
        )

    @property
    def behavior_steps(self) -> int:
        """Updates that fit the behaviour guide."""
        return int(self.behavior_share * self.total_steps) if self.variant != "residual" else 0


# Losses -------------------------------------------------------------------------------------


def value_target(reward: Tensor, terminated: Tensor, next_value: Tensor, gamma: float) -> Tensor:
    """y (S, B) from Vbar(s') (S, 2, B)."""
    return reward + gamma * (1 - terminated) * next_value.amin(1)


def value_loss(value: Tensor, target: Tensor, expectile: float) -> Tensor:
    """L_V (S,) from V(s) (S, 2, B) and y (S, B)."""
    u = target[:, None] - value
    weight = (expectile - (u < 0).to(u.dtype)).abs()
    return 0.5 * (weight * u.square()).mean(2).sum(1)


def residual_weight(residual: Tensor, alpha: float) -> Tensor:
    """Weight of each transition in L_g, from y - V(s) of the same shape."""
    # Cut before the exponential, so that it never overflows.
    return (alpha * residual).clamp(max=math.log(LARGEST_WEIGHT)).exp()


def residual_loss(weight: Tensor, log_prob: Tensor, known: Tensor) -> Tensor:
    """L_g (S,) of "residual" from weights, log g(s'|s) and which s' are known (S, B)."""
    return -mean_of(weight * log_prob, known)


def known_successors(obs: Tensor, next_obs: Tensor, terminated: Tensor) -> Tensor:
    """1 where s' was recorded, 0 where not (S, B).

    `Episodes` repeats the last observation where an episode's final one is unknown, and
    `Transitions` keeps such a row only if the episode terminated.
    """
    return 1 - terminated * (next_obs == obs).all(2).to(obs.dtype)


def mean_of(x: Tensor, known: Tensor) -> Tensor:
    """Mean (S,) of those entries of x (S, B) where `known` is 1; 0 where none is."""
    return (x * known).sum(1) / known.sum(1).clamp(min=1)


def value_gradient_weight(value: Tensor, alpha: float) -> Tensor:
    """lambda (S,) from V(s~) (S, B)."""
    return alpha / value.detach().abs().mean(1).clamp(min=1e-6)


def value_gradient_loss(weight: Tensor, value: Tensor, behavior_log_prob: Tensor) -> Tensor:
    """L_g (S,) of "value_gradient" from lambda (S,), V(s~) and log b(s~|s) (S, B)."""
    return -weight * value.mean(1) - behavior_log_prob.mean(1)


class StackedNormal(nn.Module):
    """Normals with a mean from a network and a deviation of its own, S seeds side by side.

    Args:
        sizes: width of the input, the hidden layers and the output.
        activation: a key of `ctrl_rl.networks.ACTIVATIONS`.
        generators: source of the initial weights of each seed.
    """

    def __init__(
        self, sizes: Sequence[int], activation: str, generators: Sequence[torch.Generator]
    ) -> None:
        super().__init__()
        self.net = StackedMLP(1, sizes, activation, generators)
        self.log_std = nn.Parameter(torch.zeros(len(generators), 1, sizes[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """The means (S, B, out) for (S, B, in)."""
        return self.net(x)[:, 0]

    def std(self) -> Tensor:
        """Deviations (S, 1, out)."""
        return self.log_std.clamp(*LOG_STD_RANGE).exp()

    def log_prob(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density (S, B) of y (S, B, out), given x (S, B, in)."""
        log_std = self.log_std.clamp(*LOG_STD_RANGE)
        z = (y - self(x)) * (-log_std).exp()
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(2)


# The learner --------------------------------------------------------------------------------


class POR:
    """Networks, optimisers and random generators of S seeds; no data inside.

    Args:
        config: settings.
        data: what will be learned from: its sizes, device and normaliser count.
        spec: what the policy reads and gives.
        seeds: decide initial weights and noise; S of them, learned side by side.
        critic_optimizer: makes V's optimiser; None for what `config` says.
        goes_on: `load_state_dict` will bring all weights; `execute_from` may be gone by now.

    Raises:
        ValueError: the spec's actions are discrete or unbounded; or `execute_from` is no run of
            POR, or one of other observations, actions, statistics, networks or activation.
    """

    name, metrics, stats = "por", METRICS, STATS
    fixed_length = True

    def __init__(
        self,
        config: PORConfig,
        data: Transitions,
        spec: EnvSpec,
        seeds: Sequence[int] = (0,),
        critic_optimizer: MakeOptimizer | None = None,
        goes_on: bool = False,
    ) -> None:
        self.config, self.spec, self.seeds = config, spec, tuple(seeds)
        self.device, self.normalizer = data.device, data.normalizer
        low, high = (x.to(self.device) for x in action_bounds(spec, self.name))
        self.middle, self.half_range = (high + low) / 2, (high - low) / 2
        start = [stream(seed, "weights") for seed in seeds]
        d, hidden = data.obs_size, config.hidden
        shape = (config.activation, start)
        self.value = StackedMLP(2, (d, *hidden, 1), *shape, layer_norm=config.layer_norm)
        self.value.to(self.device)
        self.guide = StackedNormal((d, *hidden, d), *shape).to(self.device)
        sizes = (2 * d, *config.execute_hidden, len(low))
        self.execute = StackedNormal(sizes, *shape).to(self.device)
        self.target = deepcopy(self.value).requires_grad_(False)
        self.noise = [stream(seed, "noise", self.device) for seed in seeds]
        slow = config.value_learning_rate
        optimizer = critic_optimizer or value_optimizer(config, self.value, len(seeds), slow)
        self.value_step = minibatch_step(config, self.value, self._value_objective, slow, optimizer)
        if config.execute_from:
            if not goes_on:
                self._take_execute(Path(config.execute_from))
            self.execute.requires_grad_(False)
        else:
            self.execute_step = minibatch_step(config, self.execute, self._likelihood)
        if config.variant == "residual":
            self.guide_step = minibatch_step(config, self.guide, self._residual_objective)
        else:
            self.behavior = StackedNormal((d, *hidden, d), *shape).to(self.device)
            self.behavior_step = minibatch_step(config, self.behavior, self._likelihood, slow)
            self.guide_step = minibatch_step(config, self.guide, self._value_gradient_objective)
        self._parts = [name for name in _PARTS if hasattr(self, name)]
        self._targets: list[Tensor] = [*self.target.parameters()]
        self._sources: list[Tensor] = [*self.value.parameters()]
        self.updates = 0
        self._of_behavior = torch.zeros(2, len(self.seeds), device=self.device)

    def update(self, batch: Batch) -> Tensor:
        """One step of V, its target, guide and execute policy; or one of the behaviour guide.

        Returns:
            Figures (K, S) named by `STATS`; those of the behaviour guide are of its last step.
        """
        obs, action, reward, next_obs, terminated = batch
        known = known_successors(obs, next_obs, terminated)
        if self.updates < self.config.behavior_steps:
            self._of_behavior = self.behavior_step(obs, next_obs, known)
            self.updates += 1
            rest = torch.zeros(len(STATS) - 2, len(self.seeds), device=self.device)
            return torch.cat([rest, self._of_behavior])
        self._anneal()
        with torch.no_grad():
            next_value = self.target(next_obs)[..., 0]
            y = value_target(reward, terminated, next_value, self.config.gamma)
        of_value = self.value_step(obs, y)
        with torch.no_grad():
            torch._foreach_lerp_(  # pyright: ignore
                self._targets, self._sources, self.config.polyak
            )
        if self.config.variant == "residual":
            with torch.no_grad():
                residual = y - self.value(obs)[..., 0].amin(1)
            of_guide = self.guide_step(obs, next_obs, residual, known)
        else:
            of_guide = self.guide_step(obs, normal(self.noise, *obs.shape[1:]))
        both, scaled = torch.cat([obs, next_obs], 2), (action - self.middle) / self.half_range
        if self.config.execute_from:
            with torch.no_grad():
                loss = -mean_of(self.execute.log_prob(both, scaled), known)
            of_execute = torch.stack([torch.zeros_like(loss), loss])
        else:
            of_execute = self.execute_step(both, scaled, known)
        self.updates += 1
        return torch.cat([of_value, of_guide, of_execute, self._of_behavior])

    def policy_section(self, seed: int) -> dict:
        """Policy of the seed at this place of the job, as `ctrl_rl.policy` reads it."""
        weights = {f"guide.{k}": v for k, v in self.guide.net.weights_of(seed).items()}
        weights |= {f"execute.{k}": v for k, v in self.execute.net.weights_of(seed).items()}
        last = f"execute.layers.{len(self.config.execute_hidden)}"  # in action units
        weights[f"{last}.weight"] *= self.half_range[:, None]
        weights[f"{last}.bias"] *= self.half_range
        weights[f"{last}.bias"] += self.middle
        return {
            "format": 1,
            "kind": "gaussian_guided",
            "spec": self.spec.to_json(),
            "group": "actor",
            "hidden": list(self.config.execute_hidden),
            "guide_hidden": list(self.config.hidden),
            "activation": self.config.activation,
            "normalizer": None if self.normalizer is None else self.normalizer.section(),
            "bound": "clip",
            "weights": weights,
            "log_std": (self.execute.std()[seed, 0].detach() * self.half_range).log(),
        }

    def state_dict(self) -> dict:
        """Everything that decides the future of training but what is drawn, as a copy."""
        return deepcopy(
            {
                **{name: getattr(self, name).state_dict() for name in self._parts},
                "updates": self.updates,
                "of_behavior": self._of_behavior,
                "noise": [generator.get_state() for generator in self.noise],
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in self._parts:
            getattr(self, name).load_state_dict(state[name])
        self.updates = state["updates"]
        self._of_behavior = state["of_behavior"].to(self.device)
        for generator, saved in zip(self.noise, state["noise"], strict=True):
            generator.set_state(saved)

    def _anneal(self) -> None:
        """Set the step sizes of guide and execute policy."""
        first = self.config.behavior_steps
        done = (self.updates - first) / (self.config.total_steps - first)
        rate = self.config.learning_rate / 2 * (1 + math.cos(math.pi * done))
        self.guide_step.learning_rate.fill_(rate)
        if not self.config.execute_from:
            self.execute_step.learning_rate.fill_(rate)

    @torch.no_grad()
    def _take_execute(self, folder: Path) -> None:
        """Copy the execute policies of a run: of each seed its own, where the run has it."""
        for place, seed in enumerate(self.seeds):
            own = folder / f"s{seed}"
            policy = load_policy(own if own.is_dir() else folder, "last")
            section, activation = policy.section(), self.config.activation
            if section["kind"] != "gaussian_guided":
                raise ValueError(f"execute_from {folder}: its policy has no execute policy")
            try:
                check_same_shape(policy.spec, self.spec, ["actor"])
            except ValueError as error:
                raise ValueError(f"execute_from {folder}: {error}") from None
            if section["activation"] != activation:
                raise ValueError(
                    f"execute_from {folder}: its activation is {section['activation']}, not "
                    f"{activation}; use --algo.activation {section['activation']}"
                )
            mine = None if self.normalizer is None else self.normalizer.section()
            if not _same_statistics(section["normalizer"], mine):
                raise ValueError(
                    f"execute_from {folder}: its observations are normalised by other statistics "
                    "than the data's; train both with observations as they are"
                )
            for i, layer in enumerate(self.execute.net.layers):
                weight, bias = (
                    section["weights"][f"execute.layers.{i}.{part}"].to(self.device)
                    for part in ("weight", "bias")
                )
                if i == len(self.config.execute_hidden):
                    weight = weight / self.half_range[:, None]
                    bias = (bias - self.middle) / self.half_range
                if weight.T.shape != layer.weight[place].shape:
                    raise ValueError(
                        f"execute_from {folder}: layer {i} of its execute policy is "
                        f"{tuple(weight.T.shape)}, not {tuple(layer.weight[place].shape)}"
                    )
                layer.weight[place] = weight.T
                layer.bias[place, 0] = bias
            log_std = section["log_std"].to(self.device) - self.half_range.log()
            self.execute.log_std[place, 0] = log_std

    def _value_objective(self, value, obs, y):
        """L_V of a minibatch and mean V."""
        v = value(obs)[..., 0]
        return value_loss(v, y, self.config.expectile), v.detach().mean((1, 2))[None]

    def _likelihood(self, module, x, y, known):
        """-mean log density of y given x; no other figure."""
        loss = -mean_of(module.log_prob(x, y), known)
        return loss, loss.detach()[None][:0]

    def _residual_objective(self, guide, obs, next_obs, residual, known):
        """L_g of a minibatch and the mean weight."""
        weight = residual_weight(residual, self.config.alpha)
        loss = residual_loss(weight, guide.log_prob(obs, next_obs), known)
        return loss, mean_of(weight, known)[None]

    def _value_gradient_objective(self, guide, obs, noise):
        """L_g of a minibatch and lambda."""
        drawn = guide(obs) + guide.std() * noise
        value = self.value(drawn)[..., 0].amin(1)
        weight = value_gradient_weight(value, self.config.alpha)
        loss = value_gradient_loss(weight, value, self.behavior.log_prob(obs, drawn))
        return loss, weight[None]


def _same_statistics(a: dict | None, b: dict | None) -> bool:
    """Whether two sections of normalisers do the same, but for rounding."""
    if a is None or b is None:
        return a is b
    return all(torch.allclose(a[key].cpu(), b[key].cpu(), rtol=1e-4) for key in ("mean", "var"))


_PARTS = (
    *("value", "target", "guide", "execute", "behavior"),
    *("value_step", "guide_step", "execute_step", "behavior_step"),
)


def train(
    config: PORConfig,
    data: Transitions,
    spec: EnvSpec,
    seeds: Sequence[int] = (0,),
    run: Run | None = None,
    evaluate: Evaluate | None = None,
    critic_optimizer: MakeOptimizer | None = None,
) -> Run:
    """Train on recorded transitions, or go on where `run` stopped; see `offline.training.fit`.

    A narrower execute policy than the source's is named in the log and among the warnings of the
    run's record.
    """
    goes_on = run is not None and run.goes_on
    learner = POR(config, data, spec, seeds, critic_optimizer, goes_on)
    if min(config.execute_hidden) < min(SOURCE_EXECUTE_HIDDEN) and not config.execute_from:
        widths = ("-".join(map(str, x)) for x in (config.execute_hidden, SOURCE_EXECUTE_HIDDEN))
        said = "the execute policy is {} wide, the source's {}".format(*widths)
        print(f"warning: {said}")
        data = copy(data)
        data.report = data.report | {"warnings": [*data.report.get("warnings", []), said]}
    return fit(learner, data, run, evaluate)
