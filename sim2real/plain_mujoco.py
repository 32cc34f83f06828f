"""Single robots in plain MuJoCo, seen through the sensors and moved by the gains of the card.

Nothing here knows the training environment: what the runtime reads and sends is all there is.

Reading order: `Sensors` -> `Robots`.
"""

import copy
import os
from concurrent.futures import ThreadPoolExecutor

import mujoco
import numpy as np

from ctrl_rl.spec import EnvSpec
from sim2real.card import robot_of
from sim2real.observer import Reading, imu_to_base
from sim2real.runtime import JointCommand


class Sensors:
    """Raw sensor readings from plain MuJoCo states; addresses go by joint name.

    Args:
        model: compiled robot whose IMU's body floats freely.
        spec: from the card.

    Raises:
        ValueError: the model lacks a joint, or the IMU's body does not float.
    """

    def __init__(self, model: mujoco.MjModel, spec: EnvSpec) -> None:
        self.joint_names = tuple(
            model.joint(j).name
            for j in range(model.njnt)
            if model.jnt_type[j] != mujoco.mjtJoint.mjJNT_FREE
        )
        wanted = {j.name for j in robot_of(spec).joints}
        if wanted != set(self.joint_names):
            missing = ", ".join(sorted(wanted ^ set(self.joint_names)))
            raise ValueError(f"model and card do not have the same joints: {missing}")
        address = lambda key: [  # noqa: E731
            int(getattr(model, key)[model.joint(n).id]) for n in self.joint_names
        ]
        self.qpos, self.qvel = address("jnt_qposadr"), address("jnt_dofadr")
        body = model.body(robot_of(spec).imu_body)
        joint = int(body.jntadr[0]) if body.jntnum[0] else -1
        if joint < 0 or model.jnt_type[joint] != mujoco.mjtJoint.mjJNT_FREE:
            raise ValueError(
                f"body {robot_of(spec).imu_body!r}, which holds the IMU, does not float"
            )
        self.base_qpos = int(model.jnt_qposadr[joint])
        self.base_qvel = int(model.jnt_dofadr[joint])
        self._imu_to_base = imu_to_base(spec)
        self._imu_quat = np.array(robot_of(spec).imu_quat)

    def read(self, qpos: np.ndarray, qvel: np.ndarray, now: float, signals=None) -> Reading:
        """What the robot's sensors say in states (N, nq), (N, nv); no noise."""
        quat = self.base_quat(qpos).copy()
        if not np.array_equal(self._imu_quat, (1, 0, 0, 0)):
            for row in quat:
                mujoco.mju_mulQuat(row, row.copy(), self._imu_quat)
        gyro = qvel[:, self.base_qvel + 3 : self.base_qvel + 6] @ self._imu_to_base
        return Reading(
            time=now,
            joint_pos=qpos[:, self.qpos],
            joint_vel=qvel[:, self.qvel],
            gyro=gyro,
            quat=quat,
            signals=signals or {},
        )

    def velocities(self, qpos: np.ndarray, qvel: np.ndarray) -> dict[str, np.ndarray]:
        """Linear (N, 3) [m/s] and angular (N, 3) [rad/s] velocity of the base in its own frame."""
        linear = np.empty((len(qpos), 3))
        inverse = np.empty(4)
        for i, quat in enumerate(self.base_quat(qpos)):
            mujoco.mju_negQuat(inverse, quat)
            mujoco.mju_rotVecQuat(linear[i], qvel[i, self.base_qvel : self.base_qvel + 3], inverse)
        return {"lin": linear, "ang": qvel[:, self.base_qvel + 3 : self.base_qvel + 6]}

    def base_quat(self, qpos: np.ndarray) -> np.ndarray:
        """Orientation of the base in the world (N, 4), wxyz."""
        return qpos[:, self.base_qpos + 3 : self.base_qpos + 7]

    def base_xy(self, qpos: np.ndarray) -> np.ndarray:
        """Place of the base on the floor (N, 2) [m]."""
        return qpos[:, self.base_qpos : self.base_qpos + 2]

    def tilt(self, qpos: np.ndarray) -> np.ndarray:
        """Angle between the base's up axis and the vertical (N,) [rad]."""
        x, y = self.base_quat(qpos)[:, 1:3].T
        return np.arccos(np.clip(1 - 2 * (x * x + y * y), -1, 1))


