"""A benchmark trains each cell once, whatever is killed, and keeps a result of every one."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded import episodes
from recordings import family_arrays, write_hdf5

from ctrl_rl import cli, registry, workers
from ctrl_rl.checkpoints import load_checkpoint
from ctrl_rl.run_folder import read_metrics
from offline import benchmark, d4rl, results, training
from offline.commands import bench, train
from offline.registry import ALGOS, COMMANDS
from offline.td3_bc import TD3BC

SMALL = {
    "total-steps": "40",
    "eval-every": "20",
    "checkpoint-every": "20",
    "episodes": "2",
    "algo.hidden": "8",
    "algo.batch-size": "16",
    "algo.compile": "off",
}
X = Path("x")


def write_data(path: Path, seed: int = 0) -> Path:
    draw = np.random.default_rng(seed)
    found = episodes(
        draw.standard_normal((210, 11)),
        draw.uniform(-1, 1, (200, 3)),
        draw.uniform(0, 1, 200),
        np.full(10, 20),
        np.arange(10) % 2 == 0,
        np.arange(10) % 2 == 1,
    )
    d4rl.write(path, dataclasses.replace(found, metadata={"task": "Hopper-v5"}))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return str(write_data(tmp_path_factory.mktemp("data") / "hopper-noise.hdf5"))


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Short rows, no pictures, jobs in this process, and this checkout's names."""
    monkeypatch.setattr(training, "LOG_EVERY", 10)
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
    names, ours = registry.names, {"offline_algos": ALGOS, "commands": COMMANDS}
    monkeypatch.setattr(registry, "names", lambda g: {**names(g), **ours.get(g, {})})

    def in_turn(function, jobs, done, **kinds):
        for job in jobs:
            done(job, function(job))

    monkeypatch.setattr(bench, "on_this_machine", in_turn)


def words(*more: str, **settings: str) -> list[str]:
    settings = SMALL | {k.replace("__", ".").replace("_", "-"): v for k, v in settings.items()}
    return [*more, "--out", "x", *(w for k, v in settings.items() for w in ("--set", f"{k}={v}"))]


def run(*more: str, **settings: str) -> dict:
    return bench.main(words(*more, **settings))


def planned(*more: str, **settings: str) -> list[benchmark.Planned]:
    return bench.plan_cells(cli.parse(bench.Bench, words(*more, **settings), "x"))


def seeds_of(jobs: list[benchmark.Job]) -> list[tuple[int, ...]]:
    return [job.seeds for job in jobs]


# Cells --------------------------------------------------------------------------------------


def test_every_data_set_meets_every_algorithm_and_settings_reach_it(data, tmp_path):
    other = str(write_data(tmp_path / "hopper-other.hdf5"))
    found = planned(data, other, "--algo", "bc,td3_bc,td3_bc alpha=1 hidden=16 4")
    assert [(plan.name, plan.label) for plan in found] == [
        (name, label)
        for name in ("hopper-noise", "hopper-other")
        for label in ("bc", "td3_bc", "td3_bc alpha=1 hidden=16 4")
    ]
    plan = train.read_plan([*found[2].words, "--seeds", "1"])
    assert (plan.algo_config.alpha, plan.algo_config.hidden) == (1.0, (16, 4))
    assert (plan.flags.episodes, plan.algo_config.total_steps, plan.dataset) == (2, 40, data)
    assert found[2].total_steps == 40 and found[2].config["hidden"] == [16, 4]
    relative = os.path.relpath(data)
    assert planned(relative, "--algo", "bc") == found[:1]  # a path is the same from anywhere
    assert "total_steps" not in found[2].config and found[1].config["hidden"] == [8]


def test_seeds_are_one_job_unless_asked(data, tmp_path):
    (plan,) = planned(data)
    split = lambda count, per: seeds_of(benchmark.plan_jobs(plan, tmp_path, count, per))  # noqa: E731
    assert split(4, 0) == [(0, 1, 2, 3)]
    assert split(5, 2) == [(0, 1), (2, 3), (4,)]
    assert split(2, 1) == [(0,), (1,)]
    folders = [job.folder.name for job in benchmark.plan_jobs(plan, tmp_path, 3, 2)]
    assert folders == ["s0-1", "s2"]


