"""Our environments as stable-baselines3 sees them, with the real library."""

import dataclasses
import sys
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from probes import AgeReward, ConstantReward, LastStepReward, PointMass, Probe
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from toys import Toy

import ctrl_rl
from ctrl_rl.adapters import sb3
from ctrl_rl.spec import ActionDim, Discrete


class Choice(Probe):
    """Three choices; the reward is the choice."""

    id = "Probe-Choice-v0"
    action = Discrete(n=3)

    def reward_terms(self, action):
        return {"choice": action.to(self.sim.dtype)}


class Single(gymnasium.Env):
    """Row `index` of one of our tasks as a gymnasium environment without auto-reset."""

    def __init__(self, task: type[Probe], index: int) -> None:
        self.env = task(None, num_envs=1, first_index=index)
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.env.spec.obs_size(),))
        dims = self.env.spec.action
        low, high = ([getattr(d, end) for d in dims] for end in ("low", "high"))
        self.action_space = spaces.Box(np.float32(low), np.float32(high))
        self.first = None

    def reset(self, *, seed=None, options=None):
        if self.first is None:
            self.first = self.env.reset()["actor"]
        return self.first[0].numpy(), {}

    def step(self, action):
        step = self.env.step(torch.from_numpy(action)[None])
        self.first = step.obs["actor"]
        end = bool(step.terminated), bool(step.truncated)
        return step.next_obs["actor"][0].numpy(), float(step.reward), *end, {}


class Balance(Toy):
    """Ends in both ways: it falls, or its 12 steps are over."""

    def make_spec(self):
        return dataclasses.replace(super().make_spec(), max_episode_steps=6)


def actions_for(venv, steps: int, seed: int = 0) -> list[np.ndarray]:
    venv.action_space.seed(seed)
    return [
        np.stack([venv.action_space.sample() for _ in range(venv.num_envs)]) for _ in range(steps)
    ]


def play(venv, steps: int):
    """Observations (steps + 1, N, d), rewards and dones (steps, N), infos."""
    obs, rows = [venv.reset()], []
    for action in actions_for(venv, steps):
        result = venv.step(action)
        obs.append(result[0])
        rows.append(result[1:])
    reward, ended, infos = zip(*rows, strict=True)
    return np.stack(obs), np.stack(reward), np.stack(ended), infos


# What a step gives ----------------------------------------------------------------------------


