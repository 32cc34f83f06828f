"""MuJoCo C on a native thread pool (`mujoco.batch.Batch`): the CPU backend.

Results do not depend on the number of threads and equal a plain `mj_step` loop; a partial reset
leaves the other worlds unchanged; both to the bit. All tensors are float64 views of the batch's
own memory.

MuJoCo resets a world whose state or acceleration turns bad in silence: its next state is finite
and its status is "no error". Only the warning counters tell, so every `step` starts them from zero
and looks at them.
"""

import os

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from robots.sim import Rows, mujoco_warnings
from robots.sim.contact_batch import ContactBatch

STEP_FIELDS = frozenset(
    "xpos xquat xmat xipos ximat xanchor xaxis site_xpos site_xmat geom_xpos geom_xmat "
    "subtree_com cinert cvel cdof ten_length ten_velocity actuator_length actuator_velocity "
    "actuator_force qfrc_actuator qfrc_passive qfrc_bias qfrc_constraint qacc sensordata".split()
)
"""Fields that a step computes for every world; any other would show another world's value."""

FORCE_FIELDS = frozenset(
    "actuator_force qfrc_actuator qfrc_constraint qacc cfrc_ext sensordata".split()
)
"""Those of them that `forward` does not compute, or in part: there they belong to a step."""

DERIVED_FIELDS = frozenset(mujoco.MjModel._setconst_outputs) - frozenset(
    mujoco.MjModel._setconst_inputs
)
"""Model fields that `commit` computes from others; a value written to one would be lost."""

REMEDY = {
    mujoco.mjtWarning.mjWARN_CONTACTFULL: 'contacts were dropped; raise <size memory="..."/>',
    mujoco.mjtWarning.mjWARN_CNSTRFULL: 'constraints were dropped; raise <size memory="..."/>',
}
"""What to do about a warning, where the user can do something."""


