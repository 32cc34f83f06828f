"""The result tables, each built from small results whose numbers are worked out here."""

import json

import numpy as np
import pytest

from benchmarks import metadiffuser, table
from benchmarks.ppo_halfcheetah import verdict


@pytest.fixture
def results(tmp_path):
    def write(benchmark: str, **cells: dict):
        for name, cell in cells.items():
            path = tmp_path / benchmark / f"{name.replace('_', '-')}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            record = {
                "benchmark": benchmark,
                "hardware": {"cores": 2, "cpu": "Abacus"},
                "versions": {"torch": "2.13.0", "numpy": "2.0"},
                "date": "2026-01-02T03:04:05+00:00",
                "config": {},
            }
            path.write_text(json.dumps(record | cell))
        return tmp_path

    return write


@pytest.mark.parametrize("name", table.TABLES)
def test_what_was_not_measured_is_said(name, tmp_path):
    assert table.NOT_MEASURED in table.TABLES[name](tmp_path)


def test_ppo_speed(results):
    folder = results(
        "ppo_speed",
        rate={
            "result": {
                "env_steps_per_s": {
                    "ours, compiled": {"per_s": 12000.0},
                    "sb3, DummyVecEnv": {"per_s": 3000.0},
                },
                "ratio": {"ours, compiled": 4.0, "sb3, DummyVecEnv": 1.0},
            }
        },
        steps_ours_compiled={"result": {"wall_s": 101.4}},
    )
    text = table.ppo_speed(folder)
    assert "| ctrl-rl, compiled | 12,000 | 4.00 | 101 s |" in text
    assert "| stable-baselines3, DummyVecEnv | 3,000 | 1.00 | not measured |" in text
    assert "2 cores of Abacus; torch 2.13.0; 2026-01-02; `python -m benchmarks.ppo_speed`." in text


def test_ppo_halfcheetah_judges_from_five_seeds_on(results):
    seeds = {f"ctrl_rl_s{k}": {"result": {"returns": [100.0 * k]}} for k in range(5)}
    peers = {f"sb3_s{k}": {"result": {"returns": [100.0, 300.0]}} for k in range(4)}
    folder = results("ppo_halfcheetah", **seeds, **peers)
    assert "shown, not judged" in table.halfcheetah(folder)
    folder = results("ppo_halfcheetah", sb3_s4={"result": {"returns": [200.0]}})
    text = table.halfcheetah(folder)
    assert "| ctrl-rl | 5 | 0, 100, 200, 300, 400 |" in text
    # Middle three of 0 .. 400: mean 200; the reference is 200 throughout.
    assert "Interquartile mean 200 against 200: ratio 1.00" in text


def test_verdict_by_hand():
    v = verdict(np.array([1.0, 2, 3, 4, 100]), np.full(5, 2.0))
    assert v["iqm"] == 3.0  # (2 + 3 + 4) / 3
    assert v["ratio"] == 1.5
    assert v["ci95"][0] < 1.5 < v["ci95"][1]
    same = verdict(np.full(5, 7.0), np.full(5, 7.0))
    assert same["ci95"] == (1.0, 1.0)


def test_aro_ddpg_judges_from_five_seeds_on(results):
    cell = lambda x: {"result": {"average_reward": x}}  # noqa: E731
    cells = {f"aro_ddpg-HalfCheetah-v5-s{k}": cell(float(k)) for k in range(5)}
    cells |= {f"ddpg-HalfCheetah-v5-s{k}": cell(1.0) for k in range(5)}
    cells |= {f"aro_ddpg-Walker2d-v5-s{k}": cell(3.0) for k in range(4)}
    folder = results("aro_ddpg")
    for name, content in cells.items():
        results("aro_ddpg", x=content)
        (folder / "aro_ddpg/x.json").rename(folder / f"aro_ddpg/{name}.json")
    text = table.aro_ddpg(folder)
    assert "| HalfCheetah-v5 | ARO-DDPG | 5 | 0.00, 1.00, 2.00, 3.00, 4.00 |" in text
    # Middle three of 0 .. 4: mean 2; DDPG is 1 throughout.
    assert "HalfCheetah-v5: interquartile mean 2.00 against 1.00, difference +1.00, 95 %" in text
    assert "| Walker2d-v5 | ARO-DDPG | 4 | 3.00, 3.00, 3.00, 3.00 |" in text
    assert "| Walker2d-v5 | DDPG | 0 | not measured |" in text
    assert "Walker2d-v5: fewer than five seeds on a side are shown, not judged." in text


