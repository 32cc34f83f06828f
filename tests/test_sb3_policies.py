"""Policies saved by stable-baselines3 in our tools, with the real library."""

import base64
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from deployment import make_spec
from gymnasium import spaces
from probes import PointMass
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

import ctrl_rl
from ctrl_rl import cli
from ctrl_rl.adapters import sb3
from ctrl_rl.checkpoints import save_checkpoint
from ctrl_rl.spec import ActionDim, Discrete, ObsTerm
from sim2real.export import export

MODEL, STATISTICS = Path("model.zip"), Path("vecnormalize.pkl")

ACTIONS = (ActionDim(name="x", low=-1.0, high=1.0), ActionDim(name="y", low=0.0, high=10.0))


def box(action=ACTIONS):
    """A task without a robot."""
    terms = (ObsTerm(name="x", kind="signal", size=4),)
    return make_spec(terms, action=action, robot=None, command=())


class Noise(gymnasium.Env):
    """Random observations, of a spread and an offset that ask for statistics."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,))

    def __init__(self, action_space=None, space=None) -> None:
        low, high = ([getattr(d, end) for d in ACTIONS] for end in ("low", "high"))
        self.action_space = action_space or spaces.Box(np.float32(low), np.float32(high))
        self.observation_space = space or self.observation_space
        self.random = np.random.default_rng(0)

    def draw(self):
        return (3 + 2 * self.random.normal(size=4)).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        return self.draw(), {}

    def step(self, action):
        return self.draw(), float(np.sum(action)), False, self.random.random() < 0.1, {}


def normalised(steps=100) -> VecNormalize:
    venv = VecNormalize(DummyVecEnv([Noise] * 2), clip_obs=1.5)
    venv.reset()
    for _ in range(steps):
        venv.step(np.ones((2, 2), np.float32))
    return venv


def widen(model, spread=3.0):
    """Larger weights, so that actions reach the bounds; saved.

    Not so large that rounding shows: what an unbounded activation gives is several times as large.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.policy.named_parameters():
            if "policy_net" in name or name.startswith("actor."):
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
            elif "action_net.weight" in name:
                value.normal_(0, spread, generator=generator)
    model.save(MODEL)
    return model


def make(learner=PPO, env=None, **policy):
    kwargs = {PPO: {"n_steps": 8, "batch_size": 8}, A2C: {}}.get(learner, {"buffer_size": 10})
    spread = 3.0 if policy.get("activation_fn", nn.Tanh) is nn.Tanh else 0.8
    model = learner("MlpPolicy", env or Noise(), policy_kwargs=policy, seed=0, **kwargs)
    return widen(model, spread)


def random_obs(count=500) -> np.ndarray:
    return (3 + 4 * np.random.default_rng(1).normal(size=(count, 4))).astype(np.float32)


def check_equal(policy, model, normalise=lambda obs: obs) -> np.ndarray:
    """Ours against `predict`, and the exported file against both; the actions."""
    obs = random_obs()
    expected, _ = model.predict(normalise(obs), deterministic=True)
    found = policy(torch.from_numpy(obs))
    assert found.dtype == (torch.int64 if expected.dtype == np.int64 else torch.float32)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6, rtol=1e-6)
    export(policy, "policy.onnx", obs=torch.from_numpy(obs))
    exported = ctrl_rl.load_policy("policy.onnx")
    np.testing.assert_allclose(exported(torch.from_numpy(obs)).numpy(), expected, atol=1e-5)
    return expected


