"""Jobs in processes of their own, side by side: on this machine, or on a Ray cluster.

A job is whatever the function takes; it must survive pickling, and the function must be importable.
The function returns None, or one line on what went wrong. Its process serves one job only, so that
nothing is left over for the next one. One that is killed is started again, and finds on disk what
it had reached.

Reading order: `on_this_machine`, `on_ray`, then what jobs need: `alone`, `written_to`.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import TypeVar

Job = TypeVar("Job")

LEAVE_S = 60.0
"""How long jobs may take to save and leave after Ctrl-C [s]."""


def on_this_machine(
    function: Callable[[Job], str | None],
    jobs: Sequence[Job],
    done: Callable[[Job, str | None], None],
    *,
    at_once: int,
    retries: int,
) -> None:
    """Run all jobs, `at_once` at a time.

    Ctrl-C reaches every job once; each then has a minute to save and leave. Jobs die with this
    process.

    Args:
        function: does one job.
        jobs: in the order in which they begin.
        done: called with each job when it ended, and the line on what went wrong.
        at_once: processes side by side.
        retries: how often a job whose process was killed begins again.
    """
    context = multiprocessing.get_context("spawn")  # a simulator's threads do not survive a fork
    waiting, running = deque((job, 0) for job in jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job, tries = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_serve, args=(function, job, theirs))
                process.start()
                theirs.close()
                running[process.sentinel] = process, ours, job, tries
            for sentinel in connection.wait(list(running)):
                process, ours, job, tries = running.pop(sentinel)
                process.join()
                try:
                    line = ours.recv()
                except EOFError:
                    if tries < retries:
                        waiting.appendleft((job, tries + 1))
                        continue
                    line = f"its worker was killed too often: exit status {process.exitcode}"
                done(job, line)
    except KeyboardInterrupt:
        print("stopping all jobs after their iteration; Ctrl-C again aborts", flush=True)
        for process, *_ in running.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        for process, *_ in running.values():
            process.join(LEAVE_S)
        raise
    finally:
        for process, *_ in running.values():
            process.kill()


def _serve(function: Callable, job, answer) -> None:
    """In the process of a job."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C in the terminal reaches the parent alone, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        answer.send(function(job))
    except KeyboardInterrupt:
        answer.send("it was stopped")
    except Exception as error:
        traceback.print_exc()
        answer.send(f"{type(error).__name__}: {error}")


def _die_with_parent() -> None:
    """Nothing goes on writing where another process may begin anew."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def on_ray(
    function: Callable[[Job], str | None],
    jobs: Sequence[Job],
    done: Callable[[Job, str | None], None],
    *,
    address: str | None,
    cpus: int,
    gpus: float,
    retries: int,
) -> None:
    """Run all jobs on Ray, as many at once as there is room for.

    Args:
        function: does one job.
        jobs: in the order in which they begin.
        done: called with each job when it ended, and the line on what went wrong.
        address: Ray cluster, "auto" for the one this machine belongs to; None for this machine
            alone.
        cpus: cores of a job.
        gpus: GPUs of a job; a part of one lets jobs share it.
        retries: how often a job whose process was killed begins again.

    Raises:
        ValueError: Ray is not installed, or a job fits nowhere.
    """
    ray = import_ray()
    if address is None:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=100 * 2**20,
        )
    else:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        have = ray.cluster_resources()
        if have.get("CPU", 0) < cpus or have.get("GPU", 0) < gpus:
            raise ValueError(
                f"a cell of {cpus} cores and {gpus:g} GPUs fits nowhere: Ray has "
                f"{have.get('CPU', 0):g} cores and {have.get('GPU', 0):g} GPUs"
            )
        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=retries, max_calls=1)(
            function
        )
        running = {remote.remote(job): job for job in jobs}
        try:
            while running:
                (task,), _ = ray.wait(list(running), num_returns=1)
                try:
                    line = ray.get(task)
                except ray.exceptions.RayError as error:
                    line = f"its worker was killed too often: {type(error).__name__}"
                done(running.pop(task), line)
        except KeyboardInterrupt:
            print("stopping all cells after their iteration; Ctrl-C again aborts", flush=True)
            for task in running:
                ray.cancel(task)  # in the worker as if Ctrl-C was pressed there
            ray.wait(list(running), num_returns=len(running), timeout=LEAVE_S)
            raise
    finally:
        ray.shutdown()


def import_ray():
    """The module.

    Raises:
        ValueError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ValueError("this needs Ray: pip install 'ctrl-rl[scale]'") from None
    return ray


# What jobs need -----------------------------------------------------------------------------


@contextlib.contextmanager
def alone(folder: Path, what: str) -> Iterator[None]:
    """Two at once in one folder would do the same jobs twice.

    Raises:
        ValueError: another process is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            import fcntl
        except ImportError:  # Windows has no such locks
            fcntl = None
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"another {what} is at work in {folder}") from None
        yield


@contextlib.contextmanager
def written_to(path: Path) -> Iterator[None]:
    """stdout and stderr of this process, also those of libraries in C, at the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(path, "a", buffering=1) as file:  # by lines: a killed job leaves what it said
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield
        finally:
            for number, old in enumerate(kept, 1):
                os.dup2(old, number)
                os.close(old)
