"""MuJoCo Warp on an NVIDIA GPU, or on Warp's CPU device (slow but correct, for tests).

All tensors are float32 views of Warp's own arrays. A control step is one graph (a CUDA graph on a
GPU, a recording that Warp replays on the CPU), launched on torch's current stream, so Warp's and
torch's work keep their order without waiting, and `step` never asks the GPU for a number.

What differs from the `mujoco` backend:

- Room for contacts and constraint rows is fixed when the simulator is made (`nconmax`, `njmax`).
  What does not fit is dropped and reported once as a Python warning.
- MuJoCo Warp checks no state, so a world whose state or acceleration leaves the numbers is found
  and reset here, after each `step`.
- It has no PGS solver; such models run with Newton.
- Time is float32, too coarse to compare time stamps exactly; delays are snapped to the steps that
  they stand for (`_snap_delays`).
"""

# Kernels look like Python but have Warp's own types and loops.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

import contextlib
import copy
import dataclasses
import math
import warnings
from collections.abc import Callable

import mujoco
import mujoco_warp
import numpy as np
import torch
import warp as wp
from torch import Tensor

from robots.sim import Rows
from robots.sim.mujoco_backend import DERIVED_FIELDS, STEP_FIELDS, delay_layout, model_value

MAX_VALUE = 1e10
"""A state or acceleration beyond this is bad (mjMAXVAL of mjmodel.h)."""

CONTACTS_PER_PAIR = {
    frozenset({mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_SPHERE}): 1,
    frozenset({mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_CAPSULE}): 2,
    frozenset({mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_ELLIPSOID}): 1,
    frozenset({mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_CYLINDER}): 4,
    frozenset({mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_BOX}): 4,
    frozenset({mujoco.mjtGeom.mjGEOM_SPHERE}): 1,
    frozenset({mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_CAPSULE}): 1,
    frozenset({mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_CYLINDER}): 1,
    frozenset({mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_BOX}): 1,
    frozenset({mujoco.mjtGeom.mjGEOM_CAPSULE}): 2,
    frozenset({mujoco.mjtGeom.mjGEOM_CAPSULE, mujoco.mjtGeom.mjGEOM_BOX}): 2,
}
"""Most contacts that a pair of shapes gives; any other pair counts `OTHER_CONTACTS`."""
OTHER_CONTACTS = 8
SELF_CONTACTS = 4
"""Contacts with other moving shapes to make room for, per moving shape."""

OVERFLOWS = {
    mujoco_warp.OverflowType.NEFC: ("constraint rows", "njmax"),
    mujoco_warp.OverflowType.NJMAX_NNZ: ("constraint rows", "njmax"),
    mujoco_warp.OverflowType.BROADPHASE: ("contact candidates", "nconmax"),
    mujoco_warp.OverflowType.NARROWPHASE: ("contacts", "nconmax"),
    mujoco_warp.OverflowType.CCD: ("contacts of convex shapes", "nconmax"),
}
"""What was dropped, and the setting that makes room for it. Other bits (iteration limits, which
a real-time setting reaches on purpose) are no overflow."""

wp.set_module_options({"enable_backward": False})


