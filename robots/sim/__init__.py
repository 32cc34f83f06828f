"""Simulators behind one small interface: N worlds of one compiled model.

A task is written once against `Sim` and does not know which backend runs it.
"""

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, device, dtype

if TYPE_CHECKING:
    import mujoco

Rows = Any
"""`slice(None)` for all worlds, or an int64 tensor of row numbers."""


class Sim(Protocol):
    """N worlds. Tensors are live views: a write to `qpos`, `qvel` or `ctrl` is the world's state.

    Derived fields (`field`) describe the state before the last physics step, as after `mj_step`,
    unless `step(current=True)` or `forward(rows)` brought them up to date.
    """

    num_worlds: int
    device: device
    dtype: dtype
    """float64 on the CPU backends, float32 on Warp; terms run in it."""
    physics_dt: float
    """[s]"""
    qpos: Tensor
    """(N, nq) positions; quaternions wxyz."""
    qvel: Tensor
    """(N, nv) velocities; a free joint's linear part in the world, angular part in the body."""
    ctrl: Tensor
    """(N, nu) actuator inputs."""
    time: Tensor
    """(N,) [s]"""
    faulty: Tensor
    """(N,) bool: worlds whose warning counters rose in the last `step`."""

    def fault_cause(self, row: int) -> str:
        """One line that says what went wrong in a faulty world."""
        ...

    def field(self, name: str) -> Tensor:
        """Derived field (N, ...) by its MjData name; call before the first step that needs it.

        `cfrc_ext` (torque and force on each body in the last physics step, contacts included)
        exists where `make_mujoco_sim` was asked for `contact_forces`.
        """
        ...

    def model_field(self, name: str) -> Tensor:
        """A copy of a field of the compiled model, the baseline of a randomiser."""
        ...

    def expand(self, name: str) -> Tensor:
        """Give a model field per-world values; returns the live (N, ...) tensor.

        An `actuator_delay` of (k - 1/2) `physics_dt` delays by exactly k physics steps. One of
        k `physics_dt` delays by k or k + 1: rounding of the accumulated time decides.
        """
        ...

    def commit(self) -> None:
        """Recompute what follows from expanded fields; once, after they were written."""
        ...

    def reset(self, rows: Rows) -> None:
        """Model defaults (qpos0, zero velocity, zero control) in some worlds."""
        ...

    def fill_delay(self, rows: Rows) -> None:
        """Make delayed actuators see the present `ctrl` as if it had always been there."""
        ...

    def forward(self, rows: Rows) -> None:
        """Bring position- and velocity-dependent fields up to the present state.

        Forces and accelerations stay those of the last step, or zero after a reset.
        """
        ...

    def step(self, num_steps: int, current: bool = False) -> None:
        """`num_steps` physics steps; `current` also brings derived fields up to date."""
        ...

    def state_dict(self) -> dict:
        """State rows, warning counts, bound derived fields and every expanded field."""
        ...

    def load_state_dict(self, state: dict) -> None:
        """Continue to the bit where `state_dict` was taken."""
        ...

    def get_rows(self, rows: Tensor) -> dict:
        """State of some worlds, bound derived and expanded fields included."""
        ...

    def set_rows(self, rows: Tensor, state: dict) -> None:
        """Write what `get_rows` gave into other worlds."""
        ...

    def close(self) -> None:
        """Free threads and buffers."""
        ...


def make_mujoco_sim(
    model: "mujoco.MjModel",
    num_worlds: int,
    backend: str = "mujoco",
    device: str | torch.device = "cpu",
    threads: int = 0,
    nconmax: int | None = None,
    njmax: int | None = None,
    contact_forces: bool = False,
) -> Sim:
    """N worlds of a compiled model on the backend that the user chose; tasks call this.

    Args:
        model: compiled model; never written to.
        num_worlds: N.
        backend: "mujoco" (CPU) or "warp" (NVIDIA GPU; Warp's CPU device for tests).
        device: torch device of all tensors.
        threads: simulator threads of the mujoco backend, 0 for all cores.
        nconmax: warp only: contacts per world to make room for; None: from the model.
        njmax: warp only: constraint rows per world to make room for; None: from the model.
        contact_forces: make the field `cfrc_ext` available; costs time, for tasks that read it.

    Raises:
        ValueError: an unknown backend, a device that it cannot use, or a model that it cannot run.
    """
    if backend == "mujoco":
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"backend 'mujoco' runs on the CPU, not on {device!r}; use backend 'warp' there"
            )
        from robots.sim.mujoco_backend import MujocoSim

        return MujocoSim(model, num_worlds, threads, contact_forces)
    if backend == "warp":
        try:
            from robots.sim.warp_backend import WarpSim
        except ImportError as error:
            if error.name not in ("warp", "mujoco_warp"):
                raise
            raise ValueError("backend 'warp' needs: pip install 'ctrl-rl[warp]'") from error

        return WarpSim(
            model, num_worlds, device, nconmax=nconmax, njmax=njmax, contact_forces=contact_forces
        )
    raise ValueError(f"unknown backend {backend!r}; choose from mujoco, warp")
