"""The one set of PPO settings that every library trains HalfCheetah with; plain data.

They are the usual ones for continuous control: two layers of 64, 8 environments, 10 epochs of
minibatches of 64, observations normalised, rewards not.
"""

TASK = "HalfCheetah-v5"

SETTINGS = {
    "num_envs": 8,
    "num_steps": 512,
    "batch_size": 64,
    "epochs": 10,
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "entropy_coef": 0.0,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
    "hidden": [64, 64],
    "activation": "tanh",
    "initial_std": 1.0,
    "total_steps": 245 * 8 * 512,  # the first whole iteration past one million
}