class WarpSim:
    """N worlds of one `mujoco.MjModel`.

    Args:
        model: compiled model; never written to.
        num_worlds: N.
        device: torch device; "cpu" is Warp's CPU device, single-threaded.
        contact_forces: make `cfrc_ext` available.
        nconmax: contacts to make room for, per world on average; None: `default_capacity`.
        njmax: constraint rows to make room for in every world; None: `default_capacity`.
        deterministic: the same bits in every run on one GPU, so that a resume is exact; costs
            the sorting of contacts and sums. (On the CPU device it is so anyway.)

    Raises:
        ValueError: no such GPU, or a model with something that MuJoCo Warp lacks.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_worlds: int,
        device: str | torch.device = "cuda",
        *,
        contact_forces: bool = False,
        nconmax: int | None = None,
        njmax: int | None = None,
        deterministic: bool = True,
    ) -> None:
        self.device = _check_device(device)
        self.dtype = torch.float32
        self.num_worlds = num_worlds
        self.physics_dt = float(model.opt.timestep)
        self.model = model = _supported(model)
        # Warp's greetings and compile times would land on stdout, which belongs to the command.
        wp.config.log_level = wp.LOG_ERROR if self.device.type == "cpu" else wp.LOG_WARNING
        wp.init()
        self._wp_device = wp.device_from_torch(self.device)
        with wp.ScopedDevice(self._wp_device):
            m = _put_model(model)
            m.opt.warn_overflow = 0  # a line per world and step; `_report_overflow` says it once
            m.opt.deterministic = deterministic
            m.opt.run_rne_postconstraint = contact_forces
            if self._wp_device.is_cuda and not wp.is_conditional_graph_supported():
                m.opt.graph_conditional = False
            default = default_capacity(model, m.nxn_geom_pair_filtered.numpy())
            self.nconmax = default[0] if nconmax is None else nconmax
            self.njmax = default[1] if njmax is None else njmax
            d = mujoco_warp.make_data(model, num_worlds, nconmax=self.nconmax, njmax=self.njmax)
            self._cause = wp.zeros(num_worlds, dtype=int)
            self._faulty = wp.zeros(num_worlds, dtype=bool)
            self._selected = wp.zeros(num_worlds, dtype=bool)
            self._usage = wp.zeros(3, dtype=int)  # most contacts, most rows, overflow bits
            self._delay = m.actuator_delay
            m.actuator_delay = _clone(self._delay)  # waits for all that was made on Warp's stream
        self._m, self._d = m, d
        self._fields: dict[str, Tensor] = {}
        self._expanded: dict[str, Tensor] = {}
        self._graphs: dict[tuple, wp.Graph] = {}
        self.qpos, self.qvel = wp.to_torch(d.qpos), wp.to_torch(d.qvel)
        self.ctrl, self.time = wp.to_torch(d.ctrl), wp.to_torch(d.time)
        self.faulty = wp.to_torch(self._faulty)
        self._selected_view, self._usage_view = map(wp.to_torch, (self._selected, self._usage))
        self._state = {
            name: wp.to_torch(getattr(d, name))
            for name in ("time", "qpos", "qvel", "act", "history", "ctrl", "qacc_warmstart")
            if getattr(d, name).size
        }
        self._resets: dict[str, tuple[wp.array, wp.array]] = {}
        for name, value in self._state.items():
            self._reset_to(name, value[:1].clone(), value)
        self._seen = torch.zeros(3, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._reported = 0
        self._streams: dict[int, wp.Stream] = {}
        self._allowed = STEP_FIELDS | {"cfrc_ext"} if contact_forces else STEP_FIELDS
        self._delay_slots, self._delay_actuators = (x.to(self.device) for x in delay_layout(model))

    # The interface ------------------------------------------------------------------------------

    def fault_cause(self, row: int) -> str:
        """Which quantities were bad."""
        cause = int(wp.to_torch(self._cause)[row])
        names = [n for bit, n in ((1, "qpos"), (2, "qvel"), (4, "qacc")) if cause & bit]
        return f"simulator: {', '.join(names)} not finite or above {MAX_VALUE:g}"

    def field(self, name: str) -> Tensor:
        """See `Sim.field`. Raises ValueError for a field that a step does not compute."""
        if name not in self._allowed or not hasattr(self._d, name):
            hint = "; make the simulator with contact_forces" if name == "cfrc_ext" else ""
            raise ValueError(f"field {name!r} is not computed by a step for every world{hint}")
        if name not in self._fields:
            shape = getattr(mujoco.MjData(self.model), name)
            view = wp.to_torch(getattr(self._d, name))
            view = view.view(self.num_worlds, *np.shape(shape))
            self._fields[name] = view
            if view.dtype == self.dtype:
                self._reset_to(name, torch.zeros_like(view[:1]), view)
            self.forward(slice(None))
        return self._fields[name]

    def model_field(self, name: str) -> Tensor:
        """See `Sim.model_field`; floats as float32."""
        value = torch.from_numpy(np.array(model_value(self.model, name))).to(self.device)
        return value.to(self.dtype) if value.is_floating_point() else value

    def expand(self, name: str) -> Tensor:
        """See `Sim.expand`. Raises ValueError for a field that cannot differ between worlds."""
        if name in DERIVED_FIELDS:
            raise ValueError(
                f"model field {name!r} follows from others; expand those, write, then commit"
            )
        if name not in self._expanded:
            array = self._widen(name)
            shape = np.shape(model_value(self.model, name))
            self._expanded[name] = wp.to_torch(array).view(self.num_worlds, *shape)
            if name == "qpos0":
                self._reset_to("qpos", self._expanded[name], self.qpos)
        return self._expanded[name]

    def commit(self) -> None:
        """See `Sim.commit`. Worlds whose inputs differ need derived constants of their own."""
        batched = _batched_fields(self._m)
        for name in sorted(set(mujoco.MjModel._setconst_outputs) & batched - {"geom_size"}):
            if getattr(self._m, name).shape[0] != self.num_worlds:
                self._widen(name)
        with _kept(self._fields, None), self._warp_stream():
            mujoco_warp.set_const(self._m, self._d)

    def reset(self, rows: Rows) -> None:
        """See `Sim.reset`."""
        self._selected_view.zero_()
        self._selected_view[rows] = True
        self._run(("reset",), lambda: self._restore(self._selected))

    def fill_delay(self, rows: Rows) -> None:
        """See `Sim.fill_delay`. Without it a delayed motor starts from a target of zero."""
        if len(self._delay_slots):
            filled = self.ctrl[rows][:, self._delay_actuators]
            if isinstance(rows, Tensor):
                rows = rows[:, None]
            self._state["history"][rows, self._delay_slots] = filled

    def forward(self, rows: Rows) -> None:
        """See `Sim.forward`. Free where no derived field is bound: nobody would see it."""
        if self._fields:
            with _kept(self._fields, rows):
                self._run(("forward",), self._forward)

    def step(self, num_steps: int, current: bool = False) -> None:
        """See `Sim.step`."""
        self._run(("step", num_steps, current), lambda: self._step(num_steps, current))
        # On a GPU the copy may land after the next line has read the step before; the bits stay
        # set, so a warning comes a step late instead of making the GPU wait.
        self._seen.copy_(self._usage_view, non_blocking=True)
        self._report_overflow(int(self._seen[2]))

    def state_dict(self) -> dict:
        """See `Sim.state_dict`."""
        return {
            "state": {k: v.clone() for k, v in self._state.items()},
            "fields": {k: v.clone() for k, v in self._fields.items()},
            "expanded": {k: v.clone() for k, v in self._expanded.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        """See `Sim.load_state_dict`; ends with one `commit`, after which steps are bit-exact."""
        for name, value in state["expanded"].items():
            self.expand(name).copy_(value)
        for name, value in state["state"].items():
            self._state[name].copy_(value)
        if self._expanded:
            self.commit()
        for name, value in state["fields"].items():
            self.field(name).copy_(value)

    def get_rows(self, rows: Tensor) -> dict:
        """See `Sim.get_rows`."""
        return {
            "state": {k: v[rows].clone() for k, v in self._state.items()},
            "fields": {k: v[rows].clone() for k, v in self._fields.items()},
            "expanded": {k: v[rows].clone() for k, v in self._expanded.items()},
        }

    def set_rows(self, rows: Tensor, state: dict) -> None:
        """See `Sim.set_rows`."""
        for name, value in state["state"].items():
            self._state[name][rows] = value
        for name, value in state["expanded"].items():
            self.expand(name)[rows] = value
        if self._expanded:
            self.commit()
        for name, value in state["fields"].items():
            self.field(name)[rows] = value

    def capacities(self) -> dict[str, int]:
        """Room per world, and the most that was used at the end of a `step` so far."""
        contacts, rows, _ = self._usage_view.tolist()
        return {
            "nconmax": self.nconmax,
            "njmax": self.njmax,
            "used_contacts": math.ceil(contacts / self.num_worlds),
            "used_rows": rows,
        }

    def close(self) -> None:
        """Free graphs and arrays; the tensors must not be used afterwards."""
        self._graphs.clear()
        del self._m, self._d

    # Work on the device -------------------------------------------------------------------------

    def _step(self, num_steps: int, current: bool) -> None:
        if len(self._delay_slots):
            self._launch_snap()
        for _ in range(num_steps):
            mujoco_warp.step(self._m, self._d)
        if current:
            self._forward()
        d = self._d
        wp.launch(
            _survey,
            dim=self.num_worlds,
            inputs=[d.qpos, d.qvel, d.qacc, d.nefc, d.nacon, d.overflow],
            outputs=[self._cause, self._faulty, self._usage],
        )
        self._restore(self._faulty)

    def _launch_snap(self) -> None:
        wp.launch(
            _snap_delays,
            dim=self._delay.shape,
            inputs=[self._delay, self._m.actuator_history, self.physics_dt],
            outputs=[self._m.actuator_delay],
        )

    def _forward(self) -> None:
        """Positions, velocities and their sensors; a step computes them anew, so nothing shifts."""
        mujoco_warp.fwd_position(self._m, self._d, factorize=False)
        mujoco_warp.sensor_pos(self._m, self._d)
        mujoco_warp.fwd_velocity(self._m, self._d)
        mujoco_warp.sensor_vel(self._m, self._d)

    def _restore(self, selected: wp.array) -> None:
        """Model defaults in the selected worlds; their derived fields show zeros, not the past."""
        for initial, value in self._resets.values():
            wp.launch(_restore_rows, dim=value.shape, inputs=[selected, initial], outputs=[value])

    def _reset_to(self, name: str, initial: Tensor, value: Tensor) -> None:
        """A reset writes `initial` (1 or N rows) into `value`; graphs hold the former list."""
        self._resets[name] = wp.from_torch(_flat(initial)), wp.from_torch(_flat(value))
        self._graphs.clear()

    def _run(self, key: tuple, launch: Callable[[], None]) -> None:
        """Launch the graph of this work on torch's current stream; capture it at its first use."""
        if key not in self._graphs:
            self._graphs[key] = self._capture(launch)
        wp.capture_launch(self._graphs[key], stream=self._torch_stream())

    def _capture(self, launch: Callable[[], None]) -> wp.Graph:
        """Record the work on a stream of Warp's: torch's default stream cannot be captured.

        Kernels compile and load at their first launch, which must not happen during a capture:
        the work is done once before, and the state put back.
        """
        live = [*self._state.values(), *self._fields.values(), self._usage_view]
        saved = [value.clone() for value in live]
        self._synchronize()
        with wp.ScopedDevice(self._wp_device):
            launch()
            wp.synchronize_device(self._wp_device)
            with wp.ScopedCapture() as capture:
                launch()
        for value, before in zip(live, saved, strict=True):
            value.copy_(before)
        self._synchronize()
        assert capture.graph is not None
        return capture.graph

    def _synchronize(self) -> None:
        """Wait for torch's work, which Warp's own stream knows nothing of."""
        if self._wp_device.is_cuda:
            torch.cuda.synchronize(self.device)

    def _torch_stream(self) -> wp.Stream | None:
        """torch's current stream, as Warp's object; None on the CPU, which has none."""
        if not self._wp_device.is_cuda:
            return None
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = wp.stream_from_torch(stream)
        return self._streams[stream.cuda_stream]

    def _warp_stream(self):
        """Launches inside go to torch's current stream."""
        stream = self._torch_stream()
        return wp.ScopedDevice(self._wp_device) if stream is None else wp.ScopedStream(stream)

    def _widen(self, name: str) -> wp.array:
        """Give a model field N rows, filled from its one; graphs hold the old address."""
        if name not in _batched_fields(self._m):
            raise ValueError(f"model field {name!r} cannot differ between worlds on backend 'warp'")
        owner, attribute = (self._m.opt, name[4:]) if name.startswith("opt.") else (self._m, name)
        old = self._delay if name == "actuator_delay" else getattr(owner, attribute)
        new = _clone(old, self.num_worlds)
        if name == "actuator_delay":
            self._delay, self._m.actuator_delay = new, _clone(new)
        else:
            setattr(owner, attribute, new)
        self._graphs.clear()
        return new

    def _report_overflow(self, bits: int) -> None:
        """Say once per kind what was dropped, and the setting to raise."""
        if bits & ~self._reported == 0:
            return
        for bit, (what, setting) in OVERFLOWS.items():
            if bits & bit & ~self._reported:
                warnings.warn(
                    f"simulator: {what} were dropped; raise {setting} "
                    f"(now {getattr(self, setting)} per world) of make_mujoco_sim",
                    RuntimeWarning,
                    stacklevel=3,
                )
        self._reported |= bits


