"""Other libraries, each in an interpreter of its own, measured in alternating slices.

`python -m benchmarks.peers make` creates the interpreters from `peers/*.txt`, in the folder that
CTRL_RL_PEERS names (default: ctrl-rl/peers in the user's cache). A peer that was not made is
reported as absent, with the command that makes it; nothing is skipped in silence.

Slices alternate because a shared machine drifts: designs that take turns see the same drift, and
the ratio of their medians stays. Work per CPU second stands beside work per second.

Reading order: `interpreter` -> `Worker` -> `interleave` -> `race` -> `make`.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cells import ROOT, Absent

REQUIREMENTS = ROOT / "benchmarks" / "peers"
OURS = "ctrl-rl"
"""Name of this project among the peers: the running interpreter."""


@dataclass(frozen=True)
class Slice:
    """What one worker did in one turn."""

    work: float
    wall_s: float
    cpu_s: float
    """CPU seconds of the worker and its children [s]; 0 where the system does not tell."""


def folder() -> Path:
    """Where the peers' interpreters live."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CTRL_RL_PEERS") or cache / "ctrl-rl" / "peers")


def known() -> list[str]:
    """Names of the peers."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def interpreter(peer: str) -> Path:
    """Python of a peer. Raises Absent with the command that makes it."""
    if peer == OURS:
        return Path(sys.executable)
    python = folder() / peer / "bin" / "python"
    if not python.exists():
        raise Absent(f"peer {peer!r} is absent; make it: python -m benchmarks.peers make {peer}")
    return python


class Worker:
    """A worker script in a peer's interpreter.

    Args:
        peer: one of `known()`, or `OURS`.
        script: file in `benchmarks/` with arguments; it ends with `worker.serve(...)`.
        config: handed to its `run`.
        threads: value of OMP_NUM_THREADS.

    Raises:
        Absent: the peer was not made.
        RuntimeError: the worker died before its first tick; its last words stand above.
    """

    def __init__(self, peer: str, script: str, config: dict, threads: int = 1) -> None:
        self.name = f"{peer}: {script}"
        self._process = subprocess.Popen(
            [interpreter(peer), "-u", *_script(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(threads),
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout
        self.versions = self._ask(config)["ready"]

    def run(self, seconds: float) -> Slice:
        """Let it work for at least `seconds` and until its next tick."""
        before = _cpu_seconds(self._process.pid)
        answer = self._ask({"seconds": seconds})
        cpu = _cpu_seconds(self._process.pid) - before
        return Slice(answer["work"], answer["wall_s"], cpu)

    def close(self) -> None:
        """End of input; a worker that does not go is killed."""
        self._in.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _ask(self, message: dict) -> dict:
        try:
            self._in.write(json.dumps(message) + "\n")
            self._in.flush()
        except BrokenPipeError:
            pass
        line = self._out.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(line)


def call(peer: str, script: str, config: dict, threads: int = 1) -> dict:
    """The answer of a script that ends with `worker.answer(...)`: its result and versions.

    Raises:
        Absent: the peer was not made.
        RuntimeError: the script failed; its last words stand above.
    """
    run = subprocess.run(
        [interpreter(peer), "-u", *_script(script)],
        input=json.dumps(config) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(threads),
        check=False,
    )
    if run.returncode != 0:
        raise RuntimeError(f"{peer}: {script} ended with status {run.returncode}")
    return json.loads(run.stdout)


def interleave(
    workers: dict[str, Worker], *, seconds: float, rounds: int, warm_up: int = 1, seed: int = 0
) -> dict[str, list[Slice]]:
    """Slices of all workers in turn, in a fresh random order each round.

    Args:
        workers: name -> worker.
        seconds: least length of a slice [s].
        rounds: slices of each that count.
        warm_up: slices of each that do not.
        seed: of the order.
    """
    order = list(workers)
    shuffle = random.Random(seed).shuffle
    slices: dict[str, list[Slice]] = {name: [] for name in workers}
    for turn in range(warm_up + rounds):
        shuffle(order)
        for name in order:
            done = workers[name].run(seconds)
            if turn >= warm_up:
                slices[name].append(done)
    return slices


def race(
    designs: dict[str, tuple[str, str, dict]], *, seconds: float, rounds: int, warm_up: int
) -> tuple[dict[str, dict], dict[str, dict]]:
    """Rates of several designs that take turns.

    Args:
        designs: name -> (peer, script, config); `torch_threads` of the config, where it is given,
            is also the value of OMP_NUM_THREADS.
        seconds: see `interleave`.
        rounds: likewise.
        warm_up: likewise.

    Returns:
        Name -> `summary`, and peer -> versions.

    Raises:
        Absent: a peer was not made.
    """
    for peer, _, _ in designs.values():
        interpreter(peer)  # before anything is started
    workers: dict[str, Worker] = {}
    try:
        for name, (peer, script, config) in designs.items():
            workers[name] = Worker(peer, script, config, threads=config.get("torch_threads", 1))
        slices = interleave(workers, seconds=seconds, rounds=rounds, warm_up=warm_up)
        versions = {designs[name][0]: worker.versions for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    return {name: summary(s) for name, s in slices.items()}, versions


def summary(slices: Sequence[Slice]) -> dict:
    """Median rates and all of them: `per_s`, `per_cpu_s`, `all_per_s`."""
    rates = [s.work / s.wall_s for s in slices]
    per_cpu = [s.work / s.cpu_s for s in slices if s.cpu_s > 0]
    return {
        "per_s": round(statistics.median(rates), 1),
        "per_cpu_s": round(statistics.median(per_cpu), 1) if per_cpu else None,
        "all_per_s": [round(r, 1) for r in rates],
    }


def make(peer: str) -> None:
    """Create a peer's interpreter. Raises ValueError for an unknown one."""
    if peer not in known():
        raise ValueError(f"unknown peer {peer!r}; known: {', '.join(known())}")
    target = folder() / peer
    print(f"{peer}: making {target}", flush=True)
    venv.create(target, with_pip=True, clear=True)
    install = [target / "bin" / "python", "-m", "pip", "install", "--quiet"]
    lines = (REQUIREMENTS / f"{peer}.txt").read_text().split("\n")
    torch = [line for line in lines if line.startswith("torch==")]
    if torch:  # first and alone, so that what follows finds it and pulls no other build
        subprocess.run([*install, *torch], check=True)
    subprocess.run([*install, "-r", REQUIREMENTS / f"{peer}.txt"], check=True)


def _script(script: str) -> list[str]:
    """A file in `benchmarks/` with its arguments, as a command."""
    name, *arguments = script.split()
    return [str(ROOT / "benchmarks" / name), *arguments]


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process, its living children and those it waited for [s]."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = sum(int(ticks) for ticks in stat[11:15]) / os.sysconf("SC_CLK_TCK")
    return own + sum(_cpu_seconds(int(child)) for child in children)


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("action", choices=("make", "list"))
    parser.add_argument("peers", nargs="*", help=f"default: all of {', '.join(known())}")
    args = parser.parse_args()
    for peer in args.peers or known():
        if args.action == "make":
            make(peer)
            continue
        try:
            print(f"{peer}: {interpreter(peer)}")
        except Absent as absent:
            print(absent)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
