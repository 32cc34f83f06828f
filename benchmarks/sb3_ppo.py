"""stable-baselines3's PPO with the settings of `ppo_settings.py`; runs in the peer's interpreter.

`sb3_ppo.py train` answers with the returns after training, `sb3_ppo.py speed` ticks once per
iteration of `learn`.
"""

import math
import sys
import time
from typing import Any

import judge
import torch
import worker
from sb3_curve import Returns
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

PACKAGES = ("stable-baselines3", "torch", "gymnasium", "mujoco", "numpy")


def build(config):
    """The learner and its vectorised environments, observations normalised, rewards not."""
    torch.set_num_threads(config["torch_threads"])
    s = config["settings"]
    vectorised = {"DummyVecEnv": DummyVecEnv, "SubprocVecEnv": SubprocVecEnv}[config["vec_env"]]
    env = make_vec_env(
        config["task"], n_envs=s["num_envs"], seed=config["seed"], vec_env_cls=vectorised
    )
    env = VecNormalize(env, norm_obs=True, norm_reward=False, clip_obs=10.0)
    return PPO(
        "MlpPolicy",
        env,
        n_steps=s["num_steps"],
        batch_size=s["batch_size"],
        n_epochs=s["epochs"],
        learning_rate=s["learning_rate"],
        gamma=s["gamma"],
        gae_lambda=s["gae_lambda"],
        clip_range=s["clip_range"],
        ent_coef=s["entropy_coef"],
        vf_coef=s["value_coef"],
        max_grad_norm=s["max_grad_norm"],
        policy_kwargs={
            "net_arch": list(s["hidden"]),
            "activation_fn": {"tanh": torch.nn.Tanh}[s["activation"]],
            "log_std_init": math.log(s["initial_std"]),
        },
        seed=config["seed"],
        device="cpu",
    )


def train(config):
    """Train, then play in gymnasium with the statistics of training."""
    model = build(config)
    returns = Returns(config["settings"]["num_envs"] * config["settings"]["num_steps"])
    wall, cpu = time.perf_counter(), time.process_time()
    model.learn(config["settings"]["total_steps"], callback=returns)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    env: Any = model.get_env()

    def policy(obs):
        return model.predict(env.normalize_obs(obs), deterministic=True)[0]

    return {
        "returns": judge.episode_returns(policy, config["task"], config["episodes"], seed=10_000),
        "env_steps": model.num_timesteps,
        "train_wall_s": round(wall, 1),
        "train_cpu_s": round(cpu, 1),
        "curve": returns.curve.columns(),
    }


def speed(config, tick):
    """`learn` for ever; one tick per roll-out and update."""
    steps = config["settings"]["num_envs"] * config["settings"]["num_steps"]

    class Tick(BaseCallback):
        def _on_rollout_start(self):
            tick(steps)

        def _on_step(self):
            return True

    build(config).learn(10**12, callback=Tick())


if __name__ == "__main__":
    if sys.argv[1] == "train":
        worker.answer(train, PACKAGES)
    else:
        worker.serve(speed, PACKAGES)