def test_the_best_return_is_that_of_full_moves():
    """Played in the environment: 0.1 m a step along each axis until it is there."""
    import torch

    import ctrl_rl
    from robots.tasks.point_robot import GOALS, HELD_OUT, PointRobotConfig

    config = PointRobotConfig(index=HELD_OUT, start_noise=0.0)
    env, goal = (
        ctrl_rl.make("Point-Robot-v0", 5, config=config),
        torch.tensor([GOALS[i] for i in HELD_OUT]),
    )
    obs, total = env.observe()["actor"], 0.0
    for _ in range(20):
        step = env.step((goal - obs).clamp(-0.1, 0.1))
        obs, total = step.next_obs["actor"], total + step.reward.mean().item()
    assert metadiffuser.best_return() == pytest.approx(total, abs=1e-4)


def test_metadiffuser_judges_from_five_seeds_on(results):
    cell = lambda x: {"result": {"mean": x, "uniform": [-16.0, -14.0]}}  # noqa: E731
    level = {"full": -2.0, "no_return": -4.0, "no_dynamics": -2.0, "unconditioned": -9.0}
    cells = {
        f"Point-Robot-v0-{variant}-s{k}": cell(level.get(variant, -6.0) - k)
        for variant in metadiffuser.VARIANTS
        for k in range(5)
    }
    cells["Point-Robot-v0-data"] = {"result": {"mean_return_by_stage": [-15.6, -9.0, -3.4]}}
    cells["Cheetah-Vel-v0-full-s0"] = cell(-80.0)
    folder = results("metadiffuser")
    for name, content in cells.items():
        results("metadiffuser", x=content)
        (folder / "metadiffuser/x.json").rename(folder / f"metadiffuser/{name}.json")
    text = table.meta(folder)
    row = "| Point-Robot-v0 | MetaDiffuser | 5 | -4.0 | -2.0, -3.0, -4.0, -5.0, -6.0 |"
    assert row in text
    assert "| Point-Robot-v0 | uniform actions |  | -15.0 |  |" in text
    assert "| Point-Robot-v0 | data, on training tasks |  | -15.6 to -3.4 |  |" in text
    # Middle three of each: -4 against -11
    assert "Point-Robot-v0, MetaDiffuser against Diffuser: +7.0, 95 % interval +" in text
    assert "against MetaDiffuser without the dynamics guide: +0.0, 95 % interval -" in text
    assert "| Cheetah-Vel-v0 | Diffuser | 0 |  | not measured |" in text
    assert "Cheetah-Vel-v0: fewer than five seeds are shown, not judged." in text


def test_go1_walk(results):
    metrics = {}
    for k, physics in enumerate(("training", "fine", "randomised")):
        metrics[f"{physics}/falls"] = {"mean": 0.005 * (k + 1)}
        for axis in ("lin_vel_x", "lin_vel_y", "ang_vel_z"):
            metrics[f"{physics}/rms_{axis}"] = {"mean": 0.1 * (k + 1)}
    checks = {"training/drift": {"value": 0.02}, "fine/drift": {"value": 0.03}}
    cell = {"train_wall_s": 80.2, "env_steps": 1_600_000, "checks": checks, "verify_passed": True}
    cell["metrics"] = metrics
    slow = {**cell, "train_wall_s": 90.2, "verify_passed": False}
    text = table.go1_walk(results("go1_walk", seed_0={"result": cell}, seed_1={"result": slow}))
    shared = "1.6 M | training | 0.5 % | 0.100 | 0.100 | 0.100 | 2.0 cm"
    assert f"| seed-0 | 80 s | {shared} | passed |" in text
    assert f"| seed-1 | 90 s | {shared} | not passed |" in text
    assert "|  |  |  | fine | 1.0 % | 0.200 | 0.200 | 0.200 | 3.0 cm |  |" in text
    assert "|  |  |  | randomised | 1.5 % | 0.300 | 0.300 | 0.300 |  |  |" in text
    assert "Median of 2 seeds 85 s, worst 90 s." in text