class MujocoSim:
    """N worlds of one `mujoco.MjModel`. Not usable in a process forked after it was made.

    Args:
        model: compiled model; never written to.
        num_worlds: N.
        threads: pool size, 0 for all cores.
        contact_forces: make `cfrc_ext` available, at 2 to 9 % of the time (`ContactBatch`).
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_worlds: int,
        threads: int = 0,
        contact_forces: bool = False,
    ) -> None:
        mujoco_warnings.install()
        self.model = model
        self.num_worlds = num_worlds
        self.device = torch.device("cpu")
        self.dtype = torch.float64
        self.physics_dt = float(model.opt.timestep)
        self._pid = os.getpid()
        make = ContactBatch if contact_forces else Batch
        self._made: Batch | ContactBatch = make(model, num_worlds, nthread=threads)
        self._allowed = STEP_FIELDS | {"cfrc_ext"} if contact_forces else STEP_FIELDS
        self.qpos = torch.from_numpy(self._batch.bind("qpos"))
        self.qvel = torch.from_numpy(self._batch.bind("qvel"))
        self.ctrl = torch.from_numpy(self._batch.bind("ctrl"))
        self.time = torch.from_numpy(self._batch.bind("time"))
        self._state = torch.from_numpy(self._batch.state)
        self._warning = torch.from_numpy(self._batch.warning)[:, :, 1]
        self._initial = self._state[0].clone()
        self.faulty = torch.zeros(num_worlds, dtype=torch.bool)
        self._fields: dict[str, Tensor] = {}
        self._expanded: dict[str, Tensor] = {}
        self._history = torch.from_numpy(self._batch.bind("history")) if model.nhistory else None
        self._force_sensor = _force_sensors(model)
        self._delay_slots, self._delay_actuators = delay_layout(model)

    def fault_cause(self, row: int) -> str:
        """MuJoCo's warnings about this world's last step, and what to do about them."""
        kinds = [mujoco.mjtWarning(i) for i in self._warning[row].nonzero().flatten().tolist()]
        return "simulator: " + ", ".join(
            k.name + (f" ({REMEDY[k]})" if k in REMEDY else "") for k in kinds
        )

    def field(self, name: str) -> Tensor:
        """See `Sim.field`. Raises ValueError for a field that a step does not compute."""
        if name not in self._allowed:
            hint = "; make the simulator with contact_forces" if name == "cfrc_ext" else ""
            raise ValueError(f"field {name!r} is not computed by a step for every world{hint}")
        if name not in self._fields:
            array = self._batch.bind(name).view()
            array.flags.writeable = True  # an output, written to only by `load_state_dict`
            self._fields[name] = torch.from_numpy(array)
            self.forward(slice(None))
        return self._fields[name]

    def model_field(self, name: str) -> Tensor:
        """See `Sim.model_field`."""
        return torch.from_numpy(np.array(model_value(self.model, name)))

    def expand(self, name: str) -> Tensor:
        """See `Sim.expand`. Raises ValueError for a field that `commit` derives from others."""
        if name in DERIVED_FIELDS:
            raise ValueError(
                f"model field {name!r} follows from others; expand those, write, then commit"
            )
        if name not in self._expanded:
            self._expanded[name] = torch.from_numpy(self._batch.expand(name))
        return self._expanded[name]

    def commit(self) -> None:
        """See `Sim.commit`."""
        self._batch.set_const()

    def reset(self, rows: Rows) -> None:
        """See `Sim.reset`. Forces of the last step are forgotten: they read zero."""
        self._state[rows] = self._initial
        if "qpos0" in self._expanded:
            self.qpos[rows] = self._expanded["qpos0"][rows]
        for name in FORCE_FIELDS & self._fields.keys():
            self._fields[name][rows] = 0.0

    def fill_delay(self, rows: Rows) -> None:
        """See `Sim.fill_delay`. Without it a delayed motor starts from a target of zero."""
        if self._history is not None:
            filled = self.ctrl[rows][:, self._delay_actuators]
            if isinstance(rows, Tensor):
                rows = rows[:, None]
            self._history[rows, self._delay_slots] = filled

    def forward(self, rows: Rows) -> None:
        """See `Sim.forward`. Free where no derived field is bound: nobody would see it."""
        if not self._fields:
            return
        forces = {n: self._fields[n][rows].clone() for n in FORCE_FIELDS & self._fields.keys()}
        self._batch.forward(_ids(rows), stage=int(mujoco.mjtStage.mjSTAGE_VEL))
        for name, value in forces.items():  # else they would be another world's
            if name == "sensordata":
                value = torch.where(self._force_sensor, value, self._fields[name][rows])
            self._fields[name][rows] = value

    def step(self, num_steps: int, current: bool = False) -> None:
        """See `Sim.step`."""
        self._warning.zero_()  # a reset by MuJoCo sets them to 1, so an old count would hide it
        stage = mujoco.mjtStage.mjSTAGE_VEL if current else mujoco.mjtStage.mjSTAGE_NONE
        self._batch.step(nstep=num_steps, stage=int(stage))
        self.faulty = self._warning.any(1)

    def state_dict(self) -> dict:
        """See `Sim.state_dict`."""
        return {
            "state": self._state.clone(),
            "warning": self._warning.clone(),
            "fields": {k: v.clone() for k, v in self._fields.items()},
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
        for name in state["fields"]:
            self.field(name)  # bound first: binding recomputes them all
        for name, value in state["fields"].items():
            self._fields[name].copy_(value)

    def get_rows(self, rows: Tensor) -> dict:
        """See `Sim.get_rows`."""
        return {
            "state": self._state[rows].clone(),
            "fields": {k: v[rows].clone() for k, v in self._fields.items()},
            "expanded": {k: v[rows].clone() for k, v in self._expanded.items()},
        }

    def set_rows(self, rows: Tensor, state: dict) -> None:
        """See `Sim.set_rows`."""
        self._state[rows] = state["state"]
        for name, value in state["expanded"].items():
            self.expand(name)[rows] = value
        if self._expanded:
            self._batch.set_const(_ids(rows.unique()))
        for name in state["fields"]:
            self.field(name)
        for name, value in state["fields"].items():
            self._fields[name][rows] = value

    def close(self) -> None:
        """Free the batch once its last tensor is gone; the simulator must not be used again."""
        del self._made

    @property
    def _batch(self):
        """The batch; its threads do not exist in a forked child, where a call would hang."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a simulator made before a fork cannot run in the child: "
                "make it there, or start the process with spawn"
            )
        return self._made


def _ids(rows: Rows):
    return None if isinstance(rows, slice) else rows.numpy()


def model_value(model: mujoco.MjModel, name: str):
    """A field of the model or, as "opt.x", of its options."""
    owner, _, attribute = name.rpartition(".")
    return getattr(model.opt if owner == "opt" else model, attribute)


def _force_sensors(model: mujoco.MjModel) -> Tensor:
    """Columns (nsensordata,) bool of `sensordata` that need accelerations or forces."""
    columns = torch.zeros(model.nsensordata, dtype=torch.bool)
    for i in range(model.nsensor):
        start, size = int(model.sensor_adr[i]), int(model.sensor_dim[i])
        columns[start : start + size] = model.sensor_needstage[i] == mujoco.mjtStage.mjSTAGE_ACC
    return columns


def delay_layout(model: mujoco.MjModel) -> tuple[Tensor, Tensor]:
    """Columns of `history` that hold delayed inputs, and whose they are.

    An actuator's buffer of n samples is (user, cursor, n times, n values), mjmodel.h.
    """
    slots, actuators = [], []
    for i in range(model.nu):
        n, start = int(model.actuator_history[i][0]), int(model.actuator_historyadr[i])
        slots += range(start + 2 + n, start + 2 + 2 * n)
        actuators += [i] * n
    return torch.tensor(slots, dtype=torch.int64), torch.tensor(actuators, dtype=torch.int64)
