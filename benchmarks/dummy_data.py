"""Data of Hopper's sizes, made of normal numbers: the same in every library. Needs numpy alone."""

import numpy as np

OBS, ACTIONS = 11, 3
EPISODE = 1000  # [steps]


def arrays(rows):
    """Observation (n, 11), action (n, 3) in -1..1, reward (n,), float32; episodes of 1000 steps."""
    draw = np.random.default_rng(0)
    obs = draw.standard_normal((rows, OBS), dtype=np.float32)
    action = np.tanh(draw.standard_normal((rows, ACTIONS), dtype=np.float32))
    return obs, action, draw.standard_normal(rows, dtype=np.float32)
