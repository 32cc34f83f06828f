"""Mirror symmetry: what a spec says of it, Go1 against the simulator, PPO with mirror images."""

import copy
import dataclasses

import mujoco
import numpy as np
import pytest
import torch
from probes import FollowSignal

import ctrl_rl
from ctrl_rl.policy import Policy
from ctrl_rl.ppo import PPO, STATS, PPOConfig, ppo_loss, train
from ctrl_rl.rollout import collect
from ctrl_rl.spec import ActionDim, Discrete, EnvSpec, Mirror, ObsTerm
from robots import go1
from robots.tasks import go1_velocity
from robots.tasks.go1_velocity import MIRROR as MIRROR_GO1
from robots.tasks.go1_velocity import Go1Velocity, Go1VelocityConfig

SIDES = ObsTerm(name="sides", kind="signal", size=2, labels=("left", "right"), history=2)
SLOPE = ObsTerm(name="slope", kind="signal", size=1, clip=(-1.0, 1.0))
MIRROR = Mirror(terms={"sides": ("right", "left"), "slope": ("-0",)}, action=("-turn",))
SPEC = EnvSpec(
    task="Toy-v0",
    num_envs=1,
    obs={"actor": (SIDES, SLOPE)},
    action=(ActionDim(name="turn", low=-2.0, high=2.0),),
    physics_dt=1.0,
    step_dt=1.0,
    max_episode_steps=10,
    mirror=MIRROR,
)


def mirrored(spec, name, x):
    column, sign = spec.mirrored(name)
    return x[:, list(column)] * torch.tensor(sign, dtype=x.dtype)


# The spec -----------------------------------------------------------------------------------


def test_columns_and_signs_by_hand():
    # two frames of (left, right), then the slope
    assert SPEC.mirrored("actor") == ((1, 0, 3, 2, 4), (1, 1, 1, 1, -1))
    assert SPEC.mirrored("action") == ((0,), (-1,))
    x = torch.tensor([[1.0, 2, 3, 4, 0.5]])
    assert mirrored(SPEC, "actor", x).tolist() == [[2, 1, 4, 3, -0.5]]
    assert EnvSpec.from_json(SPEC.to_json()) == SPEC


def changed(obs=(SIDES, SLOPE), action=SPEC.action, **mirror):
    mirror = dataclasses.replace(MIRROR, **mirror)
    return lambda: dataclasses.replace(SPEC, obs={"actor": obs}, action=action, mirror=mirror)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (changed(terms={"sides": ("right", "left")}), "nothing is said of 'slope'"),
        (changed(terms={**MIRROR.terms, "slope": ("-1",)}), "no element is called 1"),
        (changed(terms={**MIRROR.terms, "sides": ("right",)}), "needs 2 elements"),
        (changed(terms={**MIRROR.terms, "sides": ("left", "left")}), "not the same again"),
        (changed(terms={**MIRROR.terms, "sides": ("-right", "left")}), "not the same again"),
        (
            changed((dataclasses.replace(SIDES, scale=(1.0, 2.0)), SLOPE)),
            "elements of 'sides' that change places differ in scale",
        ),
        (changed((SIDES, dataclasses.replace(SLOPE, clip=(-1.0, 2.0)))), "'slope' has a side"),
        (changed(action=(ActionDim(name="turn", low=-1.0, high=2.0),)), "differ in bounds"),
        (changed(action=(ActionDim(name="turn", offset=0.1),)), "differ in bounds, scale or off"),
        (changed(action=Discrete(n=2)), "a discrete action has none"),
    ],
)
def test_a_mirror_that_does_not_fit_is_refused(build, message):
    with pytest.raises(ValueError, match=f"^Toy-v0: mirror.*{message}"):
        build()


def test_a_task_without_a_mirror_says_so():
    with pytest.raises(ValueError, match="Toy-v0 does not say how it looks in a mirror"):
        dataclasses.replace(SPEC, mirror=None).mirrored("actor")


# Go1 ----------------------------------------------------------------------------------------


def symmetric_model() -> mujoco.MjModel:
    """The model with mass spread alike on left and right: the real robot's is off by 2 mm."""
    model = go1.make_model()
    reflect = np.diag([1.0, -1, 1])

    def inertia(body: int) -> np.ndarray:
        rotation = np.empty(9)
        mujoco.mju_quat2Mat(rotation, model.body_iquat[body])
        rotation = rotation.reshape(3, 3)
        return rotation @ np.diag(model.body_inertia[body]) @ rotation.T

    other_side = dict(zip(go1.LEGS, go1.MIRRORED_LEGS, strict=True))
    for body in range(1, model.nbody):
        leg, _, part = model.body(body).name.partition("_")
        other = model.body(f"{other_side[leg]}_{part}").id if part else body
        if other < body:
            continue
        pos = (model.body_ipos[body] + reflect @ model.body_ipos[other]) / 2
        mean = (inertia(body) + reflect @ inertia(other) @ reflect) / 2
        for b, p, full in ((body, pos, mean), (other, reflect @ pos, reflect @ mean @ reflect)):
            values, axes = np.linalg.eigh(full)
            axes[:, 0] *= np.linalg.det(axes)
            model.body_ipos[b], model.body_inertia[b] = p, values
            mujoco.mju_mat2Quat(model.body_iquat[b], axes.flatten())
    mujoco.mj_setConst(model, mujoco.MjData(model))
    return model


