"""The MuJoCo backend: exactness, faulty worlds, stale fields, delays, randomised fields, state."""

import logging
import multiprocessing
import os
from pathlib import Path

import gymnasium.envs.mujoco
import mujoco
import numpy as np
import pytest
import torch

from robots.sim import make_mujoco_sim, mujoco_warnings
from robots.sim.mujoco_backend import DERIVED_FIELDS, STEP_FIELDS, MujocoSim

ANT = Path(gymnasium.envs.mujoco.__file__).parent / "assets" / "ant.xml"
ALL = slice(None)

PENDULUM = """<mujoco><option timestep="0.001" integrator="{integrator}"/><worldbody>
  <body pos="0 0 1"><joint name="hinge" axis="0 1 0"/>
    <geom type="sphere" size="0.05" pos="0 0 -0.5" mass="2" contype="0" conaffinity="0"/>
    <site name="tip" pos="0 0 -0.5"/></body></worldbody>
  <actuator>{actuator}</actuator>
  <sensor><jointpos joint="hinge"/><jointvel joint="hinge"/></sensor></mujoco>"""
MOTOR = '<motor joint="hinge" ctrlrange="-10 10"/>'
DELAYED = '<motor joint="hinge" delay="0.0025" nsample="6"/>'


def compiled(actuator=MOTOR, integrator="RK4", xml=PENDULUM):
    return mujoco.MjModel.from_xml_string(xml.format(actuator=actuator, integrator=integrator))


def ant():
    return mujoco.MjModel.from_xml_path(str(ANT))


def scatter(sim, seed=0):
    """A different state and control in every world."""
    g = torch.Generator().manual_seed(seed)
    sim.reset(ALL)
    sim.qpos += 0.1 * torch.rand(sim.qpos.shape, generator=g, dtype=torch.float64)
    sim.qvel += torch.randn(sim.qvel.shape, generator=g, dtype=torch.float64)
    sim.ctrl[:] = torch.rand(sim.ctrl.shape, generator=g, dtype=torch.float64) * 2 - 1
    return sim


# Exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("contact_forces", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_batch_equals_a_plain_loop_to_the_bit(threads, contact_forces):
    model = ant()
    sim = scatter(make_mujoco_sim(model, 5, threads=threads, contact_forces=contact_forces))
    fields = {name: sim.field(name) for name in sorted(STEP_FIELDS)}
    datas = [mujoco.MjData(model) for _ in range(5)]
    for i, data in enumerate(datas):
        data.qpos[:], data.qvel[:], data.ctrl[:] = sim.qpos[i], sim.qvel[i], sim.ctrl[i]
    for _ in range(20):
        sim.step(5)
    for i, data in enumerate(datas):
        mujoco.mj_step(model, data, nstep=100)
        np.testing.assert_array_equal(sim.qpos[i], data.qpos)
        np.testing.assert_array_equal(sim.qvel[i], data.qvel)
        for name, value in fields.items():  # every allowed field is this world's own
            np.testing.assert_array_equal(value[i], getattr(data, name), err_msg=name)
    assert sim.time.tolist() == [datas[0].time] * 5
    assert not sim.faulty.any()


@pytest.mark.parametrize("contact_forces", [False, True])
def test_partial_reset_leaves_the_others_unchanged(contact_forces):
    """And what it resets is current at once (derived fields are not those of the old episode)."""
    model = ant()
    sim = scatter(make_mujoco_sim(model, 4, threads=2, contact_forces=contact_forces))
    twin = scatter(make_mujoco_sim(model, 4, threads=2, contact_forces=contact_forces))
    torso, others = sim.field("xpos"), torch.tensor([0, 3])
    twin_torso = twin.field("xpos")
    for s in (sim, twin):
        s.step(5)
    rows = torch.tensor([1, 2])
    sim.reset(rows)
    sim.qpos[rows, 0] = 3.0
    sim.forward(rows)
    assert torso[rows, 1, 0].tolist() == [3.0, 3.0]
    assert sim.time[rows].tolist() == [0.0, 0.0] and not sim.qvel[rows].any()
    assert torch.equal(torso[others], twin_torso[others])
    for s in (sim, twin):
        s.step(5)
    assert torch.equal(sim.qpos[others], twin.qpos[others])
    assert torch.equal(torso[others], twin_torso[others])
    assert not torch.equal(sim.qpos[rows], twin.qpos[rows])


