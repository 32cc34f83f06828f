"""Benchmarks: cells are measured once, peers take turns, an absent peer is said to be absent."""

import json
import sys

import pytest

from benchmarks import cells, peers
from benchmarks.cells import Absent, Cell


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def test_a_cell_is_measured_once_and_again_when_its_config_changes(results, capsys):
    seen = []

    def measure(config):
        seen.append(config["n"])
        return {"twice": 2 * config["n"]}

    run = lambda n, *argv: cells.main(  # noqa: E731
        "demo", [Cell(name="one", config={"n": n})], measure, argv, results
    )
    assert run(3) == 0
    assert run(3) == 0  # done: skipped
    assert seen == [3]
    assert run(3, "--redo") == 0
    assert run(4) == 0  # another config: the file says something else
    assert seen == [3, 3, 4]

    record = cells.load("demo", results)["one"]
    assert record["result"] == {"twice": 8}
    assert record["config"] == {"n": 4}
    assert record["command"] == "python -m benchmarks.demo one"
    assert record["hardware"]["cores"] >= 1
    assert record["versions"]["torch"]
    assert {"commit", "date", "wall_s", "schema"} <= record.keys()


def test_tuples_in_a_config_do_not_count_as_a_change(results):
    seen = []
    cell = Cell(name="one", config={"sizes": (64, 64)})
    for _ in range(2):
        cells.main("demo", [cell], lambda c: seen.append(1) or {}, [], results)
    assert len(seen) == 1


def test_a_failing_cell_leaves_no_file_and_the_others_are_measured(results, capsys):
    def measure(config):
        if config["bad"] == "raises":
            raise RuntimeError("broken")
        if config["bad"] == "absent":
            raise Absent("no such peer")
        return {"value": float("nan")} if config["bad"] == "nan" else {"value": 1.0}

    chosen = [Cell(name=n, config={"bad": n}) for n in ("raises", "absent", "good")]
    assert cells.main("demo", chosen, measure, [], results) == 1
    assert list(cells.load("demo", results)) == ["good"]
    assert "absent: not measured: no such peer" in capsys.readouterr().err
    assert cells.main("demo", [Cell(name="nan", config={"bad": "nan"})], measure, [], results) == 1
    assert list(cells.load("demo", results)) == ["good"]


def test_patterns_choose_cells_and_an_unknown_one_is_refused(results, capsys):
    seen = []
    some = [Cell(name=n, config={"name": n}) for n in ("a-1", "a-2", "b-1")]
    measure = lambda c: seen.append(c["name"]) or {}  # noqa: E731
    assert cells.main("demo", some, measure, ["a-*"], results) == 0
    assert seen == ["a-1", "a-2"]
    assert cells.main("demo", some, measure, ["c"], results) == 2
    assert "b-1" in capsys.readouterr().err
    assert cells.main("demo", some, measure, ["--list"], results) == 0
    assert "open  b-1" in capsys.readouterr().out
    assert seen == ["a-1", "a-2"]


WORKER = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
import worker

def run(config, tick):
    print("a library that prints")
    os.write(1, b"to the file descriptor too")
    while True:
        time.sleep(config["sleep"])
        tick(config["work"])

worker.serve(run, ["pytest"])
"""


@pytest.fixture
def script(tmp_path, repository):
    path = tmp_path / "sleeper.py"
    path.write_text(WORKER.format(benchmarks=str(repository / "benchmarks")))
    return path


def test_workers_take_turns_and_count_their_work(script):
    slow = peers.Worker(peers.OURS, str(script), {"sleep": 0.02, "work": 1})
    fast = peers.Worker(peers.OURS, str(script), {"sleep": 0.02, "work": 10})
    with slow, fast:
        assert slow.versions["pytest"] == pytest.__version__
        slices = peers.interleave({"slow": slow, "fast": fast}, seconds=0.1, rounds=3)
    rates = {name: peers.summary(s)["per_s"] for name, s in slices.items()}
    assert [len(s) for s in slices.values()] == [3, 3]
    assert all(s.wall_s >= 0.1 for s in slices["slow"])
    assert 5 < rates["slow"] <= 50  # one unit per 20 ms or, on a busy machine, some more
    assert rates["fast"] / rates["slow"] == pytest.approx(10, rel=0.5)
    assert slow._process.returncode == 0


def test_a_worker_that_dies_is_named(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(7)")
    with pytest.raises(RuntimeError, match=r"broken\.py ended with status 7"):
        peers.Worker(peers.OURS, str(broken), {})


def test_an_absent_peer_says_how_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("CTRL_RL_PEERS", str(tmp_path))
    assert peers.folder() == tmp_path
    with pytest.raises(Absent, match="python -m benchmarks.peers make sb3"):
        peers.interpreter("sb3")
    assert str(peers.interpreter(peers.OURS)) == sys.executable


def test_summary_is_the_median():
    slices = [peers.Slice(10, 1.0, 2.0), peers.Slice(30, 1.0, 2.0), peers.Slice(12, 1.0, 2.0)]
    assert peers.summary(slices) == {
        "per_s": 12.0,
        "per_cpu_s": 6.0,
        "all_per_s": [10.0, 30.0, 12.0],
    }


def test_every_committed_result_is_complete(repository):
    for path in (repository / "benchmarks" / "results").rglob("*.json"):
        record = json.loads(path.read_text())
        missing = {"config", "result", "command", "commit", "date", "hardware", "versions"}
        assert not missing - record.keys(), f"{path} lacks {missing - record.keys()}"


ADDER = """
import sys
sys.path.insert(0, {benchmarks!r})
import worker

def add(config):
    print("a library that prints")
    return {{"sum": config["a"] + config["b"]}}

worker.answer(add, ["pytest"])
"""


def test_call_gives_the_answer_and_the_versions(tmp_path, repository):
    script = tmp_path / "adder.py"
    script.write_text(ADDER.format(benchmarks=str(repository / "benchmarks")))
    answer = peers.call(peers.OURS, str(script), {"a": 2, "b": 3})
    assert answer["result"] == {"sum": 5}
    assert answer["versions"]["pytest"] == pytest.__version__
    with pytest.raises(RuntimeError, match="ended with status 1"):
        peers.call(peers.OURS, str(script), {"a": 2})
