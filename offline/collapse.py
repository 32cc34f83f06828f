"""A monitor that says when a critic's temporal differences feed themselves, and why.

A critic that bootstraps from actions outside its data can run away: its own target grows with it.
Near a fixed set of transitions the TD error e under Adam follows (Qiao et al., "AdamO",
arXiv:2605.01968, section 4; the same matrix in Yue et al., "Understanding, predicting and better
resolving Q-value divergence in offline RL", NeurIPS 2023, arXiv:2310.04411)

    e <- e + lr S ebar,      S = gamma K(X', X) - K(X, X),      K(X1, X2) = Z(X1)' P Z(X2)

Z: gradients of Q by its parameters at each input, P: Adam's diagonal 1 / (sqrt(vhat) + eps), X' the
successors with the actions that are bootstrapped from, ebar the error averaged by Adam's momentum.
Where an eigenvalue of S has a positive real part, the error grows at a small learning rate; at
a finite one it grows where the companion matrix of an eigenvalue and momentum has a spectral radius
above 1 (`spectral_radius`, derived here from that recurrence).

Ours: rows of terminated transitions have no K(X', X); S is divided by the size of the batch and
multiplied by the curvature of the loss, as its mean's gradient is; and what is made of the figures,
see `CollapseMonitor`. Target networks that lag are not in the recurrence: they slow a runaway down.

Tensors: N networks side by side, inputs (B, d) or for S seeds (S, B, d).

Reading order: `METRICS` -> `legal_bound` -> `spectral_radius` -> kernels -> `CollapseMonitor` ->
`Watch`.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from ctrl_rl.compiled import BETA1, Diverged
from offline.transitions import Transitions

METRICS: dict[str, str] = {
    "collapse/q_max": "largest |Q| on the probe batch, of its own and of the next actions [reward]",
    "collapse/q_share": "the same over the largest size that the data's rewards allow",
    "collapse/growth": "relative growth of q_max per update since the last check",
    "collapse/eigenvalue": "largest real part of S's eigenvalues, under Adam's diagonal [1/lr]",
    "collapse/eigenvalue_normalized": "the same without Adam's diagonal, over S's Frobenius norm",
    "collapse/radius": "spectral radius of the companion matrix: above 1 the error grows",
}
"""Every figure of a check, each the worst of a seed's networks."""

WATCH_EVERY = 1_000
"""Updates between the checks of a run."""

PROBE_SIZE = 64
"""Transitions that a run's critics are looked at on: of these S has its eigenvalues."""

QFunction = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]
"""`q_function(params, obs, action) -> Q`: (B,) of one network, or (..., B) of N side by side, whose
parameters all hold the networks in equal parts of their first dimension."""


class Probe(NamedTuple):
    """The transitions on which a critic is looked at; with S seeds every shape begins with S."""

    obs: Tensor
    """(B, d)"""
    action: Tensor
    """(B, A)"""
    next_obs: Tensor
    """(B, d)"""
    next_action: Tensor
    """(B, A) that the critic's target bootstraps from now."""
    discount: Tensor
    """(B,) gamma, and 0 where the transition terminated."""


def legal_bound(reward: Tensor, terminated: Tensor, gamma: float) -> float:
    """The largest |Q| that some policy could have with rewards as in the data.

    The bound Q solves Q = max(r_end, r_on + gamma Q), with r_end the largest |reward| of a step
    that terminates and r_on that of one that does not.

    Args:
        reward: (n,)
        terminated: (n,)
        gamma: discount per step, below 1.

    Raises:
        ValueError: no transitions, a reward that is not finite, or gamma outside 0..1 without 1.
    """
    if not 0 <= gamma < 1:
        raise ValueError(f"values have a bound for a discount in 0..1 without 1, not {gamma}")
    if not len(reward) or not bool(reward.isfinite().all()):
        raise ValueError("values have a bound for finite rewards, of one transition or more")
    size, ends = reward.abs(), terminated.bool()
    goes_on, stops = (float(x.max()) if len(x) else 0.0 for x in (size[~ends], size[ends]))
    return max(goes_on / (1 - gamma), stops)


def spectral_radius(eigenvalue: Tensor, learning_rate: float, beta1: float = BETA1) -> Tensor:
    """Largest |mu| with mu^2 - (1 + beta1 + lr (1 - beta1) sigma) mu + beta1 = 0, elementwise.

    This is the characteristic polynomial of [[1 + lr (1 - beta1) sigma, lr beta1 sigma],
    [1 - beta1, beta1]], the step of (e, ebar) along an eigenvector of S. A real negative sigma is
    stable up to lr |sigma| = 2 (1 + beta1) / (1 - beta1).
    """
    sigma = eigenvalue.to(torch.complex128)
    half = (1 + beta1 + learning_rate * (1 - beta1) * sigma) / 2
    root = (half.square() - beta1).sqrt()
    return torch.maximum((half + root).abs(), (half - root).abs())