class Pair(Go1Velocity):
    """Row 1 is the mirror image of row 0, in everything that is drawn."""

    def world_uniform(self, term, size, low=0.0, high=1.0):
        draw = super().world_uniform(term, size, low, high)
        draw[1] = draw[0]
        if term == "trunk_com":
            draw[1, 1] = -draw[0, 1]
        elif size == 12:
            draw[1] = draw[0].unflatten(0, (4, 3))[[1, 0, 3, 2]].flatten()
        return draw

    def reflect(self):
        """Write the mirror image of row 0 to row 1: positions, velocities, targets, memory."""
        column, sign = self.spec.mirrored("action")
        joints = lambda x: x[list(column)] * torch.tensor(sign, dtype=x.dtype)  # noqa: E731
        sim = self.sim
        for full, base in ((sim.qpos, [1, -1, 1, 1, -1, 1, -1]), (sim.qvel, [1, -1, 1, -1, 1, -1])):
            n = len(base)
            full[1, :n] = full[0, :n] * torch.tensor(base, dtype=full.dtype)
            full[1, n:] = joints(full[0, n:])
        sim.ctrl[1] = joints(sim.ctrl[0] - self.default_joint_pos) + self.default_joint_pos
        sim.fill_delay(slice(None))
        for name, value in self.memory.items():
            if name not in ("com_offset", "strength_offset"):  # drawn as mirror images
                value[1] = value[0]
        self.prev_action[1] = joints(self.prev_action[0])
        self.command[1] = self.command[0] * torch.tensor([1.0, -1, -1])
        self.phase_start[1] = (self.phase_start[0] + 0.5) % 1


def walk(monkeypatch, model, steps) -> tuple[dict[str, float], float]:
    """How far row 1 is from the mirror image of row 0: each observation term, and the rewards."""
    monkeypatch.setattr(go1, "make_model", lambda: model)
    config = dataclasses.replace(
        Go1VelocityConfig().evaluation(), noise=False, command_zero_share=0.0, push_velocity=0.0
    )
    env = Pair(config, num_envs=2, seed=5, threads=1)
    env.reflect()
    rng = torch.Generator().manual_seed(0)
    sizes = [term.size for term in env.spec.obs["critic"]]
    off, reward_off, touched = dict.fromkeys(MIRROR_GO1.terms, 0.0), 0.0, False
    for _ in range(steps):
        action = 0.3 * torch.randn(1, 12, generator=rng)
        step = env.step(torch.cat([action, mirrored(env.spec, "action", action)]))
        assert not (step.terminated | step.truncated).any()
        terms = env.observe_terms(slice(None))
        raw = torch.cat([terms[t.name] for t in env.spec.obs["critic"]], 1)
        far = (mirrored(env.spec, "critic", raw)[0] - raw[1]).abs()
        for term, x in zip(env.spec.obs["critic"], far.split(sizes), strict=True):
            off[term.name] = max(off[term.name], x.max().item())
        touched |= bool(terms["foot_contact"].any())
        for value in step.info.reward_terms.values():
            reward_off = max(reward_off, (value[0] - value[1]).abs().item())
    assert touched
    return off, reward_off


def test_the_mirrored_state_and_action_give_the_mirrored_next_state(monkeypatch):
    """Contacts, randomised worlds, clock, command and previous action included."""
    off, reward_off = walk(monkeypatch, symmetric_model(), 20)
    assert max(off.values()) < 1e-9, off
    assert reward_off < 1e-9


@pytest.mark.parametrize(
    "name", [k for k, v in MIRROR_GO1.terms.items() if v != ("0",)] + ["action"]
)
def test_a_wrong_sign_of_any_term_is_found(monkeypatch, name):
    flip = lambda elements: tuple(  # noqa: E731
        e.removeprefix("-") if e.startswith("-") else f"-{e}" for e in elements
    )
    wrong = dataclasses.replace(
        MIRROR_GO1, terms={k: flip(v) if k == name else v for k, v in MIRROR_GO1.terms.items()}
    )
    if name == "action":
        wrong = dataclasses.replace(MIRROR_GO1, action=flip(MIRROR_GO1.action))
    monkeypatch.setattr(go1_velocity, "MIRROR", wrong)
    if name == "action":  # the targets' offsets already contradict it
        with pytest.raises(ValueError, match="differ in bounds, scale or offset"):
            walk(monkeypatch, symmetric_model(), 1)
    else:
        off, _ = walk(monkeypatch, symmetric_model(), 3)
        assert {k for k, v in off.items() if v > 1e-3} == {name}