def test_the_same_as_its_own_vec_env_and_monitor():
    """Every row, flag and info of `DummyVecEnv` around single environments with a `Monitor`."""
    ours = sb3.vec_env(Balance(None, num_envs=3))
    theirs = DummyVecEnv([lambda i=i: Monitor(Single(Balance, i)) for i in range(3)])
    a, b = play(ours, 40), play(theirs, 40)
    for x, y in zip(a[:3], b[:3], strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.array_equal(x, y)
    ends = 0
    for row, other in zip((i for s in a[3] for i in s), (i for s in b[3] for i in s), strict=True):
        assert row.keys() == other.keys()
        assert row["TimeLimit.truncated"] is other["TimeLimit.truncated"]
        if "terminal_observation" in row:
            ends += 1
            assert row["terminal_observation"].dtype == np.float32
            assert np.array_equal(row["terminal_observation"], other["terminal_observation"])
            assert row["episode"].keys() == other["episode"].keys()
            assert row["episode"]["l"] == other["episode"]["l"]
            assert row["episode"]["r"] == pytest.approx(other["episode"]["r"], abs=2e-6)
            assert row["episode"]["t"] > 0
    truncated = sum(i["TimeLimit.truncated"] for s in a[3] for i in s)
    assert 0 < truncated < ends == a[2].sum()


def test_the_observation_that_ends_an_episode_is_not_lost():
    """The observation counts 0 .. 8: the last one is 8, the next one 0."""
    obs, _, ended, infos = play(sb3.vec_env(ConstantReward(None, num_envs=2)), 20)
    assert obs[:, 0, 0].tolist() == [*range(8), *range(8), *range(5)]
    assert ended[:, 1].nonzero()[0].tolist() == [7, 15]
    for t in (7, 15):
        assert infos[t][1]["terminal_observation"].tolist() == [8.0]
        assert infos[t][1]["TimeLimit.truncated"] is True
        assert infos[t][1]["episode"]["r"] == infos[t][1]["episode"]["l"] == 8
    assert not any("episode" in i or "terminal_observation" in i for i in infos[6])


def test_an_end_on_the_last_allowed_step_is_no_time_limit():
    *_, ended, infos = play(sb3.vec_env(LastStepReward(None, num_envs=1)), 8)
    assert ended[-1].all()
    assert infos[-1][0]["TimeLimit.truncated"] is False


def test_actor_alone_with_its_history_read_once():
    """Delay, noise and history are those of the environment itself (the critic is left out)."""
    env, twin = Toy(None, num_envs=3, seed=4), Toy(None, num_envs=3, seed=4)
    venv = sb3.vec_env(env)
    assert venv.observation_space.shape == (twin.spec.obs_size("actor"),) == (3,)
    assert np.array_equal(venv.reset(), twin.reset()["actor"].numpy())
    for action in actions_for(venv, 30):
        obs, reward, *_ = venv.step(action)
        venv.get_attr("spec")
        step = twin.step(torch.from_numpy(action))
        assert np.array_equal(obs, step.obs["actor"].numpy())
        assert np.array_equal(reward, step.reward.numpy())


def test_results_belong_to_the_caller():
    """Neither a later step nor the caller's own writing changes what was or will be given."""
    quiet, loud = (sb3.vec_env(Toy(None, num_envs=2, seed=1)) for _ in range(2))
    kept = [quiet.reset()]
    copies = [kept[0].copy()]
    loud.reset()[:] = 7.0
    for action in actions_for(quiet, 30):
        obs, reward, ended, infos = quiet.step(action)
        final = [i.get("terminal_observation", obs[0]) for i in infos]
        kept += [obs, reward, ended, *final]
        copies += [x.copy() for x in (obs, reward, ended, *final)]
        mine = action.copy()
        loud.step_async(mine)
        mine[:] = 0.0
        others = loud.step_wait()
        assert np.array_equal(obs, others[0]) and np.array_equal(reward, others[1])
        for x in (*others[:3], *(i["terminal_observation"] for i in others[3] if len(i) > 1)):
            x[:] = 1
    assert all(np.array_equal(x, y) for x, y in zip(kept, copies, strict=True))


def test_choices():
    venv = sb3.vec_env(Choice(None, num_envs=4))
    assert venv.action_space == spaces.Discrete(3)
    venv.reset()
    assert venv.step(np.array([0, 1, 2, 1]))[1].tolist() == [0, 1, 2, 1]
    DQN("MlpPolicy", venv, learning_starts=20, buffer_size=100, device="cpu").learn(60)


def test_a_fault_is_named_and_cut():
    venv = sb3.vec_env(Toy(None, num_envs=3))
    venv.reset()
    action = np.zeros((3, 1), np.float32)
    action[1] = np.nan
    _, reward, ended, infos = venv.step(action)
    assert ended.tolist() == [False, True, False]
    assert infos[1]["fault"] == "action: not finite in force"
    assert infos[1]["TimeLimit.truncated"] is True
    assert reward[1] == 0 and np.isfinite(infos[1]["terminal_observation"]).all()
    assert "fault" not in infos[0]


# Spaces, seeds and the rest of the interface ----------------------------------------------------


def test_spaces_hold_what_is_given():
    venv = sb3.vec_env(ctrl_rl.make("Pendulum-v0", 4))
    assert venv.action_space == spaces.Box(-2.0, 2.0, (1,), np.float32)
    obs, _, _, infos = play(venv, 201)
    assert all(venv.observation_space.contains(row) for row in obs.reshape(-1, 3))
    final = [i["terminal_observation"] for s in infos for i in s if "episode" in i]
    assert len(final) == 4 and all(venv.observation_space.contains(row) for row in final)


def test_unbounded_actions_are_refused_unless_a_bound_is_given():
    env = PointMass(None, num_envs=2)
    with pytest.raises(ValueError, match="no bounds in force.*give action_bound"):
        sb3.vec_env(env)
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be a positive number"):
            sb3.vec_env(env, action_bound=wrong)
    venv = sb3.vec_env(env, action_bound=3.0)
    assert venv.action_space == spaces.Box(-3.0, 3.0, (1,), np.float32)
    assert sb3.vec_env(Toy(None, num_envs=1), action_bound=9.0).action_space.high.tolist() == [3.0]


def test_half_bounded_actions():
    class Half(PointMass):
        action = (ActionDim(name="up", low=1.0), ActionDim(name="down", high=-1.0))

        def apply_action(self, action):
            self.before = self.sim.qpos[:, 0].clone(), self.sim.qvel[:, 0].clone()

    env = Half(None, num_envs=1)
    space = sb3.vec_env(env, action_bound=5.0).action_space
    assert (space.low.tolist(), space.high.tolist()) == ([1.0, -5.0], [5.0, -1.0])
    with pytest.raises(ValueError, match="leaves up no room: 1.0 to 0.5"):
        sb3.vec_env(env, action_bound=0.5)


def test_seeds():
    """`seed` and a reset: that seed's numbers from their start, a row's own whatever N."""
    venv = sb3.vec_env(ctrl_rl.make("Pendulum-v0", 4, seed=3))
    first = venv.reset()
    assert len(np.unique(first, axis=0)) == 4
    play(venv, 250)
    assert list(venv.seed(5)) == [5, 6, 7, 8]
    a = play(venv, 250)
    assert not np.array_equal(a[0][0], first)
    venv.seed(5)
    b = play(venv, 250)
    assert all(np.array_equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    assert not np.array_equal(venv.reset(), a[0][0])  # a seed counts for one reset
    wide = sb3.vec_env(ctrl_rl.make("Pendulum-v0", 8, seed=0))
    wide.seed(5)
    assert np.array_equal(wide.reset()[:4], a[0][0])
    fresh = ctrl_rl.make("Pendulum-v0", 4, seed=5)
    assert np.array_equal(sb3.vec_env(fresh).reset(), a[0][0])


def test_the_learner_s_seed_decides_the_environments():
    runs = []
    for seed in (1, 1, 2):
        venv = sb3.vec_env(ctrl_rl.make("Pendulum-v0", 2))
        model = PPO("MlpPolicy", venv, n_steps=32, batch_size=64, seed=seed, device="cpu")
        model.learn(128)
        runs.append(model.rollout_buffer.observations.copy())
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_attributes_and_methods():
    env = Toy(None, num_envs=3)
    venv = sb3.vec_env(env)
    assert venv.get_attr("seed") == [0, 0, 0]
    assert venv.get_attr("seed", indices=1) == venv.get_attr("seed", [2]) == [0]
    assert venv.has_attr("device") and not venv.has_attr("nothing")
    venv.set_attr("mark", 5)
    assert env.mark == 5
    (same, *_) = rows = venv.env_method("observe")
    assert len(rows) == 3 and torch.equal(same["actor"], env.observe()["actor"])
    with pytest.raises(ValueError, match="cannot set mark for some rows"):
        venv.set_attr("mark", 6, indices=0)
    with pytest.raises(ValueError, match="cannot call observe for some rows"):
        venv.env_method("observe", indices=[0, 1])
    assert venv.env_is_wrapped(Monitor) == [True] * 3
    assert venv.env_is_wrapped(gymnasium.wrappers.TimeLimit, indices=[0]) == [False]
    venv.set_options({"x": 1})
    with pytest.raises(ValueError, match="takes none"):
        venv.reset()


def test_pictures(monkeypatch):
    env = ctrl_rl.make("Pendulum-v0", 4)
    monkeypatch.setattr(env, "frame", lambda row: np.full((2, 3, 3), row, np.uint8))
    venv = sb3.vec_env(env)
    assert venv.render_mode == "rgb_array"
    assert venv.metadata["render_fps"] == 20  # a step is 0.05 s
    image = venv.render()
    assert image.shape == (4, 6, 3)  # 2 x 2 tiles
    assert image[0, 0, 0] == 0 and image[-1, -1, 0] == 3


def test_without_the_library_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(ValueError, match=r"pip install 'ctrl-rl\[sb3\]'"):
        sb3.vec_env(ConstantReward(None, num_envs=1))


# Its learners ---------------------------------------------------------------------------------


def advantages(venv, value) -> np.ndarray:
    """What PPO's roll-out of 24 steps finds, with a value function in the place of its own."""
    model = PPO("MlpPolicy", venv, n_steps=24, batch_size=24, gamma=0.98, device="cpu")
    policy = model.policy
    policy.predict_values = lambda obs: value(obs, 0.98)
    policy.forward = lambda obs: (torch.zeros(len(obs), 1), value(obs, 0.98), torch.zeros(len(obs)))
    _, callback = model._setup_learn(48)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 24)
    return model.rollout_buffer.advantages


@pytest.mark.parametrize("probe", [ConstantReward, AgeReward, LastStepReward])
def test_with_the_exact_value_every_advantage_is_zero(probe):
    found = advantages(sb3.vec_env(probe(None, num_envs=2)), probe.value)
    assert found.shape == (24, 2)
    assert np.abs(found).max() < 2e-3  # of values up to 2800 in float32


@pytest.mark.parametrize(("key", "least"), [("TimeLimit.truncated", 2000), ("final", 700)])
def test_the_probe_can_fail(key, least):
    """A time limit taken for an end, and a bootstrap from the first state of the next episode."""
    venv = sb3.vec_env(AgeReward(None, num_envs=2))
    honest = venv.step_wait

    def wrong():
        obs, reward, ended, infos = honest()
        for row in ended.nonzero()[0]:
            if key == "final":
                infos[row]["terminal_observation"] = obs[row]
            else:
                infos[row][key] = False
        return obs, reward, ended, infos

    venv.step_wait = wrong
    assert np.abs(advantages(venv, AgeReward.value)).max() > least / 2


def test_its_replay_holds_true_successors():
    venv = sb3.vec_env(ConstantReward(None, num_envs=2))
    model = SAC("MlpPolicy", venv, learning_starts=1000, buffer_size=200, device="cpu")
    model.learn(48)
    replay = model.replay_buffer
    age, after = replay.observations[:24, :, 0], replay.next_observations[:24, :, 0]
    assert np.array_equal(after, age + 1)  # 8 follows 7, not 0
    assert np.array_equal(replay.timeouts[:24] == 1, age == 7)
    assert replay._get_samples(np.arange(24)).dones.sum() == 0  # the value goes on


@pytest.mark.parametrize("learner", [PPO, SAC])
def test_trains_on_pendulum(learner):
    venv = VecNormalize(sb3.vec_env(ctrl_rl.make("Pendulum-v0", 4)), norm_reward=False)
    kwargs = {"n_steps": 128, "batch_size": 128} if learner is PPO else {"learning_starts": 400}
    model = learner("MlpPolicy", venv, seed=0, device="cpu", **kwargs)
    before = {k: v.clone() for k, v in model.policy.state_dict().items()}
    model.learn(1024)
    after = model.policy.state_dict()
    moved = [k for k, v in before.items() if not torch.equal(v, after[k])]
    assert any("actor" in k or "policy_net" in k for k in moved)
    assert [e["l"] for e in model.ep_info_buffer] == [200] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns of environments without a Monitor
        mean, _ = evaluate_policy(model, sb3.vec_env(ctrl_rl.make("Pendulum-v0", 4)), 4)
    assert -2000 < mean < 0


@pytest.mark.slow
@pytest.mark.parametrize(("learner", "steps"), [(PPO, 200_000), (SAC, 6_000)])
def test_learns_pendulum(learner, steps):
    """Random actions return about -1200, a pendulum that is held about -150."""
    num_envs = 16 if learner is PPO else 4
    venv = sb3.vec_env(ctrl_rl.make("Pendulum-v0", num_envs, seed=0))
    if learner is PPO:
        kwargs = {"n_steps": 256, "batch_size": 256, "gamma": 0.9, "learning_rate": 1e-3}
    else:
        kwargs = {"gradient_steps": 4, "learning_rate": 1e-3, "batch_size": 128}
        kwargs["policy_kwargs"] = {"net_arch": [64, 64]}
    model = learner("MlpPolicy", venv, seed=0, device="cpu", **kwargs)
    model.learn(steps)
    fresh = sb3.vec_env(ctrl_rl.make("Pendulum-v0", 20, seed=100))
    mean, _ = evaluate_policy(model, fresh, 20)
    assert mean > -300, mean
