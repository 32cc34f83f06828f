"""One optimiser step on a minibatch: flat gradient -> finite check -> clip and Adam.

Eager, or as one compiled graph, in which a loss or gradient that is not finite changes nothing.
Both modes keep weights and Adam's moments in one flat vector each and the latter in
`torch.optim.Adam`'s format, so that each reads the other's checkpoints. Their bits differ: a run
stays with its mode.

In a group of processes each computes the gradient of the rows it holds of the minibatch; the mean
over all rows is what is checked, clipped and applied, on all ranks alike. There compilation makes
two graphs, one before the exchange and one after it.

The optimiser is Adam (Kingma and Ba, ICLR 2015, arXiv:1412.6980, algorithm 1), or any
`torch.optim.Optimizer`: then the gradient alone may be a compiled graph, and the step is the
optimiser's own.

Reading order: `Objective` -> `MinibatchStep` -> `pays` -> the compiler's cache.
"""

import os
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from ctrl_rl import distributed

BETA1, BETA2 = 0.9, 0.999  # Adam

Objective = Callable[..., tuple[Tensor, Tensor]]
"""`objective(module, *batch) -> (loss (), stats (K,))`, a pure function of its tensors.

Loss and stats are means over the batch's rows. A module of S independent networks side by side,
whose parameters all have a first dimension that S divides, gives loss (S,) and stats (K, S)."""

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""`make_optimizer(parameters) -> optimizer`."""

Adapt = Callable[[Tensor, Tensor], Tensor]
"""`adapt(learning_rate (), stats (K,)) -> learning_rate ()`, before each step."""


class Diverged(FloatingPointError):
    """A loss or gradient is not a finite number, or a critic's values are beyond all rewards."""


def diverged(step: int, reason: object, unit: str = "step") -> Diverged:
    """What stops a run, in one line: when and why.

    Args:
        step: at the row that is logged next.
        reason: figure and value.
        unit: what is counted.
    """
    return Diverged(
        f"training diverged before {unit} {step:,}: {reason}; the last checkpoint is kept. "
        "A smaller learning rate or rewards of smaller size may help"
    )


