"""What every learner owes to a run: it survives kills, divergence and damaged checkpoints."""

import copy
import dataclasses
import math
import random
import re
import shutil

import pytest
import torch
from kill_server import Server
from test_runs import contents, same, without_config

import ctrl_rl
from ctrl_rl import cli, registry, run_folder
from ctrl_rl.checkpoints import load_checkpoint, save_checkpoint
from ctrl_rl.compiled import MinibatchStep
from ctrl_rl.runs import Run
from ctrl_rl.sac import SACConfig
from robots.env import TaskEnv
from robots.tasks.pendulum import Pendulum

RUN = (
    "--num-envs 4 --eval-episodes 2 --eval-every 128 --checkpoint-every 32 --video-s 0"
    " --task.max-episode-steps 20 --algo.hidden 8"
).split()
ON_POLICY = "--total-steps 512 --algo.num-steps 16 --algo.num-minibatches 2".split()
OFF_POLICY = (
    "--total-steps 256 --algo.warmup-steps 32 --algo.buffer-size 300 --algo.batch-size 8"
    " --algo.updates-per-step 0.25 --algo.compile off"
).split()
OWN = {
    "ppo": [*ON_POLICY, "--algo.compile", "off"],
    "recurrent_ppo": [*ON_POLICY, "--algo.memory-size", "8"],
    "multi_critic_ppo": [*ON_POLICY, "--algo.compile", "off"],
    "sac": OFF_POLICY,
    "td3": OFF_POLICY,
    "fast_sac": [*OFF_POLICY, *"--algo.critic-hidden 8 --algo.num-atoms 11".split()],
    "ddpg": OFF_POLICY,
    "aro_ddpg": [*OFF_POLICY, "--algo.update-every", "8"],
}
"""Flags of a run of ten checkpoints or so, for every learner."""


def words(algo: str) -> list[str]:
    return ["train", "Pendulum-v0", "--algo", algo, *RUN, *OWN[algo]]


def test_every_learner_is_tried_here():
    assert OWN.keys() == registry.names("algos").keys()


# Kills --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


def train(server, folder, algo, kill=None) -> dict:
    """One sitting: begins the run, or goes on with it."""
    begun = (folder / "config.json").exists()
    given = ["train", "--resume", str(folder)] if begun else words(algo)
    given += [] if begun else ["--run-dir", str(folder)]
    log = folder.with_suffix(".log")
    result = server.run(*given, log=log, kill=kill)
    assert result["status"] == (-9 if kill and result["status"] else 0), log.read_text()
    return result


def figures(folder) -> list[dict]:
    rows = run_folder.read_metrics(folder)
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def names(folder) -> list[str]:
    """All files of a run; TensorBoard's carry the time in their names."""
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(re.sub("tfevents.*", "tfevents", name) for name in found)


def compare(folder, whole) -> None:
    """A run that was killed has what one that was not has."""
    a, b = (run_folder.read_config(f) for f in (folder, whole))
    assert a == b
    assert names(folder) == names(whole)
    assert figures(folder) == figures(whole)
    for path in sorted((whole / "checkpoints").iterdir()):
        one, other = (load_checkpoint(f / "checkpoints" / path.name) for f in (folder, whole))
        same(without_config(one), without_config(other), path.name)
    assert (folder / "evaluation.json").read_text() == (whole / "evaluation.json").read_text()


def kill_and_compare(server, folder, algo, kills, draw) -> None:
    """Kill runs `kills` times in all, each at a moment that `draw` chooses, resume and compare."""
    whole = folder / "whole"
    made = train(server, whole, algo)
    killed = folder / "killed"
    while kills:
        if draw.random() < 0.5:
            kill = "byte", draw.randrange(made["bytes"])
        else:
            kill = "after", draw.uniform(0.0, made["seconds"])
        if train(server, killed, algo, kill)["status"]:
            kills -= 1
        else:  # it was through before its moment came
            compare(killed, whole)
            shutil.rmtree(killed)
    train(server, killed, algo)
    compare(killed, whole)


