"""What an install weighs: packages, size on disk, start of the command line.

`core` is what training needs; `robot` is what a robot's computer needs: numpy, onnxruntime and
this package without its dependencies. Versions are those of requirements.lock; torch is the
build that pip finds, which on Linux includes CUDA unless a CPU build was chosen.
"""

import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from benchmarks.cells import ROOT, Cell, main

CELLS = [
    Cell(
        name="core",
        config={"first": ["torch"], "install": ["."], "start": ["ctrl-rl", "--help"]},
    ),
    Cell(
        name="robot",
        config={
            "first": ["numpy", "onnxruntime"],
            "install": ["--no-deps", "."],
            "start": ["python", "-c", "import sim2real.runtime, sim2real.safety"],
        },
    ),
]


def measure(config: dict) -> dict:
    """Install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        bin_folder = Path(folder) / "bin"
        site = next(Path(folder).glob("lib/python*/site-packages"))
        empty = {p.name for p in site.iterdir()}
        pip = [
            bin_folder / "python",
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            ROOT / "requirements.lock",
        ]
        subprocess.run([*pip, *config["first"]], cwd=ROOT, check=True)
        subprocess.run([*pip, *config["install"]], cwd=ROOT, check=True)
        sizes = {p.name: _size_mb(p) for p in site.iterdir() if p.name not in empty}
        largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
        command = [bin_folder / config["start"][0], *config["start"][1:]]
        return {
            "packages": sum(name.endswith(".dist-info") for name in sizes),
            "size_mb": round(sum(sizes.values())),
            "largest_mb": {name: round(sizes[name]) for name in largest},
            "start": " ".join(config["start"]),
            "start_s": round(statistics.median(_seconds(command) for _ in range(7)), 3),
        }


def _size_mb(path: Path) -> float:
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return sum(p.stat().st_size for p in files) / 1e6


def _seconds(command: list) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main("install", CELLS, measure))
