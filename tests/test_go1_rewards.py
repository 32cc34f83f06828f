"""Every reward term of Go1 against a calculation of its own, from MuJoCo's quantities."""

import dataclasses

import mujoco
import numpy as np
import pytest
import torch

import ctrl_rl
from robots import go1
from robots.tasks.go1_velocity import Go1VelocityConfig

CONFIG = dataclasses.replace(Go1VelocityConfig().nominal(), command_zero_share=0.5)


def tumbled(num_envs=24, **changes):
    """Environments at random states, actions and commands, half of these zero."""
    config = dataclasses.replace(CONFIG, **changes)
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", num_envs, config=config, threads=1)
    draw = lambda *size: torch.randn(  # noqa: E731
        *size, generator=torch.Generator().manual_seed(len(size) + size[-1]), dtype=torch.float64
    )
    quat = torch.tensor([1.0, 0, 0, 0]) + 0.3 * draw(num_envs, 4)
    env.sim.qpos[:, 2] += 0.02 * draw(num_envs, 1)[:, 0]
    env.sim.qpos[:, 3:7] = quat / quat.norm(dim=1, keepdim=True)
    env.sim.qpos[:, 7:] += 0.2 * draw(num_envs, 12)
    env.sim.qvel[:] = draw(num_envs, 18)
    env.prev_action[:] = draw(num_envs, 12)
    env.step_count[:] = torch.arange(num_envs)
    action = draw(num_envs, 1, 12)[:, 0].float()
    env.apply_action(action)
    return env, action


def expected(env, action, i):
    """The terms of world i before their weights, in numpy."""
    c, model = env.config, env.sim.model
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = env.sim.qpos[i], env.sim.qvel[i]
    mujoco.mj_forward(model, data)
    rotation = data.body("trunk").xmat.reshape(3, 3)
    velocity, turning = rotation.T @ data.qvel[:3], data.qvel[3:6]
    gravity = rotation.T @ [0, 0, -1]
    command, walks = env.command[i].numpy(), bool(env.command[i].any())
    feet = np.array([data.geom(f"{leg}_foot").xpos[2] - 0.023 for leg in ("FR", "FL", "RR", "RL")])
    turns = float(env.phase_start[i]) + float(env.step_count[i]) * 0.02 * c.gait_rate_hz
    phase = np.sin(2 * np.pi * turns)
    # a trot: front right with rear left, then front left with rear right
    swing = c.swing_height * np.maximum([phase, -phase, -phase, phase], 0)
    # the mean over a cycle of |swing| is height / pi: what standing still errs by
    gait = 1 - np.abs(feet - swing).mean() / (c.swing_height / np.pi)
    pos, vel = data.qpos[7:] - np.tile([0, 0.9, -1.8], 4), data.qvel[6:]
    limit = np.tile([23.7, 23.7, 35.55], 4)
    torque = np.clip(35 * (c.action_scale * action[i].numpy() - pos) - 0.6 * vel, -limit, limit)
    corners = [[x, y, z] for x in (-0.16, 0.16) for y in (-0.075, 0.075) for z in (-0.05, 0.05)]
    trunk = min((data.qpos[2] + (rotation @ corner)[2]) for corner in corners)
    knees = [data.body(f"{leg}_calf").xpos[2] for leg in ("FR", "FL", "RR", "RL")]
    fallen = trunk < 0.003 or gravity[2] > -0.5 or min(knees) < 0.02
    lin, ang = velocity[:2] - command[:2], turning[2] - command[2]
    return {
        "track_lin_vel": np.exp(-(lin @ lin) / c.tracking_variance),
        "track_ang_vel": np.exp(-(ang**2) / c.tracking_variance),
        "gait": gait if walks else 0,
        "stand": 0 if walks else np.exp(-(vel @ vel) / 10 - 20 * np.maximum(feet, 0).sum()),
        "lin_vel_z": velocity[2] ** 2,
        "ang_vel_xy": turning[0] ** 2 + turning[1] ** 2,
        "tilt": gravity[0] ** 2 + gravity[1] ** 2,
        "height": (data.qpos[2] - c.base_height) ** 2,
        "action_rate": ((action[i].numpy() - env.prev_action[i].numpy()) ** 2).sum(),
        "torque": torque @ torque,
        "hip": (pos[[0, 3, 6, 9]] ** 2).sum(),
        "leg": (pos[[1, 2, 4, 5, 7, 8, 10, 11]] ** 2).sum(),
        "termination": float(fallen),
    }


