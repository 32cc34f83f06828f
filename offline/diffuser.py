"""Diffuser: planning as the drawing of whole plans; with `offline.diffusion` it reads as one.

Paper: Janner, Du, Tenenbaum, Levine, "Planning with diffusion for flexible behavior synthesis",
ICML 2022, arXiv:2205.09991. A network removes noise from plans [obs | action] of H steps; drawing
one means removing the noise from noise, K times, with the present observation in its place. A
gradient bends every step towards reward. The first action of the plan is played.

    L_R = mean (R(s, a) - r)^2                    L_P = mean |P(s, a) - s'|^2
    L   = mean |output(tau_k, k) - target|^2,     target tau ("x0") or eps ("eps"),
          k uniform in 1..K, eps ~ N(0, 1), the first action weighed `action_weight` times

First R and P learn for `model_steps` updates, then the network. Plans are drawn by its moving
average.

Deviations from the paper, each with its reason:

1. The guide is the return of a reward model at tau_hat, not a value network of noisy plans: it is
   the guide that MetaDiffuser has, so that the two differ in the context alone; see
   `offline.diffusion`.
2. The dynamics guide of MetaDiffuser is there, too, for the same reason; the paper has none, which
   is `dynamics_scale` 0.
3. The U-Net is small (`offline.unet`). Plans never reach beyond an episode's end.
4. All columns are normalised by mean and deviation; tau_hat is clamped to the data's range.

Tensors: plans (B, H, D), D = d + A. `docs/algorithms/metadiffuser.md` explains every logged key.

Reading order: `METRICS` -> `DiffuserConfig` -> `Diffuser` -> `train`; `offline.planner` plays it.
"""

import dataclasses
import math
import time
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ctrl_rl import distributed
from ctrl_rl.compiled import MinibatchStep, diverged
from ctrl_rl.networks import action_bounds
from ctrl_rl.runs import Recorded, Run
from ctrl_rl.spec import EnvSpec
from offline.diffusion import (
    Models,
    PlanConfig,
    add_noise,
    cosine_schedule,
    diffusion_loss,
    models_loss,
)
from offline.networks import stream
from offline.segments import Segments
from offline.training import Draws
from offline.unet import GROUPS, TemporalUNet

METRICS: dict[str, str] = {
    "loss/reward": "L_R, mean over the updates since the last row [-]",
    "loss/dynamics": "L_P, likewise [-]",
    "loss/diffusion": "L, likewise [-]",
    "gradient/models": "Euclidean norm of the gradient of L_R + L_P",
    "gradient/diffusion": "Euclidean norm of L's gradient",
    "time/updates_per_s": "updates per second",
}
"""Every key that is logged; an unknown key is an error."""

LOG_EVERY = 250
"""Updates behind a row of the log; the run is asked for a checkpoint as often."""


