"""Data sets of our own in the manner of D4RL: medium-replay and medium-expert of two bodies.

    medium-replay   everything that FastSAC saw in its first 200,000 steps
    medium-expert   half by the policy that these steps led to, half by an expert's, as in training

`python -m benchmarks.offline_data` makes the four files in `data/`, which is not committed; the
result keeps their checksums and what is in them. The same machine makes the same bytes again. On
another processor trainings differ by rounding, and the data with them.
"""

import shutil
import sys
import time

from benchmarks.cells import ROOT, Cell, main, run_cli

DATA = ROOT / "data"
ROWS = 200_000
SETTINGS = {
    "num-envs": 64,
    "algo.updates-per-step": 0.125,
    "algo.batch-size": 512,
    "algo.buffer-size": 1_000_000,
    "algo.value-bound": 500.0,
    "algo.hidden": "64 64",
    "algo.critic-hidden": "128 128",
}
"""Of FastSAC, for both bodies and both trainings; HalfCheetah's preset."""

EXPERT_STEPS = {"HalfCheetah-v5": 600_000, "Hopper-v5": 600_000}


def name_of(task: str) -> str:
    """As D4RL calls it."""
    return task.partition("-")[0].lower()


CELLS = [
    Cell(
        name=name_of(task),
        config={
            "task": task,
            "seed": 0,
            "rows": ROWS,
            "expert_steps": expert_steps,
            "settings": SETTINGS,
        },
    )
    for task, expert_steps in EXPERT_STEPS.items()
]


def measure(config: dict) -> dict:
    """Train twice and collect twice; files that are there already are made anew.

    Returns:
        Of each file its checksum, the score of its mean return, and returns and lengths of its
        episodes; `wall_s` of each step.
    """
    task, rows, seed = config["task"], str(config["rows"]), str(config["seed"])
    runs, clock, files = DATA / "runs" / name_of(task), {}, {}
    shutil.rmtree(runs, ignore_errors=True)
    flags = [word for k, v in config["settings"].items() for word in (f"--{k}", *str(v).split())]
    for kind, steps in (("medium", rows), ("expert", str(config["expert_steps"]))):
        start = time.perf_counter()
        where = ("--threads", "1", "--video-s", "0", "--run-dir", str(runs / kind))
        run_cli("train", task, "--algo", "fast_sac", "--seed", seed, *flags, *where,
                "--total-steps", steps)  # fmt: skip
        clock[f"train {kind}"] = round(time.perf_counter() - start, 1)
    sources = {
        "medium-replay": [f"{runs / 'medium'}:replay"],
        "medium-expert": [f"{runs / 'medium'}:last=0.5", f"{runs / 'expert'}:last=0.5"],
    }
    for kind, words in sources.items():
        path = DATA / f"{name_of(task)}-{kind}.hdf5"
        path.unlink(missing_ok=True)
        start = time.perf_counter()
        run_cli("dataset", "collect", task, "--sources", *words, "--steps", rows, "--seed", seed,
                *("--threads", "1", "--out", str(path)))  # fmt: skip
        clock[f"collect {kind}"] = round(time.perf_counter() - start, 1)
        found = run_cli("dataset", "info", str(path))
        files[path.name] = {
            "sha256": found["metadata"]["sha256"],
            "score": found["score"]["normalized"],
            **{k: found["figures"][k] for k in ("steps", "episode_return", "episode_length")},
        }
    return {"files": files, "wall_s": clock}


if __name__ == "__main__":
    sys.exit(main("offline_data", CELLS, measure, parallel=True))
