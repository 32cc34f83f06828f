"""rsl_rl's PPO on `dummy_env.Dummy`; ticks once per iteration of `learn`.

Its fastest settings: no log, no check for NaN, a fixed learning rate (so no KL divergence), no
clipped value loss; compiled by its own option, where the design says so.
"""

import dummy_env
import torch
import worker
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict


class Env(VecEnv):
    """rsl_rl's interface around `Dummy`."""

    def __init__(self, dummy):
        self.dummy, self.num_envs, self.num_actions = dummy, dummy.num_envs, dummy_env.ACTIONS
        self.max_episode_length = dummy_env.EPISODE
        self.episode_length_buf = dummy.age
        self.device, self.cfg = "cpu", {}

    def get_observations(self):
        """The current observation."""
        return TensorDict({"policy": self.dummy.obs()}, batch_size=[self.num_envs])

    def step(self, actions):
        """One step."""
        reward, terminated = self.dummy.step(actions)
        return self.get_observations(), reward, terminated, {}


def run(config, tick):
    """`learn` for ever."""
    torch.set_num_threads(config["torch_threads"])
    s = config["settings"]
    model = {
        "class_name": "MLPModel",
        "hidden_dims": config["hidden"],
        "activation": "elu",
        "obs_normalization": True,
    }
    settings = {
        "num_steps_per_env": s["num_steps"],
        "check_for_nan": False,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**model, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": model,
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": s["epochs"],
            "num_mini_batches": s["minibatches"],
            "learning_rate": s["learning_rate"],
            "schedule": "fixed",
            "entropy_coef": 0.0,
            "max_grad_norm": s["max_grad_norm"],
            "use_clipped_value_loss": False,
        },
        "torch_compile_mode": "default" if config["compile"] == "on" else None,
    }
    env = Env(dummy_env.Dummy(config["num_envs"], s["num_steps"], tick))
    OnPolicyRunner(env, settings, log_dir=None, device="cpu").learn(10**12)


if __name__ == "__main__":
    worker.serve(run, ("rsl-rl-lib", "torch", "tensordict"))
