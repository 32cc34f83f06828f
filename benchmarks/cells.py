"""A benchmark is a list of cells; a cell is measured once and leaves one JSON file.

Started again, a benchmark skips every cell whose file exists with the same configuration, so an
interrupted run goes on where it was. A cell that fails is reported, leaves no file and makes the
exit status 1.

Reading order: `Cell` -> `main` -> `load`.
"""

import argparse
import datetime
import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ctrl_rl.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 1


class Absent(RuntimeError):
    """What the cell needs is not there (a peer, a device); the message says how to get it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement."""

    name: str
    """File name under `results/<benchmark>/`, without the ending."""
    config: dict
    """Everything that decides the measurement; JSON data, handed to `measure`."""


def main(
    benchmark: str,
    cells: Sequence[Cell],
    measure: Callable[[dict], dict],
    argv: Sequence[str] | None = None,
    results: Path = RESULTS,
    parallel: bool = False,
) -> int:
    """Measure what is missing; the command line of every benchmark.

    Args:
        benchmark: folder of the results.
        cells: what is to be measured, in this order.
        measure: takes a cell's config and returns its result, JSON data without NaN.
        argv: `--list`, `--redo`, patterns of cell names; None for `sys.argv`.
        results: parent of the benchmark's folder.
        parallel: offer `--jobs`, where cells do not time anything and compute in processes of
            their own.

    Returns:
        Exit status: 0 if every chosen cell has its file, 1 if one failed, 2 if none was chosen.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}")
    parser.add_argument("names", nargs="*", help="cells to measure, with * and ?; default: all")
    parser.add_argument("--list", action="store_true", help="show the cells and what is done")
    parser.add_argument("--redo", action="store_true", help="measure again what is done")
    if parallel:
        parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    args = parser.parse_args(argv)

    chosen = [c for c in cells if _chosen(c.name, args.names)]
    if not chosen:
        print(f"no cell is called {' or '.join(args.names)}; there are:", file=sys.stderr)
        print("\n".join(f"  {c.name}" for c in cells), file=sys.stderr)
        return 2
    todo = []
    for cell in chosen:
        path = results / benchmark / f"{cell.name}.json"
        done = _is_done(path, cell)
        if args.list:
            print(f"{'done' if done else 'open':5} {cell.name}")
        elif done and not args.redo:
            print(f"{cell.name}: done, {path.relative_to(results.parent)}")
        else:
            todo.append((cell, path))
    with ThreadPoolExecutor(args.jobs if parallel else 1) as pool:
        good = list(pool.map(lambda job: _measure(benchmark, job[0], measure, job[1]), todo))
    failed = good.count(False)
    if failed:
        print(f"{failed} of {len(chosen)} cells failed", file=sys.stderr)
    return 1 if failed else 0


def load(benchmark: str, results: Path = RESULTS) -> dict[str, dict]:
    """Cell name -> the whole JSON object, of every measured cell in order of its name."""
    paths = sorted((results / benchmark).glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def run_cli(*words: str, environment: dict | None = None, statuses: tuple[int, ...] = (0,)) -> dict:
    """Run `ctrl-rl ... --json` of this interpreter and return its object.

    Raises:
        RuntimeError: an exit status that is not among `statuses`.
    """
    program = Path(sys.executable).parent / "ctrl-rl"
    done = subprocess.run(
        [program, *words, "--json"],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode not in statuses:
        raise RuntimeError(f"ctrl-rl {' '.join(words)} exited with {done.returncode}")
    return json.loads(done.stdout)


def _chosen(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)


def _is_done(path: Path, cell: Cell) -> bool:
    return path.exists() and json.loads(path.read_text())["config"] == _plain(cell.config)


def _measure(benchmark: str, cell: Cell, measure: Callable[[dict], dict], path: Path) -> bool:
    """Measure one cell and write its file; False where it failed."""
    print(f"{cell.name}: measuring", flush=True)
    record = {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "cell": cell.name,
        "config": _plain(cell.config),
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", cell.name]),
        **provenance(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    start = time.perf_counter()
    try:
        record["result"] = measure(cell.config)
        record["wall_s"] = round(time.perf_counter() - start, 2)
        text = _numbers_in_a_line(json.dumps(record, indent=1, allow_nan=False))
    except Absent as absent:
        print(f"{cell.name}: not measured: {absent}", file=sys.stderr)
        return False
    except Exception:
        traceback.print_exc()
        print(f"{cell.name}: failed", file=sys.stderr)
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)
    print(f"{cell.name}: {json.dumps(record['result'])[:300]}", flush=True)
    return True


def _numbers_in_a_line(text: str) -> str:
    """Indented JSON with each list of numbers in one line; strings hold no raw line break."""
    inside = re.compile(r"\[\n[\s\d.,eE+-]*\]")
    return inside.sub(lambda found: re.sub(r"\n\s*", " ", found[0]), text)


def _plain(config: dict) -> dict:
    """As JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(config))
