"""MetaDiffuser on tasks it has not seen: against Diffuser, and without each of its guides.

    python -m benchmarks.metadiffuser                  everything that is missing
    python -m benchmarks.metadiffuser 'Point-Robot*'   of one family

Three kinds of cells, each of which goes on where it was stopped:

- `<family>-data` trains one of our learners on each training task alone, from scratch, and records
  behaviour: episodes of uniform actions and of the policy at each of its 8 to 10 checkpoints, with
  its exploration noise. So the data is a mixture from random to trained.
- `<family>-<learner>-s<seed>` trains MetaDiffuser or Diffuser on that data.
- `<family>-<variant>-s<seed>` plays the held-out tasks; MetaDiffuser is first shown the first
  `warm_steps` steps of one episode of uniform actions per task.

Data and run folders lie in `runs/metadiffuser`. No cell is a timing.

Reading order: `FAMILIES` -> `CELLS` -> `make_data` -> `train` -> `play` -> `verdict`.
"""

import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ctrl_rl
from benchmarks.cells import ROOT, Cell, main
from ctrl_rl.checkpoints import load_checkpoint, replacing
from ctrl_rl.curves import iqm
from ctrl_rl.evaluation import EVALUATION_SEED
from ctrl_rl.policy import Policy
from offline import diffuser, metadiffuser
from offline.diffusion import PlanConfig
from offline.episodes import Episodes, concatenate
from offline.planner import Planner
from offline.segments import Segments

PLACE = ROOT / "runs" / "metadiffuser"
RESAMPLES = 10_000

FAMILIES = {
    "Point-Robot-v0": {
        "tasks": None,  # all training tasks
        "algo": "ppo",
        "algo_config": {"total_steps": 25_600},
        "episodes": 8,
        "uniform_episodes": 40,
        "seeds": 5,
        "train": {"horizon": 8, "multipliers": (1, 2), "total_steps": 7_000, "model_steps": 4_000},
        "warm_steps": 20,
        "rows": 4,
    },
    "Cheetah-Vel-v0": {
        "tasks": (0, 5, 9, 13, 18, 22, 26, 30, 34, 39),
        "algo": "fast_sac",
        "algo_config": {"total_steps": 60_000, "compile": "off"},
        "episodes": 2,
        "uniform_episodes": 10,
        "seeds": 1,
        "train": {"horizon": 8, "multipliers": (1, 2), "total_steps": 9_000, "model_steps": 4_000},
        "warm_steps": 20,
        "rows": 2,
    },
}
"""What is measured of each family. `episodes`: recorded of each policy,
`uniform_episodes` of uniform actions; `rows`: episodes played of
each held-out task."""

LEARNERS = {
    "metadiffuser": (metadiffuser.MetaDiffuser, metadiffuser.MetaDiffuserConfig),
    "diffuser": (diffuser.Diffuser, diffuser.DiffuserConfig),
}

VARIANTS = {
    "full": ("metadiffuser", {}),
    "no_return": ("metadiffuser", {"return_scale": 0.0}),
    "no_dynamics": ("metadiffuser", {"dynamics_scale": 0.0}),
    "no_guide": ("metadiffuser", {"return_scale": 0.0, "dynamics_scale": 0.0}),
    "overshoot": ("metadiffuser", {"dynamics_scale": 10.0}),
    "unconditioned": ("diffuser", {"dynamics_scale": 0.0}),
    "unconditioned_both": ("diffuser", {}),
    "unconditioned_none": ("diffuser", {"return_scale": 0.0, "dynamics_scale": 0.0}),
}
"""Variant -> learner, and what of `PlanConfig` is not its default. Diffuser's own guide is that of
the return alone."""

LABELS = {
    "full": "MetaDiffuser",
    "no_return": "MetaDiffuser without the return guide",
    "no_dynamics": "MetaDiffuser without the dynamics guide",
    "no_guide": "MetaDiffuser without both guides",
    "overshoot": "MetaDiffuser with a dynamics guide that overshoots",
    "unconditioned": "Diffuser",
    "unconditioned_both": "Diffuser with the dynamics guide, too",
    "unconditioned_none": "Diffuser without a guide",
}
"""Variant -> its name in tables."""


def cells() -> list[Cell]:
    """All cells, in the order in which they need each other."""
    found = []
    for family, plan in FAMILIES.items():
        base = {"family": family, "learner": plan["algo"], "learner_config": plan["algo_config"]}
        base |= {name: plan[name] for name in ("tasks", "episodes", "uniform_episodes")}
        found.append(Cell(name=f"{family}-data", config={"kind": "data", **base, "seed": 0}))
        for seed in range(plan["seeds"]):
            for learner in LEARNERS:
                config = {"kind": "train", "data": base, "planner": learner, "seed": seed}
                config["settings"] = plan["train"]
                found.append(Cell(name=f"{family}-{learner}-s{seed}", config=config))
            for variant, (learner, changes) in VARIANTS.items():
                config = {"kind": "play", "family": family, "planner": learner, "seed": seed}
                config |= {"settings": plan["train"], "rows": plan["rows"]}
                config["plan"] = dataclasses.asdict(PlanConfig(**changes))
                config |= {"warm_steps": plan["warm_steps"], "data": base}
                found.append(Cell(name=f"{family}-{variant}-s{seed}", config=config))
    return found


