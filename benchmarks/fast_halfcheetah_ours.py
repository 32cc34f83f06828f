"""This project's FastSAC with the task's preset, until the goal; see `fast_halfcheetah.py`."""

import time
from dataclasses import replace

import judge
import torch
import worker

import ctrl_rl
from ctrl_rl import fast_sac, registry

PACKAGES = ("ctrl-rl", "torch", "gymnasium", "mujoco", "numpy")


class UntilGoal(ctrl_rl.Run):
    """Asks for an evaluation after every row, and stops at the goal."""

    def __init__(self, goal):
        super().__init__(console=False)
        self.goal, self.best = goal, -float("inf")

    def due(self, kind, step):
        """Evaluate always, save never."""
        return kind == "eval"

    def stopping(self, step):
        """The goal is reached."""
        return self.best >= self.goal


def train(config):
    """The curve, and when the goal was reached."""
    torch.set_num_threads(config["torch_threads"])
    begun, judged_s, curve = time.perf_counter(), 0.0, []
    settings = ctrl_rl.preset(config["task"], "fast_sac")
    settings = replace(settings, total_steps=config["max_steps"], seed=config["seed"])
    num_envs = registry.load("tasks", config["task"]).presets["fast_sac"]["num_envs"]
    threads = config["sim_threads"]
    env = ctrl_rl.make(config["task"], num_envs, seed=config["seed"], threads=threads)
    run = UntilGoal(config["goal"])

    def evaluate(policy):
        nonlocal judged_s
        now = time.perf_counter()
        play = lambda obs: policy(torch.from_numpy(obs)).numpy()  # noqa: E731
        returns = judge.episode_returns(play, config["task"], config["episodes"], seed=10_000)
        mean = sum(returns) / len(returns)
        curve.append([round(now - begun - judged_s, 2), run.rows[-1]["step"], round(mean, 1)])
        judged_s += time.perf_counter() - now
        run.best = max(run.best, mean)
        return {"eval/episode_return": mean}

    fast_sac.train(settings, env, run, evaluate)
    reached = [seconds for seconds, _, mean in curve if mean >= config["goal"]]
    return {"curve": curve, "goal_s": reached[0] if reached else None}


if __name__ == "__main__":
    worker.answer(train, PACKAGES)
