"""Jobs in processes of their own: each counts once, whatever is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest

from ctrl_rl import workers


def run(*names: str, at_once: int = 2, retries: int = 1) -> list[tuple[str, str | None]]:
    found = []
    workers.on_this_machine(
        jobs.note,
        [Path(name).resolve() for name in names],
        lambda job, line: found.append((job.name, line)),
        at_once=at_once,
        retries=retries,
    )
    return found


def test_every_job_runs_in_a_process_of_its_own_and_is_told_once():
    found = run("slow-a", "wrong", "slow-b", "broken")
    assert dict(found) == {
        "slow-a": None,
        "wrong": "it went wrong",
        "slow-b": None,
        "broken": "RuntimeError: no such luck",
    }
    assert len(found) == 4
    pids = {path.read_text() for path in Path().glob("*.try0")}
    assert len(pids) == 4 and str(os.getpid()) not in pids
    assert not list(Path().glob("*.try1"))


def test_a_killed_job_begins_again_and_counts_once():
    found = run("killed-once", "killed-always", at_once=1)
    assert found == [
        ("killed-once", None),
        ("killed-always", "its worker was killed too often: exit status -9"),
    ]
    assert sorted(path.name for path in Path().glob("*.try*")) == [
        "killed-always.try0",
        "killed-always.try1",
        "killed-once.try0",
        "killed-once.try1",
    ]
    assert run("killed-once", retries=0) == [("killed-once", None)]  # it is the third try


@pytest.fixture
def waiting():
    """A process that runs two jobs until Ctrl-C, and theirs."""
    process = subprocess.Popen(
        [sys.executable, jobs.__file__, *(str(Path(n).resolve()) for n in ("a", "b"))],
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    until(lambda: all(Path(n).is_file() and Path(n).read_text() for n in ("a", "b")))
    pids = [int(Path(n).read_text()) for n in ("a", "b")]
    yield process, pids
    for pid in (process.pid, *pids):
        if lives(pid):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_reaches_every_job_once_and_lets_it_save(waiting):
    process, pids = waiting
    os.kill(process.pid, signal.SIGINT)
    process.wait(60)
    assert Path("a.saved").is_file() and Path("b.saved").is_file()
    assert not any(map(lives, pids))


def test_jobs_do_not_outlive_what_started_them(waiting):
    process, pids = waiting
    assert all(os.getpgid(pid) == pid for pid in pids)  # the terminal's Ctrl-C misses them
    process.kill()
    until(lambda: not any(map(lives, pids)))
    assert not Path("a.saved").exists()


def test_two_at_once_in_one_folder_are_refused():
    with workers.alone(Path("x"), "sweep"):
        with pytest.raises(ValueError, match="another sweep is at work in x"):
            with workers.alone(Path("x"), "sweep"):
                pass
    with workers.alone(Path("x"), "sweep"):
        pass


def test_what_a_job_prints_goes_to_its_file(capfd):
    for word in ("first", "second"):
        with workers.written_to(Path("log")):
            print(word)
            os.write(2, b"in C\n")
    print("after")
    assert Path("log").read_text().split() == ["first", "in", "C", "second", "in", "C"]
    assert capfd.readouterr().out == "after\n"
