"""Recurrent PPO: its state where it must be, zero where it must be zero, and its use."""

import dataclasses
from pathlib import Path

import pytest
import torch
from probes import AgeReward, ConstantReward, LastStepReward, Probe
from test_ppo import Blind, Counter, differing, pendulum

from ctrl_rl.evaluation import evaluate
from ctrl_rl.memory import Pieces, RecurrentNet, forget
from ctrl_rl.policy import Policy
from ctrl_rl.recurrent_ppo import METRICS, RecurrentPPO, RecurrentPPOConfig, train
from ctrl_rl.rollout import collect
from ctrl_rl.runs import Run
from ctrl_rl.spec import Discrete, ObsTerm

SMALL = RecurrentPPOConfig(
    num_steps=8, num_epochs=2, num_minibatches=2, memory_size=8, hidden=(16,)
)
CELLS = pytest.mark.parametrize("cell", ["gru", "lstm"])


def small(**changes) -> RecurrentPPOConfig:
    return dataclasses.replace(SMALL, **changes)


def learner(env, config=SMALL) -> RecurrentPPO:
    return RecurrentPPO(config, env.spec, env.device)


def roll(learner, env):
    return collect(learner.act, env, learner.draw_noise(), learner.forget)[0]


class Recall(Probe):
    """A cue of -1 or 1 is seen in the first of four steps; the fourth pays if the action is it.

    Reward: 1 - (action - cue)^2 on the fourth step, which terminates. Who remembers earns 1. Who
    does not sees the same in every last step, and the best is then 0: 1 - 1 = 0.
    """

    id = "Probe-Recall-v0"
    terms = (
        ObsTerm(name="cue", kind="signal", size=1),
        ObsTerm(name="last", kind="signal", size=1),
    )

    def observe_terms(self, rows):
        first = self.step_count[rows, None] == 0
        last = self.step_count[rows, None] == 3
        return {"cue": self.sim.qpos[rows] * first, "last": last.to(self.sim.dtype)}

    def begin(self, rows):
        self.sim.qpos[rows] = self.uniform("cue", rows, 1).round() * 2 - 1

    def reward_terms(self, action):
        hit = 1 - (action[:, 0] - self.sim.qpos[:, 0]).square()
        return {"hit": hit * (self.step_count == 4)}

    def terminations(self):
        return {"end": self.step_count == 4}


class Seen(Counter):
    """Counts from 1, because an observation of 0 leaves a state of 0 as it is."""

    id = "Probe-Seen-v0"

    def observe_terms(self, rows):
        return {k: v + 1 for k, v in super().observe_terms(rows).items()}


class Choice(Seen):
    """Counts its steps, with a choice of three for an action."""

    id = "Probe-Choice-v0"
    action = Discrete(n=3)


# The recurrent network ----------------------------------------------------------------------


def network(cell) -> RecurrentNet:
    return RecurrentNet(cell, 4, (3, 5, 2), "tanh", generator=torch.Generator().manual_seed(0))


def test_a_gru_by_hand():
    """Cho et al. 2014, with the reset gate on the product, as torch has it."""
    net = network("gru")
    x, state = torch.randn(2, 3), torch.randn(1, 2, 4)
    w_i, w_h, b_i, b_h = (p.detach() for p in net.memory.parameters())
    (r_i, z_i, n_i), (r_h, z_h, n_h) = (
        (x @ w_i.T + b_i).chunk(3, 1),
        (state[0] @ w_h.T + b_h).chunk(3, 1),
    )
    r, z = torch.sigmoid(r_i + r_h), torch.sigmoid(z_i + z_h)
    expected = (1 - z) * torch.tanh(n_i + r * n_h) + z * state[0]
    _, after = net(x, state)
    torch.testing.assert_close(after[0], expected)


