"""Offline learners that go on in the simulator."""

import dataclasses

import h5py
import numpy as np
import pytest
import torch
from probes import FollowSignal, LastStepReward
from recorded import episodes, same

from ctrl_rl.buffers import ReplayBuffer
from ctrl_rl.checkpoints import load_checkpoint, save_checkpoint
from ctrl_rl.compiled import Diverged
from ctrl_rl.run_folder import read_metrics
from ctrl_rl.runs import Run
from offline import collapse, d4rl, minari, online, training
from offline.awac import AWAC, AWACConfig
from offline.bc import BC, BCConfig
from offline.commands import online as command
from offline.commands import train
from offline.iql import IQL, IQLConfig
from offline.online import Mixture, OnlineConfig, acting_policy, go_on, longer
from offline.td3_bc import TD3BC, TD3BCConfig
from offline.transitions import Transitions

SMALL = {"total_steps": 20, "batch_size": 16, "hidden": (8,), "compile": "off"}


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(online, "LOG_EVERY", 20)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


def followed(low=-1.0, high=1.0, count=300, **kinds) -> Transitions:
    """FollowSignal as it was played by uniform actions within low..high."""
    draw = np.random.default_rng(0)
    signal, action = draw.uniform(-1, 1, count), draw.uniform(low, high, count)
    found = episodes(
        np.repeat(signal, 2)[:, None], action[:, None], -((action - signal / 2) ** 2),
        np.ones(count), np.ones(count),
    )  # fmt: skip
    return Transitions.from_episodes(found, **kinds)


def test_a_minibatch_is_half_recorded_and_half_new_and_both_are_seen_alike():
    """New rewards are shifted, new observations standardised as the recorded ones are."""
    data = followed(normalize_obs=True, reward="antmaze")
    env = LastStepReward(num_envs=2, seed=0)
    replay = ReplayBuffer(100, 2, {"actor": 1}, 1)
    obs = env.observe()
    for _ in range(24):
        action = torch.full((2, 1), 0.25)
        step = env.step(action)
        replay.add(obs, action, step)
        obs = step.obs
    generator = torch.Generator().manual_seed(0)
    batch = Mixture(data, replay, 64, 0.25, generator).draw()
    assert [tuple(x.shape) for x in batch] == [(1, 64, 1), (1, 64, 1), (1, 64), (1, 64, 1), (1, 64)]
    assert bool((batch.action[0, 16:] == 0.25).all()) and not bool(
        (batch.action[0, :16] == 0.25).any()
    )
    assert bool((batch.reward[0, :16] <= -1).all())
    last = batch.terminated[0, 16:] == 1
    assert 0 < int(last.sum()) < 48
    torch.testing.assert_close(batch.reward[0, 16:], last.float() - 1)
    assert data.normalizer is not None
    raw = batch.obs[0, 16:] * (data.normalizer.std + 1e-3) + data.normalizer.mean
    torch.testing.assert_close(raw.round(), raw, atol=1e-4, rtol=0)
    torch.testing.assert_close(raw.amax(), torch.tensor(7.0))
    torch.testing.assert_close(raw[last], torch.full_like(raw[last], 7.0))
    raw_next = batch.next_obs[0, 16:] * (data.normalizer.std + 1e-3) + data.normalizer.mean
    torch.testing.assert_close(raw_next, raw + 1)
    whole = Mixture(data, replay, 8, 1.0, generator).draw()
    assert not bool((whole.action == 0.25).any()) and whole.obs.shape == (1, 8, 1)
    none = Mixture(data, replay, 8, 0.0, generator).draw()
    assert bool((none.action == 0.25).all())


def test_only_a_policy_without_noise_is_given_some():
    data, env = followed(), FollowSignal(num_envs=4000, seed=0)
    plain = TD3BC(TD3BCConfig(**SMALL), data, env.spec)
    obs, generator = torch.zeros(4000, 1), torch.Generator().manual_seed(0)
    spread = acting_policy(plain, 0.2).sample(obs, generator).std()
    assert float(spread) == pytest.approx(0.2, rel=0.1)
    noisy = IQL(IQLConfig(**SMALL), data, env.spec)
    with torch.no_grad():
        assert noisy.actor.log_std is not None
        noisy.actor.log_std.fill_(-1.5)
    spread = acting_policy(noisy, 9.0).sample(obs, generator).std()
    assert float(spread) == pytest.approx(np.exp(-1.5), rel=0.1)


