"""AdamO: Adam for critics, with a correction towards orthogonal weights on a budget.

Paper: Qiao, Yue, Wang, Ren, "AdamO: A Collapse-Suppressed Optimizer for Offline RL", ICML 2026,
arXiv:2605.01968. We know its abstract, its section titles and the start of its project page, not
its algorithm. This is an implementation of its idea, not a reproduction.

Of the paper: the recurrence of the TD error under Adam and its divergence (`offline.collapse`
watches it); that a penalty in the loss contaminates Adam's moments, so that the correction is
decoupled and the moments see the task gradient alone; that a strict budget of alignment with the
task limits the correction. Our reading: the direction, every formula of the budget, all constants
and defaults.

    m, v   = Adam's moments of the task gradient g;  u = mhat / (sqrt(vhat) + eps)
    R(W)   = 1/4 ||G - c I||_F^2,  G = W'W or WW', whichever is smaller
    d      = -grad R = -W (W'W - c I)  or  -(WW' - c I) W
    D      = t d,  t = min(strength lr, 1 / (3 ||W||_2^2 + c))
    B      = budget min(lr max(<g, u>, 0), lr <mhat, u>)
    W     <- W - lr u + f D,  f in 0..1 by the mode:
        strict    f = min(1, B / (||g|| ||D||))                      whatever D's direction
        scale     f = min(1, B / <g, D>) if <g, D> > 0, else 1
        project   D loses its part along g if <g, D> > 0; then f = min(1, norm_cap lr ||u|| / ||D||)
        none      f = 1: no budget

lr <g, u> is what Adam's step gains on the minibatch's loss to first order, and lr <mhat, u> the
rate at which Adam's continuous-time energy dissipates. With f D the step still gains at least
(1 - budget) lr <g, u> whenever <g, u> >= 0; where momentum points uphill nothing harmful is added.
"Gain" is that of the semi-gradient, with the bootstrapped target held fixed: it says nothing about
the true value error. In collapse the growth of the weights is the way down that gradient, so that
correction and task conflict, and a budget can stop a part of the growth only. The defaults come
from a toy (`benchmarks/adamo.py`); without a budget values stayed smaller still there.

Two other optimisers have this name and are not meant: that of Rosseau, Müller, Nowé, "Preserving
Plasticity in Continual Learning via Dynamical Isometry" (arXiv:2606.09762) and that of Chen, Yuan,
Zhang, "Decoupled Orthogonal Dynamics" (arXiv:2602.05136).

Tensors: a matrix is each last two dimensions of a parameter, so that S networks of E members are
one parameter (S*E, in, out). N is the number of matrices in a parameter.

Reading order: `AdamOConfig` -> `parameter_groups` -> the formulas -> `AdamO` -> `make`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

MODES = ("scale", "strict", "project", "none")
SCOPES = ("global", "matrix")


@dataclass(frozen=True, kw_only=True)
class AdamOConfig:
    """The correction's settings; learning rate and Adam's own stand apart."""

    mode: str = "scale"
    """How the budget is kept: "scale", "strict", "project", or "none" for no budget."""
    scope: str = "global"
    """"global": one budget for all parameters of a network; "matrix": one for each matrix, which
    does not bound their sum where some matrix has <g, u> < 0."""
    strength: float = 100.0
    """Step of the correction before cap and budget, in learning rates [-]; 0 is Adam."""
    budget: float = 0.9
    """Share of Adam's first-order gain that the correction may undo, in 0..1 without 1 [-]."""
    gram_scale: float | str = "init"
    """c, the eigenvalue of G that is aimed at: "init" for each matrix's mean eigenvalue before the
    first step, "running" for that of now, or a number. 1 inflates a net that started smaller."""
    norm_cap: float = 0.5
    """Length of the correction in lengths of Adam's step, for mode "project" alone [-]."""
    head: bool = True
    """Correct the last layer also, which for one output is a control of its norm."""
    weight_decay: float = 0.0
    """Decoupled weight decay per learning rate (AdamW) of all parameters; not in the budget."""

    def __post_init__(self) -> None:
        scale = self.gram_scale
        named = scale in ("init", "running")
        checks = [
            ("mode", self.mode in MODES, f"one of {', '.join(MODES)}"),
            ("scope", self.scope in SCOPES, f"one of {', '.join(SCOPES)}"),
            ("strength", 0 <= self.strength < math.inf, "0 or more"),
            ("budget", 0 <= self.budget < 1, "at least 0 and below 1"),
            (
                "gram_scale",
                named or (not isinstance(scale, str) and 0 < scale < math.inf),
                "init, running or a positive number",
            ),
            ("norm_cap", 0 <= self.norm_cap < math.inf, "0 or more"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
        ]
        for name, good, wanted in checks:
            if not good:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}")


