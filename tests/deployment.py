"""A made-up robot, its policy and its file, for the tests of sim2real."""

import numpy as np
import torch

from ctrl_rl.networks import MLP
from ctrl_rl.policy import Policy
from ctrl_rl.spec import ActionDim, CommandDim, Discrete, EnvSpec, Joint, ObsTerm, Robot

YAW_90 = (0.5**0.5, 0.0, 0.0, 0.5**0.5)  # wxyz
ROLL_90 = (0.5**0.5, 0.5**0.5, 0.0, 0.0)

JOINTS = tuple(
    Joint(
        name=name,
        default_pos=default,
        kp=kp,
        kd=0.5,
        effort_limit=20.0,
        velocity_limit=10.0,
        pos_low=-1.0,
        pos_high=2.0,
    )
    for name, default, kp in (("a", 0.1, 10.0), ("b", 0.2, 20.0), ("c", 0.3, 30.0))
)

TERMS = (
    ObsTerm(name="gyro", kind="base_ang_vel_b", size=3, scale=(0.25,)),
    ObsTerm(name="gravity", kind="projected_gravity_b", size=3),
    ObsTerm(name="command", kind="command", size=2, labels=("turn", "walk"), scale=(1.0, 2.0)),
    ObsTerm(name="pos", kind="joint_pos_rel", size=3, labels=("a", "b", "c")),
    ObsTerm(
        name="vel",
        kind="joint_vel",
        size=3,
        labels=("a", "b", "c"),
        scale=(0.1,),
        clip=(-5.0, 5.0),
        history=3,
        history_fill="zero",
    ),
    ObsTerm(name="last", kind="prev_action", size=3, history=2),
    ObsTerm(name="clock", kind="phase", size=2, rate_hz=2.5),
    ObsTerm(name="range", kind="signal", size=1, unit="m"),
)


def make_spec(terms=TERMS, imu_quat=(1.0, 0.0, 0.0, 0.0), **changes) -> EnvSpec:
    """A robot of three joints that walks and turns at 50 Hz."""
    values = {
        "task": "Toy-v0",
        "num_envs": 4,
        "obs": {"actor": tuple(terms)},
        "action": tuple(
            ActionDim(name=j.name, low=-2.0, high=2.0, scale=0.1 * k, offset=j.default_pos)
            for k, j in enumerate(JOINTS, 1)
        ),
        "physics_dt": 0.005,
        "step_dt": 0.02,
        "max_episode_steps": 100,
        "command": (
            CommandDim(name="walk", unit="m/s", low=-1.0, high=1.0),
            CommandDim(name="turn", unit="rad/s", low=-0.5, high=0.5),
        ),
        "robot": Robot(name="toy", joints=JOINTS, imu_body="trunk", imu_quat=imu_quat),
    }
    return EnvSpec(**values | changes)


def make_policy(spec: EnvSpec, mean=0.0, sd=1.0, hidden=(16,), seed=0) -> Policy:
    """A random network behind a normaliser."""
    generator = torch.Generator().manual_seed(seed)
    size, discrete = spec.obs_size(), isinstance(spec.action, Discrete)
    section = {
        "format": 1,
        "kind": "categorical_mlp" if discrete else "gaussian_mlp",
        "spec": spec.to_json(),
        "group": "actor",
        "hidden": list(hidden),
        "activation": "elu",
        "normalizer": {
            "mean": torch.full((size,), float(mean), dtype=torch.float64),
            "var": torch.full((size,), float(sd) ** 2, dtype=torch.float64),
            "count": torch.tensor(1000.0, dtype=torch.float64),
            "clip": 10.0,
            "epsilon": 1e-8,
        },
        "bound": "clip",
        "weights": MLP((size, *hidden, spec.action_size), "elu", generator=generator).state_dict(),
    }
    if not discrete:
        section["log_std"] = torch.zeros(spec.action_size)
    return Policy.from_section(section)


def make_obs(spec: EnvSpec, count=64, mean=0.0, sd=1.0) -> torch.Tensor:
    """Random observations (count, d)."""
    generator = torch.Generator().manual_seed(1)
    return mean + sd * torch.randn(count, spec.obs_size(), generator=generator)


def reading_values(rows=1, seed=0) -> dict[str, np.ndarray]:
    """Random sensor values of a robot whose joints are in the order c, a, b."""
    random = np.random.default_rng(seed)
    quat = random.normal(size=(rows, 4))
    return {
        "joint_pos": random.normal(size=(rows, 3)),
        "joint_vel": 8 * random.normal(size=(rows, 3)),
        "gyro": random.normal(size=(rows, 3)),
        "quat": quat / np.linalg.norm(quat, axis=1, keepdims=True),
        "signals": {"range": random.normal(size=(rows, 1))},
    }
