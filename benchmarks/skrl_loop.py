"""skrl's PPO on `dummy_env.Dummy`; ticks once per roll-out and update of `train`.

Its fastest settings: no log, no checkpoints, no progress bar, a fixed learning rate, no clipped
value loss, no entropy loss. It has no option to compile.
"""

import dummy_env
import gymnasium
import numpy as np
import torch
import worker
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import Wrapper
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from torch import nn


class Env(Wrapper):
    """skrl's interface around `Dummy`."""

    device = torch.device("cpu")
    state_space = None

    def __init__(self, dummy):
        super().__init__(dummy)

    @property
    def observation_space(self):
        """48 numbers."""
        return gymnasium.spaces.Box(-np.inf, np.inf, (dummy_env.OBS,), np.float32)

    @property
    def action_space(self):
        """12 numbers."""
        return gymnasium.spaces.Box(-np.inf, np.inf, (dummy_env.ACTIONS,), np.float32)

    def reset(self):
        """The current observation."""
        return self._env.obs(), {}

    def step(self, actions):
        """One step; rewards and flags are columns."""
        reward, terminated = self._env.step(actions)
        terminated = terminated[:, None]
        return self._env.obs(), reward[:, None], terminated, torch.zeros_like(terminated), {}

    def state(self):
        """There is none beside the observation."""

    def render(self):
        """Nothing to see."""

    def close(self):
        """Nothing to free."""


def network(hidden, out):
    """Linear layers with ELU between them."""
    layers, width = [], dummy_env.OBS
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ELU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, out))


class Actor(GaussianMixin, Model):
    """Mean from the observation, a deviation of its own."""

    def __init__(self, env, hidden):
        spaces = {
            "observation_space": env.observation_space,
            "action_space": env.action_space,
        }
        Model.__init__(self, **spaces, device="cpu")
        GaussianMixin.__init__(self, clip_log_std=False)
        self.net = network(hidden, dummy_env.ACTIONS)
        self.log_std = nn.Parameter(torch.zeros(dummy_env.ACTIONS))

    def compute(self, inputs, role=""):
        """Mean and log of the deviation."""
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Critic(DeterministicMixin, Model):
    """Value of the observation."""

    def __init__(self, env, hidden):
        spaces = {
            "observation_space": env.observation_space,
            "action_space": env.action_space,
        }
        Model.__init__(self, **spaces, device="cpu")
        DeterministicMixin.__init__(self)
        self.net = network(hidden, 1)

    def compute(self, inputs, role=""):
        """One number."""
        return self.net(inputs["observations"]), {}


def run(config, tick):
    """`train` for ever."""
    torch.set_num_threads(config["torch_threads"])
    s = config["settings"]
    env = Env(dummy_env.Dummy(config["num_envs"], s["num_steps"], tick))
    agent = PPO(
        models={"policy": Actor(env, config["hidden"]), "value": Critic(env, config["hidden"])},
        memory=RandomMemory(memory_size=s["num_steps"], num_envs=env.num_envs, device="cpu"),
        observation_space=env.observation_space,
        action_space=env.action_space,
        device="cpu",
        cfg={
            "rollouts": s["num_steps"],
            "learning_epochs": s["epochs"],
            "mini_batches": s["minibatches"],
            "learning_rate": s["learning_rate"],
            "grad_norm_clip": s["max_grad_norm"],
            "value_clip": 0.0,
            "value_loss_scale": 1.0,
            "observation_preprocessor": RunningStandardScaler,
            "observation_preprocessor_kwargs": {"size": env.observation_space, "device": "cpu"},
            "experiment": {"write_interval": 0, "checkpoint_interval": 0},
        },
    )
    trainer = SequentialTrainer(
        env=env,
        agents=agent,
        cfg={
            "timesteps": 10**12,
            "headless": True,
            "disable_progressbar": True,
            "close_environment_at_exit": False,
        },
    )
    trainer.train()


if __name__ == "__main__":
    worker.serve(run, ("skrl", "torch"))