def test_an_lstm_remembers_from_the_start():
    bias = network("lstm").memory.bias_ih_l0
    assert bias.tolist() == [0] * 4 + [1] * 4 + [0] * 8  # input, forget, cell, output gate
    # c' = sigmoid(1) c when neither input nor h say anything
    state = torch.tensor([[[0.0] * 4], [[0.5] * 4]])
    _, after = network("lstm")(torch.zeros(1, 3), state)
    torch.testing.assert_close(after[1], torch.full((1, 4), 0.5 * torch.sigmoid(torch.tensor(1.0))))


@CELLS
def test_gates_start_orthogonal_from_the_generator_given(cell):
    state = torch.get_rng_state()
    net = network(cell)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(a, b) for a, b in zip(net.parameters(), network(cell).parameters(), strict=True)
    )
    for gate in net.memory.weight_hh_l0.split(4):
        torch.testing.assert_close(gate @ gate.T, torch.eye(4), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="unknown cell 'rnn'"):
        network("rnn")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_flags_are_never_row_numbers(dtype):
    # O-18: taken as numbers, [0, 0, 1] would wipe rows 0 and 1.
    state = torch.ones(2, 3, 4)
    state[:, 2, 0] = torch.nan  # zero means zero, whatever stood there
    kept = forget(state, torch.tensor([0, 0, 1]).to(dtype))
    assert (kept[:, :2] == 1).all() and (kept[:, 2] == 0).all()
    one = torch.ones(1, 1, 4)
    assert torch.equal(forget(one, torch.tensor([0]).to(dtype)), one)
    assert not forget(one, torch.tensor([1]).to(dtype)).any()


def test_pieces_by_hand():
    # Row 0 ends at steps 1 and 3, row 1 at step 0, row 2 never, of 4 steps.
    ended = torch.zeros(4, 3, dtype=torch.bool)
    ended[1, 0] = ended[3, 0] = ended[0, 1] = True
    pieces = Pieces.of(ended)
    # Lengths: row 2: 4; row 1: 3 (from step 1); row 0: 2 and 2; row 1: 1.
    assert pieces.owner.tolist() == [2, 1, 0, 0, 1]
    assert pieces.first.tolist() == [0, 1, 0, 2, 0]
    assert pieces.last.tolist() == [3, 3, 1, 3, 0]
    assert pieces.batch_sizes.tolist() == [5, 4, 2, 1]
    assert pieces.row.tolist() == [2, 1, 0, 0, 1, 2, 1, 0, 0, 2, 1, 2]
    assert pieces.t.tolist() == [0, 1, 0, 2, 0, 1, 2, 1, 3, 2, 3, 3]
    state = torch.tensor([[[1.0], [2.0], [3.0]]])
    assert pieces.start(state).flatten().tolist() == [3, 0, 1, 0, 2]


@CELLS
def test_replay_equals_one_step_after_the_other(cell):
    net = network(cell)
    generator = torch.Generator().manual_seed(1)
    ended = torch.rand(20, 6, generator=generator) < 0.2
    x = torch.randn(20, 6, 3, generator=generator)
    start = torch.randn(net.num_states, 6, 4, generator=generator)
    state, expected = start, []
    with torch.no_grad():
        for t in range(20):
            out, state = net(x[t], state)
            expected.append(out)
            state = forget(state, ended[t])
        pieces = Pieces.of(ended)
        out, after = net.replay(x[pieces.t, pieces.row], pieces.batch_sizes, pieces.start(start))
    found = torch.empty(20, 6, 2)
    found[pieces.t, pieces.row] = out
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-6, rtol=0)
    on = (pieces.last == 19) & ~ended[pieces.last, pieces.owner]
    torch.testing.assert_close(after[:, on], state[:, pieces.owner[on]], atol=1e-6, rtol=0)


# Collection ---------------------------------------------------------------------------------


@CELLS
def test_the_state_is_zero_before_the_first_observation_and_only_there(cell):
    env = Seen(num_envs=4)  # cut after 3 steps
    ppo, seen = learner(env, small(cell=cell, num_steps=7)), []
    net = ppo.networks.actor
    net.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone()))
    roll(ppo, env)
    begins = [not state.any() for state in seen]
    assert begins == [True, False, False, True, False, False, True]
    roll(ppo, env)  # the next roll-out goes on in the midst of an episode
    assert [not s.any() for s in seen[7:]] == [False, False, True, False, False, True, False]