def test_a_reset_of_no_world_resets_none():
    sim = scatter(make_mujoco_sim(ant(), 2, contact_forces=True))
    sim.field("xpos")
    before = sim.qpos.clone()
    sim.reset(torch.tensor([], dtype=torch.int64))
    sim.forward(torch.tensor([], dtype=torch.int64))
    assert torch.equal(sim.qpos, before)


def test_terms_run_in_float64_and_views_are_live():
    sim = make_mujoco_sim(compiled(), 3)
    for tensor in (sim.qpos, sim.qvel, sim.ctrl, sim.time, sim.field("xpos")):
        assert tensor.dtype == sim.dtype == torch.float64
    qpos = sim.qpos
    qpos[1] = 0.5
    sim.step(1)
    assert sim.qpos is qpos and qpos[1] != 0.5 and qpos[0] == 0.0


# Faulty worlds -------------------------------------------------------------------------------


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("part", "value", "warning"),
    [
        ("qpos", NAN, "BADQPOS"),
        ("qpos", INF, "BADQPOS"),
        ("qvel", NAN, "BADQVEL"),
        ("qvel", 1e11, "BADQVEL"),
        ("ctrl", NAN, "BADCTRL"),
    ],
)
def test_a_bad_world_is_flagged_and_the_others_do_not_notice(part, value, warning):
    model = compiled()
    sim, twin = (scatter(make_mujoco_sim(model, 4, threads=2)) for _ in range(2))
    getattr(sim, part)[2] = value
    for s in (sim, twin):
        s.step(4)
    # MuJoCo has reset the world in silence: the state alone would tell nothing
    assert torch.isfinite(sim.qpos).all() and torch.isfinite(sim.qvel).all()
    assert sim.faulty.tolist() == [False, False, True, False]
    assert warning in sim.fault_cause(2)
    healthy = torch.tensor([0, 1, 3])
    assert torch.equal(sim.qpos[healthy], twin.qpos[healthy])
    assert torch.equal(sim.qvel[healthy], twin.qvel[healthy])
    if part == "ctrl":
        sim.ctrl[2] = 0.0
    sim.step(4)
    assert not sim.faulty.any()  # an old warning is no new fault
    getattr(sim, part)[2] = value
    sim.step(4)
    assert sim.faulty.tolist() == [False, False, True, False]  # and a second one is seen


def test_dropped_contacts_are_a_fault_that_names_the_setting():
    boxes = "".join(
        f'<body pos="0 0 {0.1 + 0.199 * k}"><freejoint/><geom type="box" size=".1 .1 .1"/></body>'
        for k in range(12)
    )
    xml = """<mujoco><size memory="{}"/><worldbody><geom type="plane" size="5 5 1"/>{}
      </worldbody></mujoco>"""
    roomy = make_mujoco_sim(mujoco.MjModel.from_xml_string(xml.format("10M", boxes)), 2)
    roomy.step(1)
    assert not roomy.faulty.any()
    tight = make_mujoco_sim(mujoco.MjModel.from_xml_string(xml.format("60K", boxes)), 2)
    tight.step(1)
    assert tight.faulty.all()
    assert 'raise <size memory="..."/>' in tight.fault_cause(0)


