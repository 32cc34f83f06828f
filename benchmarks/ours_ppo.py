"""This project's PPO with the settings of `ppo_settings.py`.

`ours_ppo.py train` answers with the returns after training, `ours_ppo.py speed` ticks once per
iteration of `train`.
"""

import sys
import time

import judge
import torch
import worker

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
    run = KeepPolicy(console=False)
    start = time.process_time()
    ppo.train(settings, env, run)
    cpu = time.process_time() - start
    policy = ctrl_rl.policy.Policy.from_section(run.policy)

    def act(obs):
        return policy(torch.from_numpy(obs)).numpy()

    returns = judge.episode_returns(act, config["task"], config["episodes"], seed=10_000)
    return {"returns": returns, "env_steps": run.rows[-1]["step"], "train_cpu_s": round(cpu, 1)}


class KeepPolicy(ctrl_rl.Run):
    """A run in memory that keeps the policy of its last checkpoint."""

    def save(self, step, policy, learner, env):
        """Keep the policy section."""
        self.policy = policy


def speed(config, tick):
    """`train` for ever; one tick per iteration, as it logs."""
    settings, env = build(config, total_steps=10**12)
    steps = env.spec.num_envs * settings.num_steps

    class Tick(ctrl_rl.Run):
        def log(self, step, metrics):
            super().log(step, metrics)
            del self.rows[:-1]  # an endless run does not fill the memory
            tick(steps)

    ppo.train(settings, env, Tick(console=False))


if __name__ == "__main__":
    if sys.argv[1] == "train":
        worker.answer(train, PACKAGES)
    else:
        worker.serve(speed, PACKAGES)
