"""Return over env steps and time while training; standard library only."""

import time


class Curve:
    """Rows of (env step, wall-clock [s], CPU time of the process [s], mean return)."""

    def __init__(self):
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        self.rows = []

    def add(self, step, value):
        """`value` is the mean return of the training episodes since the row before."""
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.rows.append((int(step), round(wall, 1), round(cpu, 1), round(float(value), 2)))

    def columns(self):
        """Name -> list, as the result keeps it."""
        names = ("step", "wall_s", "cpu_s", "return")
        return {name: [row[i] for row in self.rows] for i, name in enumerate(names)}