# Kernels ------------------------------------------------------------------------------------


def features(q_function: QFunction, params: Mapping[str, Tensor], obs, action) -> list[Tensor]:
    """Gradient of Q at each input, a tensor (B, *shape) for each parameter.

    Networks side by side do not touch each other: the gradient of their sum is each one's own.
    """

    def q_of_one(params, obs, action):
        return q_function(params, obs.unsqueeze(-2), action.unsqueeze(-2)).sum()

    at_each = vmap(grad(q_of_one), in_dims=(None, obs.ndim - 2, action.ndim - 2))
    return [*at_each(dict(params), obs, action).values()]


def kernel(left: list[Tensor], right: list[Tensor], diagonal: list[Tensor], n: int) -> Tensor:
    """K (N, B, B) of two lists of features and P, each (*shape) of its parameter."""
    total: Tensor | float = 0.0
    for z, other, p in zip(left, right, diagonal, strict=True):
        z = (z * p).reshape(len(z), n, -1).transpose(0, 1)
        total = total + z @ other.reshape(len(other), n, -1).permute(1, 2, 0)
    assert isinstance(total, Tensor)
    return total


def preconditioner(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """P of each parameter after Adam's last step; None before the first.

    Args:
        optimizer: Adam, AdamO or another with their state: over these parameters, or over one
            vector of all of them as `ctrl_rl.compiled.MinibatchStep` has.
        params: by name, in the order of that vector.

    Raises:
        ValueError: the optimiser keeps no second moment of these parameters.
    """
    found = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p)
            if not state or not float(state.get("step", 0)):
                return None
            if "exp_avg_sq" not in state:
                raise ValueError(f"{type(optimizer).__name__} keeps no second moment to look at")
            corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
            found[p.data_ptr()] = 1 / (corrected.sqrt() + group["eps"])
    sizes = [p.numel() for p in params.values()]
    if len(found) == 1 and len(sizes) > 1:
        (flat,) = found.values()
        parts = flat.split(sizes) if flat.numel() == sum(sizes) else ()
        if len(parts) == len(sizes):
            pairs = zip(params.items(), parts, strict=True)
            return {name: part.view(p.shape) for (name, p), part in pairs}
    missing = [name for name, p in params.items() if p.data_ptr() not in found]
    if missing:
        raise ValueError(f"the optimizer does not hold the critic's {', '.join(missing)}")
    return {name: found[p.data_ptr()].view(p.shape) for name, p in params.items()}


# The monitor --------------------------------------------------------------------------------