def test_warnings_are_counted_and_said_once_and_leave_no_file(tmp_path, caplog):
    mujoco_warnings.counts.clear()
    sim = make_mujoco_sim(compiled(), 8, threads=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sim.qvel[:] = float("nan")
            sim.step(1)
    assert sum(mujoco_warnings.counts.values()) == 24
    said = [r for r in caplog.records if "QVEL" in r.getMessage()]
    assert len(said) == 1
    assert os.listdir(tmp_path) == []


# Stale fields --------------------------------------------------------------------------------


def test_derived_fields_lag_one_physics_step_unless_asked():
    sim = make_mujoco_sim(compiled(integrator="Euler"), 1)
    tip, sensor = sim.field("site_xpos"), sim.field("sensordata")
    sim.qpos[0], sim.qvel[0] = 0.3, 2.0

    def height():  # of a point 0.5 m from the hinge, which is 1 m up
        return 1 - 0.5 * torch.cos(sim.qpos[0, 0])

    sim.forward(ALL)
    assert torch.allclose(tip[0, 0, 2], height(), rtol=0, atol=1e-15)
    before, state_before = height().clone(), (sim.qpos[0, 0].item(), sim.qvel[0, 0].item())
    sim.step(1)
    assert torch.allclose(tip[0, 0, 2], before, rtol=0, atol=1e-15) and height() != before
    assert sensor[0].tolist() == list(state_before)
    sim.step(3, current=True)
    assert torch.allclose(tip[0, 0, 2], height(), rtol=0, atol=1e-15)
    assert sensor[0].tolist() == [sim.qpos[0, 0].item(), sim.qvel[0, 0].item()]


def test_fields_that_a_step_does_not_compute_are_refused():
    sim = make_mujoco_sim(ant(), 2)
    for name in (
        "subtree_linvel",
        "qfrc_inverse",
        "cacc",
        "energy",
        "efc_force",
        "qpos",
        "nonsense",
    ):
        with pytest.raises(ValueError, match="not computed by a step for every world"):
            sim.field(name)
    with pytest.raises(ValueError, match="contact_forces"):
        sim.field("cfrc_ext")


def test_bound_fields_are_current_at_once():
    sim = make_mujoco_sim(compiled(), 2)
    sim.qpos[:] = 0.3
    assert sim.field("sensordata")[:, 0].tolist() == [0.3, 0.3]


def test_forward_costs_nothing_while_no_field_is_bound(monkeypatch):
    sim = make_mujoco_sim(compiled(), 2)
    calls = []
    monkeypatch.setattr(sim._made, "forward", lambda *a, **k: calls.append(a), raising=True)
    sim.forward(ALL)
    assert not calls
    sim.field("xpos")
    assert len(calls) == 1


def test_forces_of_a_reset_world_read_zero_and_of_others_stay():
    """A forward pass computes no forces; what a thread computed last must not show through."""
    xml = PENDULUM.replace("<jointpos", '<actuatorfrc actuator="m"/><jointpos')
    motor = '<motor name="m" joint="hinge"/>'
    sim = make_mujoco_sim(compiled(motor, "Euler", xml), 3, threads=1)
    force, sensor = sim.field("actuator_force"), sim.field("sensordata")
    sim.ctrl[:, 0] = torch.tensor([1.0, 2.0, 3.0])
    sim.step(1)
    assert force[:, 0].tolist() == sensor[:, 0].tolist() == [1, 2, 3]
    sim.reset(torch.tensor([1]))
    sim.qpos[1] = 0.5
    sim.forward(torch.tensor([1]))
    assert force[:, 0].tolist() == sensor[:, 0].tolist() == [1, 0, 3]
    assert sensor[1].tolist() == [0, 0.5, 0]  # position sensors are current
    sim.forward(ALL)
    assert force[:, 0].tolist() == sensor[:, 0].tolist() == [1, 0, 3]


# Contact forces ------------------------------------------------------------------------------


def test_a_resting_box_feels_its_weight():
    box = mujoco.MjModel.from_xml_string("""<mujoco><worldbody><geom type="plane" size="5 5 1"/>
      <body pos="0 0 .1"><freejoint/><geom type="box" size=".1 .1 .1" mass="1"/></body>
      </worldbody></mujoco>""")
    sim = make_mujoco_sim(box, 3, threads=2, contact_forces=True)
    force = sim.field("cfrc_ext")
    for _ in range(20):
        sim.step(50)
    assert force.shape == (3, 2, 6)
    torch.testing.assert_close(force[:, 1, 5], torch.full((3,), 9.81).double(), rtol=0, atol=1e-3)
    plain = MujocoSim(box, 3)  # a step alone leaves zeros, so the field cannot be bound there
    with pytest.raises(ValueError, match="contact_forces"):
        plain.field("cfrc_ext")


def test_contact_batch_frees_its_memory():
    import gc
    import weakref

    sim = make_mujoco_sim(compiled(), 2, contact_forces=True)
    owner = weakref.ref(sim._made._owner)
    qpos = sim.qpos
    sim.close()
    del sim
    gc.collect()
    assert owner() is not None  # a view keeps it
    assert qpos.tolist() == [[0.0], [0.0]]
    del qpos
    gc.collect()
    assert owner() is None


# Delay ---------------------------------------------------------------------------------------


def test_an_input_arrives_after_exactly_its_delay():
    """(k - 1/2) physics steps of delay are k steps, for ever; k steps themselves are k or k + 1.

    MuJoCo compares accumulated times, whose rounding decides at the border.
    """
    coarse = PENDULUM.replace('timestep="0.001"', 'timestep="0.004"')
    sim = make_mujoco_sim(compiled(DELAYED, "Euler", coarse), 4)
    steps = torch.tensor([0, 0.5, 2.5, 3.0], dtype=torch.float64)
    sim.expand("actuator_delay")[:, 0] = steps * sim.physics_dt
    sim.commit()
    sim.reset(ALL)
    sim.fill_delay(ALL)
    force, lags = sim.field("actuator_force"), []
    for k in range(1100):
        sim.ctrl[:] = k  # a staircase: what is felt tells when it was sent
        sim.qvel[:] = 0.0
        sim.step(1)
        lags.append(k - force[:, 0])
    lags = torch.stack(lags[4:])
    assert lags[:, 0].unique().tolist() == [0]
    assert lags[:, 1].unique().tolist() == [1]
    assert lags[:, 2].unique().tolist() == [3]
    assert lags[:, 3].unique().tolist() == [3, 4]  # the trap


def test_a_delayed_servo_starts_from_its_target_not_from_zero():
    two = PENDULUM.replace("</worldbody>", '<body pos="1 0 1"><joint name="b" axis="0 1 0"/>'
        '<geom size=".1"/></body></worldbody>')  # fmt: skip
    servo = '<position joint="{}" kp="40" delay="0.01" nsample="12"/>'
    sim = make_mujoco_sim(compiled(servo.format("hinge") + servo.format("b"), "Euler", two), 3)
    home = torch.tensor([0.8, -0.5], dtype=torch.float64)
    force = sim.field("actuator_force")

    def start(rows):
        sim.reset(rows)
        sim.qpos[rows] = home
        sim.ctrl[rows] = home

    start(ALL)
    sim.step(1)
    assert force[0].tolist() == [-40 * 0.8, 40 * 0.5]  # the trap: a history of zeros
    start(ALL)
    sim.fill_delay(torch.tensor([0, 2]))
    sim.step(1)
    assert force[0].abs().max() < 1e-12 and force[2].abs().max() < 1e-12
    assert force[1].tolist() == [-40 * 0.8, 40 * 0.5]  # row 1 was not asked for
    start(ALL)
    sim.fill_delay(ALL)
    sim.step(1)
    assert force.abs().max() < 1e-12


# Randomised fields ---------------------------------------------------------------------------


def test_a_factor_on_the_baseline_does_not_compound():
    sim = make_mujoco_sim(compiled(), 2)
    mass = sim.expand("body_mass")
    for _ in range(3):
        mass[:] = sim.model_field("body_mass") * 1.1
        sim.commit()
    assert mass[0, 1].item() == pytest.approx(2.2, abs=1e-15)  # not 2.662
    assert sim.model_field("body_mass")[1] == 2.0  # the compiled model is untouched


@pytest.mark.parametrize("contact_forces", [False, True])
def test_randomising_by_nothing_changes_nothing(contact_forces):
    def play(names):
        sim = scatter(make_mujoco_sim(ant(), 3, contact_forces=contact_forces))
        for name in names:
            sim.expand(name).copy_(sim.model_field(name))
        sim.commit()
        for _ in range(10):
            sim.step(5)
        return sim.qpos.clone()

    fields = ["body_mass", "body_ipos", "geom_friction", "dof_damping", "actuator_gear"]
    assert torch.equal(play(fields), play([]))


@pytest.mark.parametrize(
    "name", ["body_mass", "geom_friction", "dof_damping", "actuator_gear", "body_ipos"]
)
def test_a_randomised_field_really_differs_per_world_and_touches_no_other(name):
    model = ant()
    sim = make_mujoco_sim(model, 4, threads=2)
    others = {n: sim.expand(n) for n in ("body_mass", "geom_friction", "dof_damping")}
    factor = torch.tensor([1.0, 0.5, 1.5, 2.0], dtype=torch.float64)
    field = sim.expand(name)
    field[:] = sim.model_field(name) * factor.view(-1, *[1] * (field.ndim - 1))
    if name == "body_ipos":
        field[:, 1, 0] += factor - 1.0
    sim.commit()
    sim.reset(ALL)
    sim.ctrl[:] = 0.5
    sim.qvel[:, 6:] = 1.0
    for _ in range(20):
        sim.step(5)
    assert len({tuple(row.tolist()) for row in sim.qpos}) == 4
    data = mujoco.MjData(model)  # factor 1 is the compiled model
    data.ctrl[:], data.qvel[6:] = 0.5, 1.0
    mujoco.mj_step(model, data, nstep=100)
    np.testing.assert_array_equal(sim.qpos[0], data.qpos)
    for other, value in others.items():
        if other != name:
            assert (value == sim.model_field(other)).all()


def test_commit_carries_a_mass_into_what_follows_from_it():
    model = compiled()
    sim = make_mujoco_sim(model, 2)
    sim.expand("body_mass")[1, 1] = 8.0
    sim.commit()
    heavy = compiled()
    heavy.body_mass[1] = 8.0
    mujoco.mj_setConst(heavy, mujoco.MjData(heavy))
    assert sim._made.get_model(1).dof_invweight0[0] == heavy.dof_invweight0[0]
    assert sim._made.get_model(0).dof_invweight0[0] == model.dof_invweight0[0]


def test_fields_that_commit_derives_are_refused():
    sim = make_mujoco_sim(compiled(), 2)
    assert {"body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0"} <= DERIVED_FIELDS
    for name in ("body_subtreemass", "dof_invweight0", "actuator_acc0"):
        with pytest.raises(ValueError, match="follows from others"):
            sim.expand(name)
    with pytest.raises(ValueError):
        sim.expand("no_such_field")


# State ---------------------------------------------------------------------------------------


def disturbed(model, seed, contact_forces=False):
    """A simulator with expanded fields, delays and a history."""
    sim = scatter(make_mujoco_sim(model, 4, threads=2, contact_forces=contact_forces), seed)
    g = torch.Generator().manual_seed(seed)
    mass = sim.expand("body_mass")
    mass[:] = sim.model_field("body_mass") * (
        0.5 + torch.rand(4, 1, generator=g, dtype=torch.float64)
    )
    sim.commit()
    return sim


def same_state(a, b):
    for x, y in zip(a.values(), b.values(), strict=True):
        if isinstance(x, dict):
            same_state(x, y)
        else:
            assert torch.equal(x, y)


@pytest.mark.parametrize("contact_forces", [False, True])
@pytest.mark.parametrize("model", [ant(), compiled(DELAYED, "Euler")], ids=["ant", "delayed"])
def test_state_continues_to_the_bit_in_a_fresh_simulator(model, contact_forces):
    a = disturbed(model, 1, contact_forces)
    a.field("xpos")
    if contact_forces:
        a.field("cfrc_ext")
    a.qvel[3] = float("nan")
    a.step(7)
    saved = a.state_dict()
    b = disturbed(model, 2, contact_forces)
    b.step(3)
    b.load_state_dict(saved)
    same_state(b.state_dict(), saved)  # bound fields too: they may feed the next reward
    for _ in range(10):
        a.ctrl += 0.1
        b.ctrl += 0.1
        a.step(3)
        b.step(3)
        assert torch.equal(a.faulty, b.faulty)
    same_state(a.state_dict(), b.state_dict())


@pytest.mark.parametrize("contact_forces", [False, True])
def test_worlds_are_copied_with_their_model(contact_forces):
    sim = disturbed(ant(), 1, contact_forces)
    sim.field("xpos")
    sim.step(5)
    sim.set_rows(torch.tensor([3, 1]), sim.get_rows(torch.tensor([0, 2])))
    before = sim.qpos.clone()
    assert torch.equal(before[3], before[0]) and torch.equal(before[1], before[2])
    assert not torch.equal(before[0], before[2])
    for _ in range(10):
        sim.step(5)
    assert torch.equal(sim.qpos[3], sim.qpos[0]) and torch.equal(sim.qpos[1], sim.qpos[2])
    assert torch.equal(sim.field("xpos")[3], sim.field("xpos")[0])


def _step_in_child(sim, answers):
    try:
        sim.step(1)
    except RuntimeError as error:
        answers.put(str(error))


def test_a_forked_child_is_told_instead_of_hanging():
    sim = make_mujoco_sim(compiled(), 4, threads=2)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_step_in_child, args=(sim, answers))
    child.start()
    assert "made before a fork" in answers.get(timeout=20)
    child.join(timeout=20)
    sim.step(1)  # the parent goes on


