"""ARO-DDPG: gains and differential values that are known, and what an end means for them."""

import dataclasses

import pytest
import torch
from probes import ConstantReward, LastStepReward, Probe
from test_ddpg import CASES, Keep, filled, pendulum
from test_ppo import differing
from torch import nn

from ctrl_rl import aro_ddpg
from ctrl_rl.aro_ddpg import actor_loss, critic_loss, differential_target
from ctrl_rl.spec import ObsTerm

CASE = CASES["aro_ddpg"]


class Ring(Probe):
    """Two states in turn, which pay 1 and 3: gain 2, and Q(second) - Q(first) = 1.

    Each episode begins in the first and has 5 steps, so that a restart shows: 1 3 1 3 1, 1 3 ...
    pays 9/5 per step. Observation: one-hot of the state.
    """

    id = "Probe-Ring-v0"
    terms = (ObsTerm(name="state", kind="signal", size=2),)
    ends = False

    def __init__(self, **options):
        super().__init__(dataclasses.replace(self.Config(), max_episode_steps=5), **options)

    def observe_terms(self, rows):
        state = self.step_count[rows] % 2
        return {"state": nn.functional.one_hot(state, 2).to(self.sim.dtype)}

    def reward_terms(self, action):
        return {"state": (1 + 2 * ((self.step_count - 1) % 2)).to(self.sim.dtype)}

    def terminations(self):
        return {"end": (self.step_count == 5) & self.ends}


class EndingRing(Ring):
    """The same, and the fifth step terminates: the restart belongs to the task."""

    id = "Probe-EndingRing-v0"
    ends = True


class EvenRing(Ring):
    """Both states pay 1."""

    id = "Probe-EvenRing-v0"

    def reward_terms(self, action):
        return {"one": torch.ones(self.num_envs, dtype=self.sim.dtype)}


class LosesFinalObs(Ring):
    """What many vector environments do: after a cut the next observation is the new episode's."""

    def step(self, action):
        step = super().step(action)
        return step._replace(next_obs={g: x.clone() for g, x in step.obs.items()})


def td_errors(env, value, gain: float, failure: bool = False, **changes) -> torch.Tensor:
    """y - rho - Q of every transition of 30 steps, with values that are given.

    Args:
        env: a probe.
        value: Q as a function of the observation (B, d).
        gain: rho.
        failure: take what follows a termination for 0, as an episodic target does.
        changes: of the configuration.
    """
    learner = CASE.make(env, **changes)
    replay = filled(learner, env, 30)
    batch = learner.continuing(replay, torch.arange(len(replay)))
    next_q = torch.stack([value(batch.next_obs["actor"])] * 2)
    if failure:
        next_q = next_q * ~replay.terminated.view(-1)[: len(replay)]
    return differential_target(batch.reward, next_q) - gain - value(batch.obs["actor"])


# Losses by hand -------------------------------------------------------------------------------


def test_critic_loss_by_hand():
    q = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    gain = torch.tensor(0.5, requires_grad=True)
    target = torch.tensor([2.0, 2.0])
    # errors Q + rho - y: -0.5, 0.5 and -1.5, 2.5; means of squares 0.25 and 4.25
    loss = critic_loss(q, gain, target)
    assert loss.item() == pytest.approx(0.5 * (0.25 + 4.25))
    # d/d rho = sum over critics of the mean error: 0 + 0.5
    assert torch.autograd.grad(loss, gain)[0].item() == pytest.approx(0.5)


def test_actor_loss_and_target_by_hand():
    q = torch.tensor([[1.0, 2.0, 5.0], [0.0, 4.0, 5.0]])
    assert actor_loss(q).item() == pytest.approx(-(0 + 2 + 5) / 3)
    assert differential_target(torch.tensor([1.0, 1.0, -1.0]), q).tolist() == [1.0, 3.0, 4.0]


def test_the_gain_is_no_part_of_the_target_and_steps_with_the_critics():
    env = pendulum()
    learner = CASE.make(env)
    batch = learner.sample(filled(learner, env))
    parts = (batch.obs["actor"], batch.action, batch.reward, *[batch.next_obs["actor"]] * 2)
    with torch.no_grad():
        learner.target_critic.gain.fill_(100.0)
    loss = learner._critic_objective(learner.critic, *parts)[0]
    with torch.no_grad():
        learner.target_critic.gain.fill_(0.0)
    assert learner._critic_objective(learner.critic, *parts)[0] == loss
    learner.update(batch)
    assert abs(learner.critic.gain.item()) == pytest.approx(3e-4, rel=1e-3)  # Adam's first step


# What an end means ----------------------------------------------------------------------------


def test_exact_differential_values_leave_no_error():
    ring = lambda obs: obs[:, 1] + 7.0  # noqa: E731, whatever the constant
    assert td_errors(Ring(num_envs=3), ring, 2.0).abs().max() < 1e-6
    nothing = lambda obs: torch.zeros(len(obs))  # noqa: E731
    assert td_errors(ConstantReward(num_envs=3), nothing, 1.0).abs().max() < 1e-6


def test_a_termination_goes_on_in_the_new_episode():
    """One in eight steps pays 1: gain 1/8, and Q(age) grows by 1/8 until it is paid out."""
    last = lambda obs: obs[:, 0] / 8 + 5.0  # noqa: E731
    assert td_errors(LastStepReward(num_envs=3), last, 1 / 8).abs().max() < 1e-6
    # With a reset cost of 2 the eight steps bring 1 - 2: gain -1/8.
    fall = lambda obs: -obs[:, 0] / 8 + 5.0  # noqa: E731
    costly = td_errors(LastStepReward(num_envs=3), fall, -1 / 8, reset_cost=2.0)
    assert costly.abs().max() < 1e-6