# Actions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"net_arch": []},
        {"net_arch": [32]},
        {"net_arch": {"pi": [24, 16, 8], "vf": [64]}},
        {"activation_fn": nn.ELU},
        {"activation_fn": nn.ReLU, "net_arch": [32, 32]},
        {"activation_fn": nn.Tanh, "log_std_init": -1.0},
        {"share_features_extractor": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("learner", [PPO, A2C])
def test_clipped_gaussian(learner, policy):
    model = make(learner, **policy)
    loaded = sb3.load_policy(MODEL, box())
    actions = check_equal(loaded, model)
    assert actions.min(0).tolist() == [-1, 0] and actions.max(0).tolist() == [1, 10]
    assert ((actions > -1) & (actions < 1)).any() and ((actions > 0) & (actions < 10)).any()
    assert torch.equal(loaded.section()["log_std"], model.policy.log_std.detach())


@pytest.mark.parametrize(
    "policy", [{}, {"net_arch": []}, {"net_arch": [24, 16, 8]}, {"activation_fn": nn.ELU}], ids=str
)
@pytest.mark.parametrize("learner", [SAC, TD3, DDPG])
def test_squashed(learner, policy):
    """Bounds differ per dimension, and one of them is not symmetric."""
    policy = {"net_arch": [32, 32], **policy}
    model = make(learner, **policy)
    loaded = sb3.load_policy(MODEL, box())
    actions = check_equal(loaded, model)
    assert (actions >= [-1, 0]).all() and (actions <= [1, 10]).all()
    assert (actions.max(0) - actions.min(0) > [0.2, 1.0]).all()
    obs = torch.from_numpy(random_obs(1)).repeat(20_000, 1)
    sampled = loaded.sample(obs, torch.Generator().manual_seed(0))
    if learner is SAC:
        mean, log_std, _ = model.actor.get_action_dist_params(obs[:1])
        u = torch.atanh(((sampled - torch.tensor([0.0, 5.0])) / torch.tensor([1.0, 5.0])).double())
        std = log_std[0].exp()
        # Quantiles, since an action at its very bound has an infinite u.
        low, middle, high = u.float().quantile(torch.tensor([0.15866, 0.5, 0.84134]), 0)
        assert ((middle - mean[0]).abs() < 0.05 * std).all()
        assert torch.allclose((high - low) / 2, std, rtol=0.05)
    else:
        assert torch.equal(sampled, loaded(obs))


@pytest.mark.parametrize("learner", [SAC, TD3])
def test_squashed_with_statistics_in_bounds_of_its_own(learner):
    venv = normalised()
    model = widen(learner("MlpPolicy", venv, policy_kwargs={"net_arch": [32, 32]}, seed=0))
    venv.save(str(STATISTICS))
    free = (ActionDim(name="x"), ActionDim(name="y", low=0.0))
    check_equal(sb3.load_policy(MODEL, box(free), STATISTICS), model, venv.normalize_obs)


def test_choices():
    model = make(env=Noise(spaces.Discrete(5)))
    actions = check_equal(sb3.load_policy(MODEL, box(Discrete(n=5))), model)
    assert set(actions) == set(range(5))


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_with_statistics(protocol):
    venv = normalised()
    model = widen(PPO("MlpPolicy", venv, n_steps=8, batch_size=8, seed=0), spread=0.3)
    STATISTICS.write_bytes(pickle.dumps(venv, protocol))
    policy = sb3.load_policy(MODEL, box(), STATISTICS)
    saved = policy.section()["normalizer"]
    assert np.array_equal(saved["mean"], venv.obs_rms.mean)
    assert np.array_equal(saved["var"], venv.obs_rms.var)
    assert saved["count"] == venv.obs_rms.count
    assert (saved["clip"], saved["epsilon"]) == (1.5, 1e-8)
    actions = check_equal(policy, model, venv.normalize_obs)
    bare, _ = model.predict(random_obs(), deterministic=True)
    assert np.abs(actions - bare).max() > 0.5  # the statistics matter


def test_bounds_that_only_training_had():
    """An unbounded task was trained in a box of its own, per dimension; the file acts in it."""
    free = (ActionDim(name="x"), ActionDim(name="y", low=0.0))
    model = make()
    actions = check_equal(sb3.load_policy(MODEL, box(free)), model)
    assert actions.min(0).tolist() == [-1, 0] and actions.max(0).tolist() == [1, 10]
    sampled = sb3.load_policy(MODEL, box(free)).sample(torch.from_numpy(random_obs()))
    assert sampled.amin(0).tolist() == [-1, 0] and sampled.amax(0).tolist() == [1, 10]


def test_from_our_environment_and_back(monkeypatch):
    """Trained on an unbounded task of ours, played there."""
    env = PointMass(None, num_envs=4)
    model = PPO("MlpPolicy", sb3.vec_env(env, action_bound=0.5), n_steps=64, device="cpu")
    model.learn(256)
    widen(model)
    policy = sb3.load_policy(MODEL, env.spec)
    obs = env.reset()
    expected, _ = model.predict(obs["actor"].numpy(), deterministic=True)
    np.testing.assert_allclose(policy(obs).numpy(), expected, atol=1e-6)
    result = ctrl_rl.evaluate(policy, PointMass(None, num_envs=4), episodes=8)
    assert result.metrics["episode_length"].mean == 8


def test_many_bounds_are_read_to_the_last_digit():
    random = np.random.default_rng(0)
    low, high = -random.random(40, np.float32) * 10.0 ** random.integers(-6, 6, 40), None
    low = np.float32(low)
    high = np.float32(low + random.random(40) + 1e-7)
    model = make(env=Noise(spaces.Box(low, high)))
    free = tuple(ActionDim(name=f"a{i}") for i in range(40))
    limits = sb3.read_section(MODEL, box(free))[0]["limits"]
    assert np.array_equal(limits["low"], model.action_space.low)
    assert np.array_equal(limits["high"], model.action_space.high)


# Nothing in a file is run -----------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def rewrite(**parts: bytes | None) -> None:
    """Put other parts into the archive; None leaves one out."""
    with zipfile.ZipFile(MODEL) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content |= {name.replace("policy_pth", "policy.pth"): part for name, part in parts.items()}
    with zipfile.ZipFile(MODEL, "w") as archive:
        for name, part in content.items():
            if part is not None:
                archive.writestr(name, part)


def edit(change) -> None:
    """Let `change` write into the archive's JSON."""
    with zipfile.ZipFile(MODEL) as archive:
        data = json.loads(archive.read("data"))
    change(data)
    rewrite(data=json.dumps(data).encode())


def test_the_bomb_works():
    pickle.loads(pickle.dumps(Bomb()))
    assert Path("exploded").exists()


def test_pickles_in_the_data_are_left_alone():
    make(activation_fn=nn.ELU)
    bomb = base64.b64encode(pickle.dumps(Bomb())).decode()

    def arm(data):
        for value in data.values():
            if isinstance(value, dict) and ":serialized:" in value:
                value[":serialized:"] = bomb

    edit(arm)
    assert sb3.load_policy(MODEL, box()).section()["activation"] == "elu"
    assert not Path("exploded").exists()


def test_a_pickle_for_weights_is_refused():
    make()
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer)
    rewrite(policy_pth=buffer.getvalue())
    with pytest.raises(ValueError, match="policy.pth holds something other than tensors"):
        sb3.load_policy(MODEL, box())
    assert not Path("exploded").exists()


