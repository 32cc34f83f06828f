"""An environment without physics, whose step costs next to nothing: what is left is the learner.

Needs torch alone and runs in any interpreter. Observations come from a fixed store of normal
numbers. Episodes last 1000 steps and end by termination, a few at each step, so that no library
pays for a bootstrap that another leaves out.
"""

import torch

OBS, ACTIONS = 48, 12
EPISODE = 1000  # [steps]
STORE = 64


class Dummy:
    """N environments.

    Args:
        num_envs: N.
        num_steps: T, steps between two ticks.
        tick: called with T N whenever T steps and what follows them are done.
    """

    def __init__(self, num_envs, num_steps, tick):
        generator = torch.Generator().manual_seed(0)
        self.store = torch.randn(STORE, num_envs, OBS, generator=generator)
        self.age = torch.arange(num_envs) * EPISODE // num_envs
        self.num_envs, self.num_steps, self.tick = num_envs, num_steps, tick
        self.steps = 0

    def obs(self):
        """(N, 48)."""
        return self.store[self.steps % STORE]

    def step(self, action):
        """Action (N, 12) -> reward (N,), terminated (N,) bool; `obs` has what follows."""
        if self.steps and self.steps % self.num_steps == 0:
            self.tick(self.num_steps * self.num_envs)
        self.steps += 1
        reward = 1.0 - 0.1 * action.square().mean(-1)
        age = self.age + 1
        terminated = age >= EPISODE
        self.age = age.masked_fill(terminated, 0)
        return reward, terminated