def measure(config: dict) -> dict:
    """One cell of any kind."""
    torch.set_num_threads(1)
    return {"data": make_data, "train": train, "play": play}[config["kind"]](config)


# Data ---------------------------------------------------------------------------------------


class KeepPolicies(ctrl_rl.Run):
    """A run in memory that keeps the policy of each of its checkpoints."""

    def __init__(self) -> None:
        super().__init__(console=False)
        self.policies: list[dict] = []

    def save(self, step, policy, learner, env, replay=None):
        """Only the policy."""
        self.policies.append(policy)


def make_data(config: dict) -> dict:
    """Train on each task alone and record its behaviour; a task whose file exists is done.

    Returns:
        Mean return of the episodes of uniform actions and of each policy, over the tasks; sizes;
        SHA-256 of each task's file.
    """
    family, seed = config["family"], config["seed"]
    task_class = ctrl_rl.registry.load("tasks", family)
    results = {}
    for index in config["tasks"] or task_class.train:
        path = data_path(family, index)
        if not path.is_file():
            task = task_class.Config(index=(index,))
            settings = ctrl_rl.preset(
                family, config["learner"], seed=seed + index, **config["learner_config"]
            )
            env = make_env(family, task, task_class.presets[config["learner"]]["num_envs"], seed)
            run = KeepPolicies()
            ctrl_rl.registry.load("algos", config["learner"]).train(settings, env, run)
            players = [(None, config["uniform_episodes"])]
            players += [(Policy.from_section(x), config["episodes"]) for x in run.policies]
            parts = [
                record(family, task, player, number, 1_000 * index + i)
                for i, (player, number) in enumerate(players)
            ]
            write_episodes(path, concatenate(parts))
            print(f"{path.name}: {[round(float(p.returns().mean()), 1) for p in parts]}")
        results[index] = path
    episodes = {i: read_episodes(path) for i, path in results.items()}
    uniform, n = config["uniform_episodes"], config["episodes"]
    stages = np.stack([
        [e.returns()[:uniform].mean(), *e.returns()[uniform:].reshape(-1, n).mean(1)]
        for e in episodes.values()
    ])  # fmt: skip
    return {
        "tasks": list(results),
        "steps": sum(e.num_steps for e in episodes.values()),
        "mean_return_by_stage": stages.mean(0).round(2).tolist(),
        "best_return_by_task": [float(e.returns().max()) for e in episodes.values()],
        "sha256": {str(i): hashlib.sha256(p.read_bytes()).hexdigest() for i, p in results.items()},
    }


def make_env(family: str, task, num_envs: int, seed: int):
    """Environments of a family, on one thread."""
    return ctrl_rl.make(family, num_envs, seed=seed, threads=1, config=task)


def record(family: str, task, policy: Policy | None, episodes: int, seed: int) -> Episodes:
    """Whole episodes side by side, of sampled actions; of uniform ones without a policy."""
    env = make_env(family, task, episodes, seed)
    generator = torch.Generator().manual_seed(seed)
    steps = walk(env, lambda obs: act(env.spec, policy, obs, generator), env.spec.max_episode_steps)
    obs, action, reward = (x.flatten(0, 1) for x in steps)
    n, t = episodes, env.spec.max_episode_steps
    return Episodes(
        obs=obs.numpy(),
        action=action.numpy(),
        reward=reward.numpy(),
        lengths=np.full(n, t),
        terminated=np.zeros(n, bool),
        truncated=np.ones(n, bool),
        final_known=np.ones(n, bool),
    )


def act(spec, policy: Policy | None, obs, generator: torch.Generator) -> Tensor:
    """A sampled action, or a uniform one."""
    if policy is not None:
        return policy.sample(obs, generator)
    low, high = (torch.tensor([getattr(x, end) for x in spec.action]) for end in ("low", "high"))
    shape = len(obs["actor"]), spec.action_size
    return torch.lerp(low, high, torch.rand(shape, generator=generator))