@wp.kernel
def _survey(
    qpos: wp.array2d(dtype=float),
    qvel: wp.array2d(dtype=float),
    qacc: wp.array2d(dtype=float),
    nefc: wp.array(dtype=int),
    nacon: wp.array(dtype=int),
    overflow: wp.array(dtype=int),
    cause: wp.array(dtype=int),
    faulty: wp.array(dtype=bool),
    usage: wp.array(dtype=int),
):
    """Per world: which of qpos, qvel, qacc are bad (bits 1, 2, 4). Over all worlds: usage."""
    world = wp.tid()
    bad = int(0)  # noqa: UP018 -- so that Warp makes it a variable
    for i in range(qpos.shape[1]):
        if not (wp.abs(qpos[world, i]) < MAX_VALUE):  # also where it is NaN
            bad = bad | 1
    for i in range(qvel.shape[1]):
        if not (wp.abs(qvel[world, i]) < MAX_VALUE):
            bad = bad | 2
        if not (wp.abs(qacc[world, i]) < MAX_VALUE):
            bad = bad | 4
    cause[world] = bad
    faulty[world] = bad != 0
    if world == 0:
        wp.atomic_max(usage, 0, nacon[0])
    wp.atomic_max(usage, 1, nefc[world])
    if overflow[world] != 0:
        wp.atomic_or(usage, 2, overflow[world])


