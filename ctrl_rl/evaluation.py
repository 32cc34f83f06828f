"""What a policy reaches, each figure with its 95 % interval.

Of N environments each plays ceil(K / N) episodes from its own first one, and the first K by
(environment, episode) count. The choice does not depend on how an episode went: counting the
first K that *finish* would favour short ones.

Rates get a Wilson interval (Wilson, "Probable inference, the law of succession, and statistical
inference", JASA 1927), means a bias-corrected bootstrap interval (Efron, "Better bootstrap
confidence intervals", JASA 1987), both by scipy.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrl_rl.env import VecEnv
from ctrl_rl.policy import check_fits

RESAMPLES = 2000
"""Bootstrap resamples of an interval."""

SELECTION_SEED = 1_000_003
"""Added to a run's seed for the evaluations during training, which choose `best.pt`."""

EVALUATION_SEED = 2_000_003
"""Added to the seed of `ctrl-rl eval`: neither training nor the choice has seen its episodes."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure over episodes."""

    mean: float
    ci95: tuple[float, float] | None
    """Interval of the mean; None where one episode tells nothing about it."""
    n: int
    """Episodes."""
    unit: str

    def __str__(self) -> str:
        """For people: `123.4 [120.1, 126.8] m/s`."""
        unit = "" if self.unit == "-" else f" {self.unit}"
        if self.ci95 is None:
            return f"{self.mean:.4g}{unit}"
        return f"{self.mean:.4g} [{self.ci95[0]:.4g}, {self.ci95[1]:.4g}]{unit}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `evaluate` found."""

    metrics: dict[str, Metric]
    """`episode_return`, `episode_length`, `terminated_rate`, `fault_rate`, then the task's own
    figures, each the mean over the steps of an episode; `average_reward`, the reward per step."""
    episodes: dict[str, Tensor]
    """The same before averaging, but the last; (K,) float64 each, by (environment, episode)."""

    def log(self) -> dict[str, float]:
        """The means under `eval/` keys, for `Run.log`."""
        return {f"eval/{name}": metric.mean for name, metric in self.metrics.items()}

    def to_dict(self) -> dict:
        """Plain values without NaN, as `--json` prints them."""
        return {
            name: {
                "mean": m.mean,
                "ci95": list(m.ci95) if m.ci95 else None,
                "n": m.n,
                "unit": m.unit,
            }
            for name, m in self.metrics.items()
        }


def evaluate(
    policy,
    env: VecEnv,
    episodes: int = 100,
    *,
    deterministic: bool = True,
    seed: int = 0,
) -> Result:
    """Play episodes and measure.

    Args:
        policy: as `load_policy` gives it. Its statistics do not change; its memory begins anew. One
            with a method `receive` is told the reward (N,) of each step.
        env: environments of evaluation's own; they are reset first.
        episodes: K.
        deterministic: play the mean action; otherwise sample as in training.
        seed: of the sampled actions.

    Returns:
        Figures over the K episodes.

    Raises:
        ValueError: K < 1, or the policy does not fit the environment.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, not {episodes}")
    check_fits(policy, env.spec)
    n = env.spec.num_envs
    per_env = math.ceil(episodes / n)
    generator = torch.Generator(policy.device).manual_seed(seed)

    played = torch.zeros(n, dtype=torch.int64, device=env.device)
    running: dict[str, Tensor] = {}  # sums over the steps of each row's present episode
    table: dict[str, Tensor] = {}  # (N, per_env) values of finished episodes
    receive = getattr(policy, "receive", None)
    obs = env.reset()
    policy.reset()
    while (played < per_env).any():
        action = policy(obs) if deterministic else policy.sample(obs, generator)
        step = env.step(action.to(env.device))
        if receive is not None:
            receive(step.reward)
        fault = torch.zeros(n, device=env.device)
        for found in step.info.faults:
            fault[found.row] = 1.0
        figures = {
            "episode_return": step.reward,
            "episode_length": torch.ones(n, device=env.device),
            "terminated_rate": step.terminated,
            "fault_rate": fault,
            **step.info.metrics,
        }
        for name, value in figures.items():
            if name not in running:
                running[name] = torch.zeros(n, dtype=torch.float64, device=env.device)
                table[name] = torch.zeros(n, per_env, dtype=torch.float64, device=env.device)
            running[name] += value.double()
        ended = step.terminated | step.truncated
        if ended.any():
            rows = ended.nonzero().flatten()
            count = rows[played[rows] < per_env]
            length = running["episode_length"].clone()
            for name, total in running.items():
                per_step = name in step.info.metrics
                value = total[count] / length[count] if per_step else total[count]
                table[name][count, played[count]] = value
                total[rows] = 0.0
            played[count] += 1
            policy.reset(rows)
        obs = step.obs

    values = {name: column.flatten()[:episodes].cpu() for name, column in table.items()}
    units = {"episode_length": "steps", **getattr(env, "metric_units", {})}
    metrics = {
        name: _metric(value, units.get(name, "-"), rate=name.endswith("_rate"))
        for name, value in values.items()
    }
    metrics["average_reward"] = ratio_metric(values["episode_return"], values["episode_length"])
    return Result(metrics=metrics, episodes=values)


def _metric(values: Tensor, unit: str, rate: bool) -> Metric:
    """Mean and interval of one figure."""
    ci95 = wilson(int(values.sum()), len(values)) if rate else bootstrap(values)
    return Metric(mean=float(values.mean()), ci95=ci95, n=len(values), unit=unit)


def ratio_metric(total: Tensor, steps: Tensor) -> Metric:
    """Sum of `total` per step over all episodes, with the bootstrap interval over episodes.

    Each step counts the same, whatever the length of its episode: what the mean of the episodes'
    own ratios would not give.
    """
    import numpy as np
    from scipy.stats import bootstrap as resample

    mean, ci95 = float(total.sum() / steps.sum()), None
    if len(total) > 1:
        ci95 = (mean, mean)
        if (total != mean * steps).any():
            found = resample(
                (total.numpy(), steps.numpy()),
                lambda x, y, axis: x.sum(axis) / y.sum(axis),
                n_resamples=RESAMPLES,
                confidence_level=0.95,
                paired=True,
                method="percentile",  # stands where all but one episode are equal
                rng=np.random.default_rng(0),
            ).confidence_interval
            ci95 = float(found.low), float(found.high)
    return Metric(mean=mean, ci95=ci95, n=len(total), unit="-")


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % Wilson interval of the rate hits / n."""
    from scipy.stats import binomtest

    interval = binomtest(hits, n).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap(values: Tensor) -> tuple[float, float] | None:
    """95 % bootstrap interval of the mean; None for a single value, a point if all are equal."""
    from scipy.stats import bootstrap as resample

    if len(values) < 2:
        return None
    if (values == values[0]).all():
        return float(values[0]), float(values[0])
    import numpy as np

    found = resample(
        (values.numpy(),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=0.95,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