class Robots:
    """N single robots, each an `MjData` of its own, stepped by `mj_step`.

    Position control runs in the model's actuators with the gains of the card.

    Args:
        model: the plain model; its actuators' gains are overwritten in a copy.
        spec: from the card.
        qpos: start (N, nq).
        qvel: start (N, nv).
        threads: 0 for all cores.
        watch: geoms whose contacts are noted in every physics step.

    Raises:
        ValueError: a joint without a position actuator.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        spec: EnvSpec,
        qpos: np.ndarray,
        qvel: np.ndarray,
        threads: int,
        watch: tuple[str, ...] = (),
    ) -> None:
        self.sensors = Sensors(model, spec)
        self.model = model = _with_gains(model, spec)
        self.joint_names = self.sensors.joint_names
        driver = {int(model.actuator_trnid[u, 0]): u for u in range(model.nu)}
        self._actuators = [driver[model.joint(n).id] for n in self.joint_names]
        self.num_steps = round(spec.step_dt / model.opt.timestep)
        self.data = [mujoco.MjData(model) for _ in range(len(qpos))]
        for data, q, v in zip(self.data, qpos, qvel, strict=True):
            data.qpos[:], data.qvel[:] = q, v
            mujoco.mj_forward(model, data)
        self.alive = np.ones(len(qpos), bool)
        self.touched = np.zeros(len(qpos), bool)
        """Robots of which a watched geom touched something during the last `step` (N,)."""
        self._watched = np.zeros(model.ngeom, bool)
        self._watched[[model.geom(g).id for g in watch]] = True
        self.time = 0.0
        count = threads or os.cpu_count() or 1
        self._chunks = np.array_split(np.arange(len(qpos)), count)
        self._pool = ThreadPoolExecutor(count)

    @property
    def qpos(self) -> np.ndarray:
        """Positions (N, nq)."""
        return np.stack([d.qpos for d in self.data])

    @property
    def qvel(self) -> np.ndarray:
        """Velocities (N, nv)."""
        return np.stack([d.qvel for d in self.data])

    def read(self) -> Reading:
        """Sensor readings now, (N, ...)."""
        return self.sensors.read(self.qpos, self.qvel, self.time)

    def step(self, command: JointCommand) -> None:
        """Hold a command for one policy step; robots that are not alive stay frozen."""

        def advance(rows: np.ndarray) -> None:
            for i in rows:
                if self.alive[i]:
                    data = self.data[i]
                    data.ctrl[self._actuators] = command.pos[i]
                    for _ in range(self.num_steps):
                        mujoco.mj_step(self.model, data)
                        if data.ncon and self._watched[data.contact.geom].any():
                            self.touched[i] = True

        self.touched[:] = False
        list(self._pool.map(advance, self._chunks))
        self.time += self.num_steps * self.model.opt.timestep

    def touching(self, geoms: tuple[str, ...]) -> np.ndarray:
        """Which of the named geoms touch something (N, G), as of the last physics step."""
        column = np.full(self.model.ngeom, len(geoms))  # the others share a last column
        column[[self.model.geom(g).id for g in geoms]] = np.arange(len(geoms))
        touch = np.zeros((len(self.data), len(geoms) + 1), bool)
        for i, data in enumerate(self.data):
            if self.alive[i] and data.ncon:
                touch[i, column[data.contact.geom]] = True
        return touch[:, :-1]

    def bad(self) -> np.ndarray:
        """Robots whose simulation left the numbers, which MuJoCo resets without an error (N,)."""
        kinds = (
            mujoco.mjtWarning.mjWARN_BADQPOS,
            mujoco.mjtWarning.mjWARN_BADQVEL,
            mujoco.mjtWarning.mjWARN_BADQACC,
        )
        return np.array([any(d.warning[k].number for k in kinds) for d in self.data])

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()


def _with_gains(model: mujoco.MjModel, spec: EnvSpec) -> mujoco.MjModel:
    """A copy of the model whose position actuators have the card's gains."""
    model = copy.deepcopy(model)
    driver = {int(model.actuator_trnid[u, 0]): u for u in range(model.nu)}
    for joint in robot_of(spec).joints:
        u = driver.get(model.joint(joint.name).id)
        if u is None or model.actuator_biastype[u] != mujoco.mjtBias.mjBIAS_AFFINE:
            raise ValueError(f"joint {joint.name!r} of the plain model has no position actuator")
        model.actuator_gainprm[u, 0] = joint.kp
        model.actuator_biasprm[u, 1:3] = -joint.kp, -joint.kd
    return model
