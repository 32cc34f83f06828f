"""MetaDiffuser: Diffuser for tasks it has not seen, told by a few transitions of them.

Paper: Ni, Hao, Mu, Yuan, Zheng, Wang, Liang, "MetaDiffuser: diffusion model as conditional planner
for offline meta-RL", ICML 2023, arXiv:2305.19923.

    z     = E(h transitions (s, a, r, s') of one task)
    L_ctx = mean (R(s, a, z) - r)^2 + mean |P(s, a, z) - s'|^2   over tasks; trains E, R and P
    L     = mean |output(tau_k, (1 - b) z + b nothing, k) - target|^2,     b ~ Bernoulli(drop)
    out   = output(nothing) + w (output(z) - output(nothing))     when drawing
    both guides of `offline.diffusion`, with R and P told z

First E, R and P learn for `model_steps` updates. Then they stand still, every task gets `labels`
contexts of its data, and the network learns from segments with one of their task's. In a test
`warm_start` gives z from a few transitions of the task, and the first action of each plan is
played.

Which of it is the paper's, and which our reading: docs/algorithms/metadiffuser.md. Deviations, each
with its reason:

1. E is a mean over transitions, so that it takes any number of them in any order; the paper's reads
   h in a row. Half of the contexts in training come from one episode, half from anywhere in the
   task: E then cannot tell the task by the policy that acted.
2. R and P are evaluated at tau_hat (`offline.diffusion`), so that they learn from real transitions
   alone.
3. "nothing" is the zero vector in the place of the context's embedding.
4. |.|^2 is a mean over dimensions, so that a large body does not drown the reward.

Reading order: `METRICS` -> `MetaDiffuserConfig` -> `ContextModels` -> `MetaDiffuser` -> `train` ->
`MetaPlanner`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrl_rl.networks import MLP
from ctrl_rl.runs import Run
from ctrl_rl.spec import EnvSpec
from offline import diffuser
from offline.diffuser import Diffuser, DiffuserConfig, fit
from offline.diffusion import Models, models_loss
from offline.planner import Planner
from offline.segments import Segments

METRICS = diffuser.METRICS
"""Every key that is logged: those of Diffuser; L_R + L_P is L_ctx."""

STD_OFFSET = 0.01
"""Added to a context's deviations, of columns whose deviation over all data is 1."""