class Ragged(Seen):
    """Counts, and row i terminates after i + 1 steps; row 3 is cut after 3."""

    id = "Probe-Ragged-v0"

    def terminations(self):
        return {"end": (self.step_count == self.index + 1) & (self.index < 2)}


def test_rows_end_apart():
    env = Ragged(num_envs=4)
    ppo, seen = learner(env), []
    ppo.networks.actor.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone()))
    rollout = roll(ppo, env)
    begins = torch.stack([~s.any(2).any(0) for s in seen])
    assert begins[0].all() and torch.equal(begins[1:], rollout.ended[:-1])
    assert begins[1].tolist() == [True, False, False, False]


# Update -------------------------------------------------------------------------------------


def log_ratios(ppo, rollout):
    """log r of every sample with the present weights, as the first minibatch computes it."""
    pieces = Pieces.of(rollout.ended)
    obs = ppo._normalize("actor", rollout.obs["actor"])[pieces.t, pieces.row]
    head, _ = ppo.networks.actor.replay(obs, pieces.batch_sizes, pieces.start(ppo.actor_start))
    action = rollout.action[pieces.t, pieces.row]
    new = ppo.networks.policy(head).log_prob(action)
    old = ppo.networks.policy(rollout.head).log_prob(rollout.action)
    return new - old[pieces.t, pieces.row]


@CELLS
@pytest.mark.parametrize("make", [pendulum, lambda: Ragged(num_envs=8), lambda: Choice(num_envs=8)])
def test_the_ratio_is_one_before_the_first_step(make, cell):
    """With moved statistics, states carried over, ends in the midst and discrete actions."""
    env = make()
    ppo = learner(
        env, small(cell=cell, num_steps=10, num_epochs=1, num_minibatches=1, target_kl=None)
    )
    for _ in range(3):
        rollout = roll(ppo, env)
        with torch.no_grad():
            assert log_ratios(ppo, rollout).expm1().abs().max() < 2e-6
        metrics = ppo.update(rollout)
        assert abs(metrics["policy/kl"]) < 1e-11  # r - 1 - log r is of second order
        assert metrics["policy/clip_fraction"] == 0


def test_a_wrong_state_shows_in_the_ratio():
    """Negative control: states carried across an end, or not carried between roll-outs."""
    env = Ragged(num_envs=8)
    ppo = learner(env, small(num_steps=10))
    ppo.update(roll(ppo, env))
    rollout = roll(ppo, env)
    with torch.no_grad():
        right = log_ratios(ppo, rollout).abs().max()
        never = torch.zeros_like(rollout.terminated)
        across = dataclasses.replace(rollout, terminated=never, truncated=never)
        assert log_ratios(ppo, across).abs().max() > 100 * right
        ppo.actor_start = torch.zeros_like(ppo.actor_start)
        assert log_ratios(ppo, rollout).abs().max() > 100 * right


@CELLS
def test_values_read_the_true_successor_with_the_state_of_their_own_episode(cell):
    """Against a slow loop over steps and rows."""
    env = Ragged(num_envs=4)
    ppo = learner(env, small(cell=cell))
    ppo.update(roll(ppo, env))
    start = ppo.critic_start
    assert start.any()
    rollout = roll(ppo, env)
    with torch.no_grad():
        value, next_value, after = ppo._values(rollout)
        critic, see = ppo.networks.critic, lambda x: ppo._normalize("critic", x)
        ended_obs = iter(rollout.ended_next_obs["critic"])
        states = [start[:, n : n + 1] for n in range(4)]
        for t in range(8):
            for n in range(4):
                found, states[n] = critic(see(rollout.obs["critic"][t, n : n + 1]), states[n])
                torch.testing.assert_close(found[0, 0], value[t, n], atol=1e-6, rtol=0)
                if rollout.ended[t, n]:
                    following = next(ended_obs)[None]
                elif t < 7:
                    following = rollout.obs["critic"][t + 1, n : n + 1]
                else:
                    following = rollout.last_obs["critic"][n : n + 1]
                beyond, _ = critic(see(following), states[n])
                torch.testing.assert_close(beyond[0, 0], next_value[t, n], atol=1e-6, rtol=0)
                if rollout.ended[t, n]:
                    states[n] = torch.zeros_like(states[n])
    torch.testing.assert_close(torch.cat(states, 1), after, atol=1e-6, rtol=0)


