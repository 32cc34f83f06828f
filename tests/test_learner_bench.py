"""Benchmarks of learners: operations counted, scripts that run, tables of what was measured."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ctrl_rl
from benchmarks import (
    cells,
    flops,
    learner_race,
    learners,
    peers,
    ppo_halfcheetah,
    ppo_loop,
    sac_speed,
    table,
)
from benchmarks.dummy_env import ACTIONS, EPISODE, OBS, Dummy
from benchmarks.sac_settings import SAC
from ctrl_rl import sac
from ctrl_rl.networks import MLP

# Operations ---------------------------------------------------------------------------------


def test_operations_of_one_layer_by_hand():
    assert flops.forward((3, 5)) == 2 * 3 * 5
    assert flops.forward((3, 5, 7)) == 2 * (15 + 35)
    # forward 30 and 70; gradients of the weights 30 and 70; of the second layer's input 70
    assert flops.trained((3, 5, 7)) == 270
    # actor 2-3-1: forward 18, trained 3 * 18 - 12 = 42; the critic is the same; two epochs
    assert flops.ppo_env_step(2, 1, (3,), 2) == 2 * (18 + 2 * 42)


def test_operations_are_those_that_torch_counts():
    net, x = MLP((17, 256, 256, 12), "relu"), torch.randn(32, 17)
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward()
    assert counter.get_total_flops() == 32 * flops.trained((17, 256, 256, 12))


def test_an_update_of_sac_needs_what_is_counted():
    env = ctrl_rl.make(sac_speed.TASK, 4)
    learner = sac.SAC(sac.SACConfig(compile="off"), env.spec, "cpu")
    replay, obs = learner.make_replay(), env.observe()
    for _ in range(3):
        action = learner.act_randomly()
        step = env.step(action)
        replay.add(obs, action, step)
        obs = step.obs
    batch = replay.sample(256, learner.generator)
    with FlopCounterMode(display=False) as counter:
        learner.update(batch)
    assert env.spec.obs_size() == sac_speed.OBS and env.spec.action_size == sac_speed.ACTIONS
    needed = flops.sac_update(sac_speed.OBS, sac_speed.ACTIONS, (256, 256), 256)
    # It also computes the critics' gradient by the observation, which is not needed: under 1 %.
    assert needed <= counter.get_total_flops() <= 1.01 * needed
    env.close()


# The environment without physics ------------------------------------------------------------


def test_dummy_ends_each_environment_once_per_episode_and_ticks_per_iteration():
    ticks = []
    env = Dummy(10, 24, ticks.append)
    ended = torch.zeros(10)
    at_once = 0
    for _ in range(EPISODE):
        assert env.obs().shape == (10, OBS)
        reward, terminated = env.step(torch.ones(10, ACTIONS))
        assert torch.allclose(reward, torch.full((10,), 0.9))
        ended += terminated
        at_once = max(at_once, int(terminated.sum()))
    assert ended.tolist() == [1.0] * 10
    assert at_once == 1
    assert ticks == [240] * ((EPISODE - 1) // 24)  # at the first step after each iteration


# Scripts ------------------------------------------------------------------------------------

TINY = {**SAC, "hidden": [16, 16], "batch_size": 16, "warmup_steps": 60, "buffer_size": 5000}
SHARED = {"task": "HalfCheetah-v5", "seed": 0, "sim_threads": 1, "torch_threads": 1}


@pytest.mark.parametrize(
    ("script", "config", "unit"),
    [
        ("ours_sac.py updates", {"algo": "sac", "settings": TINY, "filled": 100, **SHARED}, 50),
        ("ours_sac.py loop", {"algo": "sac", "settings": TINY, **SHARED}, 1),
        ("ours_loop.py", {"num_envs": 8, "hidden": [8], "settings": ppo_loop.SETTINGS}, 8 * 24),
        ("matmul.py", {}, 2 * 1536**3),
    ],
)
def test_scripts_tick(script, config, unit):
    config = {"compile": "off", "torch_threads": 1, **config}
    with peers.Worker(peers.OURS, script, config) as worker:
        done = worker.run(0.1)
    assert done.work >= unit and done.work % unit == 0
    assert "torch" in worker.versions


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_a_training_leaves_returns_and_a_curve(algo):
    study = next(s for s in learners.STUDIES if s.algo == algo)
    config = learners.cell(study, peers.OURS, 0).config
    settings = {**config["settings"], **TINY, "total_steps": 1100}
    result = learners.measure({**config, "settings": settings, "episodes": 2, "compile": "off"})
    assert len(result["returns"]) == 2
    assert result["env_steps"] == 1100
    curve = result["curve"]
    assert curve["step"] == [1000]  # an episode of HalfCheetah has 1000 steps, and so has a row
    assert {len(column) for column in curve.values()} == {1}
    assert 0 < curve["wall_s"][0] <= result["train_wall_s"]
    json.dumps(result, allow_nan=False)


# Cells --------------------------------------------------------------------------------------


def test_jobs_measure_two_cells_at_a_time(tmp_path):
    import threading

    together = threading.Barrier(2, timeout=20)
    some = [cells.Cell(name=n, config={}) for n in "ab"]
    measure = lambda config: {"place": together.wait()}  # noqa: E731
    assert cells.main("demo", some, measure, ["--jobs", "2"], tmp_path, parallel=True) == 0
    assert sorted(c["result"]["place"] for c in cells.load("demo", tmp_path).values()) == [0, 1]
    with pytest.raises(SystemExit):  # a benchmark that times offers no such flag
        cells.main("demo", some, measure, ["--jobs", "2"], tmp_path)


def test_lists_of_numbers_stand_in_one_line(tmp_path):
    result = {"x": [1, -2.5, 3e-7], "name": "[\n1]", "rows": [["a", 1], [2, 3]], "none": []}
    cells.main("demo", [cells.Cell(name="one", config={})], lambda c: result, [], tmp_path)
    text = (tmp_path / "demo" / "one.json").read_text()
    assert '"x": [ 1, -2.5, 3e-07 ]' in text
    assert json.loads(text)["result"] == result


def test_nothing_is_measured_twice_and_old_results_stay_valid():
    names = [c.name for c in learners.CELLS]
    assert len(set(names)) == len(names)
    studied = {(c.config["algo"], c.config["task"]) for c in learners.CELLS}
    assert ("ppo", ppo_halfcheetah.TASK) not in studied
    config = {c.name: c.config for c in ppo_halfcheetah.CELLS}
    for name, record in cells.load("ppo_halfcheetah").items():
        assert record["config"] == config[name], name


def test_the_best_of_each_side_counts():
    rates = {"ours, 1 thread": 30.0, "ours, 2 threads": 20.0, "a": 10.0, "b": 12.0}
    assert learner_race.ratio_to_best(rates) == {
        "best": "ours, 1 thread",
        "best_reference": "b",
        "ratio": 2.5,
    }


WORK = """
import sys, time
sys.path.insert(0, {benchmarks!r})
import worker

