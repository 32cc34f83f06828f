"""The Warp backend on Warp's CPU device: agreement with MuJoCo C, isolation, exactness, capacities.

The first run compiles kernels (half a minute); later ones read Warp's cache.
"""

import functools
import sys
import warnings

import mujoco
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("mujoco_warp", reason="needs the extra: pip install 'ctrl-rl[warp]'")

import ctrl_rl
from benchmarks import gpu
from benchmarks.gpu import copy_state, random_actions, relative_error
from robots import go1
from robots.sim import make_mujoco_sim
from robots.sim.warp_backend import WarpSim
from robots.tasks import gymnasium_bodies

N = 8

CART = """
<mujoco>
  <option timestep="0.005" integrator="Euler"/>
  <worldbody>
    <body name="cart"><joint name="slide" type="slide" axis="1 0 0"/>
      <geom size="0.1" mass="2" contype="0" conaffinity="0"/></body>
  </worldbody>
  <actuator><motor joint="slide" nsample="8" delay="0.005"/></actuator>
</mujoco>
"""

BALLS = """
<mujoco>
  <option timestep="0.005"/>
  <worldbody>
    <geom type="plane" size="5 5 1"/>
    {}
  </worldbody>
</mujoco>
""".format(
    "".join(
        f'<body pos="{i} 0 0.09"><freejoint/><geom size="0.1"/></body>'  # each touches the floor
        for i in range(4)
    )
)


@pytest.fixture(scope="session")
def cart() -> mujoco.MjModel:
    """2 kg on a slide with a motor that can be delayed; no contact, no damping."""
    return mujoco.MjModel.from_xml_string(CART)


@pytest.fixture
def go1_converged(monkeypatch):
    """Go1 with a solver that always converges.

    With the 4 iterations of training about 1 of 50 steps under random actions ends at the limit,
    and there each backend stops elsewhere (velocities differ by up to 1 rad/s).
    """
    monkeypatch.setattr(go1, "make_model", functools.partial(go1.make_model, iterations=20))


def make_pair(task: str):
    """The same environments on Warp's CPU device and on MuJoCo C."""
    return (
        ctrl_rl.make(task, N, backend="warp", device="cpu", seed=3),
        ctrl_rl.make(task, N, backend="mujoco", seed=3),
    )


def difference(ours, theirs) -> float:
    """Worst world's `relative_error`."""
    return float(relative_error(ours, theirs).max())


def check_one_step(task: str) -> None:
    """Everything that a step gives, to 1e-5."""
    warp, reference = make_pair(task)
    copy_state(warp, reference)
    (action,) = random_actions(warp, 1)
    ours, theirs = warp.step(action), reference.step(action)
    assert difference(warp.sim.qpos, reference.sim.qpos) < 1e-5
    assert difference(warp.sim.qvel, reference.sim.qvel) < 1e-5
    for group in ours.next_obs:
        assert difference(ours.next_obs[group], theirs.next_obs[group]) < 1e-5, group
        assert ours.obs[group].dtype == torch.float32
    assert difference(ours.reward[:, None], theirs.reward[:, None]) < 1e-5
    for term, value in ours.info.reward_terms.items():
        expected = theirs.info.reward_terms[term]
        assert difference(value[:, None], expected[:, None]) < 1e-5, term
    assert torch.equal(ours.terminated, theirs.terminated)
    assert torch.equal(ours.truncated, theirs.truncated)


def check_twenty_steps(task: str, position: float, velocity: float) -> None:
    """Both go their own way from one state; worlds whose episode ended are left out from there."""
    warp, reference = make_pair(task)
    copy_state(warp, reference)
    live = torch.ones(N, dtype=torch.bool)
    for action in 0.5 * random_actions(warp, 20):
        ours, theirs = warp.step(action), reference.step(action)
        live &= ~(ours.terminated | ours.truncated | theirs.terminated | theirs.truncated)
    assert live.sum() >= N // 2
    assert difference(warp.sim.qpos[live], reference.sim.qpos[live]) < position
    assert difference(warp.sim.qvel[live], reference.sim.qvel[live]) < velocity


# Agreement with MuJoCo C -----------------------------------------------------------------------


def test_go1_agrees_after_one_step(go1_converged):
    check_one_step("Go1-Velocity-Flat-v0")


