"""Plays plans: what a trained Diffuser gives, with a policy's calls.

A planner is a policy of a kind of its own: it draws plans from noise, in a loop, and plays the
first actions of each. `ctrl_rl.load_policy` builds it from a run folder and `ctrl_rl.evaluate`
plays it. Its section in a checkpoint holds tensors and plain values only:

    {"format": 1, "kind": "diffuser", "spec": EnvSpec as JSON, "group": "actor",
     "config": fields of the learner's configuration, "scale": of `offline.segments.Scale`,
     "models": weights of R and P, "weights": of the network, its moving average}
"""

import torch
from torch import Tensor

from ctrl_rl.env import Obs
from ctrl_rl.networks import action_bounds
from ctrl_rl.policy import read_group
from ctrl_rl.spec import EnvSpec
from offline.diffuser import DiffuserConfig, make_net
from offline.diffusion import (
    Models,
    PlanConfig,
    clean_plan,
    cosine_schedule,
    draw_plans,
    guide_gradient,
)
from offline.segments import Scale


class Planner:
    """Plays the first actions of a plan, then draws a new one.

    Plans are random draws, but always the same ones after `reset()`.

    Attributes:
        spec: the environment it was trained on.
        group: the observation group it reads.
        config: the learner's settings, with the `plan` that is used.

    Args:
        section: as `Diffuser.policy_section` gives it.
        device: torch device; None for the weights'.
        plan: how plans are drawn; None for the section's own.
        seed: of the draws.

    Raises:
        ValueError: something is missing, not finite or does not fit.
    """

    kind, Config, context_size = "diffuser", DiffuserConfig, 0
    models: Models

    def __init__(
        self,
        section: dict,
        device: str | torch.device | None = None,
        plan: PlanConfig | None = None,
        seed: int = 0,
    ) -> None:
        keys = ("format", "kind", "spec", "group", "config", "scale", "models", "weights")
        if missing := [key for key in keys if key not in section]:
            raise ValueError(f"the policy section lacks {', '.join(missing)}")
        if (section["format"], section["kind"]) != (1, self.kind):
            raise ValueError(f"the policy section is no {self.kind} of format 1")
        for part in ("scale", "models", "weights"):
            for name, value in section[part].items():
                if not bool(value.isfinite().all()):
                    raise ValueError(f"{part} {name} of the policy is not finite")
        self._section = section
        self.spec = EnvSpec.from_json(section["spec"])
        self.group = section["group"]
        config = dict(section["config"])
        config["plan"] = plan or PlanConfig(**config["plan"])
        self.config = self.Config(**config)
        self.device = torch.device(device or next(iter(section["weights"].values())).device)
        self.scale = Scale(**{k: v.to(self.device) for k, v in section["scale"].items()})
        d, a = self.spec.obs_size(self.group), self.spec.action_size
        if [len(x) for x in self.scale] != [d + a + 1] * 2 + [d + a] * 2:
            raise ValueError(f"the planner's scale is not of {d} observations and {a} actions")
        try:
            self.models = self.make_models(d, a)
            self.models.load_state_dict(section["models"])
            self.net = make_net(self.config, d + a, self.context_size)
            self.net.load_state_dict(section["weights"])
        except RuntimeError as error:
            text = " ".join(str(error).split())[:200]
            raise ValueError(f"weights of the planner do not fit: {text}") from None
        for module in (self.models, self.net):
            module.to(self.device).eval().requires_grad_(False)
        self.schedule = cosine_schedule(self.config.diffusion_steps, self.device)
        low, high = action_bounds(self.spec, self.kind)
        self.low, self.high = low.to(self.device), high.to(self.device)
        self.seed = seed
        self.reset()

    @classmethod
    def from_section(cls, section: dict, device=None) -> "Planner":
        """As `ctrl_rl.policy.Policy.from_section`."""
        return cls(section, device)

    def section(self) -> dict:
        """The section this was built from."""
        return self._section

    def make_models(self, obs_size: int, action_size: int) -> Models:
        """The models that the section's weights are of."""
        return Models(obs_size, action_size, 0, self.config.model_hidden, torch.Generator())

    def context(self, rows: Tensor) -> Tensor:
        """Context (n, Z) of rows (n,) of the observation."""
        return torch.zeros(len(rows), 0, device=self.device)

    @torch.no_grad()
    def __call__(self, obs: Obs | Tensor) -> Tensor:
        """Actions (N, A) for observations (N, d), or for a dict that holds them.

        Raises:
            ValueError: group or width is not what it was trained on, or N is not that of the
                observations before.
        """
        x = read_group(obs, self.spec, self.group).to(self.device)
        if self._plan is None:
            shape = (len(x), self.config.horizon, self.spec.action_size)
            self._plan = torch.zeros(shape, device=self.device)
            self._played = torch.full((len(x),), self.config.horizon, device=self.device)
        if len(self._plan) != len(x):
            raise ValueError(
                f"the planner plays {len(self._plan)} rows, the observation has {len(x)}; "
                "planner.reset() begins anew"
            )
        rows = (self._played >= self.config.plan.replan_every).nonzero()[:, 0]
        if len(rows):
            plan = self.draw(x[rows], self.context(rows))
            action = plan[:, :, self.spec.obs_size(self.group) :]
            self._plan[rows] = torch.clamp(action, self.low, self.high)
            self._played[rows] = 0
        action = self._plan[torch.arange(len(x), device=self.device), self._played]
        self._played += 1
        return action

    def sample(self, obs: Obs | Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The same: plans are drawn either way."""
        return self(obs)

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget the plans of rows whose episode ended; None for all, draws begin anew, too.

        Args:
            rows: bool flags (N,), or row numbers.
        """
        if rows is None:
            self._plan = None
            self._generator = torch.Generator(self.device).manual_seed(self.seed)
        elif self._plan is not None:
            self._played[rows.to(self.device)] = self.config.horizon

    @torch.no_grad()
    def draw(self, obs: Tensor, z: Tensor) -> Tensor:
        """Plans (B, H, D) in the environment's units, from observations (B, d).

        Args:
            obs: where they begin, in the environment's units.
            z: context of each (B, Z).
        """
        config, guides, d = self.config, self.config.plan, obs.shape[1]
        plan = draw_plans(
            lambda x, k: self._predict(x, k, z),
            lambda plan: guide_gradient(self.models, plan, z, d, config.gamma, guides),
            self.scale.apply(obs),
            (config.horizon, d + self.spec.action_size),
            (self.scale.low, self.scale.high),
            self.schedule,
            guides,
            self._generator,
        )
        return self.scale.undo(plan)

    def _predict(self, x: Tensor, k: Tensor, z: Tensor) -> Tensor:
        """tau_hat; with a context, out + w (out with it - out), out without it."""
        if z.shape[1] == 0:
            output = self.net(x, k)
        else:
            keep = torch.ones(2 * len(x), device=x.device)
            keep[: len(x)] = 0.0
            both = self.net(x.repeat(2, 1, 1), k.repeat(2), z.repeat(2, 1), keep)
            without, with_it = both.chunk(2)
            output = without + self.config.plan.guidance * (with_it - without)
        return clean_plan(output, x, k, self.schedule, self.config.predict)
