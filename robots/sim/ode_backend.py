"""Closed-form systems as batched ODEs in torch: CPU or GPU, differentiable.

Integrator: classical Runge-Kutta of fourth order with constant input over a physics step, or
semi-implicit Euler where a reference implementation uses it; stated by each system.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from robots.sim import Rows

Acceleration = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(qpos (N, nq), qvel (N, nv), ctrl (N, nu)) -> qacc (N, nv)."""


class OdeSim:
    """N worlds of one second-order system with nq == nv.

    Args:
        acceleration: the equation of motion.
        num_worlds: N.
        sizes: (nq, nu).
        physics_dt: step [s].
        integrator: "rk4" or "semi_implicit_euler".
        device: torch device.
    """

    def __init__(
        self,
        acceleration: Acceleration,
        num_worlds: int,
        sizes: tuple[int, int],
        physics_dt: float,
        integrator: str = "rk4",
        device: str | torch.device = "cpu",
    ) -> None:
        if integrator not in ("rk4", "semi_implicit_euler"):
            raise ValueError(f"unknown integrator {integrator!r}")
        self.num_worlds = num_worlds
        self.device = torch.device(device)
        self.dtype = torch.float64
        self.physics_dt = physics_dt
        self._acceleration = acceleration
        self._integrator = integrator
        nq, nu = sizes
        new = lambda *shape: torch.zeros(*shape, dtype=self.dtype, device=self.device)  # noqa: E731
        self.qpos, self.qvel, self.ctrl = (
            new(num_worlds, nq),
            new(num_worlds, nq),
            new(num_worlds, nu),
        )
        self.time = new(num_worlds)
        self.faulty = torch.zeros(num_worlds, dtype=torch.bool, device=self.device)

    def step(self, num_steps: int, current: bool = False) -> None:
        """See `Sim.step`. A world whose state turns bad is set to zero and reported faulty."""
        q, v, u, h = self.qpos, self.qvel, self.ctrl, self.physics_dt
        acc = self._acceleration
        for _ in range(num_steps):
            if self._integrator == "semi_implicit_euler":
                v = v + h * acc(q, v, u)
                q = q + h * v
            else:
                a1 = acc(q, v, u)
                v2 = v + 0.5 * h * a1
                a2 = acc(q + 0.5 * h * v, v2, u)
                v3 = v + 0.5 * h * a2
                a3 = acc(q + 0.5 * h * v2, v3, u)
                v4 = v + h * a3
                a4 = acc(q + h * v3, v4, u)
                q = q + h / 6 * (v + 2 * v2 + 2 * v3 + v4)
                v = v + h / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
        self.faulty = ~(torch.isfinite(q).all(1) & torch.isfinite(v).all(1))
        self.qpos = torch.where(self.faulty[:, None], 0.0, q)
        self.qvel = torch.where(self.faulty[:, None], 0.0, v)
        self.time = self.time + num_steps * h

    def fault_cause(self, row: int) -> str:
        """See `Sim.fault_cause`."""
        return "simulator: state is not finite"

    def field(self, name: str) -> Tensor:
        """Closed-form systems have no derived fields."""
        raise ValueError(f"a closed-form system has no field {name!r}")

    model_field = expand = field

    def commit(self) -> None:
        """Nothing is derived."""

    def reset(self, rows: Rows) -> None:
        """See `Sim.reset`."""
        for tensor in (self.qpos, self.qvel, self.ctrl, self.time):
            tensor[rows] = 0.0

    def fill_delay(self, rows: Rows) -> None:
        """No actuator is delayed."""

    def forward(self, rows: Rows) -> None:
        """Nothing is derived."""

    def state_dict(self) -> dict:
        """See `Sim.state_dict`."""
        return self.get_rows(slice(None))

    def load_state_dict(self, state: dict) -> None:
        """See `Sim.load_state_dict`."""
        self.set_rows(slice(None), state)

    def get_rows(self, rows: Rows) -> dict:
        """See `Sim.get_rows`."""
        return {k: getattr(self, k)[rows].clone() for k in ("qpos", "qvel", "ctrl", "time")}

    def set_rows(self, rows: Rows, state: dict) -> None:
        """See `Sim.set_rows`."""
        for key, value in state.items():
            getattr(self, key)[rows] = value

    def close(self) -> None:
        """Nothing to free."""
