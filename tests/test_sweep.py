"""A sweep trains each combination once, whatever is killed, and sums up over seeds."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ctrl_rl import cli, evaluation, workers
from ctrl_rl.checkpoints import load_checkpoint, save_checkpoint
from ctrl_rl.commands import sweep, train
from ctrl_rl.commands.sweep import Sweep, plan_cells
from ctrl_rl.run_folder import read_metrics

SMALL = {
    "total-steps": "256",
    "num-envs": "4",
    "algo.num-steps": "16",
    "algo.hidden": "8",
    "algo.num-minibatches": "2",
    "algo.compile": "off",
    "eval-episodes": "2",
    "task.max-episode-steps": "20",
    "checkpoint-every": "64",
}


def words(*more: str, **settings: str) -> list[str]:
    settings = SMALL | {k.replace("__", ".").replace("_", "-"): v for k, v in settings.items()}
    flags = [word for k, v in settings.items() for word in ("--set", f"{k}={v}")]
    return ["Pendulum-v0", *flags, "--out", "x", *more]


def cells(*more: str, **settings: str) -> list[sweep.Cell]:
    return plan_cells(cli.parse(Sweep, words(*more, **settings), "ctrl-rl sweep"))


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
    monkeypatch.setattr("ctrl_rl.report.write_report", lambda folder: folder)


# Cells --------------------------------------------------------------------------------------


def test_every_combination_is_one_cell_whose_settings_reach_the_run():
    found = cells("--seeds", "3", algo__hidden="8,16 4", algo__learning_rate="1e-3,3e-4")
    assert len(found) == 2 * 2 * 3 == len({cell.folder for cell in found})
    plans = [train.read_plan([*cell.words]) for cell in found]
    assert {(p.algo_config.hidden, p.algo_config.learning_rate, p.flags.seed) for p in plans} == {
        (h, r, s) for h in ((8,), (16, 4)) for r in (1e-3, 3e-4) for s in range(3)
    }
    assert all(p.flags.video_s == 0 and p.flags.threads == 1 for p in plans)
    assert all(p.flags.num_envs == 4 and p.algo_config.total_steps == 256 for p in plans)
    assert str(found[0].folder).startswith(str(Path("x/Pendulum-v0/ppo").resolve()))
    assert "algo.hidden=16_4" in str(found[-1].folder)
    assert "total-steps" not in str(found[-1].folder)
    (long,) = cells("--seeds", "1", algo__hidden=" ".join(["8"] * 150))
    assert len(long.folder.parent.name) < 255


REFUSED = {
    "--set algo.learnin-rate=1": "did you mean '--algo.learning-rate'",
    "--set learning-rate=1": "did you mean '--algo.learning-rate'",
    "--set algo.gamma=1.5": "gamma must be in 0..1",
    "--set algo.gamma=high": "gamma",
    "--set algo.gamma": "NAME=VALUE",
    "--set algo.gamma=0.9,": "NAME=VALUE",
    "--set algo.gamma=0.9 --set algo.gamma=0.8": "given twice",
    "--set algo.gamma=0.9,0.90": "comes twice",
    "--set seed=1,2": "--seeds does",
    "--set run-dir=y": "--out does",
    "--set device=cuda": "--gpus 1",
    "--algo ppi": "did you mean 'ppo'",
    "--seeds 0": "seeds must be at least 1",
    "--sead 3": "did you mean '--seeds'",
    "CartPole-SwingUp": "did you mean 'CartPole-SwingUp-v0'",
    "Pendulum-v0": "comes twice",
}


@pytest.mark.parametrize("given", REFUSED)
def test_bad_settings_are_refused_before_anything_starts(given, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "import_ray", lambda: pytest.fail("it went on"))
    first = [] if given.startswith("--") else given.split()
    rest = given.split() if given.startswith("--") else []
    flags = ["--set", "total-steps=256", "--seeds", "1", "--out", "x"]
    assert cli.main(["sweep", "Pendulum-v0", *first, *flags, *rest]) == 2
    assert REFUSED[given] in capsys.readouterr().err
    assert not Path("x").exists()


def test_without_ray_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["sweep", *words()]) == 2
    assert "pip install 'ctrl-rl[scale]'" in capsys.readouterr().err


def test_a_run_made_with_other_settings_is_not_gone_on_with(no_pictures):
    (cell,) = cells("--seeds", "1")
    assert not sweep.finished(cell)
    assert sweep.train_cell(cell) is None
    assert sweep.finished(cell)
    assert cells("--seeds", "1") == [cell]
    (longer,) = cells("--seeds", "1", total_steps="320")
    assert longer.folder == cell.folder and not sweep.finished(longer)  # it may be raised
    with pytest.raises(ValueError, match="started for 256 env steps, not 128; they may be raised"):
        cells("--seeds", "1", total_steps="128")
    config = json.loads((cell.folder / "config.json").read_text())
    config["algo_config"]["gamma"] = 0.5
    (cell.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"made with another gamma \(0.5, now 0.99\)"):
        cells("--seeds", "1")


def test_two_sweeps_do_not_share_a_folder(capsys, monkeypatch):
    monkeypatch.setattr(sweep, "import_ray", lambda: None)
    with workers.alone(Path("x").resolve(), "sweep"):
        assert cli.main(["sweep", *words()]) == 2
    assert "another sweep is at work in" in capsys.readouterr().err


def test_a_killed_start_is_not_in_the_way(no_pictures):
    (cell,) = cells("--seeds", "1")
    cell.folder.mkdir(parents=True)
    for leftover in (".writable", "config.json.tmp"):
        (cell.folder / leftover).write_text("x")
    assert sweep.train_cell(cell) is None and sweep.finished(cell)
    last, rows = cell.folder / "checkpoints/last.pt", cell.folder / "metrics.csv"
    whole = rows.read_text()
    rows.write_text("step,eval/episode_return\n192,1\n")
    assert not sweep.finished(cell)
    rows.write_text(whole)
    assert sweep.finished(cell)
    save_checkpoint(last, {"step": 192})  # killed while the last checkpoint was written
    assert not sweep.finished(cell)
    last.unlink()
    assert not sweep.finished(cell)


def test_the_summary_is_over_the_seeds_that_finished():
    found = cells("--seeds", "4")
    for cell, value in zip(found[:3], (1.0, 2.0, 6.0), strict=True):
        (cell.folder / "checkpoints").mkdir(parents=True)
        save_checkpoint(cell.folder / "checkpoints/last.pt", {"step": 256})
        header = "step,loss/value,eval/episode_return,eval/episode_length\n"
        (cell.folder / "metrics.csv").write_text(f"{header}128,0,9,9\n256,0,{value},20\n")
    summary = sweep.summarise(found, {found[3]: "it broke"})
    (group,) = summary["groups"]
    metric = group["metrics"]["episode_return"]
    assert metric["mean"] == 3.0 and metric["n"] == 3 == group["finished"]
    assert metric["ci95"] == evaluation.bootstrap(torch.tensor([1.0, 2.0, 6.0]).double())
    assert group["metrics"]["episode_length"]["unit"] == "steps"
    assert [c["status"] for c in summary["cells"]] == ["finished"] * 3 + ["failed"]
    assert summary["cells"][3]["error"] == "it broke"


# On Ray -------------------------------------------------------------------------------------


def of_session(leader: subprocess.Popen) -> list[int]:
    """Ids of a process and all those that it began, and so on; none where there is no /proc."""
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    with_session = []
    for number in found:
        with contextlib.suppress(ProcessLookupError):
            with_session += [number] if os.getsid(number) == leader.pid else []
    return with_session


@pytest.fixture
def start():
    """Starts `ctrl-rl sweep --json`, and leaves nothing running of what a test started."""
    code = (
        "import signal, sys; from ctrl_rl.cli import main;"
        # Ignored where the tests run in the background of a shell.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "sys.exit(main(sys.argv[1:]))"
    )
    started = []

    def run(*more: str, **settings: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "sweep", *words(*more, **settings), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
        deadline = time.monotonic() + 30  # an idle worker of Ray stays for 20 s
        while (left := of_session(process)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        assert not left, "a process had to be killed"


def until(condition, process: subprocess.Popen, seconds: float = 300.0) -> None:
    """Wait for a condition; Ray alone needs a minute where others use the machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


