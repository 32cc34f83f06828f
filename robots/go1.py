"""Unitree Go1: names, default pose and the compiled model (`models/go1.xml` holds the numbers)."""

import math
from functools import lru_cache
from pathlib import Path

import mujoco
import torch
from torch import Tensor

from ctrl_rl.spec import Joint, Robot

MODEL_PATH = Path(__file__).parent / "models" / "go1.xml"

LEGS = ("FR", "FL", "RR", "RL")
JOINTS = tuple(f"{leg}_{part}_joint" for leg in LEGS for part in ("hip", "thigh", "calf"))
"""Joint order of observations and actions."""
_OTHER_SIDE = {"FR": "FL", "FL": "FR", "RR": "RL", "RL": "RR"}
MIRRORED_LEGS = tuple(_OTHER_SIDE[leg] for leg in LEGS)
"""The leg that stands in each leg's place when left and right change, in the order of `LEGS`."""
MIRRORED_JOINTS = tuple(
    ("-" if "hip" in joint else "") + _OTHER_SIDE[joint[:2]] + joint[2:] for joint in JOINTS
)
"""The same of joints: hips turn about the forward axis, so that their sign turns."""
DEFAULT_JOINT_POS = (0.0, 0.9, -1.8) * 4
"""[rad], in the order of `JOINTS`."""
HIP_OFFSET = (0.1881, 0.04675)
"""Hip joint from the trunk's centre, forward and sideways; with the leg's signs [m]."""
THIGH_OFFSET = 0.08
"""Thigh joint from the hip joint, sideways [m]."""
LINK = 0.213
"""Length of thigh and of calf down to the foot's centre [m]."""
MAX_DELAY = 0.02
"""Longest action delay that the actuators' buffers hold [s]."""

_VELOCITY_LIMIT = {"hip": 30.1, "thigh": 30.1, "calf": 20.06}  # [rad/s], see models/go1.xml


def make_model(
    physics_dt: float = 0.005,
    cone: str = "pyramidal",
    iterations: int = 4,
    all_contacts: bool = False,
) -> mujoco.MjModel:
    """Compile the robot on a flat floor.

    Args:
        physics_dt: [s].
        cone: "pyramidal", or "elliptic" (then with impratio 10 and tolerance 1e-8).
        iterations: of the Newton solver; line search iterations are twice as many.
        all_contacts: every shape touches the floor; else feet and trunk only, as in training.
    """
    spec = mujoco.MjSpec.from_file(str(MODEL_PATH))
    option = spec.option
    option.timestep = physics_dt
    option.iterations, option.ls_iterations = iterations, 2 * iterations
    if cone == "elliptic":
        option.cone, option.impratio = mujoco.mjtCone.mjCONE_ELLIPTIC, 10
        option.tolerance = 1e-8
    elif cone != "pyramidal":
        raise ValueError(f"unknown cone {cone!r}; use 'pyramidal' or 'elliptic'")
    for actuator in spec.actuators:
        actuator.nsample = math.ceil(MAX_DELAY / physics_dt) + 2
    for geom in spec.geoms:
        touches = all_contacts or geom.name == "trunk" or geom.name.endswith("_foot")
        geom.contype = int(touches and geom.name != "floor")
        geom.conaffinity = int(geom.name == "floor")
    return spec.compile()


def make_robot(model: mujoco.MjModel) -> Robot:
    """What a deployment must know, read from the compiled model by joint name."""
    joints = []
    for name, default in zip(JOINTS, DEFAULT_JOINT_POS, strict=True):
        joint = model.joint(name)
        actuator = model.actuator(name.removesuffix("_joint"))
        low, high = joint.range
        joints.append(
            Joint(
                name=name,
                default_pos=default,
                kp=float(actuator.gainprm[0]),
                kd=-float(actuator.biasprm[2]),
                effort_limit=float(actuator.forcerange[1]),
                velocity_limit=_VELOCITY_LIMIT[name.split("_")[1]],
                pos_low=float(low),
                pos_high=float(high),
            )
        )
    return Robot(name="go1", joints=tuple(joints), imu_body="trunk")


def leg_heights(joint_pos: Tensor, gravity_b: Tensor, height: Tensor) -> tuple[Tensor, Tensor]:
    """Forward kinematics of knees and feet, heights only.

    Closed form, so that a task has them of the present state without running MuJoCo's kinematics
    again; a test holds them to MuJoCo's.

    Args:
        joint_pos: (N, 12) [rad], in the order of `JOINTS`.
        gravity_b: unit vector of gravity in the trunk's frame (N, 3).
        height: of the trunk's centre (N,) [m].

    Returns:
        Heights of knees and of feet' centres in the world (N, 4) [m], in the order of `LEGS`.
    """
    front, side = _leg_signs(joint_pos.dtype, joint_pos.device)
    up = -gravity_b[:, :, None]  # the world's z axis in the trunk's frame (N, 3, 1)
    angle = joint_pos.unflatten(1, (4, 3)).clone()
    angle[:, :, 2] += angle[:, :, 1]  # of the calf against the hip
    sin, cos = torch.sin(angle), torch.cos(angle)
    # Heights of the axes that the hip turns about x: sideways, and up in the leg's plane.
    sideways = torch.addcmul(cos[:, :, 0] * up[:, 1], sin[:, :, 0], up[:, 2])
    upward = torch.addcmul(cos[:, :, 0] * up[:, 2], sin[:, :, 0], up[:, 1], value=-1)
    thigh = torch.addcmul(height[:, None], up[:, 0], front, value=HIP_OFFSET[0])
    thigh = torch.addcmul(thigh, up[:, 1], side, value=HIP_OFFSET[1])
    thigh = torch.addcmul(thigh, sideways, side, value=THIGH_OFFSET)
    drop = torch.addcmul(sin[:, :, 1:] * up[:, :1], cos[:, :, 1:], upward[:, :, None])
    knee = torch.sub(thigh, drop[:, :, 0], alpha=LINK)
    return knee, torch.sub(knee, drop[:, :, 1], alpha=LINK)


@lru_cache(maxsize=8)
def _leg_signs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(4,) each: 1 for a front leg, else -1; 1 for a left leg, else -1. Kept on the device."""
    front = [1.0 if leg[0] == "F" else -1.0 for leg in LEGS]
    side = [1.0 if leg[1] == "L" else -1.0 for leg in LEGS]
    new = lambda signs: torch.tensor(signs, dtype=dtype, device=device)  # noqa: E731
    return new(front), new(side)