REFUSED = {
    "--algo bd": "unknown offline algo 'bd'",
    "--algo ppo": "ppo learns in a simulator",
    "--algo alpha=1": "does not begin with an algorithm",
    "--algo td3_bc,td3_bc": "a cell comes twice: hopper-noise td3_bc",
    "--algo bc,": "does not begin with an algorithm",
    "--set algo.gama=0.5": "did you mean '--algo.gamma'",
    "--set algo.gamma=1.5": "gamma must be in 0..1",
    "--set seed=3": "--seeds does",
    "--set resume=x": "the same command again does",
    "--set algo.gamma=": "neither NAME=VALUE nor the NAME of a switch",
    "--seeds 0": "seeds must be at least 1",
    "--sead 3": "did you mean '--seeds'",
    "hopper-nois": "unknown data set 'hopper-nois'",
    "pen-human-v1": "ctrl-rl dataset download pen-human-v1",
}


@pytest.mark.parametrize("given", REFUSED)
def test_bad_settings_are_refused_before_anything_starts(given, data, monkeypatch):
    monkeypatch.setattr(bench, "on_this_machine", lambda *a, **k: pytest.fail("it went on"))
    monkeypatch.setenv("D4RL_DATASET_DIR", "nowhere")
    with pytest.raises(ValueError) as error:
        run(data, *given.split())
    assert REFUSED[given] in str(error.value)
    assert not X.exists()


def test_a_variant_takes_words_that_belong_to_its_last_setting(data):
    with pytest.raises(cli.UsageError, match="is not NAME SETTING=VALUE"):
        planned(data, "--algo", "td3_bc hidden")
    (plan,) = planned(data, "--algo", "td3_bc policy-delay=1")
    assert plan.variant == (("policy_delay", "1"),)


def test_data_that_no_task_plays_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    write_hdf5(tmp_path / "pen-human-v1.hdf5", family_arrays("adroit"))
    with pytest.raises(ValueError, match="no task here is that of pen-human-v1"):
        planned("pen-human-v1")


def test_two_benchmarks_do_not_share_a_folder(data):
    with workers.alone(X.resolve(), "benchmark"):
        with pytest.raises(ValueError, match="another benchmark is at work in"):
            run(data)


# Training -----------------------------------------------------------------------------------


def test_each_seed_has_its_result_and_is_trained_once(data, capsys, monkeypatch):
    found = run(data, "--algo", "bc,td3_bc alpha=1", "--seeds", "2")
    out = capsys.readouterr().out
    assert "0 of 4 cells are finished" in out and "[2/2] hopper-noise td3_bc alpha=1 s0-1" in out
    assert found["passed"] and [c["status"] for c in found["cells"]] == ["finished"] * 4
    kept = results.load(X)
    assert {key: [r.seed for r in group] for key, group in kept.items()} == {
        ("hopper-noise", "bc"): [0, 1],
        ("hopper-noise", "td3_bc alpha=1"): [0, 1],
    }
    for (name, label), group in kept.items():
        for result in group:
            # The figures are those that the seed's own run folder holds.
            folder = X / "runs" / name / results.safe_name(label) / "s0-1" / f"s{result.seed}"
            rows = [row for row in read_metrics(folder) if "eval/episode_return" in row]
            assert [point[0] for point in result.curve] == [20, 40]
            scores = [row["eval/normalized_score"] for row in rows]
            assert [point[2] for point in result.curve] == scores
            assert result.last == scores[-1] and result.best == max(scores)
            assert result.normalized and not result.comparable
            assert result.env.startswith("Hopper-v5 (gymnasium ")
            assert result.data["origin"] == "a file of one's own" and "file" not in result.data
            assert len(result.data["sha256"]) == 64 and result.data["transitions"] == 195
            assert result.config["hidden"] == [8] and result.versions["torch"]
    assert kept["hopper-noise", "bc"][0].curve != kept["hopper-noise", "bc"][1].curve
    metric = found["metrics"]["hopper-noise bc: last"]
    assert metric["mean"] == pytest.approx(np.mean([r.last for r in kept["hopper-noise", "bc"]]))

    # Once more: nothing is left to do.
    monkeypatch.setattr(bench, "on_this_machine", lambda *a, **k: pytest.fail("it went on"))
    again = run(data, "--algo", "bc,td3_bc alpha=1", "--seeds", "2")
    assert "4 of 4 cells are finished" in capsys.readouterr().out
    assert again["cells"] == found["cells"] and results.load(X) == kept