def test_a_killed_worker_goes_on_a_broken_cell_is_named_and_nothing_counts_twice(
    start, no_pictures, capsys
):
    # 3 minibatches do not divide 64 samples, which only the learner can say.
    options = ("--seeds", "1", "--cpus", "1")
    settings = {"algo__num_minibatches": "2,3", "total_steps": "9600", "eval_every": "0",
                "checkpoint_every": "640"}  # fmt: skip
    good, broken = cells(*options, **settings)
    process = start(*options, **settings)
    until((good.folder / "checkpoints/last.pt").is_file, process)
    worker = int(re.findall(r"process (\d+)", good.log.read_text())[-1])
    os.kill(worker, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    result = json.loads(out)

    assert [cell["status"] for cell in result["cells"]] == ["finished", "failed"]
    assert "num_minibatches 3 does not divide the 64 samples" in result["cells"][1]["error"]
    assert f"failed: {broken.group} s0: num_minibatches 3 does not divide" in err
    assert not list(broken.folder.glob("*"))

    log = good.log.read_text()
    starts = re.findall(r"process (\d+).*: train (\S+)", log)
    assert [int(starts[0][0]) == worker, starts[1][1]] == [True, "--resume"] and len(starts) == 2
    steps = [row["step"] for row in read_metrics(good.folder)]
    assert steps == list(range(64, 9601, 64))
    # As if nothing had happened.
    plain = Path("plain").resolve()
    train.main([*good.words, "--run-dir", str(plain)])
    ours, theirs = (load_checkpoint(f / "checkpoints/last.pt") for f in (good.folder, plain))
    for key, weight in theirs["policy"]["weights"].items():
        assert torch.equal(ours["policy"]["weights"][key], weight)

    # Once more, without the broken one: what is finished stands, and Ray need not start.
    before = (good.folder / "checkpoints/last.pt").stat().st_mtime_ns
    again = words(*options, **settings | {"algo__num_minibatches": "2"})
    assert cli.main(["sweep", *again]) == 0
    assert "1 of 1 cells are finished" in capsys.readouterr().out
    assert (good.folder / "checkpoints/last.pt").stat().st_mtime_ns == before
    assert json.loads(Path("x/summary.json").read_text())["cells"] == result["cells"][:1]


@pytest.mark.slow
def test_ctrl_c_leaves_cells_that_go_on(start):
    # Many times what it takes to press, and not for ever if nobody does.
    settings = {"total_steps": "400000", "eval_every": "0", "checkpoint_every": "0"}
    (cell,) = cells("--seeds", "1", **settings)
    process = start("--seeds", "1", **settings)
    until(lambda: len(read_metrics(cell.folder)) > 3, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "stopping all cells" in err
    step = load_checkpoint(cell.folder / "checkpoints/last.pt")["step"]
    assert step == read_metrics(cell.folder)[-1]["step"] > 0
    assert 0 < step < 400_000 and "stopped at" in cell.log.read_text()
    assert json.loads(Path("x/summary.json").read_text())["cells"][0]["status"] == "open"
