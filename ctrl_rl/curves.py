"""Learning curves: one run's figures on a page, and runs over seeds beside each other."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ctrl_rl.checkpoints import replacing
from ctrl_rl.run_folder import read_config, read_metrics, step_unit

COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#a16207", "#4b5563")
STYLES = ("-", (0, (3, 1.5)), (0, (1, 1)))
"""Of the first lines of a panel, one per colour, of the next, and so on."""
BESIDE_LINES = 4
"""Lines up to which a panel has room for its legend; that of more stands below it."""
GROUPS = (  # title, keys (or prefixes ending in "/") that share a panel
    ("Episode return", ("rollout/episode_return", "eval/episode_return")),
    ("Episode length [steps]", ("rollout/episode_length", "eval/episode_length")),
    ("Ended by termination [share]", ("rollout/terminated", "eval/terminated_rate")),
    ("Reward terms, mean per step", ("reward/",)),
    ("Task figures, mean per step", ("task/",)),
    ("Explained variance of the critic", ("value/explained_variance",)),
    ("KL divergence per minibatch [nat]", ("policy/kl",)),
    ("Standard deviation of the action", ("policy/std",)),
    ("Learning rate", ("loss/learning_rate",)),
    ("Value loss", ("loss/value",)),
    ("Critic loss", ("loss/critic",)),
    ("Actor loss", ("loss/actor",)),
    ("Action value [reward]", ("value/q", "value/v", "value/gain")),
    ("Average reward per step", ("rollout/average_reward", "eval/average_reward")),
    ("Entropy of the action [nat]", ("policy/entropy",)),
    ("Temperature", ("policy/temperature",)),
    ("Env steps per second", ("time/env_steps_per_s",)),
)
IQM_FROM = 5
"""Runs from which on the middle is the interquartile mean instead of the mean."""


def draw_run(folder: Path) -> Path | None:
    """Write curves.png of a run; None if nothing was logged yet."""
    config, rows = read_config(folder), read_metrics(folder)
    if not rows:
        return None
    panels = _panels(rows)
    columns = 3
    lines = math.ceil(len(panels) / columns)
    tall = [len(keys) for _, keys in panels if len(keys) > BESIDE_LINES]
    legends = 0.15 * sum(math.ceil(count / 3) + 1 for count in tall)
    figure = _figure(4.6 * columns, 2.9 * lines + 0.5 + legends)
    figure.suptitle(
        f"{config['task']} · {config['algo']} · seed {config['run']['seed']}",
        x=0.012,
        ha="left",
        weight="bold",
    )
    for place, (title, keys) in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, place)
        for i, (color, key) in enumerate(zip(_colors(len(keys)), keys, strict=True)):
            x, y = series(rows, key)
            evaluation = key.startswith("eval/")
            color = {"rollout": COLORS[0], "eval": COLORS[1]}.get(key.partition("/")[0], color)
            axes.plot(
                x,
                y,
                color=color,
                marker="o" if evaluation or len(x) < 2 else None,
                markersize=3.5,
                linewidth=1.5,
                linestyle=STYLES[i // len(COLORS) % len(STYLES)],
                label=_label(key, title),
            )
        _dress(axes, title, step_unit(config))
        if title in ("Value loss", "Learning rate") and all(
            row.get(keys[0], 1) > 0 for row in rows
        ):
            axes.set_yscale("log")
            axes.tick_params(which="minor", labelleft=False)
        if len(keys) > BESIDE_LINES:
            below = {"loc": "upper left", "bbox_to_anchor": (-0.1, -0.17), "ncols": 3}
            axes.legend(fontsize=6.5, frameon=False, handlelength=2.6, columnspacing=1.0, **below)
        elif len(keys) > 1:
            axes.legend(fontsize=7, frameon=False)
    path = Path(folder) / "curves.png"
    with replacing(path, "wb") as file:
        figure.savefig(file, format="png")
    return path


def draw_comparison(
    folders: Sequence[Path], path: Path, key: str = "eval/episode_return"
) -> tuple[dict[str, dict], list[Path]]:
    """Draw one figure of several runs; those that differ by seed and length alone are one line.

    The line is the mean, from five runs on the interquartile mean (Agarwal et al., "Deep
    reinforcement learning at the edge of the statistical precipice", 2021, arXiv:2108.13264); the
    shade is its 95 % bootstrap interval over runs, drawn where all runs of the line have values.

    Args:
        folders: run folders.
        path: picture to write.
        key: column of metrics.csv.

    Returns:
        Line -> {"runs": n, "statistic": its name, "last": value and interval at the last step};
        and the runs left out, which have not logged the key.

    Raises:
        ValueError: not a run folder, or the key was logged by none of them.
    """
    lines: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    left_out, units, names = [], [], _line_names(folders)
    for folder in folders:
        config = read_config(folder)
        x, y = series(read_metrics(folder), key)
        if len(x):
            units.append(step_unit(config))
            lines.setdefault(names[folder], []).append((x, y))
        else:
            left_out.append(folder)
    if not lines:
        known = sorted({k for f in folders for row in read_metrics(f) for k in row} - {"step"})
        raise ValueError(f"no run has logged {key!r}; there are {', '.join(known) or 'none'}")
    figure = _figure(7.2, 4.4)
    axes = figure.add_subplot()
    found = {}
    for color, (name, runs) in zip(_colors(len(lines)), lines.items(), strict=True):
        x, values = align(runs)
        name_of = "interquartile mean" if len(runs) >= IQM_FROM else "mean"
        middle = _middle(values, len(runs))
        label = f"{name} ({len(runs)} run{'s' if len(runs) > 1 else ''}"
        axes.plot(
            x,
            middle,
            color=color,
            linewidth=1.8,
            label=f"{label}, {name_of})" if len(runs) > 1 else f"{label})",
        )
        low, high = interval(values)
        if len(runs) > 1:
            axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        found[name] = {
            "runs": len(runs),
            "statistic": name_of,
            "last": {
                "mean": float(middle[-1]),
                "ci95": [float(low[-1]), float(high[-1])] if len(runs) > 1 else None,
                "n": len(runs),
                "unit": "-",
            },
        }
    _dress(axes, key, " or ".join(dict.fromkeys(units)))
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)
    return found, left_out


def series(rows: Sequence[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a column, where it has any."""
    pairs = [(row["step"], row[key]) for row in rows if key in row and math.isfinite(row[key])]
    x, y = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(x, float), np.array(y, float)


def align(runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Runs (steps, values) on common steps within what all of them cover; values (R, X)."""
    low, high = max(x[0] for x, _ in runs), min(x[-1] for x, _ in runs)
    grid = np.unique(np.concatenate([x for x, _ in runs]))
    grid = grid[(grid >= low) & (grid <= high)]
    if not len(grid):
        raise ValueError("the runs have no env step in common")
    return grid, np.stack([np.interp(grid, x, y) for x, y in runs])


def iqm(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half over axis 0; scipy's 25 % trimmed mean, as rliable has it."""
    from scipy.stats import trim_mean

    return trim_mean(values, 0.25, axis=0)


def interval(values: np.ndarray, resamples: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """95 % percentile bootstrap interval over runs (R, X) of what `draw_comparison` draws."""
    runs = len(values)
    draws = np.random.default_rng(0).integers(0, runs, (resamples, runs))
    middles = np.stack([_middle(values[draw], runs) for draw in draws])
    low, high = np.percentile(middles, (2.5, 97.5), axis=0)
    return low, high


# Inside -------------------------------------------------------------------------------------


def _middle(values: np.ndarray, runs: int) -> np.ndarray:
    return iqm(values) if runs >= IQM_FROM else values.mean(0)


def _panels(rows: Sequence[dict]) -> list[tuple[str, list[str]]]:
    """Titles and the logged keys under them."""
    logged = dict.fromkeys(key for row in rows for key in row if key != "step")
    panels = []
    for title, wanted in GROUPS:
        keys = [
            k for k in logged for w in wanted if k == w or (w.endswith("/") and k.startswith(w))
        ]
        if keys:
            panels.append((title, keys))
    shown = {key for _, keys in panels for key in keys}
    rest = [key for key in logged if key not in shown and not key.startswith("time/")]
    return panels + [(key, [key]) for key in rest]


def _line_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Task and algorithm of each run, with the settings that differ among runs of the same two."""
    runs: dict[str, dict[Path, dict[str, str]]] = {}
    for folder in folders:
        config = read_config(folder)
        settings = {
            f"{part}.{key}": json.dumps(value)
            for part, name in (("algo", "algo_config"), ("task", "task_config"))
            for key, value in config[name].items()
            if key not in ("seed", "total_steps", "compile")
        }
        runs.setdefault(f"{config['task']} · {config['algo']}", {})[folder] = settings
    names = {}
    for name, found in runs.items():
        keys = dict.fromkeys(key for settings in found.values() for key in settings)
        differ = [key for key in keys if len({s.get(key) for s in found.values()}) > 1]
        for folder, settings in found.items():
            names[folder] = " · ".join([name, *(f"{key} {settings.get(key)}" for key in differ)])
    return names


def _label(key: str, title: str) -> str:
    head, _, tail = key.partition("/")
    names = {"rollout": "training", "eval": "evaluation"}
    return names[head] if head in names else tail


def _colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _figure(width: float, height: float):
    """A figure that needs no window; inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def _dress(axes, title: str, unit: str) -> None:
    """What all panels share."""
    from matplotlib.ticker import EngFormatter

    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(unit, fontsize=7.5, color="#555")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(which="both", labelsize=7.5, color="#999")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999")
