"""Diffusion over plans: the noise schedule, the loss, the two guides, and how a plan is drawn.

Pure functions and the two models that guide; what is learned when, and who plays the plans, stands
in `offline.diffuser` and `offline.metadiffuser`.

A plan tau (B, H, D) holds H steps [obs | action], normalised. With k = K..1 the diffusion step,
a_k = alpha_bar_k (Ho et al., NeurIPS 2020, arXiv:2006.11239, eq. 4 to 7) and s the first
observation, which is known and kept in every noisy plan (in-painting):

    tau_k   = sqrt(a_k) tau + sqrt(1 - a_k) eps
    tau_hat = what the network takes the clean plan to be
    mean    = c_k tau_hat + e_k tau_k,    variance Sigma_k
    J_ret   = sum_t gamma^t R(s_t, a_t),  J_dyn = -sum_t |s_{t+1} - P(s_t, a_t)|^2
    tau_{k-1} ~ N(mean + Sigma_k grad (alpha_ret J_ret + alpha_dyn J_dyn), temperature^2 Sigma_k)

R and P are evaluated at tau_hat, not at tau_k: there they see plans like those they were trained
on, and need to know nothing of noise. |.|^2 is a mean over dimensions, as in the loss of P.

Reading order: `PlanConfig` -> `Schedule` -> the loss -> `Models` -> the guides -> `draw_plans`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ctrl_rl.networks import MLP

MAX_BETA = 0.999  # Nichol and Dhariwal, 2021, section 3.2
OFFSET = 0.008  # their s, same section


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How plans are drawn and played; nothing here is trained."""

    return_scale: float = 10.0
    """alpha_ret; 0 leaves the return guide out. Rewards and plans are normalised, so that tasks
    share it."""
    dynamics_scale: float = 0.25
    """alpha_dyn; 0 leaves the dynamics guide out. J_dyn is quadratic in the observations, with a
    curvature of up to 8 / d, and Sigma_k at most 1: above d / 4 a step may overshoot, and raise the
    error that it should lower."""
    guide_steps: int = 2
    """Gradient steps of the guides per diffusion step (2 in Diffuser)."""
    unguided_steps: int = 1
    """Last diffusion steps without the guides."""
    guidance: float = 1.2
    """w of classifier-free guidance: 0 ignores the context, 1 is the conditional model."""
    temperature: float = 0.5
    """Factor on the standard deviation of what is drawn (0.5 in Decision Diffuser)."""
    replan_every: int = 1
    """Steps that are played of a plan; 1 plays its first action alone."""

    def __post_init__(self) -> None:
        for name in ("return_scale", "dynamics_scale", "guidance", "temperature"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)!r}")
        for name, least in (("guide_steps", 1), ("unguided_steps", 0), ("replan_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)!r}")


# The schedule -------------------------------------------------------------------------------


class Schedule(NamedTuple):
    """Constants of each diffusion step k = 0..K, float32 (K + 1,); k = 0 is the clean plan."""

    alpha_bar: Tensor
    """Share of the clean plan's variance."""
    of_clean: Tensor
    """c_k: weight of the clean plan in the mean of step k - 1."""
    of_noisy: Tensor
    """e_k: weight of the noisy plan in it."""
    variance: Tensor
    """Sigma_k; 0 at k = 1, where the mean is the clean plan."""


def cosine_schedule(num_steps: int, device: torch.device | str = "cpu") -> Schedule:
    """The schedule of Nichol and Dhariwal (ICML 2021, arXiv:2102.09672, eq. 17).

    Args:
        num_steps: K.
        device: of the constants.
    """
    k = torch.arange(num_steps + 1, dtype=torch.float64)
    f = torch.cos((k / num_steps + OFFSET) / (1 + OFFSET) * math.pi / 2).square()
    beta = torch.zeros_like(f)
    beta[1:] = (1 - f[1:] / f[:-1]).clamp(max=MAX_BETA)
    alpha_bar = (1 - beta).cumprod(0)
    before = torch.cat([alpha_bar[:1], alpha_bar[:-1]])
    noise = (1 - alpha_bar).clamp(min=1e-12)
    of_clean = before.sqrt() * beta / noise
    of_noisy = (1 - beta).sqrt() * (1 - before) / noise
    variance = beta * (1 - before) / noise
    return Schedule(*(x.float().to(device) for x in (alpha_bar, of_clean, of_noisy, variance)))


def add_noise(plan: Tensor, noise: Tensor, k: Tensor, schedule: Schedule, obs_size: int) -> Tensor:
    """tau_k of plans (B, H, D) at diffusion steps (B,), the first observation as it was."""
    share = schedule.alpha_bar[k][:, None, None]
    noisy = share.sqrt() * plan + (1 - share).sqrt() * noise
    return torch.cat([_with_first(noisy[:, :1], plan[:, 0, :obs_size]), noisy[:, 1:]], 1)


def clean_plan(
    output: Tensor, noisy: Tensor, k: Tensor, schedule: Schedule, predict: str
) -> Tensor:
    """tau_hat from the network's output: the plan itself ("x0"), or the noise in it ("eps")."""
    if predict == "x0":
        return output
    share = schedule.alpha_bar[k][:, None, None]
    return (noisy - (1 - share).sqrt() * output) / share.sqrt()


def diffusion_loss(output: Tensor, target: Tensor, obs_size: int, action_weight: float) -> Tensor:
    """Mean squared error of plans (B, H, D) but for the first observation, which is given.

    Args:
        output: of the network.
        target: the clean plan, or the noise.
        obs_size: d.
        action_weight: weight of the first action, the one that is played (10 in Diffuser).
    """
    weight = torch.ones_like(target[0])
    weight[0, :obs_size] = 0.0
    weight[0, obs_size:] = action_weight
    return ((output - target).square() * weight).mean()


# The models that guide ----------------------------------------------------------------------


class Models(nn.Module):
    """Reward R and dynamics P of normalised observations and actions, and of a context.

    Args:
        obs_size: d.
        action_size: A.
        context_size: Z; 0 for models that know no task.
        hidden: widths of the hidden layers.
        generator: source of the initial weights.
    """

    def __init__(
        self,
        obs_size: int,
        action_size: int,
        context_size: int,
        hidden: Sequence[int],
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.obs_size = obs_size
        fan_in = obs_size + action_size + context_size
        self.of_reward = MLP((fan_in, *hidden, 1), "relu", 1.0, generator)
        self.of_change = MLP((fan_in, *hidden, obs_size), "relu", 0.01, generator)

    def reward(self, obs: Tensor, action: Tensor, z: Tensor) -> Tensor:
        """R (...,) of (..., d), (..., A) and (..., Z)."""
        return self.of_reward(torch.cat([obs, action, z], -1))[..., 0]

    def next_obs(self, obs: Tensor, action: Tensor, z: Tensor) -> Tensor:
        """P (..., d)."""
        return obs + self.of_change(torch.cat([obs, action, z], -1))


def models_loss(models: Models, transitions: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squared errors of R and of P, the latter also over dimensions.

    Args:
        models: R and P.
        transitions: (B, n, 2 d + A + 1) as [obs | action | reward | next_obs], normalised.
        z: context of each row (B, Z).
    """
    d = models.obs_size
    a = transitions.shape[-1] - 2 * d - 1
    obs, action, reward, next_obs = transitions.split((d, a, 1, d), -1)
    z = z[:, None].expand(-1, transitions.shape[1], -1)
    of_reward = (models.reward(obs, action, z) - reward[..., 0]).square().mean()
    of_dynamics = (models.next_obs(obs, action, z) - next_obs).square().mean()
    return of_reward, of_dynamics


# The guides ---------------------------------------------------------------------------------


def plan_return(models: Models, plan: Tensor, z: Tensor, obs_size: int, gamma: float) -> Tensor:
    """J_ret (B,) of plans (B, H, D) with contexts (B, Z)."""
    obs, action = plan[..., :obs_size], plan[..., obs_size:]
    reward = models.reward(obs, action, z[:, None].expand(-1, plan.shape[1], -1))
    steps = torch.arange(plan.shape[1], device=plan.device)
    return (gamma**steps * reward).sum(1)


def plan_consistency(models: Models, plan: Tensor, z: Tensor, obs_size: int) -> Tensor:
    """J_dyn (B,): minus the squared dynamics error, so that more is better."""
    obs, action = plan[:, :-1, :obs_size], plan[:, :-1, obs_size:]
    found = models.next_obs(obs, action, z[:, None].expand(-1, plan.shape[1] - 1, -1))
    return -(plan[:, 1:, :obs_size] - found).square().mean(2).sum(1)


def guide_gradient(
    models: Models, plan: Tensor, z: Tensor, obs_size: int, gamma: float, config: PlanConfig
) -> Tensor:
    """Gradient (B, H, D) of alpha_ret J_ret + alpha_dyn J_dyn; 0 at the first observation."""
    if not (config.return_scale or config.dynamics_scale):
        return torch.zeros_like(plan)
    with torch.enable_grad():
        plan = plan.detach().requires_grad_()
        aim = torch.zeros((), device=plan.device)
        if config.return_scale:
            aim = aim + config.return_scale * plan_return(models, plan, z, obs_size, gamma).sum()
        if config.dynamics_scale:
            consistency = plan_consistency(models, plan, z, obs_size)
            aim = aim + config.dynamics_scale * consistency.sum()
        (gradient,) = torch.autograd.grad(aim, plan)
    gradient[:, 0, :obs_size] = 0.0
    return gradient


# Drawing plans ------------------------------------------------------------------------------


@torch.no_grad()
def draw_plans(
    predict: Callable[[Tensor, Tensor], Tensor],
    gradient: Callable[[Tensor], Tensor],
    first_obs: Tensor,
    shape: tuple[int, int],
    bounds: tuple[Tensor, Tensor],
    schedule: Schedule,
    config: PlanConfig,
    generator: torch.Generator,
) -> Tensor:
    """Plans (B, H, D) that begin at normalised observations (B, d).

    Args:
        predict: tau_hat from noisy plans (B, H, D) and diffusion steps (B,).
        gradient: of the guides at tau_hat.
        first_obs: where each plan begins.
        shape: (H, D).
        bounds: least and largest value of each column (D,), to which tau_hat is clamped.
        schedule: of the noise.
        config: how to draw.
        generator: of all noise.
    """
    size = (len(first_obs), *shape)
    device = first_obs.device
    draw = lambda: torch.randn(size, generator=generator, device=device)  # noqa: E731
    x = _with_first(draw(), first_obs)
    for k in range(len(schedule.alpha_bar) - 1, 0, -1):
        clean = predict(x, torch.full((len(x),), k, device=device)).clamp(*bounds)
        clean = _with_first(clean, first_obs)
        x = schedule.of_clean[k] * clean + schedule.of_noisy[k] * x
        if k > config.unguided_steps:
            shift = torch.zeros_like(clean)
            for _ in range(config.guide_steps):
                shift = shift + schedule.variance[k] * gradient(clean + shift)
            x = x + shift
        if k > 1:
            x = x + config.temperature * schedule.variance[k].sqrt() * draw()
        x = _with_first(x, first_obs)
    return x


def _with_first(plan: Tensor, first_obs: Tensor) -> Tensor:
    """The plan with its first observation put in the place of what was drawn there."""
    plan = plan.clone()
    plan[:, 0, : first_obs.shape[1]] = first_obs
    return plan
