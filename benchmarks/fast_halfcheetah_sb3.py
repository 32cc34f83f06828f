"""stable-baselines3's SAC with its defaults, until the goal; runs in the peer's interpreter.

Its zoo's one change for HalfCheetah, 10,000 steps before learning starts, is taken over.
"""

import time

import gymnasium
import judge
import torch
import worker
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback

PACKAGES = ("stable-baselines3", "torch", "gymnasium", "mujoco", "numpy")


def train(config):
    """The curve, and when the goal was reached."""
    torch.set_num_threads(config["torch_threads"])
    begun, curve = time.perf_counter(), []
    env = gymnasium.make(config["task"])
    model = SAC("MlpPolicy", env, learning_starts=10_000, seed=config["seed"], device="cpu")

    class Judge(BaseCallback):
        judged_s = 0.0

        def _on_step(self):
            if self.num_timesteps % config["evaluate_every"]:
                return True
            now = time.perf_counter()
            play = lambda obs: model.predict(obs, deterministic=True)[0]  # noqa: E731
            returns = judge.episode_returns(play, config["task"], config["episodes"], seed=10_000)
            mean = sum(returns) / len(returns)
            seconds = round(now - begun - self.judged_s, 2)
            curve.append([seconds, self.num_timesteps, round(mean, 1)])
            self.judged_s += time.perf_counter() - now
            return mean < config["goal"]

    model.learn(config["max_steps"], callback=Judge())
    reached = [seconds for seconds, _, mean in curve if mean >= config["goal"]]
    return {"curve": curve, "goal_s": reached[0] if reached else None}


if __name__ == "__main__":
    worker.answer(train, PACKAGES)