def parameter_groups(module: nn.Module, head: bool = True) -> list[dict]:
    """The parameters of a module as AdamO takes them: those that are matrices, and the others.

    Shapes do not tell: a stack of biases (E, 1, out) looks like E matrices of one row. A matrix is
    a parameter called `weight` of two dimensions or more, but not that of a normalisation layer,
    which has "norm" in its name or its class.

    Args:
        module: a network, or a stack of them. Several networks behind each other have a head each:
            call this for each and join the lists.
        head: whether the last of the matrices, in order of the parameters, is corrected also.

    Raises:
        ValueError: there is no matrix to correct.
    """
    matrices, others = {}, {}
    for path, parameter in module.named_parameters():
        owner, _, name = path.rpartition(".")
        is_norm = "norm" in f"{owner} {type(module.get_submodule(owner)).__name__}".lower()
        is_matrix = name == "weight" and parameter.ndim >= 2 and not is_norm
        (matrices if is_matrix else others)[path] = parameter
    if matrices and not head:
        last = [*matrices][-1]
        others[last] = matrices.pop(last)
    if not matrices:
        raise ValueError("AdamO found no parameter `weight` of two or more dimensions to correct")
    groups = [{"params": [*matrices.values()], "matrix": True}]
    return [*groups, {"params": [*others.values()], "matrix": False}] if others else groups


# Formulas -----------------------------------------------------------------------------------


def mean_eigenvalue(weight: Tensor) -> Tensor:
    """Mean eigenvalue (N,) of G for weights (N, a, b): ||W||_F^2 / min(a, b)."""
    return weight.square().sum((-2, -1)) / min(weight.shape[-2:])


def orthogonality(weight: Tensor, c: Tensor) -> Tensor:
    """R (N,) of weights (N, a, b): 1/4 ||G - c I||_F^2."""
    gram = _gram(weight)
    gram.diagonal(dim1=-2, dim2=-1).sub_(c[:, None])
    return 0.25 * gram.square().sum((-2, -1))


def wanted_correction(weight: Tensor, c: Tensor, limit: float | Tensor) -> Tensor:
    """D (N, a, b) of weights (N, a, b): the step down R that the budget has not seen yet.

    The largest eigenvalue of G is bounded from above by its Frobenius and by its row-sum norm,
    without an eigenvalue problem. One is close where few singular values dominate, as in collapse,
    the other near orthogonality. Where G overflows, D is zero.

    Args:
        weight: (N, a, b)
        c: (N,)
        limit: strength times learning rate.
    """
    gram = _gram(weight)
    frobenius = torch.linalg.vector_norm(gram, dim=(-2, -1))
    rows = torch.linalg.vector_norm(gram, ord=1, dim=-1).amax(-1)
    step = (1 / (3 * torch.minimum(frobenius, rows) + c)).clamp(max=limit)
    gram.diagonal(dim1=-2, dim2=-1).sub_(c[:, None])
    excess = torch.where(step[:, None, None] > 0, gram.mul_(-step[:, None, None]), 0.0)
    return weight @ excess if weight.shape[-2] >= weight.shape[-1] else excess @ weight


def _gram(weight: Tensor) -> Tensor:
    """G (N, k, k), k the smaller side."""
    tall = weight.shape[-2] >= weight.shape[-1]
    return weight.mT @ weight if tall else weight @ weight.mT