def test_cartpole(results):
    held = {"train_wall_s": 20.2, "env_steps": 1_500_160, "terminated_rate": 0.0}
    held["upright_second_half"] = 1.0
    fell = {**held, "train_wall_s": 30.2, "terminated_rate": 0.01}
    fell["upright_second_half"] = 0.99998  # rounds to 1, and is not
    text = table.cartpole(results("cartpole", seed_0={"result": held}, seed_1={"result": fell}))
    assert "| seed-0 | 20 s | 1.5 M | 1.0000 | yes | 0 % |" in text
    assert "| seed-1 | 30 s | 1.5 M | 1.0000 | no | 1 % |" in text
    assert "Median of 2 seeds 25 s, worst 30 s." in text


def test_hindsight(results):
    cell = {"train_wall_s": 50.2, "env_steps": 100_000, "success": 0.985, "there": 0.6}
    cell["distance"] = 0.05
    other = {**cell, "success": 1.0, "there": 0.8, "train_wall_s": 60.0, "distance": 0.03}
    folder = results("hindsight", hindsight_s0={"result": cell}, hindsight_s1={"result": other})
    text = table.hindsight(folder)
    assert "| Reach-v0, 100 k env steps | seeds |" in text
    assert "| SAC with hindsight | 2 | 98.5 %, 100.0 % | 70 % | 4.0 cm | 55 s |" in text
    assert "| SAC | 0 | not measured |" in text
    folder = results("hindsight", plain_s0={"result": {**cell, "success": 0.01}})
    assert "| SAC | 1 | 1.0 % | 60 % | 5.0 cm | 50 s |" in table.hindsight(folder)


def test_fast_halfcheetah_judges_from_five_seeds_on(results):
    ours = {"goal_s": 90.0, "curve": [[50.0, 40_000, 10.0], [90.0, 80_000, 3100.0]]}
    slow = {"goal_s": None, "curve": [[900.0, 300_000, 2000.0]]}
    some = {f"ctrl-rl-s{i}": {"result": ours} for i in range(4)}
    text = table.fast_returns(results("fast_halfcheetah", **some, **{"sb3-s0": {"result": slow}}))
    assert "| ctrl-rl, FastSAC | 4 | 90, 90, 90, 90 | 80,000 |" in text
    assert "| stable-baselines3, SAC | 1 | never | – |" in text and "not judged" in text
    theirs = {"goal_s": 300.0, "curve": [[300.0, 60_000, 3000.0]]}
    cells = {f"{peer}-s{i}": {"result": r} for peer, r in (("ctrl-rl", ours), ("sb3", theirs))
             for i in range(5)}  # fmt: skip
    text = table.fast_returns(results("fast_halfcheetah", **cells))
    assert "Medians 90 s against 300 s: 0.30 of the time." in text


def test_go1_learners(results):
    curve = [{"env_steps": 2_000_000, "episode_return": 47.26, "error_lin_vel_x": 0.0951,
              "terminated_rate": 0.025}]  # fmt: skip
    cell = {"result": {"curve": curve, "whole_s": 150.4}}
    text = table.go1_race(results("go1_learners", **{"ppo-s0": cell, "ppo-s1": cell}))
    row = "| PPO | 2 | 2.0 M | 150, 150 | 47.3, 47.3 | 0.095, 0.095 | 2.5%, 2.5% |"
    assert row in text and "| FastSAC | 0 | not measured |" in text


def test_memory(results):
    cell = {"result": {"return": -151.4, "train_wall_s": 30.2}}
    text = table.blind_pendulum(results("memory", **{"ppo-s0": cell, "ppo-s1": cell}))
    assert "| ctrl-rl, PPO (no memory) | 2 | -151, -151 | 30 s |" in text
    assert "| ctrl-rl, recurrent PPO | 0 | not measured |" in text


