"""Average reward of ARO-DDPG against DDPG: two bodies of its paper's suite, five seeds each.

Both learners have the settings of ARO-DDPG's authors (their code for cheetah run): networks, step
sizes, replay, noise, warm-up and number of updates. Apart is what the algorithms say: the target,
DDPG's discount, one critic or two, and when the actor steps.

The tasks are cheetah and walker as gymnasium has them. Their rewards are not those of the control
suite that the authors train in; like there, an episode ends at its time limit alone: `Walker2d-v5`
is set to go on after a fall, and without the constant that it pays for each step not to fall. The
last policy is played without noise, from starts of its own, in episodes of 10,000 steps as by the
authors, ten times those of training.
"""

import dataclasses
import math
import sys
import time

import numpy as np
import torch

import ctrl_rl
from benchmarks.cells import Cell, main
from ctrl_rl.curves import iqm
from ctrl_rl.evaluation import EVALUATION_SEED
from ctrl_rl.policy import Policy

SEEDS = range(5)
RESAMPLES = 10_000
TASKS = ("HalfCheetah-v5", "Walker2d-v5")
LEARNERS = ("aro_ddpg", "ddpg")

SETTINGS = {
    "total_steps": 100_000,
    "warmup_steps": 5_000,
    "updates_per_step": 1.0,
    "update_every": 1_000,
    "buffer_size": 100_000,
    "batch_size": 256,
    "actor_learning_rate": 3e-4,
    "critic_learning_rate": 3e-4,
    "polyak": 0.005,
    "ou_theta": 0.15,
    "ou_sigma": 0.2,
    "hidden": (128, 128),
    "activation": "relu",
    "compile": "on",
}
"""Of both learners; `total_steps` makes a cell of minutes on one core, where the authors take a
million."""

CELLS = [
    Cell(
        name=f"{learner}-{task}-s{seed}",
        config={
            "learner": learner,
            "task": task,
            "seed": seed,
            "num_envs": 1,
            "threads": 1,
            "torch_threads": 1,
            "episodes": 10,
            "episode_steps": 10_000,
            "settings": SETTINGS,
        },
    )
    for seed in SEEDS
    for task in TASKS
    for learner in LEARNERS
]


class KeepPolicy(ctrl_rl.Run):
    """A run in memory that keeps the policy of its last checkpoint."""

    def save(self, step, policy, learner, env, replay=None):
        """Only the policy."""
        self.policy = policy


def measure(config: dict) -> dict:
    """Train once and play the last policy.

    Returns:
        `average_reward` and its interval over episodes; `gain` that ARO-DDPG has learnt; the
        average reward in training, noise included, over each tenth of the steps; clocks.
    """
    torch.set_num_threads(config["torch_threads"])
    settings = {**config["settings"], "hidden": tuple(config["settings"]["hidden"])}
    algo = ctrl_rl.registry.load("algos", config["learner"])
    task = continuing(config["task"])
    make = lambda num_envs, seed, **changes: ctrl_rl.make(  # noqa: E731
        config["task"],
        num_envs,
        seed=seed,
        threads=config["threads"],
        config=dataclasses.replace(task, **changes),
    )
    env, run = make(config["num_envs"], config["seed"]), KeepPolicy(console=False)
    wall, cpu = time.perf_counter(), time.process_time()
    algo.train(ctrl_rl.preset(config["task"], config["learner"], seed=config["seed"], **settings),
               env, run)  # fmt: skip
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    judge = make(
        config["episodes"],
        config["seed"] + EVALUATION_SEED,
        max_episode_steps=config["episode_steps"],
    )
    found = ctrl_rl.evaluate(Policy.from_section(run.policy), judge, config["episodes"])
    average = found.metrics["average_reward"]
    tenths = np.array_split([row["rollout/average_reward"] for row in run.rows], 10)
    return {
        "average_reward": average.mean,
        "ci95": list(average.ci95 or ()),
        "gain": run.rows[-1].get("value/gain"),
        "training": [round(float(x.mean()), 3) for x in tenths if len(x)],
        "env_steps": run.rows[-1]["step"],
        "train_wall_s": round(wall, 1),
        "train_cpu_s": round(cpu, 1),
    }


def continuing(task: str):
    """The task's configuration, in which nothing but the time limit ends an episode."""
    config = ctrl_rl.registry.load("tasks", task).Config()
    if task == "Walker2d-v5":
        anything = (-math.inf, math.inf)
        return dataclasses.replace(
            config, healthy_z=anything, healthy_angle=anything, healthy_reward=0.0
        )
    return config


def verdict(ours: np.ndarray, baseline: np.ndarray) -> dict:
    """Difference of the interquartile means over seeds and its 95 % bootstrap interval.

    Args:
        ours: average reward of each seed (S,).
        baseline: the same of the baseline.
    """
    draw = np.random.default_rng(0).integers
    resampled = [x[draw(0, len(x), (RESAMPLES, len(x)))] for x in (ours, baseline)]
    low, high = np.percentile(iqm(resampled[0].T) - iqm(resampled[1].T), (2.5, 97.5))
    return {
        "iqm": float(iqm(ours)),
        "iqm_baseline": float(iqm(baseline)),
        "difference": float(iqm(ours) - iqm(baseline)),
        "ci95": (float(low), float(high)),
    }


if __name__ == "__main__":
    sys.exit(main("aro_ddpg", CELLS, measure))