def test_control_a_successor_that_is_lost_shows():
    """The cut after the first state leads back to the first, not to the second: 1 too little."""
    errors = td_errors(LosesFinalObs(num_envs=1), lambda obs: obs[:, 1] + 7.0, 2.0)
    assert errors.unique().tolist() == pytest.approx([-1.0, 0.0])
    assert (errors != 0).sum() == 6  # of 30 steps, those that end an episode


def test_control_an_end_without_value_shows():
    """Were what follows a termination worth 0, the arbitrary constant of 5 would be missing."""
    errors = td_errors(LastStepReward(num_envs=1), lambda obs: obs[:, 0] / 8 + 5.0, 1 / 8, True)
    assert errors.unique().tolist() == pytest.approx([-5.0, 0.0])
    assert (errors != 0).sum() == 3


# Learning the gain ----------------------------------------------------------------------------

QUICK = {  # targets that do not lag: rho then converges in hundreds of updates
    "critic_learning_rate": 1e-2,
    "polyak": 1.0,
    "actor_every": 1,
    "batch_size": 32,
    "warmup_steps": 0,
    "total_steps": 800,
}


def learnt(env, **changes):
    """The gain after training, and the learner."""
    run = Keep()
    CASE.train(env, run, **(QUICK | changes))
    learner = CASE.make(env)
    learner.load_state_dict(run.learner)
    return run.rows[-1]["value/gain"], learner


def ring_difference(learner) -> float:
    """Q(second state) - Q(first), mean over actions and critics."""
    action = torch.linspace(-1, 1, 9)[:, None]
    q = [learner.critic(torch.eye(2)[[k] * 9], action).mean().item() for k in (0, 1)]
    return q[1] - q[0]


def test_the_gain_of_a_constant_reward_is_the_constant():
    gain, learner = learnt(EvenRing(num_envs=8))
    assert gain == pytest.approx(1.0, abs=0.05)
    assert ring_difference(learner) == pytest.approx(0.0, abs=0.05)


def test_the_gain_of_a_ring_does_not_feel_its_time_limit():
    gain, learner = learnt(Ring(num_envs=8))
    assert gain == pytest.approx(2.0, abs=0.05)
    assert ring_difference(learner) == pytest.approx(1.0, abs=0.1)


def test_control_with_a_lost_successor_the_restart_is_learnt():
    """Stationary shares 3/5 and 2/5 of the states: 9/5 per step; Q differs by 6/5."""
    gain, learner = learnt(LosesFinalObs(num_envs=8))
    assert gain == pytest.approx(1.8, abs=0.06)
    assert ring_difference(learner) == pytest.approx(1.2, abs=0.1)


def test_a_termination_and_its_cost_count_in_the_gain():
    """The same restart, as part of the task; and then a cost of 1 in every fifth step."""
    assert learnt(EndingRing(num_envs=8))[0] == pytest.approx(1.8, abs=0.06)
    assert learnt(EndingRing(num_envs=8), reset_cost=1.0)[0] == pytest.approx(1.6, abs=0.06)


# Updates --------------------------------------------------------------------------------------


def test_actor_and_targets_move_in_every_second_update():
    env = pendulum()
    learner = CASE.make(env, polyak=0.25)
    batch = learner.sample(filled(learner, env))
    parts = ("actor", "critic", "target_actor", "target_critic")
    states = [{k: learner.state_dict()[k] for k in parts}]
    for _ in range(2):
        learner.update(batch)
        states.append({k: learner.state_dict()[k] for k in parts})
    start, first, second = states
    assert {k.split(".")[0] for k in differing(start, first)} == {"critic"}
    assert {k.split(".")[0] for k in differing(first, second)} == set(parts)
    for name in ("actor", "critic"):
        for key, value in second[name].items():
            expected = 0.75 * start[f"target_{name}"][key] + 0.25 * value
            torch.testing.assert_close(second[f"target_{name}"][key], expected)


def test_the_noise_of_aro_ddpg_is_never_set_back():
    run = Keep()
    CASE.train(ConstantReward(num_envs=2), run, total_steps=32, warmup_steps=0)
    assert run.learner["noise"].abs().min() > 0  # although both have just begun an episode


def test_what_follows_is_the_new_episode_also_at_the_newest_step():
    env = Ring(num_envs=1)
    learner = CASE.make(env, buffer_size=6)
    replay = filled(learner, env, 10)  # past the ring's seam; the tenth step ends an episode
    index = replay.draw(200, torch.Generator().manual_seed(0)).unique()
    assert len(index) == 6
    batch, after = replay.gather(index, 1, 1.0), replay.following(index)["actor"]
    ended = replay.ended.view(-1)[index]
    assert ended.sum() == 2
    assert torch.equal(after[ended], torch.eye(2)[[0, 0]])
    assert torch.equal(batch.next_obs["actor"][ended], torch.eye(2)[[1, 1]])
    assert torch.equal(after[~ended], batch.next_obs["actor"][~ended])


def test_the_authors_constants():
    c = aro_ddpg.ARODDPGConfig()
    assert (c.hidden, c.batch_size, c.buffer_size) == ((128, 128), 256, 100_000)
    assert c.actor_learning_rate == c.critic_learning_rate == 3e-4
    assert (c.polyak, c.actor_every, c.update_every, c.warmup_steps) == (0.005, 2, 1000, 5000)
    assert (c.ou_theta, c.ou_sigma) == (0.15, 0.2)