@wp.kernel
def _restore_rows(
    selected: wp.array(dtype=bool), initial: wp.array2d(dtype=float), value: wp.array2d(dtype=float)
):
    """Rows of `value` where selected become `initial`, which has one row or one per world."""
    world, i = wp.tid()
    if selected[world]:
        value[world, i] = initial[world % initial.shape[0], i]


@wp.kernel
def _snap_delays(
    delay: wp.array2d(dtype=float),
    history: wp.array2d(dtype=wp.vec2i),
    physics_dt: float,
    snapped: wp.array2d(dtype=float),
):
    """The delay [s] that reads, without interpolation, the sample that the true delay means.

    MuJoCo takes the newest sample that is at least `delay` old: the one ceil(delay / dt) steps
    back. Comparing float32 times that are equal in exact arithmetic would take its neighbour now
    and then (from 16 s on their spacing exceeds MuJoCo Warp's tolerance), so ask half a step
    earlier, where no time stamp is near.
    """
    world, actuator = wp.tid()
    value = delay[world, actuator]
    interpolation = history[world % history.shape[0], actuator][1]
    if value > 0.0 and interpolation == 0:
        steps = wp.max(wp.ceil(value / physics_dt - 1.0e-3), 1.0)
        value = (steps - 0.5) * physics_dt
    snapped[world, actuator] = value


