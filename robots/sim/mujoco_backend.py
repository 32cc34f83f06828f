"""MuJoCo C on a native thread pool (`mujoco.batch.Batch`): the CPU backend.

Results do not depend on the number of threads, and a partial reset leaves the other worlds
unchanged to the bit. All tensors are float64 views of the batch's own memory.
"""

import mujoco
import torch
from mujoco.batch import Batch
from torch import Tensor

from robots.sim import Rows

ALLOWED_FIELDS = frozenset(
    "xpos xquat xipos site_xpos geom_xpos sensordata cinert cvel qfrc_actuator cfrc_ext "
    "subtree_com subtree_linvel actuator_force qacc".split()
)
"""Fields that `mj_step` computes for every world; any other would show another world's value."""


class MujocoSim:
    """N worlds of one `mujoco.MjModel`.

    Args:
        model: compiled model; never written to.
        num_worlds: N.
        threads: pool size, 0 for all cores.
    """

    def __init__(self, model: mujoco.MjModel, num_worlds: int, threads: int = 0) -> None:
        self.model = model
        self.num_worlds = num_worlds
        self.device = torch.device("cpu")
        self.dtype = torch.float64
        self.physics_dt = float(model.opt.timestep)
        self._batch = Batch(model, num_worlds, nthread=threads)
        self.qpos = torch.from_numpy(self._batch.bind("qpos"))
        self.qvel = torch.from_numpy(self._batch.bind("qvel"))
        self.ctrl = torch.from_numpy(self._batch.bind("ctrl"))
        self.time = torch.from_numpy(self._batch.bind("time"))
        self._state = torch.from_numpy(self._batch.state)
        self._warning = torch.from_numpy(self._batch.warning)[:, :, 1]
        self._warning_before = self._warning.clone()
        self.faulty = torch.zeros(num_worlds, dtype=torch.bool)
        self._fields: dict[str, Tensor] = {}
        self._expanded: dict[str, Tensor] = {}

    def fault_cause(self, row: int) -> str:
        """Names of the MuJoCo warnings that rose in this world."""
        rose = (self._warning[row] > self._warning_before[row]).nonzero().flatten().tolist()
        return "simulator: " + ", ".join(mujoco.mjtWarning(i).name for i in rose)

    def field(self, name: str) -> Tensor:
        """See `Sim.field`. Raises ValueError for a field that a step does not compute."""
        if name not in ALLOWED_FIELDS:
            raise ValueError(f"field {name!r} is not computed by a step for every world")
        if name not in self._fields:
            array = self._batch.bind(name)
            array.flags.writeable = True  # torch wants it; nobody writes to it
            self._fields[name] = torch.from_numpy(array)
            array.flags.writeable = False
            self.forward(slice(None))
        return self._fields[name]

    def model_field(self, name: str) -> Tensor:
        """See `Sim.model_field`."""
        return torch.as_tensor(getattr(self.model, name)).clone()

    def expand(self, name: str) -> Tensor:
        """See `Sim.expand`."""
        if name not in self._expanded:
            self._expanded[name] = torch.from_numpy(self._batch.expand(name))
        return self._expanded[name]

    def commit(self) -> None:
        """See `Sim.commit`."""
        self._batch.set_const()

    def reset(self, rows: Rows) -> None:
        """See `Sim.reset`."""
        self._batch.reset(self._ids(rows), stage=0)

    def fill_delay(self, rows: Rows) -> None:
        """See `Sim.fill_delay`: each actuator's buffer is (user, cursor, n times, n values)."""
        if not self.model.nhistory:
            return
        history = torch.from_numpy(self._batch.bind("history"))
        for u in range(self.model.nu):
            n, start = self.model.actuator_history[u][0], self.model.actuator_historyadr[u]
            if n:
                history[rows, start + 2 + n : start + 2 + 2 * n] = self.ctrl[rows, u, None]

    def forward(self, rows: Rows) -> None:
        """See `Sim.forward`."""
        self._batch.forward(self._ids(rows), stage=int(mujoco.mjtStage.mjSTAGE_VEL))

    def step(self, num_steps: int, current: bool = False) -> None:
        """See `Sim.step`."""
        self._warning_before.copy_(self._warning)
        stage = mujoco.mjtStage.mjSTAGE_VEL if current else mujoco.mjtStage.mjSTAGE_NONE
        self._batch.step(nstep=num_steps, stage=int(stage))
        self.faulty = (self._warning > self._warning_before).any(1)

    def state_dict(self) -> dict:
        """See `Sim.state_dict`."""
        return {
            "state": self._state.clone(),
            "warning": self._warning.clone(),
            "expanded": {k: v.clone() for k, v in self._expanded.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        """See `Sim.load_state_dict`; ends with one `commit`, after which steps are bit-exact."""
        for name, value in state["expanded"].items():
            self.expand(name).copy_(value)
        self._state.copy_(state["state"])
        self._warning.copy_(state["warning"])
        if self._expanded:
            self.commit()
        if self._fields:
            self.forward(slice(None))

    def get_rows(self, rows: Tensor) -> dict:
        """See `Sim.get_rows`."""
        return {
            "state": self._state[rows].clone(),
            "expanded": {k: v[rows].clone() for k, v in self._expanded.items()},
        }

    def set_rows(self, rows: Tensor, state: dict) -> None:
        """See `Sim.set_rows`."""
        self._state[rows] = state["state"]
        for name, value in state["expanded"].items():
            self.expand(name)[rows] = value
        if self._expanded:
            self._batch.set_const(self._ids(rows))
        if self._fields:
            self.forward(rows)

    def close(self) -> None:
        """Free the batch; the tensors must not be used afterwards."""
        del self._batch

    def _ids(self, rows: Rows):
        return None if isinstance(rows, slice) else rows.numpy()
