"""Go1: the model's numbers, the task's terms against an independent calculation, its timing."""

import dataclasses
import math

import mujoco
import numpy as np
import pytest
import torch

import ctrl_rl
from robots import go1
from robots.tasks.go1_velocity import Go1Velocity, Go1VelocityConfig

TASK = "Go1-Velocity-Flat-v0"


def make(num_envs=2, seed=0, **changes):
    """A nominal environment with some fields changed."""
    config = dataclasses.replace(Go1VelocityConfig().nominal(), **changes)
    return ctrl_rl.make(TASK, num_envs, seed=seed, config=config, threads=1)


def hold(env):
    """The action that asks for the default pose."""
    return torch.zeros(env.num_envs, 12)


def test_model_has_the_published_numbers():
    model = go1.make_model()
    # 5.204 + 4 (0.68 + 1.009 + 0.195862) = 12.743448
    assert model.body_mass.sum() == pytest.approx(12.743448)
    assert (model.nq, model.nv, model.nu) == (19, 18, 12)
    robot = go1.make_robot(model)
    assert [j.name for j in robot.joints] == list(go1.JOINTS)
    calf = robot.joints[2]
    assert (calf.kp, calf.kd, calf.effort_limit, calf.velocity_limit) == (35, 0.6, 35.55, 20.06)
    assert (calf.pos_low, calf.pos_high, calf.default_pos) == (-2.818, -0.888, -1.8)
    # rotor inertia times gear squared: 0.000111842 * 9^2, at hip and thigh * 6^2
    armature = model.dof_armature[6:9]
    assert armature == pytest.approx(0.000111842 * np.array([36, 36, 81]), rel=1e-4)


def test_actuator_is_a_clamped_pd_law():
    model = go1.make_model()
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    data.qvel[6:] = np.linspace(-3, 3, 12)
    target = data.qpos[7:] + np.tile([0.1, -0.3, 0.9], 4)  # the last one saturates: 35 * 0.9 > ...
    data.ctrl[:] = target
    mujoco.mj_forward(model, data)
    limit = np.tile([23.7, 23.7, 35.55], 4)
    low, high = model.actuator_ctrlrange.T
    law = 35 * (np.clip(target, low, high) - data.qpos[7:]) - 0.6 * data.qvel[6:]
    # a fresh history reads zero, so compare with the law only without delay
    assert data.actuator_force == pytest.approx(np.clip(law, -limit, limit))


def test_fine_model_differs_only_in_physics():
    coarse, fine = (Go1Velocity.plain_models()[k] for k in ("training", "fine"))
    assert (coarse.opt.timestep, fine.opt.timestep) == (0.005, 0.001)
    assert int(fine.opt.cone) == int(mujoco.mjtCone.mjCONE_ELLIPTIC)
    assert fine.opt.iterations == 100
    assert np.array_equal(coarse.body_mass, fine.body_mass)
    assert np.array_equal(coarse.jnt_range, fine.jnt_range)


def test_projected_gravity_and_velocity_in_known_poses():
    env = make(num_envs=3)
    half = math.sqrt(0.5)
    # roll +90 degrees, yaw +90 degrees, upright; a misread quaternion order gives (0, 0, 1), ...
    env.sim.qpos[:, 3:7] = torch.tensor([[half, half, 0, 0], [half, 0, 0, half], [1, 0, 0, 0]])
    env.sim.qvel[:, :3] = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    terms = env.observe_terms(slice(None))
    gravity = torch.tensor([[0.0, -1, 0], [0, 0, -1], [0, 0, -1]], dtype=torch.float64)
    torch.testing.assert_close(terms["projected_gravity"], gravity)
    # rolled: body y is world z, body z is world -y; turned left: body x is world y
    lin_vel = torch.tensor([[1.0, 3, -2], [2, -1, 3], [1, 2, 3]], dtype=torch.float64)
    torch.testing.assert_close(terms["base_lin_vel"], lin_vel)


def test_terms_equal_mujocos_own_rotation():
    env = make(num_envs=8, seed=3)
    for _ in range(20):
        env.step(0.5 * torch.randn(8, 12, generator=torch.Generator().manual_seed(1)))
    terms = env.observe_terms(slice(None))
    for i in range(8):
        quat = env.sim.qpos[i, 3:7].numpy()
        inverse, out = np.empty(4), np.empty(3)
        mujoco.mju_negQuat(inverse, quat)
        mujoco.mju_rotVecQuat(out, np.array([0.0, 0, -1]), inverse)
        assert terms["projected_gravity"][i].numpy() == pytest.approx(out, abs=1e-12)
        mujoco.mju_rotVecQuat(out, env.sim.qvel[i, :3].numpy(), inverse)
        assert terms["base_lin_vel"][i].numpy() == pytest.approx(out, abs=1e-12)