def test_go1_agrees_after_twenty_steps(go1_converged):
    # Measured: positions 3e-7, velocities 1e-5.
    check_twenty_steps("Go1-Velocity-Flat-v0", position=1e-5, velocity=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5"])
def test_bodies_agree_after_one_step(task):
    check_one_step(task)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"])
def test_bodies_agree_after_twenty_steps(task):
    # Measured: positions 6e-6, velocities 5e-5.
    check_twenty_steps(task, position=1e-4, velocity=1e-2)


@pytest.fixture
def models_with(monkeypatch):
    """Change gymnasium's models before both backends compile their environments."""
    load = gymnasium_bodies.load_gymnasium_model

    def use(**options):
        def changed(file):
            model = load(file)
            for name, value in options.items():
                setattr(model.opt, name, value)
            return model

        monkeypatch.setattr(gymnasium_bodies, "load_gymnasium_model", changed)

    return use


@pytest.mark.slow
def test_humanoid_agrees_with_the_newton_solver(models_with):
    """Its file asks for PGS, which Warp lacks; compared is Newton with Newton."""
    models_with(solver=mujoco.mjtSolver.mjSOL_NEWTON)
    check_one_step("Humanoid-v5")
    check_twenty_steps("Humanoid-v5", position=1e-4, velocity=1e-2)


@pytest.mark.slow
def test_ant_agrees_in_contact_with_an_elliptic_cone(models_with):
    """MuJoCo Warp turns the friction pyramid of a steep capsule; a round cone has no direction."""
    models_with(cone=mujoco.mjtCone.mjCONE_ELLIPTIC)
    check_twenty_steps("Ant-v5", position=1e-4, velocity=1e-2)


# Isolation and exactness -----------------------------------------------------------------------


def test_partial_reset_leaves_the_others_unchanged_to_the_bit(go1_converged):
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 4, backend="warp", device="cpu")
    env.sim.field("site_xpos")
    env.step(torch.ones(4, 12))
    before = env.sim.state_dict()
    rows = torch.tensor([1, 3])
    env.sim.reset(rows)
    env.sim.forward(rows)
    after = env.sim.state_dict()
    for kind in ("state", "fields", "expanded"):
        for name, value in before[kind].items():
            assert torch.equal(after[kind][name][[0, 2]], value[[0, 2]]), name
    assert torch.equal(env.sim.qpos[1], torch.from_numpy(env.sim.model.qpos0).float())
    assert not env.sim.qvel[rows].any() and not env.sim.ctrl[rows].any()
    assert (env.sim.field("site_xpos")[1] != before["fields"]["site_xpos"][1]).any()


def test_expanded_field_differs_per_world_and_commit_follows(cart):
    sim = WarpSim(cart, 2, "cpu")
    sim.expand("body_mass")[:, 1] = torch.tensor([1.0, 4.0])
    sim.expand("actuator_delay")[:] = 0.0
    sim.commit()
    sim.ctrl[:] = 8.0
    sim.step(1)
    # v = F / m * dt = 8 / 1 * 0.005 and 8 / 4 * 0.005
    torch.testing.assert_close(sim.qvel[:, 0], torch.tensor([0.04, 0.01]))
    inverse_weight = torch.from_numpy(sim._m.dof_invweight0.numpy())
    torch.testing.assert_close(inverse_weight[:, 0], torch.tensor([1.0, 0.25]))
    assert sim.model_field("body_mass")[1] == 2.0, "the baseline is the compiled model's"


def test_faulty_world_is_reset_and_the_others_do_not_notice(cart):
    sim, healthy = WarpSim(cart, 3, "cpu"), WarpSim(cart, 3, "cpu")
    for s in (sim, healthy):
        s.ctrl[:] = torch.tensor([[1.0], [2.0], [3.0]])
        s.step(2)
    sim.qvel[1] = float("nan")
    sim.step(2)
    healthy.step(2)
    assert sim.faulty.tolist() == [False, True, False]
    assert sim.fault_cause(1).startswith("simulator: qpos, qvel")
    for name, value in healthy.state_dict()["state"].items():
        assert torch.equal(sim.state_dict()["state"][name][[0, 2]], value[[0, 2]]), name
    assert sim.qpos[1] == 0 and sim.qvel[1] == 0 and sim.time[1] == 0
    sim.step(1)
    assert not sim.faulty.any()


def test_a_fault_in_an_environment_truncates_its_row_alone(go1_converged):
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 3, backend="warp", device="cpu")
    env.sim.qvel[2, 0] = float("inf")
    step = env.step(torch.zeros(3, 12))
    assert step.truncated.tolist() == [False, False, True]
    assert [fault.row for fault in step.info.faults] == [2]
    assert step.reward[2] == 0
    assert all(torch.isfinite(value).all() for value in (*step.obs.values(), step.reward))


