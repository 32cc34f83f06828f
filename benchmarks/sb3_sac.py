"""stable-baselines3's SAC with the settings of `sac_settings.py`; runs in the peer's interpreter.

`sb3_sac.py train` answers with the returns after training, `sb3_sac.py updates` ticks once per
block of updates on a replay of random steps, `sb3_sac.py loop` once per env step of `learn`.
"""

import sys
import time

import judge
import torch
import worker
from sb3_curve import Returns
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

PACKAGES = ("stable-baselines3", "torch", "gymnasium", "mujoco", "numpy")
BLOCK = 50  # updates between two looks at the clock
LOG_EVERY = 1000  # env steps behind a row of the curve


def build(config, warmup_steps):
    """The learner and its environments; networks with ReLU, as by default."""
    torch.set_num_threads(config["torch_threads"])
    s = config["settings"]
    env = make_vec_env(config["task"], n_envs=s["num_envs"], seed=config["seed"])
    return SAC(
        "MlpPolicy",
        env,
        learning_rate=s["learning_rate"],
        buffer_size=s["buffer_size"],
        learning_starts=warmup_steps,
        batch_size=s["batch_size"],
        tau=s["polyak"],
        gamma=s["gamma"],
        train_freq=1,
        gradient_steps=s["updates_per_step"] * s["num_envs"],
        policy_kwargs={"net_arch": list(s["hidden"])},
        seed=config["seed"],
        device="cpu",
    )


def train(config):
    """Train, then play in gymnasium."""
    model = build(config, config["settings"]["warmup_steps"])
    returns = Returns(LOG_EVERY)
    wall, cpu = time.perf_counter(), time.process_time()
    model.learn(config["settings"]["total_steps"], callback=returns)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu

    def policy(obs):
        return model.predict(obs, deterministic=True)[0]

    return {
        "returns": judge.episode_returns(policy, config["task"], config["episodes"], seed=10_000),
        "env_steps": model.num_timesteps,
        "train_wall_s": round(wall, 1),
        "train_cpu_s": round(cpu, 1),
        "curve": returns.curve.columns(),
    }


def updates(config, tick):
    """Updates for ever, drawn from `filled` steps; one tick per block."""
    model = build(config, config["filled"])
    model.learn(config["filled"])  # random steps alone
    while True:
        model.train(gradient_steps=BLOCK, batch_size=config["settings"]["batch_size"])
        tick(BLOCK)


def loop(config, tick):
    """`learn` for ever; one tick per env step once updates go on."""
    warmup_steps, num_envs = config["settings"]["warmup_steps"], config["settings"]["num_envs"]

    class Tick(BaseCallback):
        def _on_rollout_start(self):
            if self.num_timesteps > warmup_steps + BLOCK:
                tick(num_envs)

        def _on_step(self):
            return True

    build(config, warmup_steps).learn(10**12, callback=Tick())


if __name__ == "__main__":
    if sys.argv[1] == "train":
        worker.answer(train, PACKAGES)
    else:
        worker.serve({"updates": updates, "loop": loop}[sys.argv[1]], PACKAGES)