@CELLS
def test_an_update_moves_every_weight(cell):
    env = pendulum()
    ppo = learner(env, small(cell=cell, entropy_coef=0.01))
    before = ppo.state_dict()["networks"]
    ppo.update(roll(ppo, env))
    after = ppo.state_dict()["networks"]
    assert [k for k in before if torch.equal(before[k], after[k])] == []


def test_minibatches_are_whole_rows_and_each_comes_once_per_epoch():
    env = Ragged(num_envs=6)
    ppo = learner(env, small(num_minibatches=3, num_epochs=2, initial_std=0.1))
    rollout, seen = roll(ppo, env), []
    step = ppo.step
    ppo.step = lambda *batch: (seen.append(batch), step(*batch))[1]
    ppo.step.learning_rate = step.learning_rate
    ppo.update(rollout)
    assert len(seen) == 6 and all(len(batch[3]) == 2 * 8 for batch in seen)
    for epoch in (seen[:3], seen[3:]):
        actions = torch.cat([batch[2] for batch in epoch]).flatten()
        assert torch.equal(actions.sort().values, rollout.action.flatten().sort().values)
        for batch in epoch:
            rows = [n for n in range(6) if torch.isin(rollout.action[0, n], batch[2]).all()]
            assert len(rows) == 2
            assert torch.isin(rollout.action[:, rows], batch[2]).all()


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_minibatches 4 does not divide the 6 environments"):
        learner(Counter(num_envs=6), small(num_minibatches=4))


