"""Runs in memory, as the benchmarks of this project's learners need them."""

from curve import Curve

import ctrl_rl


class KeepPolicy(ctrl_rl.Run):
    """Keeps the policy of its last checkpoint, and the curve of training."""

    def __init__(self):
        super().__init__(console=False)
        self.curve = Curve()

    def log(self, step, metrics):
        """Log; a row with finished episodes is a point of the curve."""
        super().log(step, metrics)
        if "rollout/episode_return" in metrics:
            self.curve.add(step, metrics["rollout/episode_return"])

    def save(self, step, policy, learner, env, replay=None):
        """Keep the policy section."""
        self.policy = policy


class Newest(ctrl_rl.Run):
    """Keeps its newest row alone, so that an endless run does not fill the memory."""

    def __init__(self):
        super().__init__(console=False)

    def log(self, step, metrics):
        """Log, and forget what was before."""
        super().log(step, metrics)
        del self.rows[:-1]

    def save(self, step, policy, learner, env, replay=None):
        """Nothing: the run ends with the benchmark."""
