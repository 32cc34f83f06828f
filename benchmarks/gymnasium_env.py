"""gymnasium's own vectorised environments in one process (its faster vectorisation for MuJoCo)."""

import gymnasium
import mujoco
import numpy as np
import worker


def run(config, tick):
    """One tick per step of all environments."""
    mujoco.set_mju_user_warning(lambda message: None)  # one per environment, of the model files
    n = config["num_envs"]
    env = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(config["task"])] * n)
    box, rng = gymnasium.make(config["task"]).action_space, np.random.default_rng(0)
    actions = rng.uniform(box.low, box.high, (64, n, box.low.size)).astype(np.float32)
    env.reset(seed=0)
    while True:
        for action in actions:
            env.step(action)
            tick(n)


worker.serve(run, ("gymnasium", "mujoco", "numpy"))
