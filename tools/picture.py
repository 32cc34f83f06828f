"""The picture in README: the shipped Go1 policy at 1 m/s, half a turn of its gait in four frames.

python tools/picture.py examples/policies/go1-velocity-flat.onnx docs/images/go1.png
"""

import sys

import numpy as np
import torch

import ctrl_rl
from robots.tasks.go1_velocity import Go1VelocityConfig

FRAMES, STEPS_BETWEEN = 4, 4
WALK_IN = 150  # steps before the first frame


def main(policy_file: str, picture: str) -> None:
    """Walk, draw, and write one picture of frames side by side."""
    from matplotlib import image

    policy = ctrl_rl.load_policy(policy_file)
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 1, seed=3, config=Go1VelocityConfig().nominal())
    env.hold_command(torch.tensor([1.0, 0.0, 0.0]))
    obs, frames = env.observe(), []
    for step in range(WALK_IN + FRAMES * STEPS_BETWEEN):
        obs = env.step(policy(obs)).obs
        if step >= WALK_IN and (step - WALK_IN) % STEPS_BETWEEN == 0:
            frames.append(env.frame(0)[90:410, 120:520])
    env.close()
    image.imsave(picture, np.concatenate(frames, 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