@dataclass(frozen=True, kw_only=True)
class DiffuserConfig:
    """Settings of Diffuser, for small data on a CPU."""

    total_steps: int = 10_000
    """Length of training, of the models and of the network together [updates]."""
    model_steps: int = 4_000
    """Those of them, the first ones, that train R and P."""
    seed: int = 0
    """Decides initial weights and everything drawn."""
    horizon: int = 16
    """H, steps of a plan; a multiple of 2^(levels - 1)."""
    diffusion_steps: int = 20
    """K."""
    predict: str = "x0"
    """What the network gives: "x0", the clean plan, or "eps", the noise."""
    width: int = 32
    """Channels of the network's first level."""
    multipliers: tuple[int, ...] = (1, 2, 4)
    """Channels of each level over `width`."""
    kernel: int = 5
    """Steps of the plan under a convolution."""
    batch_size: int = 32
    """Plans per update of the network."""
    learning_rate: float = 1e-3
    """Adam's step size for the network."""
    ema: float = 0.995
    """Share of the moving average that an update keeps."""
    action_weight: float = 10.0
    """Weight of the first action in L."""
    model_hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers of R and P."""
    model_tasks: int = 32
    """Tasks per update of the models."""
    model_batch: int = 8
    """Transitions per task of it."""
    model_learning_rate: float = 2e-3
    """Adam's step size for the models."""
    gamma: float = 0.99
    """Discount per step of the return that guides."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """How plans are drawn."""

    def __post_init__(self) -> None:
        positive = ("learning_rate", "model_learning_rate", "action_weight")
        at_least_one = ("model_steps", "diffusion_steps", "batch_size", "model_tasks")
        checks = [(n, getattr(self, n) >= 1, "at least 1") for n in (*at_least_one, "model_batch")]
        checks += [(n, 0 < getattr(self, n) < math.inf, "positive") for n in positive]
        halved = 2 ** (len(self.multipliers) - 1)
        checks += [
            ("total_steps", self.total_steps > self.model_steps, "more than model_steps"),
            ("multipliers", min(self.multipliers, default=0) >= 1, "positive numbers"),
            (
                "horizon",
                self.horizon >= 2 and self.horizon % halved == 0,
                f"a multiple of {halved}",
            ),
            ("predict", self.predict in ("x0", "eps"), "x0 or eps"),
            ("width", self.width >= GROUPS and self.width % GROUPS == 0, f"a multiple of {GROUPS}"),
            ("kernel", self.kernel >= 1 and self.kernel % 2 == 1, "odd"),
            ("ema", 0 <= self.ema < 1, "in 0..1, below 1"),
            ("gamma", 0 <= self.gamma <= 1, "in 0..1"),
            ("model_hidden", min(self.model_hidden, default=0) >= 1, "positive widths"),
            ("plan", self.plan.replan_every <= self.horizon, "replanned within the horizon"),
        ]
        for name, good, wanted in checks:
            if not good:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}")


# The learner --------------------------------------------------------------------------------


class Diffuser:
    """Models, network, optimisers and random generator; it draws from the data it is given.

    Args:
        config: settings.
        data: segments of `config.horizon` steps.
        spec: contract of the environment that the plans are for.
        context_size: Z; 0 for plans that know no task.

    Raises:
        ValueError: data of other sizes or another horizon, or actions that are discrete.
    """

    name, metrics = "diffuser", METRICS
    models: Models

    def __init__(
        self, config: DiffuserConfig, data: Segments, spec: EnvSpec, context_size: int = 0
    ) -> None:
        found = data.obs_size, data.action_size, data.horizon
        wanted = spec.obs_size(), spec.action_size, config.horizon
        if found != wanted:
            raise ValueError(
                "the data has observations and actions of {} and {} numbers and segments of {} "
                "steps, ".format(*found)
                + "{} has {} and {}, and horizon is {}".format(spec.task, *wanted)
            )
        action_bounds(spec, self.name)
        self.config, self.data, self.spec, self.device = config, data, spec, data.device
        self.generator = stream(config.seed, "draws", self.device)
        self.models = self.make_models(stream(config.seed, "weights")).to(self.device)
        self.net = make_net(config, data.obs_size + data.action_size, context_size)
        self.net.to(self.device)
        self.average = deepcopy(self.net).requires_grad_(False)
        self.schedule = cosine_schedule(config.diffusion_steps, self.device)
        step = lambda module, objective, rate: MinibatchStep(  # noqa: E731
            module, objective, rate, None, None, False, 1e-8, check_each=False
        )
        self.model_step = step(self.models, self.models_objective, config.model_learning_rate)
        self.net_step = step(self.net, self._net_objective, config.learning_rate)
        self._averages: list[Tensor] = [*self.average.parameters()]
        self._sources: list[Tensor] = [*self.net.parameters()]
        self.updates = 0

    # What MetaDiffuser does otherwise

    def make_models(self, generator: torch.Generator) -> Models:
        """R and P, and what else learns with them."""
        d, a = self.data.obs_size, self.data.action_size
        return Models(d, a, 0, self.config.model_hidden, generator)

    def models_batch(self) -> tuple[Tensor, ...]:
        """What an update of the models learns from."""
        task = self.data.draw_tasks(self.config.model_tasks, self.generator)
        return (self.data.draw_transitions(task, self.config.model_batch, self.generator),)

    def models_objective(self, models, transitions: Tensor) -> tuple[Tensor, Tensor]:
        """L_R + L_P, and both."""
        losses = torch.stack(models_loss(models, transitions, transitions[:, 0, :0]))
        return losses.sum(), losses.detach()

    def context(self, task: Tensor) -> tuple[Tensor, Tensor]:
        """Contexts (B, Z) of tasks (B,), and whether the network may see each (B,)."""
        return torch.zeros(len(task), 0, device=self.device), torch.ones_like(task).float()

    # One update

    def update(self) -> dict[str, Tensor]:
        """One step of the models, or once they are done of the network; figures by name."""
        if self.updates < self.config.model_steps:
            reward, dynamics, norm, _ = self.model_step(*self.models_batch()).unbind()
            found = {"loss/reward": reward, "loss/dynamics": dynamics, "gradient/models": norm}
        else:
            plan, task = self.data.draw_segments(self.config.batch_size, self.generator)
            z, keep = self.context(task)
            noise = torch.randn(plan.shape, generator=self.generator, device=self.device)
            k = 1 + torch.randint(
                self.config.diffusion_steps,
                (len(plan),),
                generator=self.generator,
                device=self.device,
            )
            norm, loss = self.net_step(plan, noise, k, z, keep).unbind()
            with torch.no_grad():
                torch._foreach_lerp_(  # pyright: ignore
                    self._averages, self._sources, 1 - self.config.ema
                )
            found = {"loss/diffusion": loss, "gradient/diffusion": norm}
        self.updates += 1
        return found

    def _net_objective(self, net, plan, noise, k, z, keep) -> tuple[Tensor, Tensor]:
        """L of a minibatch."""
        d, config = self.data.obs_size, self.config
        noisy = add_noise(plan, noise, k, self.schedule, d)
        target = plan if config.predict == "x0" else noise
        loss = diffusion_loss(net(noisy, k, z, keep), target, d, config.action_weight)
        return loss, loss.detach()[None][:0]

    def policy_section(self) -> dict:
        """What a planner needs, in tensors and plain values; see `offline.planner`."""
        return {
            "format": 1,
            "kind": self.name,
            "spec": self.spec.to_json(),
            "group": "actor",
            "config": dataclasses.asdict(self.config),
            "scale": {k: v.clone() for k, v in self.data.scale._asdict().items()},
            "models": {k: v.clone() for k, v in self.models.state_dict().items()},
            "weights": {k: v.clone() for k, v in self.average.state_dict().items()},
        }

    def state_dict(self) -> dict:
        """Everything that decides the future of training but what is drawn, as a copy."""
        return deepcopy(
            {
                "models": self.models.state_dict(),
                "net": self.net.state_dict(),
                "average": self.average.state_dict(),
                "model_step": self.model_step.state_dict(),
                "net_step": self.net_step.state_dict(),
                "updates": self.updates,
            }
        )

    def load_state_dict(self, state: dict) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in ("models", "net", "average", "model_step", "net_step"):
            getattr(self, name).load_state_dict(state[name])
        self.updates = state["updates"]


def make_net(config: DiffuserConfig, columns: int, context_size: int) -> TemporalUNet:
    """The network of these settings."""
    sizes = config.width, config.multipliers, config.kernel, context_size
    return TemporalUNet(columns, *sizes, config.seed)


def train(config: DiffuserConfig, data: Segments, spec: EnvSpec, run: Run | None = None) -> Run:
    """Train on recorded segments, or go on where `run` stopped; see `fit`."""
    return fit(Diffuser(config, data, spec), run)


def fit(learner: Diffuser, run: Run | None = None) -> Run:
    """Train to `total_steps` updates, or go on where `run` stopped.

    Args:
        learner: of this file, or of `offline.metadiffuser`.
        run: where to log and save, a `ctrl_rl.Run`; None keeps the log in memory.

    Returns:
        The run; its `rows` hold what was logged, its last checkpoint the planner.

    Raises:
        Diverged: a loss is not finite; the last checkpoint stands.
        ValueError: `run` is of other data or settings; this process is one of a group.
    """
    distributed.refuse_group(learner.name)
    run = Run() if run is None else run
    config, data = learner.config, learner.data
    record = {"dataset": "recorded data", **data.report()}
    source = Recorded(spec=learner.spec, data=record, seeds=(config.seed,), device=data.device)
    run.start(learner.metrics, config, source, learner.name)
    drawn = Draws(learner.generator)
    run.resume(learner=learner, env=drawn)
    while learner.updates < config.total_steps and not run.stopping(learner.updates):
        began, first, found = time.perf_counter(), learner.updates, {}
        for _ in range(min(LOG_EVERY, config.total_steps - first)):
            for name, value in learner.update().items():
                found.setdefault(name, []).append(value)
        step = learner.updates
        figures = {name: float(torch.stack(values).mean()) for name, values in found.items()}
        for name, value in figures.items():
            if not math.isfinite(value):
                raise diverged(step, f"{name} is {value}", "update")
        figures["time/updates_per_s"] = (step - first) / (time.perf_counter() - began)
        run.log(step, figures)
        if run.due("checkpoint", step):
            run.save(step, learner.policy_section(), learner.state_dict(), drawn.state_dict())
    run.finish()
    return run