class MinibatchStep:
    """Owns the weights of a module as one flat vector, and Adam over it.

    The parameters become views of the vector, so that clipping and Adam are one operation each
    whatever the number of layers.

    Args:
        module: the networks to train, on their device.
        objective: see `Objective`; it may call any method of the module.
        learning_rate: initial step size.
        max_grad_norm: a longer gradient is scaled down to this Euclidean norm; apart for each
            child of the module, so that a critic's large gradient does not drown the actor's. None
            leaves gradients as they are.
        adapt: see `Adapt`; None for a fixed learning rate.
        compiled: use the compiled graphs; batches must then keep their shapes.
        epsilon: Adam's; the default as in OpenAI baselines' PPO.
        check_each: look at loss and gradient before each step. False spares the wait for the
            device; the caller then gives `check` the mean of what many steps returned.
        optimizer: see `MakeOptimizer`; it gets the module's parameters with their shapes. None for
            Adam. With one, `learning_rate` and `epsilon` have no effect.

    Raises:
        ValueError: `adapt` is given with an optimiser of its own.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        learning_rate: float,
        max_grad_norm: float | None,
        adapt: Adapt | None = None,
        compiled: bool = False,
        epsilon: float = 1e-5,
        check_each: bool = True,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        if adapt is not None and optimizer is not None:
            raise ValueError("adapt changes the learning rate of Adam, not of another optimizer")
        self.max_grad_norm, self.adapt, self.compiled = max_grad_norm, adapt, compiled
        self.epsilon, self.check_each = epsilon, check_each
        self._bound = _Bound(module, objective)
        self._names = tuple(name for name, _ in self._bound.named_parameters())
        self._parameters = tuple(self._bound.parameters())
        self._shapes = tuple(p.shape for p in self._parameters)
        children = [name.split(".")[1] for name in self._names]  # a parameter of its own is one too
        self._child_sizes = [
            sum(s.numel() for s, c in zip(self._shapes, children, strict=True) if c == child)
            for child in dict.fromkeys(children)
        ]
        self._flat = _flatten(self._parameters)
        self._graphs: tuple[Callable, ...] | None = None
        device = self._flat.device
        self._foreign = optimizer is not None
        if optimizer is not None:
            self.optimizer = optimizer([*self._parameters])
            return
        self.optimizer = torch.optim.Adam(
            [self._flat],
            lr=torch.tensor(learning_rate, device=device),
            betas=(BETA1, BETA2),
            eps=epsilon,
            fused=True,
        )
        self.optimizer.state[self._flat] = {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(self._flat, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(self._flat, requires_grad=False),
        }

    @property
    def learning_rate(self) -> Tensor:
        """Step size of the next step before `adapt`, a scalar tensor."""
        return self.optimizer.param_groups[0]["lr"]

    def __call__(self, *batch: Tensor) -> Tensor:
        """Take one step on a batch, or in a group of processes on this one's rows of it.

        Returns:
            The objective's stats, then the gradient's norm before clipping and the loss (K + 2,),
            or for S networks (K + 2, S).

        Raises:
            Diverged: loss or gradient is not finite; nothing was changed. Not with `check_each`
                False.
        """
        rows = len(batch[0])  # in a group of processes there may be none
        if self.compiled and self._graphs is None:
            self._compile(batch)
        if self._graphs is None or not self.compiled:
            gradient, stats = self._of_all_ranks(*self._gradient(*batch), rows)
            if self.check_each:
                self.check(stats)
            self._eager_step(gradient, stats)
            return stats
        if len(self._graphs) == 1:
            with torch.no_grad():
                stats = self._graphs[0](*self._adam_state(), *batch)
            if self.check_each:
                self.check(stats)
            return stats
        compiled_adam = self._graphs[1]
        gradient, stats = self._compiled_gradient(self._graphs[0], batch)
        with torch.no_grad():
            gradient, stats = self._of_all_ranks(gradient, stats, rows)
            if self.check_each:
                self.check(stats)
            if self._foreign:
                self._eager_step(gradient, stats)
            else:
                compiled_adam(*self._adam_state(), gradient, stats)
        return stats

    def state_dict(self) -> dict:
        """The optimiser's state and the mode; the weights are the module's."""
        return {"optimizer": self.optimizer.state_dict(), "compiled": self.compiled}

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state_dict` was taken, in the mode it was taken in."""
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))
        if not self._foreign:
            group = self.optimizer.param_groups[0]
            group["lr"] = group["lr"].to(self._flat.device)
        self.compiled = state["compiled"]

    # Eager ------------------------------------------------------------------------------------

    def _gradient(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        loss, stats = self._bound(*batch)
        gradient = torch.autograd.grad(loss.sum(), self._parameters)
        with torch.no_grad():
            return self._with_norm(gradient, loss, stats)

    @torch.no_grad()
    def _eager_step(self, gradient: Tensor, stats: Tensor) -> None:
        if self.adapt is not None:
            self.learning_rate.copy_(self.adapt(self.learning_rate, stats))
        gradient = self._clip(gradient)
        if self._foreign:
            parts = gradient.split([shape.numel() for shape in self._shapes])
            for p, part in zip(self._parameters, parts, strict=True):
                p.grad = part.view(p.shape)
        else:
            self._flat.grad = gradient
        self.optimizer.step()

    # Compiled ---------------------------------------------------------------------------------

    def _functional_gradient(self, flat: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """`_gradient` as a function of the flat weights.

        The derivative is taken with respect to the separate tensors: that of views of one vector
        would fill a zero vector of full size for each.
        """
        parts = flat.split([shape.numel() for shape in self._shapes])
        weights = tuple(p.view(shape) for p, shape in zip(parts, self._shapes, strict=True))

        def loss(weights):
            named = dict(zip(self._names, weights, strict=True))
            value, stats = functional_call(self._bound, named, batch)
            return value.sum(), (value, stats)

        gradient, (_, (value, stats)) = grad_and_value(loss, has_aux=True)(weights)
        return self._with_norm(gradient, value, stats)

    def _functional_adam(
        self, flat, exp_avg, exp_avg_sq, step, learning_rate, gradient, stats
    ) -> None:
        """Writes in place to all but the last two, and the same as before if they are not finite.

        In the one graph `check` sees the stats only afterwards.
        """
        good = stats[-2:].isfinite().all()
        if self.adapt is not None:
            adapted = self.adapt(learning_rate, stats)
            learning_rate.copy_(torch.where(good, adapted, learning_rate))
        gradient = torch.where(good, self._clip(gradient), 0.0)
        step.add_(good)
        exp_avg.lerp_(gradient, (1 - BETA1) * good)
        exp_avg_sq.lerp_(gradient.square(), (1 - BETA2) * good)
        denominator = (exp_avg_sq / (1 - BETA2**step)).sqrt() + self.epsilon
        change = learning_rate * (exp_avg / (1 - BETA1**step)) / denominator
        flat.sub_(torch.where(good, change, 0.0))

    def _functional_step(
        self, flat, exp_avg, exp_avg_sq, step, learning_rate, *batch: Tensor
    ) -> Tensor:
        """`_functional_gradient` and `_functional_adam` in one; returns the stats."""
        gradient, stats = self._functional_gradient(flat, *batch)
        self._functional_adam(flat, exp_avg, exp_avg_sq, step, learning_rate, gradient, stats)
        return stats

    def _compile(self, batch: tuple[Tensor, ...]) -> None:
        """Build the graphs and try them on copies; if they cannot be built, stay eager.

        In a group of processes all compile or none does: their bits would differ.
        """
        reason, mark = "on another rank", None
        for attempt in (1, 2):
            try:
                self._build(batch)
                break
            except Exception as error:  # the compiler raises many kinds for many causes
                reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                if attempt == 1 and (mark := _retire_cache()):
                    continue
                if mark:  # an empty cache does not help: the old one was well
                    mark.unlink(missing_ok=True)
                break
        if distributed.any_rank(self._graphs is None):
            self._graphs, self.compiled = None, False
            warnings.warn(f"compilation failed, going on in eager mode: {reason}", stacklevel=3)

    def _build(self, batch: tuple[Tensor, ...]) -> None:
        _use_cache()
        with torch.no_grad():
            state = [] if self._foreign else [x.detach().clone() for x in self._adam_state()]
            if state and distributed.world_size() == 1:
                graphs = (_graph(self._functional_step),)
                graphs[0](*state, *batch)
            else:
                graphs = _graph(self._functional_gradient), _graph(self._functional_adam)
                gradient, stats = self._compiled_gradient(graphs[0], batch)
                if state:
                    graphs[1](*state, gradient, stats)
        self._graphs = graphs

    def _compiled_gradient(self, graph: Callable, batch: tuple[Tensor, ...]):
        """`_gradient` by its graph; a rank without rows of the minibatch has nothing to compile."""
        if not len(batch[0]):
            with torch.enable_grad():
                return self._gradient(*batch)
        if distributed.world_size() > 1:  # a rank's part of a minibatch has no fixed size
            for x in batch:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        with torch.no_grad():
            return graph(self._flat.detach(), *batch)

    def _adam_state(self) -> tuple[Tensor, ...]:
        """What `_functional_adam` writes to, in its order."""
        state = self.optimizer.state[self._flat]
        moments = state["exp_avg"], state["exp_avg_sq"], state["step"]
        return self._flat.detach(), *moments, self.learning_rate

    # Both -------------------------------------------------------------------------------------

    @staticmethod
    def _with_norm(gradient, loss: Tensor, stats: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.cat([g.flatten() for g in gradient])
        if loss.ndim:  # networks side by side: each has a norm of its own
            squares = [g.reshape(len(loss), -1).square().sum(1) for g in gradient]
            norm = torch.stack(squares).sum(0).sqrt()
        else:
            norm = torch.linalg.vector_norm(flat)
        return flat, torch.cat([stats, torch.stack([norm, loss.detach()])])

    @staticmethod
    def _of_all_ranks(gradient: Tensor, stats: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Gradient and stats of the whole minibatch, of which this rank holds some rows."""
        if distributed.world_size() == 1:
            return gradient, stats
        both = distributed.weighted_mean(torch.cat([gradient, stats]), rows)
        gradient, stats = both[: len(gradient)].clone(), both[len(gradient) :].clone()
        stats[-2] = torch.linalg.vector_norm(gradient)
        return gradient, stats

    def _clip(self, gradient: Tensor) -> Tensor:
        if self.max_grad_norm is None:
            return gradient
        parts = gradient.split(self._child_sizes)
        norms = [torch.linalg.vector_norm(part) + 1e-6 for part in parts]
        factors = [(self.max_grad_norm / norm).clamp(max=1.0) for norm in norms]
        return torch.cat([part * f for part, f in zip(parts, factors, strict=True)])

    @staticmethod
    def check(stats: Tensor) -> None:
        """Raise Diverged unless the last two of `stats`, as a call returns them, are finite."""
        columns = stats[-2:].reshape(2, -1).T.tolist()
        for i, (norm, loss) in enumerate(columns):
            if not abs(norm + loss) < float("inf"):
                which = f"network {i}: " if len(columns) > 1 else ""
                raise Diverged(f"{which}loss {loss:.4g}, gradient norm {norm:.4g}")


class _Bound(nn.Module):
    """An objective as the forward pass of a module, which `functional_call` needs."""

    def __init__(self, module: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.module, self.objective = module, objective

    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        return self.objective(self.module, *batch)


def _flatten(parameters: tuple[nn.Parameter, ...]) -> nn.Parameter:
    """One vector that holds all parameters, which become views of it."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    return nn.Parameter(flat)


def _graph(function: Callable) -> Callable:
    """One graph for one shape; several learners in a process are no recompilations of one."""
    return torch.compile(  # pyright: ignore
        function, fullgraph=True, dynamic=False, isolate_recompiles=True
    )


def pays(num_updates: int, batch_size: int, hidden: tuple[int, ...]) -> bool:
    """Whether a run is long enough for compilation to save twice what it costs.

    From measurements on one core (EPYC, 2.6 GHz): compiling takes up to 16 s; a step of two
    networks gains 0.4 ms of dispatch, and 1.5 ns per sample and hidden unit by fusion.
    """
    saved = 0.4e-3 + 1.5e-9 * batch_size * 2 * sum(hidden)  # [s] per step
    return num_updates * saved > 2 * 16.0


RETIRED = "retired"
"""A file that marks a cache with broken files."""


def cache_folder() -> Path:
    """Where compiled graphs are kept between runs, unless TORCHINDUCTOR_CACHE_DIR says otherwise.

    The compiler's default lies among temporary files, shared with other programs.
    """
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folders = (base / "ctrl-rl" / f"torch-{torch.__version__}-{n}" for n in count(1))
    return next(folder for folder in folders if not (folder / RETIRED).exists())


def _use_cache() -> None:
    """Name our folder to the compiler, unless the user named one; torch may name its default."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen is None or chosen == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder())


def _retire_cache() -> Path | None:
    """Give up a cache in which a killed process left broken files: the next one is used.

    Nothing is removed, as other processes may compile there now.

    Returns:
        The mark that it was given up; None, and nothing is done, if the cache is not ours.
    """
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    if folder != str(cache_folder()):
        return None
    mark = Path(folder) / RETIRED
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder())
    return mark