@pytest.mark.parametrize("algo", ["ppo", "sac", "recurrent_ppo"])
def test_a_kill_at_a_random_moment_loses_nothing(server, tmp_path, algo):
    kill_and_compare(server, tmp_path, algo, 1, random.Random(algo))


@pytest.mark.slow
@pytest.mark.parametrize("algo", OWN)
def test_seven_kills_at_random_moments_lose_nothing(server, tmp_path, algo):
    kill_and_compare(server, tmp_path, algo, 7, random.Random(f"{algo} 7"))


# Divergence ---------------------------------------------------------------------------------


@pytest.fixture
def short_rows(monkeypatch):
    """Off-policy learners log every 32 env steps; no pictures."""
    for name in OWN:
        monkeypatch.setattr(registry.load("algos", name), "LOG_EVERY", 32, raising=False)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)


@pytest.mark.parametrize("algo", OWN)
def test_divergence_leaves_the_last_good_checkpoint(algo, tmp_path, short_rows, capsys):
    folder = tmp_path / "r"
    terms, step, taken = Pendulum.reward_terms, MinibatchStep.__call__, []

    def huge_reward(env, action):
        taken.extend([env] * 4 if env.num_envs == 4 else [])  # not those of the evaluation
        bad = algo != "fast_sac" and len(taken) > 160 and env.num_envs == 4
        # Overflows when squared. The atoms of FastSAC's critics bound what it learns from.
        return {name: value * (1e38 if bad else 1.0) for name, value in terms(env, action).items()}

    def broken_weight(self, *batch):
        if algo == "fast_sac" and len(taken) > 160:
            self._flat.data[0] = math.nan
        return step(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pendulum, "reward_terms", huge_reward)
        patch.setattr(MinibatchStep, "__call__", broken_weight)
        assert cli.main([*words(algo), "--run-dir", str(folder)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("ctrl-rl train: training diverged") and "--debug" not in line
    found = re.search(r"diverged before step (\d+): (loss|gradient).* (nan|inf)", line)
    assert found and "the last checkpoint is kept" in line
    last = load_checkpoint(folder / "checkpoints/last.pt")
    assert 0 < last["step"] <= 160 < int(found[1]) <= 320
    values = list(leaves(last))
    if "replay" in last:
        values += leaves(load_checkpoint(folder / "checkpoints" / last["replay"]))
    assert len(values) > 10 and all(x.isfinite().all() for x in values)
    # As if nothing had happened: the poison was outside.
    assert cli.main(["train", "--resume", str(folder)]) == 0
    assert run_folder.read_metrics(folder)[-1]["step"] == int(OWN[algo][1])


@pytest.mark.parametrize("reward", [math.nan, math.inf])
@pytest.mark.parametrize("algo", OWN)
def test_a_reward_that_is_no_number_is_neither_saved_nor_learned_from(
    algo, reward, tmp_path, short_rows, capsys, monkeypatch
):
    """From an environment of one's own: `TaskEnv` takes such a world for a fault."""
    folder, step, taken, long = tmp_path / "r", TaskEnv.step, [], OWN[algo]

    def poisoned(env, action):
        found = step(env, action)
        taken.extend([env] * 4 if env.num_envs == 4 else [])  # not those of the evaluation
        if len(taken) != 100:
            return found
        terms = {k: x.clone() for k, x in found.info.reward_terms.items()}
        for x in (bad := found.reward.clone(), *terms.values()):
            x[1] = reward
        return found._replace(reward=bad, info=dataclasses.replace(found.info, reward_terms=terms))

    monkeypatch.setattr(TaskEnv, "step", poisoned)
    if "--algo.warmup-steps" in long:
        long = [*long, "--algo.warmup-steps", "192"]  # nothing is updated, which could notice
    assert cli.main([*words(algo), *long, "--run-dir", str(folder)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("ctrl-rl train: training diverged before step 128: "), line
    assert "the last checkpoint is kept" in line
    last = load_checkpoint(folder / "checkpoints/last.pt")
    values = list(leaves(last))
    if "replay" in last:
        values += leaves(load_checkpoint(folder / "checkpoints" / last["replay"]))
    assert last["step"] in (64, 96) and all(x.isfinite().all() for x in values)
    assert cli.main(["train", "--resume", str(folder)]) == 0


@pytest.mark.parametrize("algo", OWN)
def test_an_explosion_of_finite_numbers_stops_the_run(algo, tmp_path, short_rows, capsys):
    folder = tmp_path / "r"
    step, sim_step, taken = MinibatchStep.__call__, Pendulum.step, []

    def counted(env, action):
        taken.extend([env] * 4 if env.num_envs == 4 else [])  # not those of the evaluation
        return sim_step(env, action)

    def swelling(self, *batch):
        tempered = "temperature" in " ".join(self._names)  # see the test below
        if len(taken) > 160 and not tempered:
            self._flat.data *= 3.0
        return step(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pendulum, "step", counted)
        patch.setattr(MinibatchStep, "__call__", swelling)
        assert cli.main([*words(algo), "--run-dir", str(folder)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    found = re.search(
        r"diverged before step (\d+): (\S+) is \S+, and (the rewards so far allow|1000 nat)", line
    )
    assert found and "the last checkpoint is kept" in line, line
    row = run_folder.read_metrics(folder)[-1]  # what was wrong can be looked at
    assert row["step"] == int(found[1]) and math.isfinite(row[found[2]])
    assert 0 < load_checkpoint(folder / "checkpoints/last.pt")["step"] < row["step"] <= 320
    assert cli.main(["train", "--resume", str(folder)]) == 0
    assert run_folder.read_metrics(folder)[-1]["step"] == int(OWN[algo][1])


@pytest.mark.parametrize("algo", ["sac", "fast_sac"])
def test_a_temperature_that_grows_without_end_stops_the_run(algo, tmp_path, short_rows, capsys):
    """It made its own values allowed, and the last checkpoint one of a policy of pure noise."""
    step = MinibatchStep.__call__

    def heated(self, *batch):
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if "temperature" in name:
                parameter.data += 1.0
        return step(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MinibatchStep, "__call__", heated)
        assert cli.main([*words(algo), "--run-dir", str(tmp_path / "r")]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    found = re.search(r"before step \d+: policy/temperature is (\S+), and the rewards .*", line)
    assert found and float(found[1]) < 1e10, line


def leaves(value):
    """All tensors of a nested state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)


# Damaged states -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One finished run per learner, made when it is first asked for."""
    folders = {}

    def make(algo):
        if algo not in folders:
            folders[algo] = tmp_path_factory.mktemp(algo) / "r"
            given = [*words(algo), "--total-steps", "128", "--run-dir", str(folders[algo])]
            assert cli.main(given) == 0
        return folders[algo]

    return make


def places(state: dict, where=()):
    """Path of every key of a nested state."""
    for key, value in state.items():
        yield (*where, key)
        if isinstance(value, dict):
            yield from places(value, (*where, key))


@pytest.mark.parametrize("algo", OWN)
def test_a_state_that_lacks_a_key_is_one_line(algo, made, tmp_path, short_rows, capsys):
    folder = tmp_path / "r"
    shutil.copytree(made(algo), folder)
    last = load_checkpoint(folder / "checkpoints/last.pt")
    files = {"learner": "last.pt", "env": "last.pt"}
    files |= {"replay": last["replay"]} if "replay" in last else {}
    draw = random.Random(algo)
    for name, file in files.items():
        path = folder / "checkpoints" / file
        whole = load_checkpoint(path)
        for place in draw.sample(list(places(whole[name])), 4):
            damaged = copy.deepcopy(whole)
            state = damaged[name]
            for key in place[:-1]:
                state = state[key]
            del state[place[-1]]
            save_checkpoint(path, damaged)
            before = contents(folder)
            given = ["train", "--resume", str(folder), "--total-steps", "192"]
            assert cli.main(given) == 2, place
            (line,) = capsys.readouterr().err.strip().splitlines()
            where, key = ".".join(map(str, (name, *place[:-1]))), place[-1]
            assert f"{path} does not fit this run: its {where} " in line and str(key) in line
            assert contents(folder) == before
        save_checkpoint(path, whole)
    assert cli.main(["train", "--resume", str(folder), "--total-steps", "192"]) == 0


@pytest.mark.parametrize("algo", OWN)
def test_a_start_from_another_algorithm_names_both(algo, made, tmp_path, short_rows, capsys):
    """Of some, some parts are alike: what differs first says nothing to whoever mixed them up."""
    other = "sac" if algo != "sac" else "td3"
    given = [*words(algo), "--init-from", str(made(other)), "--run-dir", str(tmp_path / "r")]
    assert cli.main(given) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == (
        f"ctrl-rl train: {algo} cannot start from {made(other)}, a run of {other}: name a run of "
        f"{algo}"
    )
    assert not (tmp_path / "r").exists()


class Part:
    """What has a state."""

    def __init__(self, **state) -> None:
        self.state, self.loaded = state, None

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.loaded = state
        if state["count"] == 7:
            raise IndexError("of its own")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "learner",
            {"w": torch.ones(3, 1)},
            r"last.pt .*its learner.w is torch.float32 \(3, 1\)",
        ),
        ("learner", {"w": torch.ones(4, 2)}, r"its learner.w is .*\(4, 2\), not .*\(3, 2\)"),
        ("learner", {"w": torch.ones(3, 2).double()}, "its learner.w is torch.float64"),
        ("learner", {"w": 1.0}, "its learner.w is of type float"),
        ("learner", {"count": 1.0}, "its learner.count is of type float"),
        ("learner", {"inner": [1]}, "its learner.inner is of type list"),
        ("learner", {"inner": {"a": "1"}}, "its learner.inner.a is of type str"),
        ("learner", {"count": 7}, "does not fit this run: of its own"),
        ("env", {"w": torch.ones(4, 2)}, r"last.pt .*: its env.w is .*\(4, 2\)"),
        ("replay", {"w": torch.ones(4, 1)}, r"replay-8.pt .*: its replay.w is .*\(4, 1\)"),
        ("replay", None, "last.pt does not fit this run: its replay is of type NoneType"),
        ("replay", {"w": torch.ones(9, 2)}, None),  # a replay may be filled further
        ("learner", {"more": 1, "none": "x"}, None),  # it is the part's to say
    ],
)
def test_a_state_that_does_not_fit_is_one_line(tmp_path, name, change, message):
    env = ctrl_rl.make("Pendulum-v0", 2)
    state = {"w": torch.ones(3, 2), "count": 1, "inner": {"a": 1}, "none": None}
    parts = {key: Part(**state) for key in ("learner", "env", "replay")}
    saved = dict.fromkeys(parts, state)
    saved[name] = change and state | change
    options = {"console": False}
    run = Run(tmp_path / "r", **options)
    run.start({"loss/a": "a"}, SACConfig(total_steps=10, warmup_steps=0), env, "test")
    run.log(8, {"loss/a": 1.0})
    run.save(8, {"weights": {}}, *saved.values())
    run.log(9, {"loss/a": 1.0})
    run.close()
    before = contents(tmp_path / "r")
    run = Run(tmp_path / "r", resume=True, **options)
    run.start({"loss/a": "a"}, SACConfig(total_steps=10, warmup_steps=0), env, "test")
    if message is None:
        assert run.resume(**parts) == 8
        assert parts[name].loaded["w"].shape == saved[name]["w"].shape
    else:
        with pytest.raises(ValueError, match=message) as error:
            run.resume(**parts)
        assert "\n" not in str(error.value) and str(tmp_path / "r/checkpoints") in str(error.value)
        assert contents(tmp_path / "r") == before
    run.close()