def test_config_refuses_nonsense():
    for change, name in (
        ({"cell": "rnn"}, "cell"),
        ({"memory_size": 0}, "memory_size"),
        ({"gamma": 1.1}, "gamma"),
        ({"hidden": ()}, "hidden"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be .*, not "):
            small(**change)


# State, resume ------------------------------------------------------------------------------


@CELLS
def test_resumed_equals_uninterrupted(cell):
    """To the bit, in the midst of episodes, the hidden states included."""

    def fresh(seed):
        env = Ragged(num_envs=8, seed=seed)
        return env, learner(env, small(cell=cell, seed=seed, num_steps=7))

    env, ppo = fresh(0)
    for _ in range(3):
        ppo.update(roll(ppo, env))
    saved = ppo.state_dict(), env.state_dict()
    assert saved[0]["actor_state"].any() and saved[0]["critic_state"].any()
    for _ in range(3):
        metrics = ppo.update(roll(ppo, env))
    other_env, other = fresh(1)
    other.load_state_dict(saved[0])
    other_env.load_state_dict(saved[1])
    assert differing(saved[0], other.state_dict()) == []
    for _ in range(3):
        other_metrics = other.update(roll(other, other_env))
    assert differing(ppo.state_dict(), other.state_dict()) == []
    assert metrics == other_metrics


def test_run_folder_resumes_exactly(tmp_path):
    config = small(total_steps=512)
    train(config, pendulum(), Run(tmp_path / "whole", console=False))
    train(config, pendulum(), Run(tmp_path / "parts", stop_after=192, console=False))
    train(config, pendulum(), Run(tmp_path / "parts", resume=True, console=False))
    last = [torch.load(tmp_path / name / "checkpoints/last.pt") for name in ("whole", "parts")]
    a, b = ({k: x[k] for k in ("step", "policy", "learner", "env")} for x in last)
    assert differing(a, b) == []


def test_warm_start_begins_with_an_empty_memory():
    env = pendulum()
    ppo, other = learner(env), learner(env, small(seed=5))
    ppo.update(roll(ppo, env))
    other.warm_start(ppo.state_dict())
    a, b = ppo.state_dict(), other.state_dict()
    assert differing(a["networks"], b["networks"]) == []
    assert not b["actor_state"].any() and a["actor_state"].any()
    with pytest.raises(ValueError, match="other networks"):
        learner(env, small(cell="gru")).warm_start(ppo.state_dict())


# Policy with memory -------------------------------------------------------------------------


@CELLS
def test_the_policy_section_is_the_policy(cell):
    env = Ragged(num_envs=4)
    ppo = learner(env, small(cell=cell))
    ppo.update(roll(ppo, env))
    policy = Policy.from_section(ppo.policy_section())
    ppo.state = torch.zeros_like(ppo.state)
    obs = env.reset()
    for _ in range(10):
        _, action = ppo.act(obs, torch.zeros(4, 1))
        assert torch.equal(policy(obs), action)
        step = env.step(action)
        ended = step.terminated | step.truncated
        ppo.forget(ended)
        policy.reset(ended.nonzero().flatten())
        obs = step.obs


@CELLS
def test_memory_belongs_to_rows_until_reset(cell):
    env = Counter(num_envs=3)
    policy = Policy.from_section(learner(env, small(cell=cell, num_minibatches=1)).policy_section())
    policy.module.net.mlp.layers[-1].weight.mul_(100)
    x = torch.tensor([[1.0], [1.0], [1.0]])
    first = policy(x)
    second = policy(x)
    assert (second - first).abs().min() > 1e-3
    policy.reset(torch.tensor([1]))
    third = policy(x)
    assert third[1] == first[1] and third[0] != first[0]
    policy.reset(torch.tensor([True, False, False]))
    fourth = policy(x)
    assert fourth[0] == first[0] and fourth[1] == second[1]
    with pytest.raises(ValueError, match=r"remembers 3 rows, the observation has 2; .*reset"):
        policy(x[:2])
    policy.reset()
    assert torch.equal(policy(x[:2]), first[:2])
    for rows, message in (
        (torch.tensor([0, 0]), "a mask of rows must be bool"),
        (torch.tensor([0.0, 1.0]), "must be bool flags or int64"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.reset(rows)


def test_samples_remember_too():
    env = Counter(num_envs=3)
    policy = Policy.from_section(learner(env, small(num_minibatches=1)).policy_section())
    policy.module.net.mlp.layers[-1].weight.mul_(100)
    x = torch.ones(3, 1)
    mean = [policy(x), policy(x)][1]
    policy.reset()
    policy._std.fill_(1e-9)
    policy.sample(x)
    torch.testing.assert_close(policy.sample(x), mean, atol=1e-6, rtol=0)


def test_evaluation_plays_each_episode_from_an_empty_memory():
    """Counter's episodes are all alike, so a policy that forgets acts alike in each."""
    env = Counter(num_envs=2)
    policy = Policy.from_section(learner(env).policy_section())
    policy(torch.full((5, 1), 9.0))  # what was seen elsewhere is forgotten, the row count too
    seen, decide = [], policy.module.decide
    policy.module.decide = lambda head: (seen.append(head.clone()), decide(head))[1]
    evaluate(policy, env, 4)
    heads = torch.stack(seen).view(2, 3, 2)  # two episodes of three steps in two rows
    assert torch.equal(heads[0], heads[1])
    assert heads[0, 0, 0] != heads[0, 1, 0]


# Learning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", [ConstantReward, AgeReward, LastStepReward])
def test_the_exact_value_leaves_no_advantage(probe, monkeypatch):
    """A critic that knows gamma and the age it reads, bootstrapped at time limits and cut there."""
    env, gamma = probe(num_envs=4), 0.9
    config = small(num_steps=24, gamma=gamma, normalize_obs=False)
    ppo = learner(env, config)
    critic = ppo.networks.critic
    exact = lambda x: probe.value(x, gamma)  # noqa: E731
    monkeypatch.setattr(critic, "forward", lambda x, state: (exact(x), state))
    monkeypatch.setattr(critic, "replay", lambda x, _, state: (exact(x), state))
    rollout = roll(ppo, env)
    value, next_value, _ = ppo._values(rollout)
    from ctrl_rl.returns import gae

    flags = rollout.terminated, rollout.truncated
    assert rollout.ended.any()
    advantage = gae(rollout.reward, value, next_value, *flags, gamma, 0.95)
    assert advantage.abs().max() < 1e-4
    # negative control: the value of the next episode's first step in place of the true successor
    if probe is AgeReward:
        wrong = gae(rollout.reward, value, torch.roll(value, -1, 0), *flags, gamma, 0.95)
        assert wrong.abs().max() > 10


def test_the_critic_finds_the_value_beyond_the_time_limit():
    """A constant reward of 1, cut after 3 steps, is worth 1 / (1 - 0.9), not at most 3.

    Near it only: the memory of a fourth step, which bootstraps, is one that no step trains.
    """
    env = Blind(num_envs=16)
    ppo = learner(env, small(gamma=0.9, target_kl=None, learning_rate=0.01, num_epochs=4))
    for _ in range(60):
        rollout = roll(ppo, env)
        ppo.update(rollout)
    found = ppo._values(rollout)[0]
    assert found.mean().item() == pytest.approx(10, abs=3)


RECALL = RecurrentPPOConfig(
    total_steps=60_000,
    num_steps=16,
    num_minibatches=2,
    learning_rate=3e-3,
    memory_size=16,
    hidden=(16,),
    initial_std=0.5,
    target_kl=None,
)


def recalled(config, env, spoil=None) -> float:
    """Mean return of the deterministic policy after training."""
    ppo = RecurrentPPO(config, env.spec, env.device)
    forget_rows = ppo.forget if spoil is None else spoil(ppo)
    for _ in range(config.total_steps // (config.num_steps * env.spec.num_envs)):
        ppo.update(collect(ppo.act, env, ppo.draw_noise(), forget_rows)[0])
    policy = Policy.from_section(ppo.policy_section())
    return evaluate(policy, Recall(num_envs=32, seed=9), 64).metrics["episode_return"].mean


@CELLS
def test_recalls_a_cue(cell):
    assert recalled(dataclasses.replace(RECALL, cell=cell), Recall(num_envs=64)) > 0.9


def test_without_memory_the_cue_is_lost():
    """Negative control: a state that is wiped at every step; without memory the mean is 0."""

    def wipe_always(ppo):
        return lambda ended: ppo.forget(torch.ones_like(ended))

    env = Recall(num_envs=64)
    ppo_return = recalled(RECALL, env, wipe_always)
    assert ppo_return < 0.4  # of 64 episodes of +-1: three standard errors


def test_faulty_rows_begin_anew():
    env = Seen(num_envs=2)
    ppo = learner(env, small(num_steps=2))
    action = torch.tensor([[0.0], [torch.nan]])

    def act(obs, noise):
        head, _ = ppo.act(obs, noise)
        return head, action

    collect(act, env, ppo.draw_noise()[:1], ppo.forget)
    assert ppo.state[:, 0].any() and not ppo.state[:, 1].any()


def test_every_logged_key_is_documented(repository: Path):
    page = (repository / "docs/algorithms/recurrent_ppo.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    table = {row[1].strip().strip("`"): row[2].strip() for row in rows if "/" in row[1]}
    assert table == METRICS


def test_every_declared_key_is_logged():
    rows = train(small(total_steps=2000), pendulum(), Run(), lambda policy: {"eval/x": 0.0}).rows
    logged = set().union(*rows) - {"step"}
    plain = {k for k in METRICS if "<" not in k}
    assert plain - logged == set()
