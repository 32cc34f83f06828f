"""What hindsight is worth: SAC on the sparse Reach-v0 with goals from the future and without.

Both train by the task's presets and differ in `--algo.hindsight` alone. Then `ctrl-rl eval` plays
200 episodes with the last policy, on starts and goals that training has not seen.
"""

import tempfile
import time
from pathlib import Path

from benchmarks.cells import Cell, main, run_cli

TASK = "Reach-v0"
EPISODES = 200
NUM_GOALS = {"hindsight": 4, "plain": 0}

CELLS = [
    Cell(name=f"{name}-s{seed}", config={"hindsight": goals, "seed": seed, "episodes": EPISODES})
    for seed in range(5)
    for name, goals in NUM_GOALS.items()
]


def measure(config: dict) -> dict:
    """Train, then evaluate.

    Returns:
        `train_wall_s`, `env_steps`; of the evaluation the means `success`, the share of episodes
        that end at the goal, `there`, the share of steps there, and `distance` [m].
    """
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        flags = ["--seed", str(config["seed"]), "--algo.hindsight", str(config["hindsight"])]
        start = time.perf_counter()
        trained = run_cli(
            "train", TASK, "--algo", "sac", *flags, "--run-dir", run, "--video-s", "0"
        )
        wall = time.perf_counter() - start
        found = run_cli("eval", run, "--checkpoint", "last", "--episodes", str(config["episodes"]))
    return {
        "train_wall_s": round(wall, 1),
        "env_steps": trained["env_steps"],
        **{name: found["metrics"][name]["mean"] for name in ("success", "there", "distance")},
    }


if __name__ == "__main__":
    raise SystemExit(main("hindsight", CELLS, measure))