@pytest.mark.parametrize("start_s", [0.0, 100.0])
def test_delay_is_exactly_k_steps(cart, start_s):
    """Also where a float32 clock is coarse: at 100 s two times differ by 8e-6 s or not at all."""
    sim = WarpSim(cart, 5, "cpu")
    sim.expand("actuator_delay")[:, 0] = 0.005 * torch.tensor([0.0, 1, 2, 3, 4])
    sim.commit()
    sim.reset(slice(None))
    history = sim._state["history"]
    sim.time += start_s
    history[:, 2:10] += start_s  # the buffer is (user, cursor, 8 times, 8 values)
    sim.step(3)
    for start in range(20):
        sim.ctrl[:] = 1.0
        arrived = []
        for _ in range(6):
            before = sim.qvel[:, 0].clone()
            sim.step(1)
            arrived.append(sim.qvel[:, 0] > before)
        first = torch.stack(arrived).float().argmax(0)
        assert first.tolist() == [0, 1, 2, 3, 4], f"after impulse {start}"
        sim.ctrl[:] = 0.0
        sim.step(6)


def test_a_filled_delay_acts_from_the_first_step(cart):
    sim = WarpSim(cart, 2, "cpu")
    sim.ctrl[:] = 4.0
    sim.fill_delay(torch.tensor([1]))
    sim.step(1)
    # 4 N on 2 kg for 5 ms; the other world still sees the zero of its empty buffer.
    torch.testing.assert_close(sim.qvel[:, 0], torch.tensor([0.0, 0.01]))


def test_resumed_state_is_exact_to_the_bit(go1_converged):
    make = functools.partial(ctrl_rl.make, "Go1-Velocity-Flat-v0", 3, backend="warp", device="cpu")
    env, again = make(seed=1), make(seed=2)
    generator = torch.Generator().manual_seed(0)
    actions = torch.randn(8, 3, 12, generator=generator)
    for action in actions[:4]:
        env.step(action)
    again.load_state_dict(env.state_dict())
    for action in actions[4:]:
        ours, theirs = env.step(action), again.step(action)
        assert torch.equal(ours.reward, theirs.reward)
        for group in ours.obs:
            assert torch.equal(ours.obs[group], theirs.obs[group])
    for name, value in env.sim.state_dict()["state"].items():
        assert torch.equal(again.sim.state_dict()["state"][name], value), name


def test_graphs_follow_what_was_expanded_or_bound_after_their_capture(cart):
    """A graph holds addresses: one captured before would go on with the old model."""
    sim = WarpSim(cart, 2, "cpu")
    sim.ctrl[:] = 8.0
    sim.step(1)
    sim.step(1)
    before = sim.qvel[:, 0].clone()
    sim.expand("body_mass")[:, 1] = torch.tensor([1.0, 4.0])
    sim.commit()
    sim.step(1)
    # 8 N for 5 ms on 1 kg and on 4 kg
    torch.testing.assert_close(sim.qvel[:, 0] - before, torch.tensor([0.04, 0.01]))
    position = sim.field("xpos")
    sim.reset(torch.tensor([0]))
    assert position[0, 1, 0] == 0.0 and position[1, 1, 0] != 0.0


def test_copied_rows_continue_alike(cart):
    sim = WarpSim(cart, 3, "cpu")
    sim.expand("body_mass")[:, 1] = torch.tensor([1.0, 2.0, 3.0])
    sim.commit()
    sim.ctrl[:, 0] = torch.tensor([1.0, 3.0, 6.0])
    sim.step(3)
    sim.set_rows(torch.tensor([2]), sim.get_rows(torch.tensor([0])))
    sim.step(3)
    assert torch.equal(sim.qpos[0], sim.qpos[2]) and sim.qpos[0] != sim.qpos[1]


def test_current_fields_are_those_of_the_present_state(cart):
    lagging, current = WarpSim(cart, 1, "cpu"), WarpSim(cart, 1, "cpu")
    for sim, flag in ((lagging, False), (current, True)):
        sim.field("xpos")
        sim.qvel[:] = 1.0
        sim.step(1, current=flag)
    assert lagging.field("xpos")[0, 1, 0] == 0.0
    assert current.field("xpos")[0, 1, 0] == current.qpos[0, 0] > 0.0


# Capacities ------------------------------------------------------------------------------------


def test_room_is_made_from_the_model():
    sim = WarpSim(go1.make_model(), 1, "cpu")
    # 4 spheres and a box on a plane: 4 + 4 contacts; 4 pyramid edges each, and 12 joint limits.
    assert (sim.nconmax, sim.njmax) == (8, 44)