@contextlib.contextmanager
def _kept(fields: dict[str, Tensor], rows: Rows | None):
    """Outside `rows` (None: nowhere) derived fields keep their values; Warp computes all worlds."""
    if isinstance(rows, slice):
        yield
        return
    before = {name: value.clone() for name, value in fields.items()}
    yield
    for name, value in fields.items():
        if rows is not None:
            before[name][rows] = value[rows]
        value.copy_(before[name])


def default_capacity(model: mujoco.MjModel, geom_pairs: np.ndarray) -> tuple[int, int]:
    """Room for what the model can do at once: (contacts, constraint rows) per world.

    Contacts with the static world count fully. Those among moving shapes count fully up to
    `SELF_CONTACTS` per shape: a robot does not touch itself everywhere at once.

    Args:
        model: the compiled model.
        geom_pairs: (n, 2) pairs of shapes that may collide.
    """
    moving = model.body_weldid[model.geom_bodyid] != 0
    world_contacts = self_contacts = 0
    for a, b in geom_pairs:
        kinds = frozenset({mujoco.mjtGeom(model.geom_type[a]), mujoco.mjtGeom(model.geom_type[b])})
        count = CONTACTS_PER_PAIR.get(kinds, OTHER_CONTACTS)
        if moving[a] and moving[b]:
            self_contacts += count
        else:
            world_contacts += count
    contacts = world_contacts + min(self_contacts, SELF_CONTACTS * int(moving.sum()))
    dim = max([1, *model.geom_condim, *model.pair_dim])
    pyramid = model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL
    rows = contacts * (2 * (dim - 1) if pyramid and dim > 1 else dim)
    rows += int(model.jnt_limited.sum()) + int(model.tendon_limited.sum())
    rows += int((model.dof_frictionloss > 0).sum()) + int((model.tendon_frictionloss > 0).sum())
    equality = {mujoco.mjtEq.mjEQ_CONNECT: 3, mujoco.mjtEq.mjEQ_WELD: 6}
    rows += sum(equality.get(mujoco.mjtEq(kind), 1) for kind in model.eq_type)
    return max(int(contacts), 1), max(int(rows), 1)