def walk(env, policy: Callable, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """obs (N, T + 1, d), action (N, T, A) and reward (N, T) of the first steps of an episode."""
    obs = env.reset()
    seen, actions, rewards = [obs["actor"]], [], []
    for _ in range(num_steps):
        actions.append(policy(obs))
        step = env.step(actions[-1])
        seen.append(step.next_obs["actor"])
        rewards.append(step.reward)
        obs = step.obs
    return torch.stack(seen, 1), torch.stack(actions, 1), torch.stack(rewards, 1)


def data_path(family: str, index: int) -> Path:
    """File of a task's recorded episodes."""
    return PLACE / family / "data" / f"task-{index:02d}.npz"


def write_episodes(path: Path, episodes: Episodes) -> None:
    """Write an npz in one go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("obs", "action", "reward", "lengths", "terminated", "truncated", "final_known")
    with replacing(path, "wb") as file:
        np.savez(file, **{name: getattr(episodes, name) for name in names})


def read_episodes(path: Path) -> Episodes:
    """What `write_episodes` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return Episodes(**dict(file))


# Training and playing -----------------------------------------------------------------------


def train(config: dict) -> dict:
    """Train a planner in a run folder of its own, or go on in it.

    Returns:
        The losses of the last row of each phase, and its CPU time.
    """
    family = config["data"]["family"]
    task_class = ctrl_rl.registry.load("tasks", family)
    folder = run_folder(config)
    learner, config_class = LEARNERS[config["planner"]]
    settings = config_class(seed=config["seed"], **_tuples(config["settings"]))
    tasks = [
        read_episodes(data_path(family, i)) for i in config["data"]["tasks"] or task_class.train
    ]
    data = Segments(tasks, settings.horizon)
    spec = make_env(family, task_class.Config(), 1, 0).spec
    start = time.process_time()
    done = folder / "checkpoints" / "last.pt"
    resume = (folder / "config.json").is_file()
    run = ctrl_rl.Run(folder, resume=resume, console=False)
    diffuser.fit(learner(settings, data, spec), run)
    rows = [row for row in run.rows if "loss/reward" in row]
    return {
        "loss/reward": rows[-1]["loss/reward"],
        "loss/dynamics": rows[-1]["loss/dynamics"],
        "loss/diffusion": run.rows[-1]["loss/diffusion"],
        "parameters": sum(x.numel() for x in load_checkpoint(done)["policy"]["weights"].values()),
        "cpu_s": round(time.process_time() - start, 1),
    }


def run_folder(config: dict) -> Path:
    """Of the planner that a cell trains or plays."""
    return PLACE / config["data"]["family"] / f"{config['planner']}-s{config['seed']}"


def play(config: dict) -> dict:
    """Play every held-out task.

    Returns:
        `returns`: mean return of each held-out task; `mean` over them; for comparison the return
        of uniform actions on each.
    """
    family, seed, rows = config["family"], config["seed"], config["rows"]
    task_class = ctrl_rl.registry.load("tasks", family)
    held_out = task_class.held_out
    task = task_class.Config(index=held_out)
    section = load_checkpoint(run_folder(config) / "checkpoints" / "last.pt")["policy"]
    settings = PlanConfig(**config["plan"])
    start = time.process_time()
    uniform = make_env(family, task, len(held_out), seed + EVALUATION_SEED)
    generator = torch.Generator().manual_seed(seed)
    obs, action, reward = walk(
        uniform, lambda o: act(uniform.spec, None, o, generator), uniform.spec.max_episode_steps
    )
    if config["planner"] == "metadiffuser":
        planner = metadiffuser.MetaPlanner(section, plan=settings, seed=seed)
        h = config["warm_steps"]
        planner.warm_start(obs[:, :h], action[:, :h], reward[:, :h], obs[:, 1 : h + 1])
    else:
        planner = Planner(section, plan=settings, seed=seed)
    env = make_env(family, task, rows * len(held_out), seed + EVALUATION_SEED + 1)
    found = ctrl_rl.evaluate(planner, env, rows * len(held_out))
    returns = found.episodes["episode_return"].view(rows, len(held_out)).mean(0)
    return {
        "held_out": list(held_out),
        "returns": [round(x, 3) for x in returns.tolist()],
        "mean": round(float(returns.mean()), 3),
        "uniform": [round(x, 3) for x in reward.sum(1).tolist()],
        "cpu_s": round(time.process_time() - start, 1),
    }


def _tuples(settings: dict) -> dict:
    """JSON's lists as the tuples that configurations hold."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


def best_return() -> float:
    """Mean over Point-Robot's held-out goals of the largest return, from the origin.

    No plan is nearer at any step than one that moves as far as it may along both axes.
    """
    from robots.tasks.point_robot import GOALS, HELD_OUT, REACH, PointRobotConfig

    far = np.abs(np.array([GOALS[i] for i in HELD_OUT]))[:, None]
    moved = REACH * np.arange(1, PointRobotConfig().max_episode_steps + 1)[None, :, None]
    return float(-np.linalg.norm(np.maximum(far - moved, 0), axis=2).sum(1).mean())


def verdict(ours: np.ndarray, other: np.ndarray) -> dict:
    """Difference of the interquartile means over seeds and its 95 % bootstrap interval.

    Args:
        ours: mean return of each seed (S,).
        other: the same of the other side.
    """
    draw = np.random.default_rng(0).integers
    resampled = [x[draw(0, len(x), (RESAMPLES, len(x)))] for x in (ours, other)]
    low, high = np.percentile(iqm(resampled[0].T) - iqm(resampled[1].T), (2.5, 97.5))
    return {
        "iqm": float(iqm(ours)),
        "iqm_other": float(iqm(other)),
        "difference": float(iqm(ours) - iqm(other)),
        "ci95": (float(low), float(high)),
    }


CELLS = cells()

if __name__ == "__main__":
    sys.exit(main("metadiffuser", CELLS, measure))
