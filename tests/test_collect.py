"""What is recorded is what happened: true final observations, recorded seeds, nothing invented."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from probes import Probe
from recordings import assert_same

from ctrl_rl import registry
from ctrl_rl.buffers import ReplayBuffer
from ctrl_rl.checkpoints import load_checkpoint
from ctrl_rl.env import Fault, Info
from ctrl_rl.making import make
from offline import d4rl
from offline.collect import Source, _changed, collect, from_grid, roll_out
from offline.collect import _some_steps as some_steps
from offline.datasets import load
from offline.episodes import digest
from offline.transitions import Transitions


class Counter(Probe):
    """Counts its steps; the first environment terminates at 3, the others are cut at 5."""

    id = "Probe-Counter-v0"

    def reward_terms(self, action):
        return {"one": action[:, 0].to(self.sim.dtype)}

    def terminations(self, rows=None):
        return {"three": (self.step_count >= 3) & (torch.arange(self.num_envs) == 0)}


def count_env(num_envs=2, steps=5):
    return Counter(
        dataclasses.replace(Counter.Config(), max_episode_steps=steps), num_envs=num_envs
    )


def half(obs, rows):
    """An action that tells what was seen."""
    return obs["actor"] / 10


def steps_of(episodes):
    data = Transitions.from_episodes(episodes, timeouts="keep")
    batch = data.batch(data.index[None])
    columns = (batch.obs[0, :, 0], batch.action[0, :, 0], batch.reward[0], batch.next_obs[0, :, 0])
    table = torch.stack((*columns, batch.terminated[0]), 1)
    return [tuple(round(v, 4) for v in row) for row in table.tolist()]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A short SAC run on Pendulum, with checkpoints and a replay of 160 steps."""
    from ctrl_rl.runs import Run
    from ctrl_rl.sac import SACConfig, train

    folder = tmp_path_factory.mktemp("runs") / "r"
    config = SACConfig(
        total_steps=160, hidden=(4,), compile="off", warmup_steps=150, buffer_size=160, batch_size=4
    )
    task = registry.load("tasks", "Pendulum-v0").Config(max_episode_steps=30)
    env = make("Pendulum-v0", 4, config=task, threads=1)
    keeping = Run(folder, eval_every=0, checkpoint_every=0)
    train(config, env, keeping)
    keeping.close()
    env.close()
    return folder


def test_a_roll_out_by_hand():
    episodes, lost = roll_out(count_env(), half, 13)  # 7 steps of the first, 6 of the second
    assert lost == 0
    assert episodes.lengths.tolist() == [3, 3, 1, 5, 1]
    assert episodes.terminated.tolist() == [True, True, False, False, False]
    assert episodes.truncated.tolist() == [False, False, False, True, False]
    assert episodes.final_known.all()
    np.testing.assert_array_equal(
        episodes.obs[:, 0], [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5, 0, 1]
    )
    tenth = [0, 0.1, 0.2]
    want = np.array([*tenth, *tenth, 0, *tenth, 0.3, 0.4, 0], np.float32)
    np.testing.assert_allclose(episodes.action[:, 0], want, rtol=1e-6)
    np.testing.assert_allclose(episodes.reward, want, rtol=1e-6)
    assert steps_of(episodes)[-2:] == [(4, 0.4, 0.4, 5, 0), (0, 0, 0, 1, 0)]


def test_a_policy_is_told_which_rows_ended():
    told = []

    def act(obs, rows):
        told.append(None if rows is None else rows.tolist())
        return torch.zeros(2, 1)

    roll_out(count_env(), act, 13)
    assert told == [None, None, None, [0], None, [1], [0]]


def test_a_policy_with_memory_hears_its_rewards_and_forgets_the_rows_that_ended(run, monkeypatch):
    from offline import collect as module

    class Remembers:
        device = torch.device("cpu")
        told: list = []

        def reset(self, rows=None):
            self.told.append(None if rows is None else rows.tolist())

        def receive(self, reward):
            self.told.append(tuple(reward.tolist()))

        def sample(self, obs, generator):
            return half(obs, None)  # which is the reward, too

    monkeypatch.setattr(module, "load_policy", lambda path: Remembers())
    monkeypatch.setattr(module, "check_fits", lambda policy, spec: None)
    monkeypatch.setattr(module, "make", lambda *args, **kinds: count_env())
    collect("Pendulum-v0", Source.parse_all([str(run)]), 13, num_envs=2)
    told = [tuple(round(10 * r) for r in x) if isinstance(x, tuple) else x for x in Remembers.told]
    assert told == [
        None, (0, 0), (1, 1), (2, 2), [0], (0, 3), (1, 4), [1], (2, 0), [0], (0, 1),
    ]  # fmt: skip


