"""This project's PPO on `dummy_env.Dummy`; ticks once per iteration of `train`."""

from typing import Any

import dummy_env
import torch
import worker
from ours_runs import Newest

from ctrl_rl import ppo
from ctrl_rl.env import Info, Step
from ctrl_rl.spec import ActionDim, EnvSpec, ObsTerm


class Env:
    """The environment contract around `Dummy`."""

    device = torch.device("cpu")

    def __init__(self, dummy):
        self.dummy = dummy
        self.spec = EnvSpec(
            task="Dummy-v0",
            num_envs=dummy.num_envs,
            obs={"actor": (ObsTerm(name="signal", kind="signal", size=dummy_env.OBS),)},
            action=tuple(ActionDim(name=f"action_{i}") for i in range(dummy_env.ACTIONS)),
            physics_dt=0.02,
            step_dt=0.02,
            max_episode_steps=dummy_env.EPISODE,
        )

    def observe(self):
        """The current observation."""
        return {"actor": self.dummy.obs()}

    def step(self, action):
        """One step; a row that ended has a successor of its own."""
        reward, terminated = self.dummy.step(action)
        obs = self.observe()
        next_obs = {"actor": obs["actor"].clone()} if terminated.any() else obs
        truncated = torch.zeros_like(terminated)
        return Step(obs, reward, terminated, truncated, next_obs, Info())

    def state_dict(self):
        """A run asks for it with each checkpoint; this one keeps none."""
        return {}


def run(config, tick):
    """`train` for ever."""
    torch.set_num_threads(config["torch_threads"])
    s = config["settings"]
    settings = ppo.PPOConfig(
        total_steps=10**12,
        num_steps=s["num_steps"],
        num_epochs=s["epochs"],
        num_minibatches=s["minibatches"],
        learning_rate=s["learning_rate"],
        target_kl=None,
        max_grad_norm=s["max_grad_norm"],
        hidden=tuple(config["hidden"]),
        activation="elu",
        compile=config["compile"],
    )
    env: Any = Env(dummy_env.Dummy(config["num_envs"], s["num_steps"], tick))
    ppo.train(settings, env, Newest())


if __name__ == "__main__":
    worker.serve(run, ("ctrl-rl", "torch"))