def test_more_seeds_and_more_steps_go_on_where_it_was(data):
    run(data, "--algo", "bc", "--seeds", "2")
    before = results.load(X)["hopper-noise", "bc"]
    run(data, "--algo", "bc", "--seeds", "3", total_steps="60")
    group = results.load(X)["hopper-noise", "bc"]
    assert [(r.seed, r.steps) for r in group] == [(0, 60), (1, 60), (2, 60)]
    assert [r.curve[:2] for r in group[:2]] == [r.curve for r in before]
    assert sorted(p.name for p in (X / "runs/hopper-noise/bc").glob("s*[0-9]")) == ["s0-1", "s2"]
    # The third alone and in a job of its own learned what it would have learned beside others.
    with pytest.raises(ValueError, match="has 60 steps, not 40; they may be raised"):
        run(data, "--algo", "bc", "--seeds", "2")


def test_what_was_made_with_other_settings_is_not_gone_on_with(data):
    run(data, "--algo", "bc", "--seeds", "1")
    for key, value, told in (
        ("algo__batch_size", "32", r"s0.json was made with another batch_size \(16, now 32\)"),
        ("episodes", "3", r"another episodes \(2, now 3\)"),
    ):
        with pytest.raises(ValueError, match=told):
            run(data, "--algo", "bc", "--seeds", "1", **{key: value})
    Path("x/results/hopper-noise/bc/s0.json").unlink()  # as if killed: the run is there
    with pytest.raises(ValueError, match=r"s0 was made with another batch_size \(16, now 32\)"):
        run(data, "--algo", "bc", "--seeds", "1", algo__batch_size="32")


def test_what_was_made_from_other_data_is_not_gone_on_with(tmp_path):
    """A file that was overwritten would put two data sets into one mean."""
    path = write_data(tmp_path / "hopper-noise.hdf5")
    run(str(path), "--algo", "bc", "--seeds", "1")
    write_data(path, seed=1)
    with pytest.raises(ValueError, match="s0.json was made from other data than .*hopper-noise"):
        run(str(path), "--algo", "bc", "--seeds", "2")
    Path("x/results/hopper-noise/bc/s0.json").unlink()  # as if killed: the run is there
    with pytest.raises(ValueError, match="s0 was made from other data than .*another --out"):
        run(str(path), "--algo", "bc", "--seeds", "1")


def test_a_result_that_was_not_written_is_taken_from_the_run(data, monkeypatch):
    run(data, "--algo", "bc", "--seeds", "2")
    kept = results.load(X)
    Path("x/results/hopper-noise/bc/s1.json").unlink()
    monkeypatch.setattr(train, "main", lambda words: pytest.fail("it trained again"))
    run(data, "--algo", "bc", "--seeds", "2")
    assert results.load(X) == kept