# Physics -------------------------------------------------------------------------------------


def test_free_fall():
    ball = mujoco.MjModel.from_xml_string("""<mujoco><option timestep="0.001" gravity="0 0 -9.81"
      integrator="RK4"/><worldbody><body><freejoint/><geom size=".1" mass="3"/></body></worldbody>
      </mujoco>""")
    sim = make_mujoco_sim(ball, 2)
    sim.qvel[:, 2] = torch.tensor([0.0, 2.0])
    sim.step(500)
    # z = v t - g t^2 / 2 after 0.5 s: -1.22625 and 1 - 1.22625; v = v0 - g t
    assert sim.qpos[:, 2].tolist() == pytest.approx([-1.22625, -0.22625], abs=1e-9)
    assert sim.qvel[:, 2].tolist() == pytest.approx([-4.905, -2.905], abs=1e-9)
    assert sim.time.tolist() == pytest.approx([0.5, 0.5])


def test_pendulum_keeps_its_energy_and_its_period():
    sim = make_mujoco_sim(compiled(), 2)
    sim.qpos[:, 0] = torch.tensor([0.01, 2.0], dtype=torch.float64)
    # a 2 kg ball, radius 0.05 m, 0.5 m from the hinge: I = m (l^2 + 2/5 r^2) = 0.502 kg·m^2
    inertia, weight_arm = 0.502, 2 * 9.81 * 0.5

    def energy():
        return 0.5 * inertia * sim.qvel[:, 0] ** 2 - weight_arm * torch.cos(sim.qpos[:, 0])

    before, crossings = energy(), []
    for k in range(4000):
        last = sim.qpos[0, 0].item()
        sim.step(1)
        now = sim.qpos[0, 0].item()
        if last > 0 >= now:
            crossings.append(k + last / (last - now))
    torch.testing.assert_close(energy(), before, rtol=0, atol=1e-9)
    # T = 2 pi sqrt(I / (m g l)) = 1.42135 s; an amplitude of 0.01 rad adds 1 / 16 of its square
    period = 2 * np.pi * np.sqrt(inertia / weight_arm) * (1 + 0.01**2 / 16)
    assert (crossings[1] - crossings[0]) * 1e-3 == pytest.approx(period, rel=1e-6)