def affordable(budget: Tensor, harm: Tensor) -> Tensor:
    """f: the share of a correction that costs `harm` and may cost `budget`, elementwise.

    1 where there is no harm, and 0 where one of them is not a number, as with such a gradient.
    """
    share = torch.where(harm > 0, budget / harm, 1.0).clamp(max=1.0)
    return torch.where(share.isfinite() & harm.isfinite(), share, 0.0)


# The optimiser ------------------------------------------------------------------------------


class AdamO(torch.optim.Optimizer):
    """See the module. Everything runs as batched products, without a loop over networks.

    State is that of `torch.optim.Adam` per parameter, and for `gram_scale` "init" also `c` (N,);
    settings other than learning rate, betas, eps and decay are the caller's and not in it.

    Args:
        params: parameter groups; those with `matrix=True` are corrected, see `parameter_groups`.
        lr: learning rate, a float or a scalar tensor.
        betas: decay of both moments.
        eps: Adam's epsilon.
        config: the correction.
        replicas: S, independent networks that every parameter holds in equal parts of its first
            dimension. Each has a budget of its own, so that none depends on another.
        fused: torch's fused kernel for Adam's part.

    Raises:
        ValueError: no group has `matrix=True`; a parameter is not float32 or float64, has too few
            dimensions to be a matrix, or cannot be split into S.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 3e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        config: AdamOConfig | None = None,
        replicas: int = 1,
        fused: bool = False,
    ) -> None:
        self.config, self.replicas = config or AdamOConfig(), replicas
        if not lr > 0 or not eps > 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"lr {lr} and eps {eps} must be positive, betas {betas} in 0..1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "fused": fused, "matrix": False}
        super().__init__(params, defaults | {"weight_decay": self.config.weight_decay})
        if not any(group["matrix"] for group in self.param_groups):
            raise ValueError("no group has matrix=True: use offline.adamo.parameter_groups(module)")
        self.applied: Tensor | None = None
        """f of the last step: (S,), or with scope "matrix" (N,) over all matrices."""

    def add_param_group(self, param_group: dict) -> None:
        """As torch's, after a look at the parameters."""
        super().add_param_group(param_group)
        group, s = self.param_groups[-1], self.replicas
        for p in group["params"]:
            if p.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"AdamO needs float32 or float64 weights, not {p.dtype}")
            if group["matrix"] and p.ndim < 2 + (s > 1):
                need = "(replicas * members, in, out)" if s > 1 else "two dimensions"
                raise ValueError(f"a matrix needs {need}, not shape {tuple(p.shape)}")
            if s > 1 and (p.ndim == 0 or p.shape[0] % s):
                raise ValueError(f"shape {tuple(p.shape)} cannot be split into {s} replicas")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Adam's step, and the correction that the budget allows.

        A network whose gradient is not finite gets no correction within a budget, and Adam's step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        live = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        matrices = [(p, g) for p, g in live if g["matrix"] and self.config.strength > 0]
        wanted = [self._wanted(p, g) for p, g in matrices]  # from the weights before Adam's step
        self._adam_step()
        if not matrices:
            return loss
        if self.config.scope == "global":
            parameters = [p for p, _ in matrices]
            self.applied = self._share(parameters, wanted, live, self.replicas)
            shares = [self.applied] * len(matrices)
        else:
            pairs = zip(matrices, wanted, strict=True)
            shares = [self._share([p], [d], [(p, group)], len(d)) for (p, group), d in pairs]
            self.applied = torch.cat(shares)
        for (p, _), d, share in zip(matrices, wanted, shares, strict=True):
            f = share[:, None].expand(-1, len(d) // len(share)).reshape(-1, 1, 1)
            p.view(d.shape).addcmul_(d, f)
        return loss

    def _wanted(self, p: Tensor, group: dict) -> Tensor:
        """D (N, a, b) of a matrix parameter."""
        weight = p.reshape(-1, *p.shape[-2:])
        if self.config.gram_scale == "init":
            if "c" not in self.state[p]:
                self.state[p]["c"] = mean_eigenvalue(weight)
            c = self.state[p]["c"]
        elif self.config.gram_scale == "running":
            c = mean_eigenvalue(weight)
        else:
            c = torch.full_like(weight[:, 0, 0], float(self.config.gram_scale))
        return wanted_correction(weight, c, self.config.strength * group["lr"])

    def _adam_step(self) -> None:
        """torch's own, so that without a correction the bits are Adam's."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "step" not in self.state[p]:
                    at = p.device if group["fused"] else "cpu"
                    self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=at)
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            states = [self.state[p] for p in params]
            adam(
                params,
                [p.grad for p in params],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                [s["step"] for s in states],
                fused=group["fused"] or None,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=True,
            )

    def _share(
        self, matrices: list[Tensor], wanted: list[Tensor], counted: list, parts: int
    ) -> Tensor:
        """f (parts,): how much of the wanted corrections a budget allows.

        Args:
            matrices: parameters that share the budget.
            wanted: D of each; mode "project" changes it in place.
            counted: parameters and their groups whose gain is spent.
            parts: budgets side by side, each over an equal part of every parameter.
        """
        mode = self.config.mode
        if mode == "none":
            return torch.ones(parts, dtype=wanted[0].dtype, device=wanted[0].device)
        gradients = [p.grad for p in matrices if p.grad is not None]
        conflict = _dot(gradients, wanted, parts)
        if mode == "project":
            squared = _dot(gradients, gradients, parts)
            known = squared.isfinite()
            along = torch.where(known & (conflict > 0), conflict / squared, 0.0)
            for g, d in zip(gradients, wanted, strict=True):
                d.view(parts, -1).sub_(along[:, None] * g.reshape(parts, -1))
            lengths = []
            for p, group in counted:
                u, rate, _ = self._direction(p, group)
                lengths.append(rate**2 * _dot([u], [u], parts))
            length = torch.stack(lengths).sum(0).sqrt()
            share = affordable(self.config.norm_cap * length, _dot(wanted, wanted, parts).sqrt())
            return torch.where(known, share, 0.0)
        gain, dissipation = [], []
        for p, group in counted:
            u, rate, momentum = self._direction(p, group)
            gain.append(rate * _dot([p.grad], [u], parts))
            dissipation.append(rate * momentum * _dot([self.state[p]["exp_avg"]], [u], parts))
        smaller = torch.minimum(torch.stack(gain).sum(0), torch.stack(dissipation).sum(0))
        budget = self.config.budget * smaller.clamp(min=0)
        if mode == "scale":
            return affordable(budget, conflict)
        lengths = [_dot(x, x, parts).sqrt() for x in (gradients, wanted)]
        return affordable(budget, lengths[0] * lengths[1])

    def _direction(self, p: Tensor, group: dict) -> tuple[Tensor, Tensor, Tensor]:
        """u of the step just made, but for a factor: (u / factor, lr factor, factor).

        The factor 1 / (1 - beta1^step) of mhat is left out of the large tensors.
        """
        state, (beta1, beta2) = self.state[p], group["betas"]
        step = state["step"].double()  # float32 would leave the budget seven digits
        factor = 1 / (1 - beta1**step)
        scale = state["exp_avg_sq"].sqrt().mul_((1 - beta2**step).rsqrt()).add_(group["eps"])
        return torch.div(state["exp_avg"], scale, out=scale), group["lr"] * factor, factor


def _dot(left: Sequence[Tensor], right: Sequence[Tensor], parts: int) -> Tensor:
    """Inner products (parts,) of two lists of tensors, each split into equal parts."""
    pairs = zip(left, right, strict=True)
    dots = [a.reshape(parts, 1, -1) @ b.reshape(parts, -1, 1) for a, b in pairs]
    return torch.stack(dots).sum(0)[:, 0, 0]


def make(module: nn.Module, learning_rate: float, config: AdamOConfig, replicas: int = 1) -> AdamO:
    """AdamO for a critic of `replicas` independent networks (see `parameter_groups`)."""
    groups = parameter_groups(module, config.head)
    return AdamO(groups, learning_rate, config=config, replicas=replicas)
