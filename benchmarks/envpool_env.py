"""envpool's environments, synchronous: all of them in every step, numpy arrays out."""

import envpool
import numpy as np
import worker


def run(config, tick):
    """One tick per step of all environments."""
    n = config["num_envs"]
    env = envpool.make_gymnasium(config["task"], num_envs=n, num_threads=config["threads"], seed=0)
    box, rng = env.action_space, np.random.default_rng(0)
    actions = rng.uniform(box.low, box.high, (64, n, *box.shape))
    env.reset()
    while True:
        for action in actions:
            env.step(action)
            tick(n)


worker.serve(run, ("envpool", "numpy"))