def test_stopped_and_resumed_equals_uninterrupted_to_the_bit(tmp_path, monkeypatch):
    """O-46: weights, moments, replay, environment, generators and the monitor."""
    monkeypatch.setattr(collapse, "WATCH_EVERY", 25)
    data = followed()
    config = OnlineConfig(total_steps=80, warmup_steps=10, renew_every=4)

    def play(name, **options):
        env = LastStepReward(num_envs=2, seed=3)  # episodes of 8 steps, a row is 10 of each
        made = AWAC(AWACConfig(**SMALL, monitor="warn"), data, env.spec, (1,))
        run = Run(tmp_path / name, console=False, eval_every=40, checkpoint_every=20, **options)
        found = go_on(config, made, data, env, run, lambda p: {
            "eval/episode_return": float(p(torch.ones(1, 1)))})  # fmt: skip
        rows = [{k: v for k, v in r.items() if not k.startswith("time/")} for r in found.rows]
        return made.state_dict(), rows

    whole, rows = play("whole")
    play("parts", stop_after=40)
    resumed, again = play("parts", resume=True)
    same(resumed, whole)
    assert again == rows and [r["step"] for r in rows] == [20, 40, 60, 80]
    assert rows[0]["replay/size"] == 20 and "loss/critic" in rows[0]
    assert ["collapse/q_max" in r for r in rows] == [False, True, True, True]
    assert ["eval/episode_return" in r for r in rows] == [False, True, False, True]


def test_going_on_is_watched_against_what_is_earned_now(monkeypatch):
    monkeypatch.setattr(collapse, "WATCH_EVERY", 50)
    data, config = followed(), OnlineConfig(total_steps=80, warmup_steps=10)
    data.rows[:, -2] = 1e-3  # the critics' first values are beyond what these rewards allow

    def play(**changes):
        env = LastStepReward(num_envs=2, seed=3)
        made = AWAC(AWACConfig(**SMALL | changes), data, env.spec)
        return go_on(config, made, data, env).rows

    rows = play(monitor="stop")
    checked = [row["step"] for row in rows if "collapse/q_max" in row]
    assert checked == [60, 80]  # after 50 updates and at the end
    bounds = [row["collapse/q_max"] / row["collapse/q_share"] for row in rows[2:]]
    assert bounds == pytest.approx([1.0] * 2)  # the task's one reward, at an episode's end
    assert not any("collapse/q_max" in row for row in play())
    monkeypatch.setattr(online.Mixture, "earned", lambda self, rows: (torch.empty(0),) * 2)
    with pytest.raises(Diverged, match="at update 50: .* earn more than 0.001"):
        play(monitor="stop")


def test_updates_are_as_many_as_asked_for_and_a_falling_step_size_falls_over_both_parts():
    data, env = followed(), FollowSignal(num_envs=1, seed=0)
    config = OnlineConfig(total_steps=40, warmup_steps=10, updates_per_step=2.0)
    assert config.updates == 60
    made = IQL(longer(IQLConfig(**SMALL), config.updates), data, env.spec)
    for _ in range(20):  # as offline
        made.update(data.batch(data.draw(16, [torch.Generator().manual_seed(0)])))
    assert float(made.actor_step.learning_rate) > 0.9 * 3e-4 * (1 + np.cos(np.pi * 20 / 80)) / 2
    go_on(config, made, data, env)
    assert made.updates == 80
    assert float(made.actor_step.learning_rate) < 1e-3 * 3e-4


def test_what_does_not_fit_is_refused():
    data, env = followed(), FollowSignal(num_envs=1, seed=0)
    two = TD3BC(TD3BCConfig(**SMALL), data, env.spec, (0, 1))
    with pytest.raises(ValueError, match="2 seeds of td3_bc: one seed of"):
        go_on(OnlineConfig(), two, data, env)
    with pytest.raises(ValueError, match="1 seeds of bc"):
        go_on(OnlineConfig(), BC(BCConfig(**SMALL), data, env.spec), data, env)
    other = TD3BC(TD3BCConfig(**SMALL), data, LastStepReward(num_envs=1, seed=0).spec)
    with pytest.raises(ValueError, match="trained on Probe-LastStep-v0"):
        go_on(OnlineConfig(), other, data, env)
    for name, bad in (("data_share", 1.5), ("warmup_steps", 0), ("renew_every", 0)):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            dataclasses.replace(OnlineConfig(), **{name: bad})


def miss(learner) -> float:
    """Mean squared distance from the best action, half the signal."""
    signal = torch.linspace(-1, 1, 21)[:, None]
    return float((acting_policy(learner, 0.0)(signal) - signal / 2).square().mean())


def test_playing_finds_what_the_data_do_not_hold():
    """Data with actions within -0.6..-0.2 alone. The negative control takes as many updates more
    from the data."""
    data, found = followed(-0.6, -0.2), {}
    for share in (0.5, 1.0):
        env = FollowSignal(num_envs=4, seed=1)
        settings = TD3BCConfig(**SMALL | {"total_steps": 250, "batch_size": 64, "hidden": (32,),
                                          "learning_rate": 5e-3, "polyak": 0.05})  # fmt: skip
        made = TD3BC(settings, data, env.spec)
        training.fit(made, data)
        before = miss(made)
        config = OnlineConfig(total_steps=1200, warmup_steps=200, updates_per_step=0.5,
                              data_share=share, exploration_noise=0.4)  # fmt: skip
        go_on(config, made, data, env)
        found[share] = miss(made), before
    assert found[0.5][0] < 0.3 * found[0.5][1]
    assert found[1.0][0] > 2 * found[0.5][0]


