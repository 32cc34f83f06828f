"""What memory is worth: Pendulum without its speed, by PPO and recurrent PPO, and by sb3-contrib's.

The observation is the angle alone, as cosine and sine; the speed must be remembered. Everything
else is gymnasium's Pendulum-v1. Both recurrent learners have an LSTM of 64 in actor and critic, 16
environments and the same PPO settings; PPO has no memory. Each policy is played in 100 episodes
from starts of its own, by its mean.
"""

import sys
from dataclasses import replace

import torch

import ctrl_rl
from benchmarks import peers
from benchmarks.aro_ddpg import KeepPolicy
from benchmarks.cells import Cell, main
from ctrl_rl import ppo, recurrent_ppo
from ctrl_rl.evaluation import EVALUATION_SEED
from ctrl_rl.policy import Policy
from robots.tasks.pendulum import Pendulum

SETTINGS = {
    "total_steps": 200_000,
    "num_envs": 16,
    "num_steps": 128,
    "num_epochs": 10,
    "learning_rate": 1e-3,
    "gamma": 0.9,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "memory_size": 64,
    "hidden": [64],
}
EPISODES = 100
LEARNERS = ("recurrent_ppo", "ppo", "sb3-contrib")

CELLS = [
    Cell(
        name=f"{learner}-s{seed}",
        config={"learner": learner, "seed": seed, "episodes": EPISODES, "settings": SETTINGS},
    )
    for seed in range(5)
    for learner in LEARNERS
]


class Blind(Pendulum):
    """Pendulum whose observation lacks the speed."""

    id = "Pendulum-Blind-v0"

    def make_spec(self):
        """cos, sin; one torque."""
        spec = super().make_spec()
        return replace(spec, obs={"actor": spec.obs["actor"][:1]})

    def observe_terms(self, rows):
        """Raw values."""
        return {"angle": super().observe_terms(rows)["angle"]}


def measure(config: dict) -> dict:
    """Train once and play the last policy.

    Returns:
        `return`, the mean over the episodes, and the wall-clock of training.
    """
    if config["learner"] == "sb3-contrib":
        answer = peers.call("sb3", "sb3_memory.py", config)
        return {**answer["result"], "versions": answer["versions"]}
    torch.set_num_threads(1)
    s = dict(config["settings"])
    num_envs, run = s.pop("num_envs"), KeepPolicy(console=False)
    shared = {k: v for k, v in s.items() if k not in ("memory_size", "hidden")}
    shared |= {"seed": config["seed"], "target_kl": None, "max_grad_norm": 0.5}
    env = Blind(num_envs=num_envs, seed=config["seed"])
    if config["learner"] == "ppo":
        settings = ppo.PPOConfig(**shared, num_minibatches=4, hidden=(64, 64), compile="off")
        ppo.train(settings, env, run)
    else:
        hidden, size = tuple(s["hidden"]), s["memory_size"]
        settings = recurrent_ppo.RecurrentPPOConfig(
            **shared, num_minibatches=4, hidden=hidden, memory_size=size
        )
        recurrent_ppo.train(settings, env, run)
    judge = Blind(num_envs=config["episodes"], seed=config["seed"] + EVALUATION_SEED)
    found = ctrl_rl.evaluate(Policy.from_section(run.policy), judge, config["episodes"])
    wall = sum(row["time/collect_s"] + row["time/update_s"] for row in run.rows)
    return {"return": found.metrics["episode_return"].mean, "train_wall_s": round(wall, 1)}


if __name__ == "__main__":
    sys.exit(main("memory", CELLS, measure))
