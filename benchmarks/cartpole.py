"""From nothing to a pole that is held: wall clock of training on CartPole-SwingUp-v0.

Each seed is one `ctrl-rl train` with the task's presets from a cold start: the compiler's cache is
empty and the clock includes imports, compilation, if any, and the evaluations. Then `ctrl-rl
eval` plays 100 episodes with `best.pt`, outside the clock and on starts that neither training nor
the choice of the checkpoint has seen.
"""

import tempfile
import time
from pathlib import Path

from benchmarks.cells import Cell, main, run_cli

TASK = "CartPole-SwingUp-v0"
EPISODES = 100

CELLS = [
    Cell(name=f"seed-{seed}", config={"seed": seed, "episodes": EPISODES}) for seed in range(5)
]


def measure(config: dict) -> dict:
    """Train, then evaluate.

    Returns:
        `train_wall_s`; `env_steps` of the training; of the evaluation the means
        `upright_second_half`, which is 1 only if every episode was held, `episode_return` and
        `terminated_rate`; `checkpoint` that was played.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        cold = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "compiled")}
        flags = ["--seed", str(config["seed"]), "--run-dir", str(run), "--video-s", "0"]
        start = time.perf_counter()
        trained = run_cli("train", TASK, *flags, environment=cold)
        wall = time.perf_counter() - start
        found = run_cli("eval", str(run), "--episodes", str(config["episodes"]))
    names = ("upright_second_half", "episode_return", "terminated_rate")
    return {
        "train_wall_s": round(wall, 1),
        "env_steps": trained["env_steps"],
        **{name: found["metrics"][name]["mean"] for name in names},
        "checkpoint": found["checkpoint"],
    }


if __name__ == "__main__":
    raise SystemExit(main("cartpole", CELLS, measure))
