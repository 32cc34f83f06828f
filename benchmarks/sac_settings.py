"""Settings of SAC and TD3 on gymnasium's bodies, the same for every library; plain data.

The usual ones: two layers of 256, batch 256, one environment, one update per step, after 10,000
steps of uniform actions.
"""

SAC = {
    "num_envs": 1,
    "warmup_steps": 10_000,
    "updates_per_step": 1,
    "buffer_size": 1_000_000,
    "batch_size": 256,
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "polyak": 0.005,
    "hidden": [256, 256],
    "total_steps": 100_000,
}
"""The temperature starts at 1 and is adapted to minus the number of action dimensions."""

TD3 = {
    **SAC,
    "policy_delay": 2,
    "exploration_noise": 0.1,
    "target_noise": 0.2,
    "noise_clip": 0.5,
}
