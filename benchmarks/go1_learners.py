"""Go1: PPO against FastSAC, by wall clock and by env steps.

Each cell is one `ctrl-rl train Go1-Velocity-Flat-v0` with the task's preset and evaluations on the
way, whose time is left out of the clock. `python -m benchmarks.go1_learners plot` draws
`docs/images/go1-learners.png` from the cells: return and tracking error over both axes.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.cells import RESULTS, ROOT, Cell, load, main, run_cli
from ctrl_rl.curves import COLORS, align, interval
from ctrl_rl.run_folder import read_metrics

TASK = "Go1-Velocity-Flat-v0"
PICTURE = ROOT / "docs" / "images" / "go1-learners.png"
SEEDS = range(3)
EVALUATE_EVERY = {"ppo": 200_000, "fast_sac": 200_000}
FIGURES = {
    "episode_return": "Return of an episode",
    "error_lin_vel_x": "Forward velocity, mean error [m/s]",
}

CELLS = [
    Cell(
        name=f"{algo}-s{seed}",
        config={"algo": algo, "seed": seed, "eval_every": every, "total_steps": None},
    )
    for seed in SEEDS
    for algo, every in EVALUATE_EVERY.items()
]


def measure(config: dict) -> dict:
    """Train once from an empty compiler's cache.

    Returns:
        `curve`: for each evaluation env steps, seconds of collecting and updating so far, and the
        figures; `whole_s`: the same clock at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = ["--algo", config["algo"], "--seed", str(config["seed"]), "--video-s", "0"]
        flags += ["--run-dir", str(run), "--eval-every", str(config["eval_every"])]
        if config["total_steps"] is not None:
            flags += ["--total-steps", str(config["total_steps"])]
        cold = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "compiled")}
        run_cli("train", TASK, *flags, environment={**os.environ, **cold})
        rows = read_metrics(run)
        settings = json.loads((run / "config.json").read_text())
    clock = np.cumsum([row["time/collect_s"] + row["time/update_s"] for row in rows])
    curve = [
        {
            "env_steps": row["step"],
            "seconds": round(float(seconds), 2),
            **{key: round(row[f"eval/{key}"], 4) for key in (*FIGURES, "terminated_rate")},
        }
        for row, seconds in zip(rows, clock, strict=True)
        if "eval/episode_return" in row
    ]
    return {
        "curve": curve,
        "whole_s": round(float(clock[-1]), 1),
        "settings": {k: settings[k] for k in ("algo_config", "run")},
    }


def draw(path: Path = PICTURE, results: Path = RESULTS) -> Path:
    """The four panels; a line is the mean over seeds, the shade its 95 % interval.

    Raises:
        ValueError: no cell was measured.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    runs: dict[str, list[list[dict]]] = {}
    for cell in load("go1_learners", results).values():
        runs.setdefault(cell["config"]["algo"], []).append(cell["result"]["curve"])
    if not runs:
        raise ValueError("no cell of go1_learners was measured")
    figure = Figure(figsize=(8.4, 5.6), dpi=110, layout="constrained")
    panels = figure.subplots(len(FIGURES), 2)
    axes_of_x = {"seconds": "training [s]", "env_steps": "env steps"}
    for line, (key, title) in enumerate(FIGURES.items()):
        for column, (x_key, x_title) in enumerate(axes_of_x.items()):
            axes = panels[line, column]
            for color, (algo, curves) in zip(COLORS, sorted(runs.items()), strict=False):
                x, y = align([tuple(np.array([p[k] for p in c]) for k in (x_key, key))  # pyright: ignore
                              for c in curves])  # fmt: skip
                label = f"{algo} ({len(curves)} seed{'s' if len(curves) > 1 else ''})"
                axes.plot(x, y.mean(0), color=color, linewidth=1.8, label=label)
                if len(curves) > 1:
                    low, high = interval(y)
                    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
            axes.set_title(title, fontsize=9, loc="left")
            axes.set_xlabel(x_title, fontsize=8, color="#555")
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.tick_params(labelsize=7.5, color="#999")
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


if __name__ == "__main__":
    if sys.argv[1:] == ["plot"]:
        print(draw())
    else:
        raise SystemExit(main("go1_learners", CELLS, measure))
