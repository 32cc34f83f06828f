"""Do the evaluators put five policies in the order of what they truly earn?

`point`: PPO is stopped at five points of its training, in one task of Point-Robot-v0, whose
episodes have 20 steps; the second policy's behaviour is recorded. Every estimator of `offline.ope`
judges all five from those 1,024 episodes and the probabilities of what was done, and fitted Q
evaluation without them. The truth is the mean of 4,096 episodes in the simulator, of the policies
as they sample; of fitted Q evaluation, which judges a policy without noise over a course without
end, as they act on average, in 200 steps.

`hopper`: five points of an expert's training, judged by fitted Q evaluation from data that a
beginner's replay holds. Needs the files of `benchmarks.offline_data`.

Spearman's rank correlation is 1 for the right order, and 0 for none.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

import ctrl_rl
from benchmarks.cells import Absent, Cell, main, run_cli
from benchmarks.offline_data import DATA
from ctrl_rl import registry
from offline import datasets, ope
from offline.transitions import Transitions

HORIZON, POLICIES = 20, 5
POINT = {
    "task": "Point-Robot-v0",
    "index": 3,
    "gamma": 0.95,
    "steps": 32 * 32 * HORIZON,  # each of 32 environments plays 32 whole episodes
    "training": {"num-envs": 64, "algo.num-steps": 16, "total-steps": 25 * 64 * 16},
    "fqe_steps": 10_000,
    "fqe_hidden": (64, 64),
}
HOPPER = {
    "task": "Hopper-v5",
    "gamma": 0.99,
    "dataset": "hopper-medium-replay.hdf5",
    "fqe_steps": 50_000,
    "fqe_hidden": (256, 256),
}

CELLS = [Cell(name=f"point-s{seed}", config={**POINT, "seed": seed}) for seed in range(5)]
CELLS.append(Cell(name="hopper", config={**HOPPER, "seed": 0}))

ESTIMATORS = {
    "importance sampling": ope.importance_sampling,
    "per decision": ope.per_decision,
    "doubly robust": ope.doubly_robust,
}


def measure(config: dict) -> dict:
    """Train, record, judge.

    Returns:
        For each estimator its estimates of the five policies, the truth, and the correlation.
    """
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])  # of sampled actions
    return hopper(config) if "dataset" in config else point(config)


def point(config: dict) -> dict:
    """Every estimator, with the recorded probabilities."""
    gamma, seed = config["gamma"], config["seed"]
    with tempfile.TemporaryDirectory() as folder:
        run, total = Path(folder) / "run", config["training"]["total-steps"]
        flags = [w for k, v in config["training"].items() for w in (f"--{k}", str(v))]
        run_cli("train", config["task"], "--seed", str(seed), "--run-dir", str(run), *flags,
                "--task.index", str(config["index"]),
                "--checkpoint-every", str(total // POLICIES), "--video-s", "0")  # fmt: skip
        saved = sorted(int(p.stem[5:]) for p in (run / "checkpoints").glob("step-*.pt"))
        policies = [ctrl_rl.load_policy(run, str(step)) for step in saved[-POLICIES:]]
        path = Path(folder) / "data.hdf5"
        run_cli("dataset", "collect", config["task"], "--sources", f"{run}:{saved[-4]}",
                "--steps", str(config["steps"]), "--num-envs", "32", "--seed", str(seed),
                "--out", str(path))  # fmt: skip
        episodes = datasets.load(path)
    behaviour, last = policies[1], np.cumsum(episodes.lengths + 1) - 1
    obs = torch.from_numpy(np.delete(episodes.obs, last, 0))
    action = torch.from_numpy(episodes.action)
    reward, lengths = torch.from_numpy(episodes.reward), torch.from_numpy(episodes.lengths)
    data = Transitions.from_episodes(episodes, timeouts="keep", normalize_obs=True)
    rows = torch.from_numpy(np.delete(np.arange(len(data.rows)), last))
    found: dict[str, list[float]] = {}
    generator = torch.Generator().manual_seed(seed)
    for policy in policies:
        log_ratio = log_prob(policy, obs, action) - log_prob(behaviour, obs, action)
        steps = ope.lay_out(reward, log_ratio, lengths)
        fqe = ope.fitted_q(fqe_settings(config), data, policy.spec, policy, (seed,))
        q = fqe.q(rows, action)[0]
        drawn = [fqe.q(rows, policy.sample(obs, generator))[0] for _ in range(8)]
        parts = {"doubly robust": (q, torch.stack(drawn).mean(0))}
        for name, estimate in ESTIMATORS.items():
            for weighted in (False, True):
                title = f"{name}, weighted" if weighted else name
                value = estimate(steps, *parts.get(name, ()), gamma=gamma, weighted=weighted)
                found.setdefault(title, []).append(value)
        found.setdefault("fitted Q", []).append(float(fqe.value().mean()))
    sampled = [truth(config, p, HORIZON, p.sample) for p in policies]
    settled = [truth(config, p, 200, p) for p in policies]
    return {
        name: judged(values, settled if name == "fitted Q" else sampled)
        for name, values in found.items()
    }


def hopper(config: dict) -> dict:
    """Fitted Q evaluation alone: nobody wrote down the probabilities of a replay."""
    path, run = DATA / config["dataset"], DATA / "runs" / "hopper" / "expert"
    if not (path.is_file() and (run / "config.json").is_file()):
        raise Absent("python -m benchmarks.offline_data hopper makes its data")
    saved = sorted(int(p.stem[5:]) for p in (run / "checkpoints").glob("step-*.pt"))
    chosen = saved[1 :: max((len(saved) - 1) // POLICIES, 1)][:POLICIES]
    policies = [ctrl_rl.load_policy(run, str(step)) for step in chosen]
    data = Transitions.from_episodes(datasets.load(path), timeouts="keep", normalize_obs=True)
    settings = fqe_settings(config)
    values = [
        float(ope.fitted_q(settings, data, p.spec, p, (config["seed"],)).value().mean())
        for p in policies
    ]
    return {"fitted Q": judged(values, [truth(config, p, 1000, p, 256) for p in policies])}


def fqe_settings(config: dict) -> ope.FQEConfig:
    """Of fitted Q evaluation."""
    hidden = tuple(config["fqe_hidden"])
    return ope.FQEConfig(
        total_steps=config["fqe_steps"], gamma=config["gamma"], hidden=hidden, compile="off"
    )


def log_prob(policy, obs: Tensor, action: Tensor) -> Tensor:
    """log pi(a|s) (T,) of a normal policy whose actions are cut at the bounds."""
    section = policy.section()
    assert section["kind"] == "gaussian_mlp" and section["bound"] == "clip"
    with torch.no_grad():
        mean = policy.module.head(obs).double()
    low, high = (
        torch.tensor([getattr(d, side) for d in policy.spec.action]) for side in ("low", "high")
    )
    return cut_log_prob(mean, section["log_std"].double().exp(), action, low, high)


def cut_log_prob(mean: Tensor, std: Tensor, action: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """log of what a normal, cut at low and high (A,), says of actions (T, A): (T,).

    Inside it is a density; at a bound the probability of all that was cut there.
    """
    normal = torch.distributions.Normal(mean, std)
    inside = normal.log_prob(action.double())
    below, above = normal.cdf(low.double()).log(), (1 - normal.cdf(high.double())).log()
    cut = torch.where(action <= low, below, torch.where(action >= high, above, inside))
    return cut.sum(1)


def truth(config: dict, policy, steps: int, act, num_envs: int = 4096) -> float:
    """Mean discounted return of `num_envs` episodes from fresh starts."""
    task = registry.load("tasks", config["task"])
    own = {"index": (config["index"],)} if "index" in config else {}
    settings = replace(task.Config(), max_episode_steps=steps, **own)
    env = ctrl_rl.make(config["task"], num_envs, seed=config["seed"] + 77, config=settings)
    obs, total = env.observe(), torch.zeros(num_envs, dtype=torch.float64)
    alive = torch.ones(num_envs, dtype=torch.bool)
    for t in range(steps):
        step = env.step(act(obs))
        total += config["gamma"] ** t * step.reward.double() * alive
        alive &= ~(step.terminated | step.truncated)
        obs = step.obs
    return float(total.mean())


def judged(values: list[float], true: list[float]) -> dict:
    """Estimates, truth, and the rank correlation of both."""
    return {
        "estimates": values,
        "truth": true,
        "spearman": float(spearmanr(values, true).statistic),
    }


if __name__ == "__main__":
    sys.exit(main("ope", CELLS, measure))
