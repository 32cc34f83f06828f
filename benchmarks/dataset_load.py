"""A D4RL-style file of a million rows, from the disk to what a learner draws minibatches from.

The file is written here with random numbers, in h5py's own chunks and gzip, as D4RL's are, and lies
in the page cache when it is read. `load` and `Transitions.from_episodes` run in a fresh process on
one thread; each number of the file is checked, and its checksum is computed. Memory is held against
observation, action, reward and termination as float32, once each. `kept` counts the tensors,
`rss` the growth of the process after everything else was freed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

from benchmarks.cells import ROOT, Cell, main

CELLS = [
    Cell(
        name=name,
        config={
            "rows": 1_000_000,
            "obs": 11,
            "actions": 3,
            "episode": 1000,
            "next_observations": name == "with_next_observations",
            "repeats": 5,
            "threads": 1,
        },
    )
    for name in ("plain", "with_next_observations")
]

READER = """
import ctypes, gc, json, sys, time
import torch
torch.set_num_threads(1)
from offline.datasets import load
from offline.transitions import Transitions

def rss():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is freed goes back to the system
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

small, path = sys.argv[1:3]
Transitions.from_episodes(load(small))  # imports, and what libraries allocate once
before, start = rss(), time.perf_counter()
data = Transitions.from_episodes(load(path))
wall = time.perf_counter() - start
print(json.dumps({"s": wall, "rss": rss() - before, "kept": data.nbytes, "n": len(data)}))
"""


def write(path: Path, rows: int, config: dict) -> None:
    """A file of random numbers; every tenth episode terminates, the others are cut."""
    rng = np.random.default_rng(0)
    draw = lambda width: rng.standard_normal((rows + 1, width), dtype=np.float32)  # noqa: E731
    obs, action = draw(config["obs"]), np.tanh(draw(config["actions"]))
    ends = np.arange(1, rows + 1) % config["episode"] == 0
    terminal = np.arange(1, rows + 1) % (10 * config["episode"]) == 0
    arrays = {
        "observations": obs[:-1],
        "actions": action[:-1],
        "rewards": rng.standard_normal(rows, dtype=np.float32),
        "terminals": terminal,
        "timeouts": ends & ~terminal,
    }
    if config["next_observations"]:
        arrays["next_observations"] = obs[1:]
    with h5py.File(path, "w") as file:
        for key, values in arrays.items():
            file.create_dataset(key, data=values, compression="gzip")


def measure(config: dict) -> dict:
    """Times [s], and memory in units of the float32 data."""
    with tempfile.TemporaryDirectory() as folder:
        small, path = Path(folder) / "small.hdf5", Path(folder) / "large.hdf5"
        write(small, 2 * config["episode"], config)
        write(path, config["rows"], config)
        found = [_read(small, path, config["threads"]) for _ in range(config["repeats"])]
        size = path.stat().st_size
    columns = config["obs"] + config["actions"] + 2
    unit = 4 * columns * config["rows"]
    times = sorted(run["s"] for run in found)
    return {
        "s": round(times[len(times) // 2], 3),
        "all_s": [round(run["s"], 3) for run in found],
        "kept": round(max(run["kept"] for run in found) / unit, 3),
        "rss": round(max(run["rss"] for run in found) / unit, 3),
        "float32_mb": unit / 1e6,
        "file_mb": round(size / 1e6, 1),
        "transitions": found[0]["n"],
    }


def _read(small: Path, path: Path, threads: int) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", READER, str(small), str(path)]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main("dataset_load", CELLS, measure))
