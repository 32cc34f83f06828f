"""The curve of a stable-baselines3 training; runs in the peer's interpreter."""

from curve import Curve
from stable_baselines3.common.callbacks import BaseCallback


class Returns(BaseCallback):
    """A row per `every` env steps: mean return of the episodes that ended in them."""

    def __init__(self, every):
        super().__init__()
        self.every, self.curve = every, Curve()
        self.rows, self.returns = 0, []

    def _on_step(self):
        self.returns += [i["episode"]["r"] for i in self.locals["infos"] if "episode" in i]
        if self.num_timesteps // self.every > self.rows:
            self.rows = self.num_timesteps // self.every
            if self.returns:
                self.curve.add(self.num_timesteps, sum(self.returns) / len(self.returns))
            self.returns = []
        return True