def test_terms_equal_their_definition():
    env, action = tumbled()
    terms = env.reward_terms(action)
    weights = dataclasses.asdict(env.config.rewards)
    assert terms.keys() == weights.keys()
    walks = env.command.any(1)
    assert walks.any() and not walks.all()
    assert terms["termination"].any() and not terms["termination"].all()
    for i in range(env.num_envs):
        for name, value in expected(env, action, i).items():
            assert float(terms[name][i]) == pytest.approx(
                weights[name] * value, rel=1e-9, abs=1e-12
            ), (name, i)


def test_what_is_good_is_paid_and_what_is_bad_costs():
    weights = dataclasses.asdict(Go1VelocityConfig().rewards)
    good = {"track_lin_vel", "track_ang_vel", "gait", "stand"}
    for name, weight in weights.items():
        assert weight >= 0 if name in good else weight <= 0, name


def test_a_knee_on_the_floor_is_a_fall():
    env, _ = tumbled(num_envs=2)
    env.sim.qpos[:, 3:7] = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    env.sim.qpos[:, 2] = 0.16
    env.sim.qpos[:, 7:] = env.default_joint_pos
    env.sim.qpos[0, 8] = 0.9 - np.pi / 6  # the thigh of FR stands steeper
    env.reward_terms(torch.zeros(2, 12))
    low = 0.16 - 0.213 * np.cos([0.9 - np.pi / 6, 0.9])  # knee below the hip's height
    assert low[0] < 0.02 <= low[1]
    assert env.terminations()["knee_down"].tolist() == [True, False]
    assert not env.terminations()["trunk_down"].any()


def test_a_new_episode_remembers_no_action():
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 3, config=CONFIG, threads=1)
    env.step(torch.ones(3, 12))
    assert env.prev_action.any(1).all()
    obs = env.reset()
    assert not env.prev_action.any()
    term = env.spec.obs["actor"]
    start = sum(t.width for t in term[: [t.name for t in term].index("prev_action")])
    assert not obs["actor"][:, start : start + 12].any()


def test_the_critic_reads_what_was_written_into_the_model():
    config = Go1VelocityConfig()
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 4, config=config, threads=1)
    told, sim = env.observe_terms(slice(None)), env.sim
    base = go1.make_model()
    trunk, foot = base.body("trunk").id, base.geom("FR_foot").id
    told = {k: v.numpy() for k, v in told.items()}
    mass = sim.expand("body_mass")[:, trunk].numpy() - base.body_mass[trunk]
    assert told["trunk_mass"][:, 0] == pytest.approx(mass) and np.ptp(mass) > 0
    com = sim.expand("body_ipos")[:, trunk].numpy() - base.body_ipos[trunk]
    assert told["trunk_com"] == pytest.approx(com)
    assert told["friction"][:, 0] == pytest.approx(sim.expand("geom_friction")[:, foot, 0].numpy())
    assert told["action_delay"][:, 0] == pytest.approx(sim.expand("actuator_delay")[:, 0].numpy())
    factor = 1 + told["motor_strength"]
    for name, columns in (("gainprm", [0]), ("biasprm", [1, 2]), ("forcerange", [0, 1])):
        field = sim.expand(f"actuator_{name}").numpy()[:, :, columns]
        baseline = getattr(base, f"actuator_{name}")[:, columns]
        assert field == pytest.approx(baseline * factor[:, :, None]), name


def test_a_push_shows_in_the_observation_of_the_same_step():
    env = ctrl_rl.make(
        "Go1-Velocity-Flat-v0", 4, threads=1,
        config=dataclasses.replace(CONFIG, push_velocity=0.5, push_interval_s=(0.1, 0.1)),
    )  # fmt: skip
    for _ in range(5):
        step = env.step(torch.zeros(4, 12))
    terms = env.spec.obs["critic"]
    names = [t.name for t in terms]
    start = sum(t.width for t in terms[: names.index("base_lin_vel")])
    seen = step.obs["critic"][:, start : start + 3] / 2.0
    true = env.observe_terms(slice(None))["base_lin_vel"].float()
    assert (env.sim.qvel[:, :2].abs() > 0.05).any()
    assert seen == pytest.approx(true.numpy(), abs=1e-6)
