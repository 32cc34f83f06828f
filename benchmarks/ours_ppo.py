"""This project's PPO with the settings of `ppo_settings.py`.

`ours_ppo.py train` answers with the returns after training, `ours_ppo.py speed` ticks once per
iteration of `train`.
"""

import sys
import time

import judge
import torch
import worker
from ours_runs import KeepPolicy, Newest

import ctrl_rl
from ctrl_rl import ppo

PACKAGES = ("ctrl-rl", "torch", "gymnasium", "mujoco", "numpy")


def build(config, total_steps):
    """Configuration and environments."""
    torch.set_num_threads(config["torch_threads"])
    s = config["settings"]
    env = ctrl_rl.make(
        config["task"],
        s["num_envs"],
        seed=config["seed"],
        threads=config["sim_threads"],
    )
    settings = ppo.PPOConfig(
        total_steps=total_steps,
        seed=config["seed"],
        num_steps=s["num_steps"],
        num_epochs=s["epochs"],
        num_minibatches=s["num_envs"] * s["num_steps"] // s["batch_size"],
        learning_rate=s["learning_rate"],
        target_kl=None,
        gamma=s["gamma"],
        gae_lambda=s["gae_lambda"],
        clip_range=s["clip_range"],
        entropy_coef=s["entropy_coef"],
        value_coef=s["value_coef"],
        max_grad_norm=s["max_grad_norm"],
        hidden=tuple(s["hidden"]),
        activation=s["activation"],
        initial_std=s["initial_std"],
        normalize_obs=True,
        compile=config["compile"],
    )
    return settings, env


def train(config):
    """Train, then play in gymnasium with the policy as it would be shipped."""
    settings, env = build(config, config["settings"]["total_steps"])
    run = KeepPolicy()
    wall, cpu = time.perf_counter(), time.process_time()
    ppo.train(settings, env, run)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    policy = ctrl_rl.policy.Policy.from_section(run.policy)

    def act(obs):
        return policy(torch.from_numpy(obs)).numpy()

    return {
        "returns": judge.episode_returns(act, config["task"], config["episodes"], seed=10_000),
        "env_steps": run.rows[-1]["step"],
        "train_wall_s": round(wall, 1),
        "train_cpu_s": round(cpu, 1),
        "curve": run.curve.columns(),
    }


def speed(config, tick):
    """`train` for ever; one tick per iteration, as it logs."""
    settings, env = build(config, total_steps=10**12)
    steps = env.spec.num_envs * settings.num_steps

    class Tick(Newest):
        def log(self, step, metrics):
            super().log(step, metrics)
            tick(steps)

    ppo.train(settings, env, Tick())


if __name__ == "__main__":
    if sys.argv[1] == "train":
        worker.answer(train, PACKAGES)
    else:
        worker.serve(speed, PACKAGES)