def test_a_faulty_step_is_left_out(monkeypatch):
    env = count_env(num_envs=1)
    step = env.step

    def faulty(action, count=[0]):  # noqa: B006
        count[0] += 1
        found = step(action)
        if count[0] == 3:
            info = dataclasses.replace(found.info, faults=(Fault(0, "sick"),))
            return found._replace(info=info, truncated=torch.tensor([True]))
        return found

    monkeypatch.setattr(env, "step", faulty)
    monkeypatch.setattr(Counter, "terminations", lambda self, rows=None: {})
    episodes, lost = roll_out(env, half, 5)
    assert lost == 1
    assert steps_of(episodes) == [
        (0, 0, 0, 1, 0),
        (1, 0.1, 0.1, 2, 0),
        (3, 0.3, 0.3, 4, 0),
        (4, 0.4, 0.4, 5, 0),
    ]
    assert episodes.lengths.tolist() == [2, 2]
    assert not episodes.truncated[0] and episodes.truncated[1]


def test_only_faults_are_an_error():
    grid = np.zeros((2, 1), np.float32)
    off = grid > 0
    with pytest.raises(ValueError, match="every one ended in a fault"):
        from_grid(grid[..., None], grid[..., None], grid, off, off, ~off, grid[..., None])


def test_the_same_call_gives_the_same_data_and_says_its_seeds(run):
    sources = Source.parse_all([f"{run}:160=0.5", "random=0.25", f"{run}:replay=0.25"])
    episodes = collect("Pendulum-v0", sources, 400, num_envs=3, seed=4, threads=1)
    again = collect("Pendulum-v0", sources, 400, num_envs=3, seed=4, threads=1)
    assert_same(again, episodes)
    other = collect("Pendulum-v0", sources, 400, num_envs=3, seed=5, threads=1)
    assert digest(other) != digest(episodes) == episodes.metadata["digest"]
    about = episodes.metadata
    assert [s["steps"] for s in about["sources"]] == [200, 100, 100]
    assert len({s["seed"] for s in about["sources"] + other.metadata["sources"]}) == 6
    assert about["sources"][0]["env_steps"] == 160 and len(about["sources"][0]["sha256"]) == 64
    assert about["sources"][0]["source"].endswith(":step-160")
    assert about["action_bounds"] == [[-2.0], [2.0]]
    assert about["simulator"].startswith("Pendulum-v0 (")
    d4rl.write(Path("x.hdf5"), episodes)
    assert_same(load("x.hdf5"), episodes)


def test_what_was_recorded_in_other_settings_is_evaluated_in_them(run, tmp_path):
    from offline import scores
    from offline.commands import train
    from offline.playing import task_config

    episodes = collect("Pendulum-v0", Source.parse_all([str(run)]), 60, num_envs=1, threads=1)
    assert episodes.metadata["task_config"] == {"max_episode_steps": 30}
    assert (
        collect("Pendulum-v0", Source.parse_all(["random"]), 9).metadata.get("task_config") is None
    )
    d4rl.write(Path("short.hdf5"), episodes)
    words = ["--algo", "bc", "--dataset", "short.hdf5", "--total-steps", "2", "--episodes", "2"]
    small = ["--algo.hidden", "4", "--algo.batch-size", "4", "--algo.compile", "off"]
    done = train.main([*words, *small, "--run-dir", str(tmp_path / "bc")])
    assert done["metrics"]["episode_length"]["mean"] == 30
    assert done["config"]["data"]["task_config"] == {"max_episode_steps": 30}
    hopper = registry.load("tasks", "Hopper-v5").Config
    changed = hopper(healthy_angle=(-math.inf, 0.2))
    recorded = _changed("Hopper-v5", changed)["task_config"]
    assert json.loads(json.dumps(recorded, allow_nan=False)) == recorded
    assert task_config("Hopper-v5", recorded, "x") == changed
    # D4RL's references are returns with the task's own rewards and ends.
    hopper = {"task": "Hopper-v5", "dataset": "mine"}
    assert scores.find_reference(hopper) is not None
    assert scores.find_reference(hopper | {"task_config": {"healthy_reward": 2.0}}) is None


