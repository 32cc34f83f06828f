"""sb3-contrib's recurrent PPO on Pendulum without its speed; runs in the peer's interpreter."""

import time

import gymnasium
import numpy as np
import torch
import worker
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env

PACKAGES = ("sb3-contrib", "stable-baselines3", "torch", "gymnasium", "numpy")


class Blind(gymnasium.ObservationWrapper):
    """Pendulum-v1 whose observation lacks the speed."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))

    def observation(self, observation):
        """cos, sin."""
        return observation[:2]


def train(config):
    """Train once and play the last policy."""
    torch.set_num_threads(1)
    s, seed = config["settings"], config["seed"]
    make = lambda: Blind(gymnasium.make("Pendulum-v1"))  # noqa: E731
    env = make_vec_env(make, n_envs=s["num_envs"], seed=seed)
    model = RecurrentPPO(
        "MlpLstmPolicy",
        env,
        n_steps=s["num_steps"],
        batch_size=s["num_steps"] * s["num_envs"] // 4,
        n_epochs=s["num_epochs"],
        learning_rate=s["learning_rate"],
        gamma=s["gamma"],
        gae_lambda=s["gae_lambda"],
        clip_range=s["clip_range"],
        policy_kwargs={
            "lstm_hidden_size": s["memory_size"],
            "net_arch": list(s["hidden"]),
            "enable_critic_lstm": True,
        },
        seed=seed,
        device="cpu",
    )
    wall = time.perf_counter()
    model.learn(s["total_steps"])
    wall = time.perf_counter() - wall
    count = config["episodes"]
    judge = make_vec_env(make, n_envs=count, seed=seed + 10_000)
    obs, state, starts = judge.reset(), None, np.ones(count, bool)
    total = np.zeros(count)
    for _ in range(200):  # every episode of Pendulum
        action, state = model.predict(obs, state, starts, deterministic=True)
        obs, reward, starts, _ = judge.step(action)
        total += reward
    return {"return": float(total.mean()), "train_wall_s": round(wall, 1)}


if __name__ == "__main__":
    worker.answer(train, PACKAGES)