def test_evaluators(results):
    good = {"estimates": [1.0, 3.0], "truth": [1.0, 3.0], "spearman": 1.0}
    bad = {"estimates": [3.0, 1.0], "truth": [1.0, 3.0], "spearman": -1.0}  # off by one range
    cells = {"point-s0": {"fitted Q": good, "per decision": bad},
             "point-s1": {"fitted Q": good, "per decision": good}}  # fmt: skip
    text = table.evaluators(results("ope", **{k: {"result": v} for k, v in cells.items()}))
    assert "| point | fitted Q | 1.00, 1.00 | 0 |" in text
    assert "| point | per decision | -1.00, 1.00 | 0.71 |" in text


def test_offline_scores_are_judged_against_bc(results):
    scores = {
        "bc": [10.0, 11.0, 12.0, 13.0, 14.0],
        "iql": [20.0, 21.0, 22.0, 23.0, 24.0],
        "por": [10.0, 11.0, 12.0, 13.0, 40.0],
        "td3_bc-adamo": [1.0, 1.0, 1.0, 1.0, 3.0],
        "cql": [90.0] * 5,
    }
    folder = results("offline_quality")
    for name, last in scores.items():  # names hold "_", which the fixture turns into "-"
        results("offline_quality", cell={"result": {"last": last}})
        made = folder / "offline_quality" / "cell.json"
        made.rename(made.with_name(f"hopper-medium-replay-{name}.json"))
    text = table.TABLES["offline_quality"](folder)
    row = "| hopper-medium-replay | iql | 50,000 | 22.0 ± 1.4 | 20.0, 21.0, 22.0, 23.0, 24.0 |"
    assert row in text and "| hopper-medium-replay | td3_bc | 50,000 | not measured |  |" in text
    start = "interquartile mean 22.0, BC 12.0, difference +10.0, 95 % interval +"
    assert f"- iql on hopper-medium-replay: {start}" in text and ": better" in text
    # The middle three of five: (11 + 12 + 13) / 3 again.
    start = "interquartile mean 12.0, BC 12.0, difference +0.0, 95 % interval -"
    assert f"- por on hopper-medium-replay: {start}" in text and ": undecided" in text
    assert "- td3_bc-adamo on" in text and ": worse" in text
    assert "- cql on" not in text  # shown, of fewer updates
    assert "iql" not in table.TABLES["offline_por"](folder)


def test_adamo(results):
    toy = {"q_max": [42_773.9, 99.0, None, 7.02, 3.0]}
    door = {"q_max": [1_500.0, 2_500.0, 1.0, 1.0, 1.0], "bound": 1999.24}
    door["flagged"] = [2000, 1000, None, None, None]
    text = table.adamo(results("adamo", toy_adam={"result": toy}, door_none={"result": door}))
    row = "| 128 transitions | Adam | 4.28e+04, 99, no number, 7.02, 3 | 100 | 3 of 5 | – |"
    assert row in text
    row = "AdamO, no budget | 1.5e+03, 2.5e+03, 1, 1, 1 | 1,999 | 4 of 5 | 2 of 5, from 1,000 |"
    assert row in text
    assert "| TD3 on door, 6,704 transitions | Adam | not measured |" in text


def test_fill_replaces_between_the_markers_alone(results):
    page = "before\n<!-- table: latency -->\nold\n<!-- /table -->\nafter\n"
    folder = results(
        "latency", go1={"result": {"us": {"onnxruntime": 8.0, "torch": 32.0}, "ratio": 0.25}}
    )
    filled = table.fill(page, folder)
    assert filled.startswith("before\n<!-- table: latency -->\n| One action")
    assert "old" not in filled
    assert "| ratio | 0.25 |" in filled
    assert filled.endswith("\n<!-- /table -->\nafter\n")
    assert table.fill(filled, folder) == filled
    with pytest.raises(ValueError, match="unknown table 'nothing'"):
        table.fill("<!-- table: nothing -->\n<!-- /table -->", folder)