def test_the_command_takes_a_run_into_its_task_and_goes_on(tmp_path, our_names, capsys):
    """Pendulum: stopped and resumed, with the data and the learner of the offline run."""
    draw = np.random.default_rng(0)
    found = episodes(
        draw.normal(size=(210, 3)), draw.uniform(-2, 2, (200, 1)), -np.ones(200), np.full(10, 20),
        np.zeros(10), np.ones(10),
    )  # fmt: skip
    path = tmp_path / "swings.hdf5"
    d4rl.write(path, dataclasses.replace(found, metadata={"task": "Pendulum-v0"}))
    small = "--algo.hidden 8 --algo.batch-size 16 --algo.compile off --total-steps 20 --episodes 2"
    train.main(["--algo", "awac", "--dataset", str(path), *small.split(), "--normalize-obs",
                "--eval-every", "0", "--run-dir", str(tmp_path / "r")])  # fmt: skip
    words = [str(tmp_path / "r"), "--online.total-steps", "60", "--online.warmup-steps", "10",
             "--num-envs", "2", "--episodes", "2", "--eval-every", "0"]  # fmt: skip
    command.main([*words, "--stop-after", "40"])
    done = command.main([*words, "--resume"])
    assert done["task"] == "Pendulum-v0" and done["env_steps"] == 60
    assert "after 60 env steps" in capsys.readouterr().out
    assert [row["step"] for row in read_metrics(tmp_path / "r/online")] == [20, 40, 60]
    last = load_checkpoint(tmp_path / "r/online/checkpoints/last.pt")
    assert last["policy"]["normalizer"] is not None
    begun = load_checkpoint(tmp_path / "r/checkpoints/last.pt")["learner"]["state"]
    steps = [state["learner"]["actor_step"]["optimizer"]["state"][0]["step"]
             for state in ({"learner": begun}, last["learner"])]  # fmt: skip
    assert [float(step) for step in steps] == [20, 20 + 50]
    with open(path, "ab") as file:
        file.write(b"other")
    with pytest.raises(ValueError, match="not the data that"):
        command.main([*words, "--run-dir", str(tmp_path / "x")])


def test_a_folder_that_has_changed_is_not_gone_on_with(tmp_path, our_names):
    draw = np.random.default_rng(0)
    found = episodes(
        draw.normal(size=(42, 3)), draw.uniform(-2, 2, (40, 1)), -np.ones(40), np.full(2, 20),
        np.zeros(2), np.ones(2),
    )  # fmt: skip
    path = tmp_path / "swings-v0"
    minari.write(path, dataclasses.replace(found, metadata={"task": "Pendulum-v0"}))
    train.main(["--algo", "awac", "--dataset", str(path), "--algo.hidden", "8", "--algo.compile",
                "off", "--total-steps", "20", "--episodes", "1",
                "--run-dir", str(tmp_path / "r")])  # fmt: skip
    saved, _ = train.read_saved(tmp_path / "r")
    command.restore(tmp_path / "r", saved, 10)
    last = tmp_path / "r/checkpoints/last.pt"
    whole, content = last.read_bytes(), load_checkpoint(last)
    del content["learner"]["state"]["critic"]
    save_checkpoint(last, {k: v for k, v in content.items() if k != "format"})
    with pytest.raises(ValueError, match="last.pt does not fit: its learner lacks critic$"):
        command.restore(tmp_path / "r", saved, 10)
    last.write_bytes(whole)
    with h5py.File(path / "data" / "main_data.hdf5", "r+") as file:
        file["episode_0/actions"][0] = 0.5
    with pytest.raises(ValueError, match="not the data that"):
        command.restore(tmp_path / "r", saved, 10)
    with pytest.raises(ValueError, match="another digest .*start a new run"):
        train.main(["--resume", str(tmp_path / "r"), "--total-steps", "40"])


def test_the_command_refuses_other_runs(tmp_path, our_names):
    data, env = followed(), FollowSignal(num_envs=1)
    for name, learner, message in (
        ("bc", BC(BCConfig(**SMALL), data, env.spec), "is a run of bc; td3_bc, iql"),
        ("two", TD3BC(TD3BCConfig(**SMALL), data, env.spec, (0, 1)), "a job of several seeds"),
    ):
        data.report["file"] = "/nowhere"
        training.fit(learner, data, Run(tmp_path / name, console=False))
        with pytest.raises(ValueError, match=message):
            command.main([str(tmp_path / name)])