@pytest.mark.parametrize(
    ("room", "setting"), [({"nconmax": 1}, "raise nconmax"), ({"njmax": 1}, "raise njmax")]
)
def test_overflow_is_a_warning_that_names_the_setting(room, setting, capfd):
    model = mujoco.MjModel.from_xml_string(BALLS)
    sim = make_mujoco_sim(model, 2, "warp", **room)
    with pytest.warns(RuntimeWarning, match=setting):
        sim.step(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        sim.step(1)
    assert torch.isfinite(sim.qpos).all()
    assert "overflow" not in capfd.readouterr().out, "no line per world and step"


def test_default_room_holds_every_contact():
    model = mujoco.MjModel.from_xml_string(BALLS)
    sim = make_mujoco_sim(model, 2, "warp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            sim.step(5)
    assert sim.capacities()["used_contacts"] == 4
    assert (sim.qpos[:, 2] > 0.08).all(), "nobody sank"


# Refusals --------------------------------------------------------------------------------------


def test_pgs_runs_with_newton_and_leaves_the_model_alone(cart):
    model = mujoco.MjModel.from_xml_string(CART)
    model.opt.solver = mujoco.mjtSolver.mjSOL_PGS
    sim = WarpSim(model, 1, "cpu")
    assert sim.model.opt.solver == mujoco.mjtSolver.mjSOL_NEWTON
    assert model.opt.solver == mujoco.mjtSolver.mjSOL_PGS


def test_what_warp_lacks_is_one_line(cart):
    model = mujoco.MjModel.from_xml_string(CART)
    model.opt.enableflags |= mujoco.mjtEnableBit.mjENBL_FWDINV
    with pytest.raises(ValueError, match="backend 'warp' cannot run this model"):
        WarpSim(model, 1, "cpu")
    sim = WarpSim(cart, 1, "cpu")
    with pytest.raises(ValueError, match="follows from others"):
        sim.expand("dof_invweight0")
    with pytest.raises(ValueError, match="cannot differ between worlds"):
        sim.expand("geom_type")
    with pytest.raises(ValueError, match="not computed by a step"):
        sim.field("qfrc_inverse")
    with pytest.raises(ValueError, match="make the simulator with contact_forces"):
        sim.field("cfrc_ext")


def test_delayed_sensors_are_refused():
    model = mujoco.MjModel.from_xml_string(
        CART.replace(
            "</actuator>",
            '</actuator><sensor><jointpos joint="slide" nsample="4" delay="0.01"/></sensor>',
        )
    )
    with pytest.raises(ValueError, match="delay the observation term instead"):
        WarpSim(model, 1, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_one_line(cart):
    with pytest.raises(ValueError, match="torch finds no GPU"):
        WarpSim(cart, 1, "cuda")


def test_a_missing_extra_is_named(cart, monkeypatch):
    monkeypatch.delitem(sys.modules, "robots.sim.warp_backend")
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(ValueError, match=r"ctrl-rl\[warp\]"):
        make_mujoco_sim(cart, 1, "warp")


def test_contact_force_is_the_weight():
    model = mujoco.MjModel.from_xml_string(BALLS)
    sim = make_mujoco_sim(model, 1, "warp", contact_forces=True)
    force = sim.field("cfrc_ext")
    for _ in range(80):
        sim.step(5)
    weight = model.body_mass[1] * 9.81
    np.testing.assert_allclose(force[0, 1:, 5], weight, rtol=1e-3)


# What a GPU would wait for ---------------------------------------------------------------------


class _Waits(TorchDispatchMode):
    """Counts what makes a GPU wait: numbers asked for, and tensors made from Python's."""

    def __init__(self):
        super().__init__()
        self.asked = self.sent = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.asked += "_local_scalar_dense" in name or "nonzero" in name
        self.sent += "lift_fresh" in name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("task", "allowed"), [("Go1-Velocity-Flat-v0", 5), ("HalfCheetah-v5", 3)])
def test_a_step_asks_the_device_for_few_numbers_and_sends_it_none(task, allowed):
    """Bad action, fault, ended; Go1 also asks whose command and whose push is due."""
    env = ctrl_rl.make(task, N)
    action = torch.zeros(N, len(env.spec.action))
    with _Waits() as waits:
        step = env.step(action)
    assert not (step.terminated | step.truncated).any(), "a reset may ask and send more"
    assert 0 < waits.asked <= allowed
    assert waits.sent == 0


# The benchmark ---------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_benchmark_refuses_without_a_gpu_in_one_line(capsys):
    assert gpu.main([]) == 2
    assert capsys.readouterr().err == "no GPU here; try the script with --device cpu --quick\n"


@pytest.mark.slow
def test_benchmark_runs_end_to_end_on_the_cpu(tmp_path):
    assert gpu.main(["--device", "cpu", "--quick", "--results", str(tmp_path)]) == 0
    results = gpu.cells.load("gpu", tmp_path)
    assert len(results) == 6
    speed = results["quick-speed-go1-4"]["result"]
    assert 0 < speed["env_steps_per_s"] < speed["physics_env_steps_per_s"] * 1.5
    assert results["quick-agreement-halfcheetah"]["result"]["qpos"]["max"] < 1e-5
    assert "checks" in results["quick-walk-go1"]["result"]