def run(config, tick):
    while True:
        time.sleep(0.02 / config["speed"])
        tick(1)

worker.serve(run)
"""


def test_shares_of_the_peak(tmp_path, repository, monkeypatch):
    script = tmp_path / "work.py"
    script.write_text(WORK.format(benchmarks=str(repository / "benchmarks")))
    seen = []
    rates = {"ours, 1 thread": {"per_s": 30.0}, "it, 1 thread": {"per_s": 10.0}}

    def race(designs, **slices):
        seen.append((designs, slices))
        return {**rates, "products, 1": {"per_s": 6000.0}}, {"sb3": {}}

    monkeypatch.setattr(peers, "race", race)
    design = {"peer": peers.OURS, "script": "x.py"}
    config = {"designs": {"ours": design, "it": design}, "threads": [1]}
    config |= {"seconds": 0.1, "rounds": 1, "warm_up": 0}
    result = learner_race.race(config, {"n": 1}, 100, "mode")
    assert result["share_of_peak"] == {"ours, 1 thread": 0.5, "it, 1 thread": 0.1667}
    assert result["ratio"] == 3.0
    told = seen[0][0]["ours, 1 thread"]
    assert told[:2] == (peers.OURS, "x.py mode")
    assert told[2]["torch_threads"] == 1 and told[2]["n"] == 1


def test_a_race_gives_rates_and_versions(tmp_path, repository):
    script = tmp_path / "work.py"
    script.write_text(WORK.format(benchmarks=str(repository / "benchmarks")))
    designs = {n: (peers.OURS, str(script), {"speed": v}) for n, v in (("slow", 1), ("fast", 4))}
    rates, versions = peers.race(designs, seconds=0.2, rounds=3, warm_up=0)
    assert rates["fast"]["per_s"] > 1.5 * rates["slow"]["per_s"]
    assert versions[peers.OURS]["python"] == sys.version.split()[0]


# Tables -------------------------------------------------------------------------------------


def write(results: Path, benchmark: str, name: str, config: dict, result: dict) -> None:
    record = {
        "benchmark": benchmark,
        "config": config,
        "result": result,
        "hardware": {"cores": 2, "cpu": "a CPU"},
        "versions": {"torch": "2.13.0"},
        "date": "2026-01-02T03:04:05",
    }
    path = results / benchmark / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def test_returns_are_judged_from_five_seeds_on(tmp_path):
    def train(peer, values):
        for seed, value in enumerate(values):
            name = learners.prefix("sac", "HalfCheetah-v5", peer) + str(seed)
            write(tmp_path, "learners", name, {}, {"returns": [value - 1, value + 1]})

    train(peers.OURS, [100, 300, 200, 500, 400])
    train("sb3", [250, 250, 250, 250])
    text = table.TABLES["sac_returns"](tmp_path)
    assert "| HalfCheetah-v5, ctrl-rl, SAC | 100,000 | 5 | 100, 200, 300, 400, 500 |" in text
    assert "| HalfCheetah-v5, stable-baselines3, SAC | 100,000 | 4 | 250, 250, 250, 250 |" in text
    assert "| Hopper-v5, ctrl-rl, SAC | 100,000 | 0 | not measured |" in text
    assert "ratio" not in text
    train("sb3", [250] * 5)
    text = table.TABLES["sac_returns"](tmp_path)
    assert "HalfCheetah-v5: interquartile mean 300 against 250: ratio 1.20" in text
    # TD3 stands beside the same reference.
    text = table.TABLES["td3_returns"](tmp_path)
    assert "| HalfCheetah-v5, ctrl-rl, TD3 | 100,000 | 0 | not measured |" in text
    assert "| HalfCheetah-v5, stable-baselines3, SAC | 100,000 | 5 |" in text


def test_ppo_on_halfcheetah_comes_from_its_own_benchmark(tmp_path):
    write(tmp_path, "ppo_halfcheetah", "sb3-s0", {}, {"returns": [7.0]})
    write(tmp_path, "learners", "ppo-hopper-sb3-s0", {}, {"returns": [8.0]})
    text = table.TABLES["ppo_returns"](tmp_path)
    assert "| HalfCheetah-v5, stable-baselines3, PPO | 1,003,520 | 1 | 7 |" in text
    assert "| Hopper-v5, stable-baselines3, PPO | 1,003,520 | 1 | 8 |" in text
    assert "`python -m benchmarks.learners`, `python -m benchmarks.ppo_halfcheetah`" in text
    assert np.allclose(
        learners.seed_means(learners.measured("ppo", "Hopper-v5", "sb3", tmp_path)), 8
    )


def test_speed_tables_say_what_is_not_measured(tmp_path):
    cell = ppo_loop.CELLS[1]
    fastest = {"ours, compiled, 1 thread": 900.0, "ours, eager, 1 thread": 500.0}
    fastest |= {"rsl_rl, eager, 2 threads": 300.0, "skrl, 1 thread": 450.0}
    rates = {name: {"per_s": rate} for name, rate in fastest.items()}
    result = {"per_s": rates, "share_of_peak": dict.fromkeys(rates, 0.25)}
    write(
        tmp_path,
        "ppo_loop",
        cell.name,
        cell.config,
        {**result, **learner_race.ratio_to_best(fastest)},
    )
    text = table.TABLES["ppo_loop"](tmp_path)
    row = "| 1024 environments, 64-64 | 900 (compiled, 1 thread) | 300 (eager, 2 threads) "
    assert row + "| 450 (1 thread) | 2.00 | 1.60 | 25 % |" in text
    assert "| 64 environments, 64-64 | not measured |" in text

    names = [f"{d}, {n}" for d in sac_speed.DESIGNS for n in ("1 thread", "2 threads")]
    result = {
        "per_s": {name: {"per_s": 100.0 + i} for i, name in enumerate(names)},
        "share_of_peak": dict.fromkeys(names, 0.5),
        "ratio": 1.5,
    }
    write(tmp_path, "sac_speed", "updates", {}, result)
    text = table.TABLES["sac_speed"](tmp_path)
    assert "| ctrl-rl, compiled, 2 threads | 101 | 50 % | not measured |" in text
    assert "| stable-baselines3, 1 thread | 104 | 50 % | not measured |" in text
    assert "stable-baselines3: updates (floor 1.40) 1.50." in text