def _check_device(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"backend 'warp' runs on an NVIDIA GPU or the CPU, not on {str(device)!r}")
    if not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: torch finds no GPU; use --device cpu")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"device {str(device)!r}: this machine has {torch.cuda.device_count()} GPUs"
        )
    return torch.device("cuda", index)


def _supported(model: mujoco.MjModel) -> mujoco.MjModel:
    """The model, with Newton for PGS. Raises ValueError for what would be wrong in silence."""
    if model.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP:
        raise ValueError("backend 'warp' cannot run this model: its state would miss who sleeps")
    if model.nsensor and model.sensor_history[:, 0].any():
        raise ValueError(
            "backend 'warp' cannot run this model: delayed sensors advance at every read; "
            "delay the observation term instead"
        )
    if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
        model = copy.copy(model)
        model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    return model


def _put_model(model: mujoco.MjModel) -> mujoco_warp.Model:
    try:
        return mujoco_warp.put_model(model)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(f"backend 'warp' cannot run this model: {error}") from error


def _batched_fields(m: mujoco_warp.Model) -> set[str]:
    """Names of the model's arrays that may have a row per world; options as "opt.x"."""
    return {
        prefix + f.name
        for prefix, owner in (("", m), ("opt.", m.opt))
        for f in dataclasses.fields(owner)
        if isinstance(getattr(owner, f.name), wp.array)
        and getattr(f.type, "shape", ("",))[0] == "*"
    }


def _clone(array: wp.array, num_rows: int | None = None) -> wp.array:
    """A copy with its first axis repeated to `num_rows`."""
    num_rows = array.shape[0] if num_rows is None else num_rows
    new = wp.empty((num_rows, *array.shape[1:]), dtype=array.dtype, device=array.device)
    wp.synchronize_device(array.device)  # allocated and last written on a stream of Warp's
    if new.size:
        wp.to_torch(new).copy_(wp.to_torch(array).expand_as(wp.to_torch(new)))
    new._is_batched = True  # MuJoCo Warp's own mark
    return new


def _flat(value: Tensor) -> Tensor:
    return value.view(len(value), -1)
