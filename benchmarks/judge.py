"""Plays a policy in gymnasium's own environment: one judge for every library's policies.

Runs in any interpreter with gymnasium and MuJoCo.
"""

import gymnasium
import numpy as np


def episode_returns(policy, task, episodes, seed):
    """Return of each episode.

    Args:
        policy: observation (1, d) float32 -> action (1, A), deterministic.
        task: gymnasium's id, e.g. "HalfCheetah-v5".
        episodes: how many.
        seed: of the first episode; the following count up.
    """
    env = gymnasium.make(task)
    low, high = env.action_space.low, env.action_space.high
    returns = []
    for k in range(episodes):
        obs, _ = env.reset(seed=seed + k)
        total, ended = 0.0, False
        while not ended:
            action = policy(np.asarray(obs, np.float32)[None])[0]
            obs, reward, terminated, truncated, _ = env.step(np.clip(action, low, high))
            total += float(reward)
            ended = terminated or truncated
        returns.append(total)
    env.close()
    return returns