def test_position_actuator_is_the_pd_law():
    servo = '<position joint="hinge" kp="30" kv="2" forcerange="-12 12"/>'
    sim = make_mujoco_sim(compiled(servo, "Euler"), 3)
    sim.qpos[:, 0] = torch.tensor([0.1, -0.2, 0.0], dtype=torch.float64)
    sim.qvel[:, 0] = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64)
    sim.ctrl[:, 0] = torch.tensor([0.3, 1.0, 0.0], dtype=torch.float64)
    force = sim.field("actuator_force")
    sim.step(1)
    # kp (target - q) - kv v: 30 * 0.2 - 2 * 0.5 = 5; 30 * 1.2 = 36, clamped to 12; 2 * 1 = 2
    assert force[:, 0].tolist() == pytest.approx([5.0, 12.0, 2.0], abs=1e-12)


def test_motor_torque_is_clamped_in_the_simulator():
    """The env never clips an action; the actuator does, so 25 acts like 10."""
    sim = make_mujoco_sim(compiled(), 3)
    sim.ctrl[:, 0] = torch.tensor([10.0, 25.0, 9.0], dtype=torch.float64)
    force = sim.field("actuator_force")
    sim.step(50)
    assert sim.qpos[0] == sim.qpos[1] and sim.qpos[0] != sim.qpos[2]
    assert force[:, 0].tolist() == [10.0, 10.0, 9.0]
    assert sim.ctrl[1] == 25.0  # what was asked for stays readable
