"""A batch whose `cfrc_ext` holds the forces of contacts, as gymnasium's MuJoCo bodies read it.

`mj_step` fills `cfrc_ext` only where a sensor asks for it; `mj_rnePostConstraint` fills it on
request, but `mujoco.batch.Batch` cannot call a function on its worlds. MuJoCo's C interface can
(`mjb_apply`), so this class drives it through ctypes, from the library inside the wheel:

    mjb_step -> mjb_apply(mj_rnePostConstraint) -> mjb_forward(no stage), which copies fields out

The worlds are persistent (one mjData each), since the forces belong to the step just made. This
costs 2 to 9 % of the time and about 1 MB per world: for tasks that need the forces only.
"""

import ctypes
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

STATE_FIELDS = {
    "time": mujoco.mjtState.mjSTATE_TIME,
    "qpos": mujoco.mjtState.mjSTATE_QPOS,
    "qvel": mujoco.mjtState.mjSTATE_QVEL,
    "ctrl": mujoco.mjtState.mjSTATE_CTRL,
    "history": mujoco.mjtState.mjSTATE_HISTORY,
}
"""State rows hold these; every other field is an output."""


class _Config(ctypes.Structure):
    """`mjBatchConfig`."""

    _fields_ = [("nthread", ctypes.c_int), ("persistent", ctypes.c_bool)]


class _Owner:
    """Frees a batch when the last array on its memory is gone."""

    def __init__(self, c: ctypes.CDLL, handle: int) -> None:
        self._free, self._handle = c.mjb_deleteBatch, handle

    def __del__(self) -> None:
        self._free(self._handle)


class ContactBatch:
    """The part of `mujoco.batch.Batch` that `MujocoSim` uses, with contact forces.

    Args:
        model: compiled model; copied.
        nsim: number of worlds.
        nthread: pool size, 0 for all cores.

    Raises:
        RuntimeError: if MuJoCo cannot make the batch.
    """

    def __init__(self, model: mujoco.MjModel, nsim: int, nthread: int = 0) -> None:
        self._c = _library()
        self._model, self._nsim = model, nsim
        self._template = mujoco.MjData(model)
        self._rne = ctypes.cast(self._c.mj_rnePostConstraint, ctypes.c_void_p)
        error = ctypes.create_string_buffer(1000)
        config = _Config(nthread, True)
        made = self._c.mjb_makeBatch(model._address, nsim, ctypes.byref(config), error, 1000)
        if not made:
            raise RuntimeError(f"MuJoCo: {error.value.decode()}")
        self._handle, self._owner = made, _Owner(self._c, made)
        self.state = self._array(
            self._c.mjb_state(self._handle), "f8", (nsim, self._c.mjb_nstate(self._handle))
        )
        self.warning = self._array(
            self._c.mjb_warning(self._handle), "i4", (nsim, len(self._template.warning), 2)
        )

    def bind(self, name: str) -> np.ndarray:
        """Live (nsim, ...) array of a state field or an output, as `Batch.bind`."""
        size, item = ctypes.c_int(), ctypes.c_int()
        if name in STATE_FIELDS:
            bit = int(STATE_FIELDS[name])
            pointer = self._c.mjb_stateComponent(self._handle, bit, ctypes.byref(size))
            start = 0 if not size.value else (pointer - self.state.ctypes.data) // 8
            view = self.state[:, start : start + size.value]
            return view[:, 0] if name == "time" else view
        template = getattr(self._template, name)
        pointer = self._c.mjb_output(
            self._handle, name.encode(), ctypes.byref(size), ctypes.byref(item)
        )
        return self._array(pointer, template.dtype, (self._nsim, *template.shape))

    def expand(self, name: str) -> np.ndarray:
        """Live (nsim, ...) per-world values of a model field. Raises ValueError if it has none."""
        size, item = ctypes.c_int(), ctypes.c_int()
        pointer = self._c.mjb_expand(
            self._handle, name.encode(), ctypes.byref(size), ctypes.byref(item)
        )
        if not pointer:
            raise ValueError(f"{name} is not an expandable model field")
        template = getattr(self._model, name)
        return self._array(pointer, template.dtype, (self._nsim, *template.shape))

    def step(self, nstep: int, stage: int) -> None:
        """`nstep` physics steps, then contact forces, then the stages up to `stage`."""
        c, b = self._c, self._handle
        self._check(c.mjb_step(b, None, 0, nstep, 0))
        self._check(c.mjb_apply(b, None, 0, self._rne, None, 0))
        self._check(c.mjb_forward(b, None, 0, stage))

    def forward(self, ids: np.ndarray | None, stage: int) -> None:
        """Compute the stages up to `stage`."""
        self._check(self._c.mjb_forward(self._handle, *_ids(ids), stage))

    def set_const(self, ids: np.ndarray | None = None) -> None:
        """`mj_setConst` on each world's model."""
        self._check(self._c.mjb_setConst(self._handle, *_ids(ids)))

    def _array(self, pointer: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Array on the batch's own memory, which it keeps alive."""
        count = int(np.prod(shape))
        if not count:
            return np.zeros(shape, dtype)
        buffer = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(pointer)
        buffer.owner = self._owner  # so the memory lives as long as the last view of it
        return np.frombuffer(memoryview(buffer), dtype).reshape(shape)

    def _check(self, failed: int) -> None:
        if not failed:
            return
        status = self._array(self._c.mjb_status(self._handle), "i4", (self._nsim,))
        world = int(status.nonzero()[0][0])
        message = self._c.mjb_error(self._handle, world).decode()
        raise RuntimeError(f"MuJoCo raised in {failed} worlds; world {world}: {message}")


def _ids(ids: np.ndarray | None) -> tuple[Any, int]:
    if ids is None:
        return None, 0
    ids = np.ascontiguousarray(ids, np.int32)
    # no worlds is not the same as NULL, which means all of them
    return (ids if ids.size else np.zeros(1, np.int32)).ctypes.data_as(ctypes.c_void_p), ids.size


def _library() -> ctypes.CDLL:
    """MuJoCo's own shared library, the one that the Python package has loaded."""
    folder = Path(mujoco.__file__).parent
    found = sorted(
        p for pattern in ("libmujoco.so*", "libmujoco*.dylib", "mujoco.dll")
        for p in folder.glob(pattern)
    )  # fmt: skip
    if not found:
        raise RuntimeError(f"no MuJoCo library in {folder}: reinstall the mujoco package")
    c = ctypes.CDLL(str(found[0]))
    number, pointer, text = ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("mjb_makeBatch", pointer, (pointer, number, pointer, pointer, number)),
        ("mjb_deleteBatch", None, (pointer,)),
        ("mjb_nstate", number, (pointer,)),
        ("mjb_state", pointer, (pointer,)),
        ("mjb_stateComponent", pointer, (pointer, number, pointer)),
        ("mjb_warning", pointer, (pointer,)),
        ("mjb_status", pointer, (pointer,)),
        ("mjb_error", text, (pointer, number)),
        ("mjb_output", pointer, (pointer, text, pointer, pointer)),
        ("mjb_expand", pointer, (pointer, text, pointer, pointer)),
        ("mjb_step", number, (pointer, pointer, number, number, number)),
        ("mjb_forward", number, (pointer, pointer, number, number)),
        ("mjb_setConst", number, (pointer, pointer, number)),
        ("mjb_apply", number, (pointer, pointer, number, pointer, pointer, number)),
    ):
        function = getattr(c, name)
        function.restype, function.argtypes = result, arguments
    return c