@dataclass(frozen=True, kw_only=True)
class MetaDiffuserConfig(DiffuserConfig):
    """Settings of MetaDiffuser, for small data on a CPU."""

    context_size: int = 16
    """Z, length of a task's vector."""
    context_steps: int = 20
    """h, transitions that a context is made of in training."""
    encoder_hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers of E."""
    labels: int = 64
    """Contexts of each task that the network learns with."""
    drop: float = 0.1
    """Share of plans that the network learns without their context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("context_size", "context_steps", "labels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        if min(self.encoder_hidden, default=0) < 1:
            raise ValueError(f"encoder_hidden must be positive, not {self.encoder_hidden!r}")
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop must be in 0..1, below 1, not {self.drop!r}")


class ContextModels(Models):
    """E, and the R and P that it serves.

    Args:
        obs_size: d.
        action_size: A.
        context_size: Z.
        hidden: widths of the hidden layers of R and P.
        encoder_hidden: those of E.
        generator: source of the initial weights.
    """

    def __init__(
        self,
        obs_size: int,
        action_size: int,
        context_size: int,
        hidden: Sequence[int],
        encoder_hidden: Sequence[int],
        generator: torch.Generator,
    ) -> None:
        super().__init__(obs_size, action_size, context_size, hidden, generator)
        *widths, last = encoder_hidden
        columns = 2 * obs_size + action_size + 1
        self.each = MLP((2 * columns, *widths, last), "relu", 1.0, generator)
        self.all = MLP((last + 2 * columns, last, context_size), "relu", 1.0, generator)

    def encode(self, transitions: Tensor) -> Tensor:
        """z (B, Z) of contexts (B, h, 2 d + A + 1), normalised; the order of the h is nothing.

        Each transition is seen as it is and relative to the context's mean, in its deviations: a
        short walk moves little, and how the reward changes along it is what tells the task.
        """
        mean = transitions.mean(1, keepdim=True)
        std = transitions.std(1, keepdim=True, correction=0)
        relative = (transitions - mean) / (std + STD_OFFSET)
        each = self.each(torch.cat([transitions, relative], 2)).relu().mean(1)
        return self.all(torch.cat([each, mean[:, 0], std[:, 0]], 1)).tanh()


class MetaDiffuser(Diffuser):
    """Diffuser whose models and network know a context; see the module."""

    name = "metadiffuser"
    config: MetaDiffuserConfig
    models: ContextModels

    def __init__(self, config: MetaDiffuserConfig, data: Segments, spec: EnvSpec) -> None:
        shape = data.num_tasks, config.labels, config.context_size
        self.labels = torch.zeros(shape, device=data.device)
        super().__init__(config, data, spec, config.context_size)

    def make_models(self, generator: torch.Generator) -> ContextModels:
        """E, R and P."""
        c, d, a = self.config, self.data.obs_size, self.data.action_size
        return ContextModels(d, a, c.context_size, c.model_hidden, c.encoder_hidden, generator)

    def models_batch(self) -> tuple[Tensor, ...]:
        """Contexts and other transitions of the same tasks."""
        c = self.config
        task = self.data.draw_tasks(c.model_tasks, self.generator)
        contexts = self.data.draw_contexts(task, c.context_steps, self.generator)
        return contexts, self.data.draw_transitions(task, c.model_batch, self.generator)

    def models_objective(self, models, contexts: Tensor, transitions: Tensor):
        """L_ctx, and its two parts."""
        losses = torch.stack(models_loss(models, transitions, models.encode(contexts)))
        return losses.sum(), losses.detach()

    def context(self, task: Tensor) -> tuple[Tensor, Tensor]:
        """One of each task's labels, and which of them the network must do without."""
        if self.updates == self.config.model_steps:
            self._label()
        which = torch.randint(
            self.config.labels, (len(task),), generator=self.generator, device=self.device
        )
        u = torch.rand(len(task), generator=self.generator, device=self.device)
        return self.labels[task, which], (u >= self.config.drop).float()

    @torch.no_grad()
    def _label(self) -> None:
        """Contexts of every task's data, by the encoder as it now stands and will stay."""
        c, number = self.config, self.data.num_tasks
        for task in range(number):
            at = torch.full((c.labels,), task, device=self.device)
            contexts = self.data.draw_contexts(at, c.context_steps, self.generator)
            self.labels[task] = self.models.encode(contexts)

    def state_dict(self) -> dict:
        """Everything that decides the future of training but what is drawn, as a copy."""
        return {**super().state_dict(), "labels": self.labels.clone()}

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        super().load_state_dict(state)
        self.labels.copy_(state["labels"])


def train(config: MetaDiffuserConfig, data: Segments, spec: EnvSpec, run: Run | None = None) -> Run:
    """Train on recorded segments of several tasks; see `offline.diffuser.fit`."""
    return fit(MetaDiffuser(config, data, spec), run)


class MetaPlanner(Planner):
    """Plays plans for tasks that `warm_start` has shown it.

    Row i of the observation plays the (i mod M)-th of the M tasks, as the task families number
    their rows.
    """

    kind, Config = "metadiffuser", MetaDiffuserConfig
    config: MetaDiffuserConfig
    models: ContextModels
    z: Tensor | None = None
    """(M, Z) context of each task; None before `warm_start`."""

    def make_models(self, obs_size: int, action_size: int) -> ContextModels:
        """The models that the section's weights are of."""
        c = self.config
        self.context_size = c.context_size
        rest = c.context_size, c.model_hidden, c.encoder_hidden, torch.Generator()
        return ContextModels(obs_size, action_size, *rest)

    @torch.no_grad()
    def warm_start(self, obs: Tensor, action: Tensor, reward: Tensor, next_obs: Tensor) -> Tensor:
        """Read M tasks from h transitions of each, of any policy; plans begin anew.

        Args:
            obs: (M, h, d), in the environment's units as the others.
            action: (M, h, A)
            reward: (M, h)
            next_obs: (M, h, d)

        Returns:
            z (M, Z), kept until the next call.

        Raises:
            ValueError: shapes that do not belong together, or a number that is not finite.
        """
        d, a = self.spec.obs_size(self.group), self.spec.action_size
        lead = tuple(reward.shape)
        found = [tuple(x.shape) for x in (obs, action, reward, next_obs)]
        if len(lead) != 2 or 0 in lead or found != [(*lead, d), (*lead, a), lead, (*lead, d)]:
            raise ValueError(
                f"a warm start takes (M, h, {d}), (M, h, {a}), (M, h) and (M, h, {d}), not "
                + ", ".join(map(str, found))
            )
        x = torch.cat([obs, action, reward[..., None], next_obs], 2).to(self.device).float()
        if not bool(x.isfinite().all()):
            raise ValueError(f"warm start of task {int((~x.isfinite()).nonzero()[0, 0])} holds a "
                             "number that is not finite")  # fmt: skip
        x = torch.cat([self.scale.apply(x[..., : d + a + 1]), self.scale.apply(x[..., -d:])], 2)
        self.reset()
        self.z = z = self.models.encode(x)
        return z

    def context(self, rows: Tensor) -> Tensor:
        """Context of the task that each row plays.

        Raises:
            ValueError: there was no warm start.
        """
        if self.z is None:
            raise ValueError(
                f"{self.kind} plans for a task it was shown: call warm_start with a few "
                "transitions of the task first"
            )
        return self.z[rows % len(self.z)]