def test_leg_heights_equal_mujocos_kinematics():
    env = make(num_envs=16, seed=4)
    rng = torch.Generator().manual_seed(0)
    env.sim.qpos[:, 2:] += 0.5 * torch.rand(16, 17, dtype=torch.float64, generator=rng)
    env.sim.qpos[:, 3:7] /= env.sim.qpos[:, 3:7].norm(dim=1, keepdim=True)
    sites = env.sim.field("site_xpos")
    env.sim.forward(slice(None))
    x = env._state(slice(None))
    knee, foot = go1.leg_heights(env.sim.qpos[:, 7:], x["gravity_b"], env.sim.qpos[:, 2])
    for k, leg in enumerate(go1.LEGS):
        for ours, part in ((knee, "knee"), (foot, "foot")):
            theirs = sites[:, env.sim.model.site(f"{leg}_{part}").id, 2]
            torch.testing.assert_close(ours[:, k], theirs, atol=1e-12, rtol=0)


def test_feet_are_down_at_rest():
    env = make(command_zero_share=1.0)
    for _ in range(100):
        step = env.step(hold(env))
    assert env.observe_terms(slice(None))["foot_contact"].all()
    assert not step.terminated.any()
    assert step.info.reward_terms["stand"].min() > 0.9 * 0.03
    assert step.info.reward_terms["gait"].abs().max() == 0


def test_standing_through_a_walking_command_pays_no_gait_reward():
    env = make(command_zero_share=0.0)
    total = 0.0
    for _ in range(50):  # two turns of the 2 Hz clock, over which the mean desired height is h/pi
        total += env.step(hold(env)).info.reward_terms["gait"].mean().item()
    assert abs(total / 50) < 0.1 * 0.03


def test_clock_reads_zero_while_standing_and_turns_at_its_rate():
    env = make(num_envs=1, command_zero_share=0.0)
    first = env.observe()["actor"][0, -2:]
    for _ in range(25):  # 0.5 s at 2 Hz: one whole turn
        obs = env.step(hold(env)).obs
    torch.testing.assert_close(obs["actor"][0, -2:], first, atol=1e-5, rtol=0)
    assert first.norm() == pytest.approx(1.0)
    standing = make(num_envs=4, command_zero_share=1.0)
    assert (standing.observe()["actor"][:, -2:] == 0).all()
    assert (standing.command == 0).all()


def test_commands_cover_the_range_and_change_on_time():
    config = dataclasses.replace(Go1VelocityConfig(), push_velocity=0.0)
    env = ctrl_rl.make(TASK, 64, config=config.evaluation(), threads=1)
    seen, changes = [], []
    first = torch.ones(64, dtype=torch.bool)  # still in the first episode
    for t in range(1, 601):
        before = env.command.clone()
        step = env.step(hold(env))
        first &= ~(step.terminated | step.truncated)
        changed = (env.command != before).any(1) & first
        if changed.any():
            changes.append(t)
        seen.append(env.command.clone())
    assert set(changes) == {250, 500}  # every 5 s
    commands = torch.cat(seen)
    high = torch.tensor([1.0, 0.5, 1.0])
    assert (commands.abs() <= high).all()
    assert (commands.abs().amax(0) > 0.9 * high).all()
    share = (commands == 0).all(1).double().mean().item()
    assert 0.02 < share < 0.25  # 0.1 asked for


def test_push_adds_velocity_only_when_due():
    quiet = make(num_envs=8, command_zero_share=1.0)
    pushed = make(num_envs=8, command_zero_share=1.0, push_velocity=0.5, push_interval_s=(1.0, 1.0))
    first = torch.ones(8, dtype=torch.bool)  # still in the first episode
    for t in range(1, 51):
        for env in (quiet, pushed):
            first &= ~env.step(hold(env)).terminated
        difference = (pushed.sim.qvel - quiet.sim.qvel).abs()[first]
        if t < 50:
            assert difference.max() == 0
    assert (difference[:, :2] > 0).all() and difference[:, :2].max() <= 0.5
    assert difference[:, 2:].max() == 0