def test_a_job_that_fails_is_named_and_the_others_go_on(data, capsys, monkeypatch):
    whole = train.main

    def broken(words):
        if words[1] == "td3_bc":
            raise ValueError("seed 0 diverged before update 20")
        return whole(words)

    monkeypatch.setattr(train, "main", broken)
    found = run(data, "--algo", "td3_bc,bc", "--seeds", "2")
    assert not found["passed"]
    assert [(c["algo"], c["status"]) for c in found["cells"]] == [
        ("td3_bc", "failed"), ("td3_bc", "failed"), ("bc", "finished"), ("bc", "finished"),
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "[1/2] hopper-noise td3_bc s0-1: failed: seed 0 diverged before update 20; see" in out
    assert "failed: hopper-noise td3_bc s1: seed 0 diverged" in out
    assert "Traceback" in Path("x/runs/hopper-noise/td3_bc/s0-1.log").read_text()
    kept = json.loads(Path("x/bench.json").read_text())["cells"]
    assert kept == found["cells"]
    # What another command did stays on record; what this one repeats is told anew.
    monkeypatch.setattr(train, "main", whole)
    run(data, "--algo", "td3_bc", "--seeds", "1")
    kept = json.loads(Path("x/bench.json").read_text())["cells"]
    status = {(c["algo"], c["seed"]): c["status"] for c in kept}
    assert status == {
        ("td3_bc", 0): "finished", ("td3_bc", 1): "failed", ("bc", 0): "finished",
        ("bc", 1): "finished",
    }  # fmt: skip


def test_a_seed_that_diverges_does_not_take_the_others_along(data, capsys, monkeypatch):
    update = TD3BC.update

    def spoiled(self, batch):
        figures = update(self, batch)
        if 1 in self.seeds:
            figures[:, self.seeds.index(1)] = torch.nan
        return figures

    monkeypatch.setattr(TD3BC, "update", spoiled)
    found = run(data, "--seeds", "3")
    status = {c["seed"]: c["status"] for c in found["cells"]}
    assert status == {0: "finished", 1: "failed", 2: "finished"} and not found["passed"]
    assert "seed 1 diverged before update 10" in found["cells"][1]["error"]
    out = capsys.readouterr().out
    assert "[1/1] hopper-noise td3_bc s0-2: failed: Diverged: seed 1 diverged" in out
    assert "[2/3] hopper-noise td3_bc s1: failed: Diverged: seed 1 diverged" in out
    folders = {p.name for p in (X / "runs/hopper-noise/td3_bc").iterdir() if p.is_dir()}
    assert folders == {"s0-2-diverged", "s0", "s1", "s2"}
    assert [r.seed for r in results.load(X)["hopper-noise", "td3_bc"]] == [0, 2]
    # The same command again tries the one that is missing, and healed it finishes.
    monkeypatch.setattr(TD3BC, "update", update)
    assert run(data, "--seeds", "3")["passed"]
    assert "[1/1] hopper-noise td3_bc s1: finished" in capsys.readouterr().out


# In processes -------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path_factory):
    """Starts `ctrl-rl offline bench --json`; its name is known, whatever is installed."""
    meta = tmp_path_factory.mktemp("installed")
    info = meta / "offline_names-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offline-names\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[ctrl_rl.offline_algos]\noffline = offline.registry:ALGOS\n"
        "[ctrl_rl.commands]\noffline = offline.registry:COMMANDS\n"
    )
    started = []

    def begin(*more: str, **settings: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "ctrl_rl.cli", "offline", "bench", *words(*more, **settings),
             "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(meta)])},
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_killed_worker_goes_on_and_nothing_counts_twice(data, start, monkeypatch):
    monkeypatch.setattr(training, "LOG_EVERY", 250)  # as in the processes
    settings = {"total_steps": "1500", "eval_every": "500", "checkpoint_every": "250"}
    process = start(data, "--algo", "bc", "--seeds", "2", **settings)
    folder = Path("x/runs/hopper-noise/bc/s0-1")
    deadline = time.monotonic() + 100
    while not (folder / "checkpoints/last.pt").is_file():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)
    log = folder.with_name("s0-1.log")
    worker = int(re.findall(r"process (\d+)", log.read_text())[-1])
    os.kill(worker, signal.SIGKILL)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert [c["status"] for c in json.loads(out)["cells"]] == ["finished"] * 2
    starts = re.findall(r"process (\d+).*: train (.*)", log.read_text())
    assert [int(starts[0][0]) == worker, "--resume" in starts[1][1]] == [True, True]
    assert len(starts) == 2
    assert [row["step"] for row in read_metrics(folder)] == list(range(250, 1501, 250))
    # As if nothing had happened.
    (plan,) = planned(data, "--algo", "bc", **settings)
    (job,) = benchmark.plan_jobs(plan, Path("plain").resolve(), 2)
    assert benchmark.train_job(job) is None
    ours, plain = results.load(X), results.load(Path("plain"))
    assert ours == plain and len(ours["hopper-noise", "bc"]) == 2
    for seed in (0, 1):
        a, b = (
            load_checkpoint(f / f"s{seed}/checkpoints/last.pt")["policy"]["weights"]
            for f in (folder, job.folder)
        )
        assert all(torch.equal(a[key], b[key]) for key in b)


@pytest.mark.slow
def test_on_ray(data, start):
    process = start(data, "--algo", "bc", "--seeds", "2", "--seeds-per-job", "1",
                    "--address", "local", total_steps="250")  # fmt: skip
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert [c["status"] for c in json.loads(out)["cells"]] == ["finished"] * 2
    assert [r.seed for r in results.load(X)["hopper-noise", "bc"]] == [0, 1]


def test_without_ray_the_extra_is_named(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'ctrl-rl\[scale\]'"):
        run(data, "--address", "local")