@pytest.mark.parametrize("where", ["whole", "mean", "env"])
def test_a_pickle_for_statistics_is_taken_apart(where):
    venv = normalised(3)
    if where == "mean":
        venv.obs_rms.mean = Bomb()
    elif where == "env":
        venv.old_reward = Bomb()
    STATISTICS.write_bytes(pickle.dumps(Bomb() if where == "whole" else venv))
    if where == "env":  # in a part that is not asked for
        assert sb3.read_normalizer(STATISTICS)["clip"] == 1.5
    else:
        with pytest.raises(ValueError, match="is not a VecNormalize"):
            sb3.read_normalizer(STATISTICS)
    assert not Path("exploded").exists()


# What is refused --------------------------------------------------------------------------------


class Own(ActorCriticPolicy):
    pass


def refused(match, spec=None, **arguments) -> None:
    with pytest.raises(ValueError, match=match) as found:
        sb3.load_policy(MODEL, spec or box(), arguments.pop("normalizer", None), **arguments)
    assert str(MODEL) in str(found.value) or str(STATISTICS) in str(found.value)
    assert "\n" not in str(found.value)


def test_files_that_are_no_models():
    refused("does not exist")
    MODEL.write_text("no archive")
    refused("not a model that stable-baselines3 saved: File is not a zip file")
    save_checkpoint(MODEL, {"step": 0})
    refused("not a model that stable-baselines3 saved: .*'data'")
    make()
    whole = MODEL.read_bytes()
    MODEL.write_bytes(whole[: len(whole) // 2])
    refused("not a model that stable-baselines3 saved")
    MODEL.write_bytes(whole)
    rewrite(data=b"[]")
    refused("not a model")
    MODEL.write_bytes(whole)
    edit(lambda data: data.pop("action_space"))
    refused("is not a model as stable-baselines3 saves it: KeyError 'action_space'")


def test_networks_that_are_not_known():
    PPO(Own, Noise(), n_steps=8, batch_size=8).save(MODEL)
    refused("its policy is a class of test_sb3_policies")
    PPO("MlpPolicy", Noise(), n_steps=8, batch_size=8, use_sde=True).save(MODEL)
    refused("use_sde")
    SAC("MlpPolicy", Noise(), use_sde=True, buffer_size=10).save(MODEL)
    refused("use_sde")
    DQN("MlpPolicy", Noise(spaces.Discrete(2)), buffer_size=10).save(MODEL)
    refused("its policy is a class of stable_baselines3.dqn.policies", box(Discrete(n=2)))
    make(activation_fn=nn.LeakyReLU)
    refused("activation LeakyReLU is none of elu, relu, tanh")
    make()
    with zipfile.ZipFile(MODEL) as archive:
        weights = torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)
    for name, other, match in (
        ("features_extractor.0.weight", None, "features_extractor.0.weight belongs to no network"),
        (
            "mlp_extractor.policy_net.1.weight",
            None,
            r"layers at \[0, 1, 2\].*more than activations",
        ),
        ("mlp_extractor.policy_net.2.weight", torch.zeros(64, 9), "do not fit"),
        ("action_net.bias", torch.zeros(3), "do not fit"),
    ):
        buffer = io.BytesIO()
        torch.save({**weights, name: torch.zeros(3, 3) if other is None else other}, buffer)
        rewrite(policy_pth=buffer.getvalue())
        refused(match)


def test_an_activation_that_cannot_be_read_is_asked_for():
    make(activation_fn=lambda: nn.ELU())
    refused("its activation cannot be read from .*; name it")
    refused("unknown activation 'gelu'; known: elu, relu, tanh", activation="gelu")
    policy = sb3.load_policy(MODEL, box(), activation="elu")
    assert policy.section()["activation"] == "elu"
    make(activation_fn=nn.ELU)
    refused("its activation is elu, not tanh", activation="tanh")
    assert sb3.load_policy(MODEL, box(), activation="elu")


def test_another_task():
    make()
    other = make_spec((ObsTerm(name="x", kind="signal", size=5),), action=ACTIONS, robot=None)
    refused(r"observes \[4\] numbers, Toy-v0 gives 5", other)
    refused("its action is a .*Box.*unlike that of Toy-v0", box(Discrete(n=2)))
    refused("its action has 2 elements, Toy-v0 1", box(ACTIONS[:1]))
    wider = (ACTIONS[0], ActionDim(name="y", low=0.0, high=11.0))
    refused(r"was trained with y in \[0, 10\], Toy-v0 has \[0, 11\]", box(wider))
    make(env=Noise(spaces.Discrete(3)))
    refused("its action is a .*Discrete", box())
    refused("maps 4 observations to 3 actions; Toy-v0 has 4 and 2", box(Discrete(n=2)))
    make(env=Noise(spaces.Discrete(3, start=1)))
    refused("its choices begin at 1", box(Discrete(n=3)))
    make(env=Noise(space=spaces.Box(0, 255, (4,), np.uint8)))
    refused("observes a .*uint8, not numbers", box())


def test_statistics_that_do_not_fit():
    make()
    refused("does not exist", normalizer=STATISTICS)
    STATISTICS.write_bytes(pickle.dumps({"mean": 0}))
    refused("is not a VecNormalize", normalizer=STATISTICS)
    VecNormalize(DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")])).save(str(STATISTICS))
    refused("statistics of 3 columns, Toy-v0 4", normalizer=STATISTICS)


# The command ------------------------------------------------------------------------------------


def pendulum() -> PPO:
    venv = VecNormalize(sb3.vec_env(ctrl_rl.make("Pendulum-v0", 4)))
    model = PPO("MlpPolicy", venv, n_steps=64, batch_size=64, seed=7, device="cpu")
    model.learn(512)
    model.save(MODEL)
    venv.save(str(STATISTICS))
    return model


def test_an_imported_run_is_played_exported_and_verified(capsys):
    model = pendulum()
    words = ["import-sb3", str(MODEL), "Pendulum-v0", "--normalizer", str(STATISTICS)]
    assert cli.main([*words, "--run-dir", "run"]) == 0
    assert "run: Pendulum-v0, gaussian_mlp, 512 env steps" in capsys.readouterr().out
    assert cli.main(["eval", "run", "--episodes", "4", "--num-envs", "2"]) == 0
    assert cli.main(["export", "run"]) == 0
    assert cli.main(["eval", "run/policy.onnx", "--episodes", "2"]) == 0
    assert cli.main(["verify", "run", "--episodes", "4", "--episode-s", "2"]) in (0, 1)
    assert "Pendulum-v0, 512 training steps" in capsys.readouterr().out
    report = Path("run/report.html").read_text()
    assert "stable-baselines3" in report and "--resume" not in report
    config = json.loads(Path("run/config.json").read_text())
    assert config["run"] == {"seed": 7, "num_envs": 4}
    obs = torch.randn(100, 3)
    expected, _ = model.predict(
        model.get_vec_normalize_env().normalize_obs(obs.numpy()), deterministic=True
    )
    for source in ("run", "run/policy.onnx"):
        np.testing.assert_allclose(ctrl_rl.load_policy(source)(obs), expected, atol=1e-5)
    assert cli.main([*words, "--run-dir", "run"]) == 2
    assert "run exists and is not empty" in capsys.readouterr().err


def test_statistics_are_neither_forgotten_nor_invented(capsys):
    model = pendulum()
    words = ["import-sb3", str(MODEL), "Pendulum-v0"]
    assert cli.main(words) == 2
    assert "was trained behind a VecNormalize; give the file" in capsys.readouterr().err
    model = PPO("MlpPolicy", sb3.vec_env(ctrl_rl.make("Pendulum-v0", 4)), n_steps=16, batch_size=64)
    model.learn(64)
    model.save(MODEL)
    assert cli.main([*words, "--normalizer", str(STATISTICS)]) == 2
    assert "was trained without a VecNormalize" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert ctrl_rl.load_policy("runs/Pendulum-v0/sb3/model").section()["normalizer"] is None


def test_statistics_of_rewards_alone():
    venv = VecNormalize(sb3.vec_env(ctrl_rl.make("Pendulum-v0", 4)), norm_obs=False)
    model = PPO("MlpPolicy", venv, n_steps=16, batch_size=64)
    model.learn(64)
    model.save(MODEL)
    venv.save(str(STATISTICS))
    policy = sb3.load_policy(MODEL, "Pendulum-v0", STATISTICS)
    assert policy.section()["normalizer"] is None


def test_an_off_policy_file_does_not_say_whether_there_are_statistics(capsys):
    SAC("MlpPolicy", sb3.vec_env(ctrl_rl.make("Pendulum-v0", 4)), buffer_size=10).save(MODEL)
    assert cli.main(["import-sb3", str(MODEL), "Pendulum-v0", "--run-dir", "run"]) == 0
    assert "taken as trained without a VecNormalize" in capsys.readouterr().out
    assert cli.main(["eval", "run", "--episodes", "2"]) == 0
    assert cli.main(["export", "run"]) == 0


def test_a_refused_model_leaves_no_folder(capsys):
    pendulum()
    words = [str(MODEL), "CartPole-SwingUp-v0", "--run-dir", "run"]
    assert cli.main(["import-sb3", *words]) == 2
    assert "observes [3] numbers, CartPole-SwingUp-v0 gives 5" in capsys.readouterr().err
    assert not Path("run").exists()