def test_no_source_plays_what_one_of_another_seed_plays():
    halves = Source.parse_all(["random=0.5", "random=0.5"])
    both = collect("Pendulum-v0", halves, 200, num_envs=1, seed=0, threads=1)
    alone = collect("Pendulum-v0", Source.parse_all(["random"]), 100, num_envs=1, seed=1, threads=1)
    starts = {tuple(obs) for obs in both.obs[both.obs_starts].tolist()}
    assert len(starts) == both.num_episodes
    assert not starts & {tuple(obs) for obs in alone.obs[alone.obs_starts].tolist()}


def test_a_policy_of_recorded_data_has_updates_and_no_env_steps(run, tmp_path):
    from ctrl_rl.runs import Run
    from offline import bc

    recorded = collect("Pendulum-v0", Source.parse_all(["random"]), 40, num_envs=2)
    config = bc.BCConfig(total_steps=20, hidden=(4,), batch_size=4, compile="off")
    env = make("Pendulum-v0", 1, threads=1)
    keeping = Run(tmp_path / "bc", console=False)
    data = Transitions.from_episodes(recorded)
    bc.train(config, data, env.spec, (0,), keeping)
    keeping.close()
    found = collect("Pendulum-v0", Source.parse_all([str(tmp_path / "bc")]), 20, num_envs=2)
    (about,) = found.metadata["sources"]
    assert about["updates"] == 20 and "env_steps" not in about


def test_each_environment_gives_as_many_steps_of_whole_episodes(run):
    episodes = collect("Pendulum-v0", Source.parse_all([str(run)]), 1000, threads=1)
    # Episodes of 30 steps, as the run was trained: 1000 // 150 = 6 environments.
    assert episodes.metadata["sources"][0]["num_envs"] == 6
    assert (episodes.truncated.sum(), (~episodes.truncated).sum()) == (30, 6)
    assert set(episodes.lengths[episodes.truncated]) == {30}


def test_random_actions_fill_the_bounds():
    episodes = collect("Pendulum-v0", Source.parse_all(["random"]), 2000, num_envs=10, threads=1)
    action = episodes.action[:, 0]
    assert action.min() >= -2 and action.max() <= 2
    assert -2 < action.min() < -1.98 and 1.98 < action.max() < 2
    assert abs(action.mean()) < 4 * 4 / math.sqrt(12 * 2000)


def test_deterministic_and_sampled_actions_differ(run):
    source = Source.parse_all([f"{run}:last"])
    mean = collect("Pendulum-v0", source, 50, num_envs=1, deterministic=True, threads=1)
    sampled = collect("Pendulum-v0", source, 50, num_envs=1, threads=1)
    assert mean.metadata["deterministic"] and not np.allclose(mean.action, sampled.action)
    from ctrl_rl.policy import load_policy

    policy = load_policy(run, "last")
    first = policy(torch.from_numpy(mean.obs[:1]))
    np.testing.assert_allclose(first.numpy(), mean.action[:1], rtol=1e-6)


def test_sampled_actions_follow_from_the_seed(run):
    from offline import collect as module

    env = make("Pendulum-v0", 2, threads=1)
    obs, source = env.reset(), Source.parse_all([str(run)])[0]
    draw = lambda seed: module._actor(source, env, seed, False)[0](obs, None)  # noqa: E731
    first, again, other = draw(1), draw(1), draw(2)
    env.close()
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_replay_holds_what_the_learner_saw(run):
    episodes = collect("Pendulum-v0", Source.parse_all([f"{run}:replay"]), 160, threads=1)
    assert episodes.num_steps == 160
    # 40 steps of each of 4 environments; episodes are cut after 30, the first ones at any step.
    assert episodes.final_known.all() and not episodes.terminated.any()
    assert (~episodes.truncated).sum() == 4
    state = load_checkpoint(run / "checkpoints" / "replay-160.pt")["replay"]
    buffer = ReplayBuffer(160, 4, {"actor": 3}, 1)
    buffer.load_state_dict(state)
    batch = buffer.gather(torch.arange(160))
    order = torch.arange(160).view(40, 4).T.reshape(-1)  # ours go environment by environment
    data = Transitions.from_episodes(episodes, timeouts="keep")
    mine = data.batch(data.index[None])
    for found, want in (
        (mine.obs[0], batch.obs["actor"]),
        (mine.action[0], batch.action),
        (mine.reward[0], batch.reward),
        (mine.next_obs[0], batch.next_obs["actor"]),
    ):
        torch.testing.assert_close(found, want[order], rtol=0, atol=0)
    with pytest.raises(ValueError, match="holds 160 steps, its share is 161"):
        collect("Pendulum-v0", Source.parse_all([f"{run}:replay"]), 161, threads=1)
    part = run / "checkpoints" / "replay-160-rank1.pt"
    part.touch()
    with pytest.raises(ValueError, match="trained by several processes"):
        collect("Pendulum-v0", Source.parse_all([f"{run}:replay"]), 160, threads=1)
    part.unlink()


