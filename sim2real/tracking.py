"""How well velocities follow a command: RMS error per axis."""

import math

import numpy as np
import torch

from ctrl_rl.evaluation import Metric, bootstrap
from ctrl_rl.spec import CommandDim

AXES = {f"{kind}_vel_{axis}": (kind, k) for kind in ("lin", "ang") for k, axis in enumerate("xyz")}
"""Command name -> which body velocity follows it."""


class Tracking:
    """Sums of squared velocity errors, leaving out the time after each new command.

    Args:
        command: from the spec; only its velocities (`AXES`) are measured.
        num_robots: N.
        step_dt: [s].
        settle_s: left out [s].
    """

    def __init__(
        self, command: tuple[CommandDim, ...], num_robots: int, step_dt: float, settle_s: float
    ) -> None:
        self.dims = [(k, d) for k, d in enumerate(command) if d.name in AXES]
        self._settle_steps = round(settle_s / step_dt)
        self._last = np.full((num_robots, len(command)), np.nan)
        self._since = np.zeros(num_robots, np.int64)
        self.squares = np.zeros((num_robots, len(self.dims)))
        """Sum of squared errors (N, axes)."""
        self.count = np.zeros(num_robots, np.int64)
        """Steps counted (N,)."""

    def add(self, command: np.ndarray, velocities: dict[str, np.ndarray], alive) -> None:
        """One step: what was asked for before it, and what came of it."""
        changed = np.any(command != self._last, 1)
        self._last = np.array(command)
        self._since = np.where(changed, 1, self._since + 1)
        counts = alive & (self._since > self._settle_steps)
        self.count += counts
        for column, (k, dim) in enumerate(self.dims):
            kind, axis = AXES[dim.name]
            error = velocities[kind][:, axis] - command[:, k]
            self.squares[counts, column] += error[counts] ** 2

    def metrics(self, prefix: str) -> dict[str, Metric]:
        """RMS error over all steps of all robots; the interval is over robots."""
        found, rows = {}, self.count > 0
        for column, (_, dim) in enumerate(self.dims):
            squares = self.squares[rows, column]
            mean = math.sqrt(squares.sum() / self.count.sum()) if rows.any() else math.nan
            interval = None
            if rows.any():
                interval = bootstrap(torch.from_numpy(squares / self.count[rows]))
            if interval is not None:
                interval = math.sqrt(max(0.0, interval[0])), math.sqrt(max(0.0, interval[1]))
            found[f"{prefix}/rms_{dim.name}"] = Metric(
                mean=mean, ci95=interval, n=int(rows.sum()), unit=dim.unit
            )
        return found