def test_the_real_robots_masses_are_nearly_symmetric(monkeypatch):
    """What 2 mm in the trunk's centre of mass and alike calves do in 0.1 s."""
    off, reward_off = walk(monkeypatch, go1.make_model(), 5)
    assert 1e-3 < off["base_ang_vel"] < 0.1  # [rad/s]
    assert 1e-4 < off["joint_pos"] < 0.01  # [rad]
    assert 1e-5 < reward_off < 1e-3


# PPO ----------------------------------------------------------------------------------------


class OneSided(FollowSignal):
    """The probe whose best action is half the observation; only positive ones are ever seen."""

    def make_spec(self):
        mirror = Mirror(terms={"signal": ("-0",)}, action=("-action",))
        return dataclasses.replace(super().make_spec(), mirror=mirror)

    def begin(self, rows):
        self.sim.qpos[rows] = self.uniform("signal", rows, 1, 0.2, 1.0)


def ppo_for(env, **changes) -> PPO:
    config = PPOConfig(
        num_steps=8, num_epochs=2, num_minibatches=4, hidden=(16,), compile="off", **changes
    )
    return PPO(config, env.spec, env.device)


def batches_of(ppo, rollout):
    """The minibatches of an update, which is carried out."""
    seen, step = [], ppo.step
    ppo.step = lambda *batch: (seen.append(batch), step(*batch))[1]
    ppo.step.learning_rate = step.learning_rate
    metrics = ppo.update(rollout)
    ppo.step = step
    return seen, metrics


@pytest.mark.parametrize("normalize_obs", [True, False])
def test_every_sample_stands_beside_its_image(normalize_obs):
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 4, threads=1)
    ppo = ppo_for(env, mirror=True, normalize_obs=normalize_obs)
    rollout = collect(ppo.act, env, ppo.draw_noise())[0]
    seen, _ = batches_of(ppo, rollout)
    assert len(seen) == 2 * 4 and all(len(batch[0]) == 2 * 8 for batch in seen)  # 32 samples
    for name, k in (("actor", 0), ("critic", 1), ("action", 2)):
        x = torch.cat([batch[k] for batch in seen])
        if normalize_obs and name != "action":
            x = x * (ppo.normalizers[name].epsilon + 1) ** 0.5  # first statistics: mean 0, var 1
        torch.testing.assert_close(mirrored(env.spec, name, x[::2]), x[1::2])
        assert not torch.equal(x[::2], x[1::2])
    for k in (3, 4, 5):  # old_log_prob, advantage and value target are the sample's own
        x = torch.cat([batch[k] for batch in seen])
        assert torch.equal(x[::2], x[1::2])
    rows = torch.cat([batch[2] for batch in seen])[:64:2]  # each sample once per epoch
    assert len(rows.unique(dim=0)) == 32


def test_the_ratio_of_the_samples_is_one_before_the_first_step():
    env = ctrl_rl.make("Go1-Velocity-Flat-v0", 4, threads=1)
    ppo = ppo_for(env, mirror=True)
    with torch.no_grad():
        ppo.networks.policy.log_std += torch.linspace(-0.5, 0.5, 12)  # legs differ: not symmetric
    rollout = collect(ppo.act, env, ppo.draw_noise())[0]
    before = copy.deepcopy(ppo.networks)
    (batch, *_), _ = batches_of(ppo, rollout)
    ratio = (before.policy(before.actor(batch[0])).log_prob(batch[2]) - batch[3]).exp()
    torch.testing.assert_close(ratio[::2], torch.ones(8), rtol=0, atol=1e-5)
    assert (ratio[1::2] - 1).abs().min() > 1e-3
    _, stats = ppo_loss(before, batch, ppo.config)
    assert stats[STATS.index("policy/kl")].item() == pytest.approx(0, abs=1e-9)
    plain = ppo_loss(before, batch, dataclasses.replace(ppo.config, mirror=False))[1]
    assert plain[STATS.index("policy/kl")] > 1e-3


def answers(mirror: bool) -> torch.Tensor:
    """What 25 iterations teach for observations 0.8 and -0.8."""
    env = OneSided(num_envs=64)
    settings = {"activation": "relu", "target_kl": None, "learning_rate": 5e-3, "initial_std": 0.3}
    ppo = ppo_for(env, mirror=mirror, normalize_obs=False, **settings)
    for _ in range(25):
        ppo.update(collect(ppo.act, env, ppo.draw_noise())[0])
    return Policy.from_section(ppo.policy_section())(torch.tensor([[0.8], [-0.8]])).flatten()


def test_a_policy_acts_right_on_the_side_that_was_never_seen():
    seen, unseen = answers(mirror=True).tolist()
    print(seen, unseen)
    assert seen == pytest.approx(0.4, abs=0.1)
    assert unseen == pytest.approx(-0.4, abs=0.1)
    seen, unseen = answers(mirror=False).tolist()  # the negative control
    print(seen, unseen)
    assert seen == pytest.approx(0.4, abs=0.1)
    assert unseen > -0.2


def test_a_task_without_a_mirror_is_refused():
    env = ctrl_rl.make("Pendulum-v0", 2)
    with pytest.raises(ValueError, match="Pendulum-v0 does not say how it looks in a mirror"):
        train(PPOConfig(mirror=True), env)