def test_falls_end_the_episode_with_the_penalty():
    env = make(num_envs=4)
    angle = math.radians(61) / 2
    env.sim.qpos[0, 3:7] = torch.tensor([math.cos(angle), math.sin(angle), 0, 0])
    env.sim.qpos[0, 2] = 1.0
    env.sim.qpos[1, 2] = 0.045  # the trunk's lower side is 5 cm below its centre
    angle = math.radians(55) / 2
    env.sim.qpos[2, 3:7] = torch.tensor([math.cos(angle), 0, math.sin(angle), 0])
    env.sim.qpos[2, 2] = 1.0
    step = env.step(hold(env))
    assert step.terminated.tolist() == [True, True, False, False]
    assert step.info.reward_terms["termination"].tolist() == [-1, -1, 0, 0]


def test_randomisation_is_per_world_and_off_when_nominal():
    config = Go1VelocityConfig().evaluation()
    env = ctrl_rl.make(TASK, 16, seed=1, config=config, threads=1)
    sim, model = env.sim, go1.make_model()
    trunk, foot = model.body("trunk").id, model.geom("FR_foot").id
    friction = sim.expand("geom_friction")[:, foot, 0]
    assert friction.unique().numel() == 16 and 0.5 <= friction.min() <= friction.max() <= 1.25
    assert torch.equal(
        sim.expand("geom_friction")[:, 0], sim.model_field("geom_friction")[None, 0].expand(16, 3)
    )
    mass = sim.expand("body_mass")[:, trunk] - model.body_mass[trunk]
    assert mass.unique().numel() == 16 and mass.abs().max() <= 1
    gain = sim.expand("actuator_gainprm")[:, :, 0] / 35
    assert 0.9 <= gain.min() < 0.95 and 1.05 < gain.max() <= 1.1
    torch.testing.assert_close(sim.expand("actuator_biasprm")[:, :, 1], -35 * gain)
    torch.testing.assert_close(sim.expand("actuator_forcerange")[:, 2, 1], 35.55 * gain[:, 2])
    delay = sim.expand("actuator_delay")[:, 0]
    assert delay.min() >= 0 and delay.max() <= 0.02 and delay.unique().numel() == 16
    # the nominal robot is the model file's, to the bit
    nominal = make(num_envs=1)
    for name in nominal.sim.state_dict()["expanded"]:
        assert torch.equal(nominal.sim.expand(name)[0], nominal.sim.model_field(name)), name


def test_delay_starts_from_the_default_pose():
    slow = make(num_envs=1, action_delay_s=(0.02, 0.02))
    fast = make(num_envs=1)
    force = []
    for env in (slow, fast):
        env.sim.field("actuator_force")
        env.step(hold(env))
        force.append(env.sim.field("actuator_force").abs().max().item())
    # a zero history would ask for joint angle 0 from the calf at -1.8 rad: 35 N·m and more
    assert force[0] < 12 and force[1] < 12


def test_evaluation_and_nominal_differ_only_where_they_say():
    def changed(a, b):
        names = [f.name for f in dataclasses.fields(a)]
        return {n for n in names if getattr(a, n) != getattr(b, n)}

    base = Go1VelocityConfig()
    assert changed(base, base.evaluation()) == {"staggered_start", "command_interval_s"}
    assert changed(base.evaluation(), base.nominal()) == {
        "friction",
        "trunk_mass_offset",
        "trunk_com_offset",
        "motor_strength",
        "action_delay_s",
        "push_velocity",
        "noise",
    }


def test_clock_runs_on_for_one_turn_after_the_command_became_zero():
    env = make(num_envs=2, command_zero_share=0.0)
    env.step(hold(env))
    env.next_command[:] = 1 << 30
    env.command[0] = 0.0
    running = []
    for _ in range(40):
        step = env.step(hold(env))
        running.append(step.obs["actor"][:, -2:].norm(dim=1) > 0.5)
        assert not step.terminated.any()
    stopped, walking = torch.stack(running, 1)
    # one turn of the 2 Hz clock is 25 steps; the last observed command was not zero
    assert stopped.tolist() == [True] * 25 + [False] * 15
    assert walking.all()
    assert (step.info.reward_terms["gait"] == 0).tolist() == [True, False]


def test_an_episode_that_starts_with_standing_has_no_clock():
    env = make(num_envs=4, command_zero_share=0.0)
    for _ in range(3):
        env.step(hold(env))
    env.sim.qpos[0, 2] = 0.04  # falls, so that row 0 begins anew
    env.config = dataclasses.replace(env.config, command_zero_share=1.0)
    obs = env.step(hold(env)).obs["actor"]
    assert (obs[0, -2:] == 0).all() and (obs[1:, -2:].norm(dim=1) > 0.5).all()