def test_a_replay_that_wrapped_is_read_from_its_oldest_step(run, monkeypatch):
    from offline import collect as module

    buffer = ReplayBuffer(12, 2, {"actor": 1}, 1)  # 6 slots
    env, seen = count_env(), []
    obs = env.reset()
    for t in range(10):
        step = env.step(half(obs, None))
        if t == 7:
            cut = torch.tensor([True, False])
            step = step._replace(info=Info(faults=(Fault(0, "sick"),)), truncated=cut)
        buffer.add(obs, half(obs, None), step)
        ended = step.terminated | step.truncated
        for i in range(2):
            seen.append((i, *(x[i].item() for x in (obs["actor"], step.next_obs["actor"], ended))))
        obs = step.obs
    state = buffer.state_dict()
    last = {"step": 20, "policy": {"x": 1}, "replay": "replay-20.pt"}

    def read(path, kinds=None):
        return {"replay": state} if path.stem.startswith("replay") else last

    monkeypatch.setattr(module, "load_checkpoint", read)
    monkeypatch.setattr(module, "check_fits", lambda policy, spec: None)
    monkeypatch.setattr(module, "load_policy", lambda path: None)
    monkeypatch.setattr(module, "file_sha256", lambda path: "")
    source = Source.parse_all([f"{run}:replay"])[0]
    with pytest.raises(ValueError, match="holds 11 steps, its share is 12"):
        module.read_replay(source, env.spec, 12, 0)
    episodes, _ = module.read_replay(source, env.spec, 11, 0)
    seen.pop(7 * 2)  # the faulty step
    want = [(s, n) for i in range(2) for e, s, n, _ in seen[-11:] if e == i]
    starts, follow = episodes.step_rows(), episodes.step_rows() + 1
    assert list(zip(episodes.obs[starts, 0], episodes.obs[follow, 0], strict=True)) == want


def test_a_part_of_a_replay_is_whole_episodes_but_for_one(run):
    whole = collect("Pendulum-v0", Source.parse_all([f"{run}:replay"]), 160, threads=1)
    for steps in (1, 30, 77, 159):
        part = some_steps(whole, steps, seed=0)
        assert part.num_steps == steps
        pairs = {tuple(row) for row in np.hstack([whole.obs[:-1], whole.obs[1:]])}
        rows = part.step_rows()
        mine = np.hstack([part.obs[rows], part.obs[rows + 1]])
        assert all(tuple(row) in pairs for row in mine)
        # What was cut just stops; what is said to be truncated ended there.
        final = lambda x: [tuple(row) for row in x.obs[x.obs_starts + x.lengths][x.truncated]]  # noqa: E731
        assert set(final(part)) <= set(final(whole))
        assert_same(some_steps(whole, steps, seed=0), part)
    assert digest(some_steps(whole, 77, seed=1)) != digest(some_steps(whole, 77, seed=0))


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name at least one source"),
        (["random=0.5", "RUN=0.6"], "1 in sum"),
        (["random=0.5", "RUN"], "1 in sum"),
        (["random=x"], "'x' is no share"),
        (["random:replay"], "random actions have no checkpoint 'replay'"),
        (["RUN:7"], "has no checkpoint '7'; there are"),
        (["nowhere"], "nowhere does not exist"),
    ],
)
def test_sources_that_make_no_sense(words, message, run):
    words = [word.replace("RUN", str(run)) for word in words]
    with pytest.raises(ValueError, match=message):
        collect("Pendulum-v0", Source.parse_all(words), 100, threads=1)


def test_a_run_of_another_task_is_refused(run):
    with pytest.raises(ValueError, match="was trained in Pendulum-v0, not in CartPole-SwingUp-v0"):
        collect("CartPole-SwingUp-v0", Source.parse_all([str(run)]), 100, threads=1)
    with pytest.raises(ValueError, match="too few for 2 sources"):
        collect("Pendulum-v0", Source.parse_all(["random", "random"]), 1, threads=1)