class CollapseMonitor:
    """Looks at a critic every so often; warns when it runs away, and can stop the run.

    A seed is called collapsing for one of two reasons:

    - its largest |Q| is no number, or larger than any policy could earn;
    - at `patience` checks in succession S had an eigenvalue with a positive real part while |Q|
      grew, and at the rate of the last of them |Q| leaves its bound within `horizon` updates.

    The radius alone is no sign of it: steps that overshoot, lr |sigma| > 38, put it above 1 too, as
    they do where Adam has converged. Each seed is warned about once per reason. Values that a
    pessimistic critic pushes below anything that the data holds count as a runaway too: raise
    `bound` for such a learner.

    Args:
        bound: largest |Q| that is possible; see `legal_bound`.
        learning_rate: the critic's.
        seeds: how the S seeds are called, for messages.
        stop: raise Diverged where only a warning would be given.
        curvature: second derivative of the loss by Q: 2 for mean (Q - y)^2, 1 for half of it.
        beta1: decay of Adam's first moment.
        patience: checks in succession.
        horizon: [updates].

    Raises:
        ValueError: a bound that is not positive and finite.
    """

    def __init__(
        self,
        bound: float,
        learning_rate: float,
        seeds: tuple[int, ...] = (0,),
        stop: bool = False,
        curvature: float = 2.0,
        beta1: float = BETA1,
        patience: int = 3,
        horizon: int = 100_000,
    ) -> None:
        if not 0 < bound < math.inf:
            raise ValueError(f"the largest possible |Q| must be positive and finite, not {bound}")
        self.bound, self.learning_rate, self.seeds, self.stop = bound, learning_rate, seeds, stop
        self.curvature, self.beta1 = curvature, beta1
        self.patience, self.horizon = patience, horizon
        self._last: list[tuple[int, float] | None] = [None] * len(seeds)
        self._unstable = [0] * len(seeds)
        self._warned: set[tuple[int, str]] = set()

    def check(
        self,
        step: int,
        q_function: QFunction,
        params: Mapping[str, Tensor],
        batch: Probe,
        diagonal: Mapping[str, Tensor] | None = None,
    ) -> dict[str, list[float]]:
        """Figures of the critic as it is, one for each seed.

        Args:
            step: updates made so far.
            q_function: see `QFunction`.
            params: the critic's parameters.
            batch: the same transitions at each check, with the next actions of now.
            diagonal: P by parameter, see `preconditioner`; None for the identity.

        Returns:
            Key of `METRICS` -> S figures; without `growth` at the first check, and without
            eigenvalues where |Q| or a gradient is no number.

        Raises:
            Diverged: with `stop`, a seed collapses; the message says which and why.
            ValueError: parameters cannot be split into the networks that `q_function` shows.
        """
        params = {name: p.detach() for name, p in params.items()}
        s = len(self.seeds)
        with torch.no_grad():
            q = q_function(params, batch.obs, batch.action)
            next_q = q_function(params, batch.next_obs, batch.next_action)
        n = q.shape[:-1].numel()
        if n % s or any(p.ndim == 0 or (p.shape[0] % n and n > 1) for p in params.values()):
            raise ValueError(f"{s} seeds and these parameters cannot be {n} networks side by side")
        worst = lambda x: x.double().view(s, -1).amax(1).tolist()  # noqa: E731
        # No target holds the value of a state that an episode ended in.
        asked = self._spread(batch.discount, n).view(next_q.shape) > 0
        next_size = next_q.abs().where(asked, 0.0).amax(-1)
        q_max = worst(torch.maximum(q.abs().amax(-1), next_size))
        figures = {
            "collapse/q_max": q_max,
            "collapse/q_share": [value / self.bound for value in q_max],
        }
        if None not in self._last:
            figures["collapse/growth"] = [
                math.log(now / before) / (step - at) if now > 0 < before and step > at else 0.0
                for now, (at, before) in zip(q_max, self._last, strict=True)  # pyright: ignore
            ]
        figures |= self._spectrum(q_function, params, batch, diagonal, n, worst)
        self._judge(step, figures)
        self._last = [(step, value) for value in q_max]
        return figures

    def state_dict(self) -> dict:
        """What later checks depend on."""
        return {"last": self._last, "unstable": self._unstable, "warned": sorted(self._warned)}

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state_dict` was taken."""
        self._last, self._unstable = [*state["last"]], [*state["unstable"]]
        self._warned = {tuple(x) for x in state["warned"]}

    @staticmethod
    def _spread(discount: Tensor, n: int) -> Tensor:
        """Discounts (n, B) of all n networks, from those of the seeds that they belong to."""
        lead = discount.shape[:-1].numel()
        return discount.reshape(lead, 1, -1).expand(-1, n // lead, -1).reshape(n, -1)

    def _spectrum(self, q_function, params, batch, diagonal, n, worst) -> dict[str, list[float]]:
        """Eigenvalues of S with and without Adam's diagonal, and the radius."""
        z = features(q_function, params, batch.obs, batch.action)
        next_z = features(q_function, params, batch.next_obs, batch.next_action)
        ones = [torch.ones_like(p) for p in params.values()]
        chosen = ones if diagonal is None else [diagonal[name] for name in params]
        discount = self._spread(batch.discount, n)[..., None]
        figures = {}
        for p in (chosen, ones):
            s = discount * kernel(next_z, z, p, n) - kernel(z, z, p, n)
            s = s.double() * (self.curvature / s.shape[-1])
            if not bool(s.isfinite().all()):
                return {}
            eigenvalues = torch.linalg.eigvals(s)
            largest = eigenvalues.real.amax(-1)
            if p is chosen:
                figures["collapse/eigenvalue"] = worst(largest)
                radius = spectral_radius(eigenvalues, self.learning_rate, self.beta1)
                figures["collapse/radius"] = worst(radius.amax(-1))
            if p is ones:
                size = torch.linalg.matrix_norm(s).clamp(min=1e-300)
                figures["collapse/eigenvalue_normalized"] = worst(largest / size)
        return figures

    def _judge(self, step: int, figures: dict[str, list[float]]) -> None:
        """Warn or raise for every seed that collapses."""
        for i, seed in enumerate(self.seeds):
            q = figures["collapse/q_max"][i]
            growth = figures["collapse/growth"][i] if "collapse/growth" in figures else 0.0
            eigenvalue = figures.get("collapse/eigenvalue", [math.inf] * (i + 1))[i]
            feeds_itself = eigenvalue > 0 and growth > 0
            self._unstable[i] = self._unstable[i] + 1 if feeds_itself else 0
            if not q <= self.bound:
                text = f"the largest |Q| on the probe batch is {q:.4g}, and no policy can earn more"
                self._say(step, seed, "bound", f"{text} than {self.bound:.4g}")
            elif self._unstable[i] >= self.patience:
                if math.log(self.bound / q) / growth < self.horizon:
                    self._say(
                        step,
                        seed,
                        "growth",
                        f"TD errors feed themselves (eigenvalue {eigenvalue:.3g}) at "
                        f"{self._unstable[i]} checks in succession, and |Q| {q:.4g} grows towards "
                        f"its bound {self.bound:.4g}",
                    )

    def _say(self, step: int, seed: int, reason: str, text: str) -> None:
        text = f"the critic of seed {seed} is collapsing at update {step}: {text}"
        if self.stop:
            raise Diverged(f"{text}; try offline.adamo, layer normalisation or a smaller discount")
        if (seed, reason) not in self._warned:
            self._warned.add((seed, reason))
            warnings.warn(text, RuntimeWarning, stacklevel=4)


class Watch:
    """The monitor of a run: fixed transitions of its data, looked at whenever a check is due.

    A check is due once a multiple of `WATCH_EVERY` updates is reached or passed since the last one,
    and at the end of the run.

    Args:
        learner: what learns. It is watched if its config's `monitor` is "warn" or "stop"; then it
            has `critic(obs, action) -> (S, E, B)`, `critic_step`, `next_action(next_obs)
            -> (S, B, A)`, and learning rate and discount in its config. Where its targets add
            something to the values that they bootstrap from, `extra_reward()` is the largest size
            of it now [reward]; the largest so far raises the bound by gamma / (1 - gamma) of it.
        data: what it learns from.

    Raises:
        ValueError: with these rewards and this discount, values have no bound.
    """

    def __init__(self, learner: Any, data: Transitions) -> None:
        self._learner, mode = learner, getattr(learner.config, "monitor", "off")
        self._monitor: CollapseMonitor | None = None
        self._checked = 0
        if mode == "off":
            return
        config, size = learner.config, len(learner.seeds)
        reward, terminated = data.rows[:, -2:][data.index].unbind(1)
        self._allowed, self._extra = legal_bound(reward, terminated, config.gamma), 0.0
        stop = mode == "stop"
        self._monitor = CollapseMonitor(self._bound(), config.learning_rate, learner.seeds, stop)
        chosen = torch.linspace(0, len(data) - 1, min(PROBE_SIZE, len(data))).long()
        self._batch = data.batch(data.index[chosen.to(data.device)].expand(size, -1))

    def widen(self, reward: Tensor, terminated: Tensor) -> None:
        """Raise the bound to what rewards (n,) of other transitions, as learned from, allow."""
        if self._monitor is not None and len(reward):
            bound = legal_bound(reward, terminated, self._learner.config.gamma)
            self._allowed = max(self._allowed, bound)

    def check(self, step: int, at_end: bool = False) -> list[dict[str, float]]:
        """Figures of each seed, empty where none are due; see `CollapseMonitor.check`.

        Args:
            step: updates made so far.
            at_end: no more will be made.
        """
        learner, seeds = self._learner, len(self._learner.seeds)
        passed = step // WATCH_EVERY > self._checked // WATCH_EVERY
        if self._monitor is None or not (passed or (at_end and step > self._checked)):
            return [{} for _ in range(seeds)]
        self._checked, self._monitor.bound = step, self._bound()
        batch, critic = self._batch, learner.critic
        params = dict(critic.named_parameters())
        with torch.no_grad():
            probe = Probe(
                batch.obs,
                batch.action,
                batch.next_obs,
                learner.next_action(batch.next_obs),
                learner.config.gamma * (1 - batch.terminated),
            )
        found = self._monitor.check(
            step,
            lambda params, obs, action: functional_call(critic, params, (obs, action)),
            params,
            probe,
            preconditioner(learner.critic_step.optimizer, params),
        )
        return [{key: values[i] for key, values in found.items()} for i in range(seeds)]

    def state_dict(self) -> dict | None:
        """What later checks depend on."""
        if self._monitor is None:
            return None
        own = {"checked": self._checked, "extra": self._extra}
        return {"monitor": self._monitor.state_dict(), **own}

    def load_state_dict(self, state: dict | None) -> None:
        """Continue where `state_dict` was taken."""
        if self._monitor is not None and state is not None:
            self._monitor.load_state_dict(state["monitor"])
            self._checked, self._extra = state["checked"], state["extra"]

    def _bound(self) -> float:
        """The largest |Q| that rewards and what targets add to them allow."""
        if hasattr(self._learner, "extra_reward"):
            self._extra = max(self._extra, self._learner.extra_reward())
        gamma = self._learner.config.gamma
        return self._allowed + gamma / (1 - gamma) * self._extra
