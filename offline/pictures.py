"""Pictures of a benchmark: profiles, aggregates, pairs, learning curves; PNG bytes each.

They draw what `offline.summary` found and compute nothing but the bands of the curves.
"""

import io
import math
from collections.abc import Sequence

import numpy as np

from ctrl_rl.curves import COLORS, STYLES
from offline import statistics

GREY = "#9ca3af"
NAMES = {"iqm": "IQM", "median": "median", "mean": "mean"}


def draw_profiles(aggregates: dict[str, dict]) -> bytes:
    """Share of runs above each score, last and best side by side, with 95 % bands."""
    figure = _figure(9.6, 3.8)
    for place, (report, found) in enumerate(aggregates.items(), 1):
        axes = figure.add_subplot(1, len(aggregates), place)
        for i, (label, algo) in enumerate(found["algos"].items()):
            color, style = _look(i)
            profile = algo["profile"]
            axes.plot(
                found["taus"],
                profile["value"],
                color=color,
                linestyle=style,
                linewidth=1.8,
                label=label,
            )
            if profile["low"] is not None:
                axes.fill_between(
                    found["taus"],
                    profile["low"],
                    profile["high"],
                    color=color,
                    alpha=0.15,
                    linewidth=0,
                )
        axes.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_ylim(-0.02, 1.02)
        _dress(axes, f"{report} score", "D4RL score τ", "share of runs above τ")
    _legend(figure)
    return _png(figure)


def draw_aggregates(aggregates: dict[str, dict]) -> bytes:
    """IQM, median and mean of each algorithm with 95 % intervals; last filled, best open."""
    labels = list(aggregates["last"]["algos"])
    figure = _figure(9.6, 0.9 + 0.42 * len(labels))
    for place, (name, title) in enumerate(NAMES.items(), 1):
        axes = figure.add_subplot(1, len(NAMES), place)
        for i, label in enumerate(labels):
            color, _ = _look(i)
            for report, shift, face in (("last", -0.14, color), ("best", 0.14, "white")):
                algo = aggregates[report]["algos"][label][name]
                _interval(axes, algo, i + shift, color, face)
        axes.set_yticks(range(len(labels)), labels if place == 1 else [""] * len(labels))
        axes.set_ylim(len(labels) - 0.5, -0.5)
        _dress(axes, title, "D4RL score", "")
    return _png(figure)


def draw_pairs(aggregates: dict[str, dict]) -> bytes:
    """Probability that a run of the first beats one of the second; last filled, best open."""
    pairs = aggregates["last"]["pairs"]
    figure = _figure(7.2, 0.9 + 0.36 * len(pairs))
    axes = figure.add_subplot()
    for report, shift, face in (("last", -0.14, COLORS[0]), ("best", 0.14, "white")):
        for i, pair in enumerate(aggregates[report]["pairs"]):
            _interval(axes, pair["probability"], i + shift, COLORS[0], face)
    axes.axvline(0.5, color=GREY, linewidth=1)
    axes.set_xlim(-0.03, 1.03)
    axes.set_yticks(range(len(pairs)), [f"{pair['x']}  over  {pair['y']}" for pair in pairs])
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    _dress(axes, "Probability of improvement", "P(first > second)", "")
    return _png(figure)


def draw_curves(curves: dict[str, dict[str, dict]], algos: Sequence[str], unit: dict) -> bytes:
    """Score over updates, a panel for each data set: mean over seeds with its 95 % band."""
    columns = min(3, len(curves))
    lines = math.ceil(len(curves) / columns)
    figure = _figure(max(4.2 * columns, 5.4), 2.9 * lines + 0.5)
    for place, (dataset, found) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(lines, columns, place)
        for i, label in enumerate(algos):
            if label not in found:
                continue
            steps, scores = found[label]["steps"], np.array(found[label]["scores"])
            color, style = _look(i)
            band = statistics.estimate(lambda s: s.mean(-2).T, scores, resamples=1000)
            mark = {"marker": "o", "markersize": 3} if len(steps) < 12 else {}
            axes.plot(
                steps, band.value, color=color, linestyle=style, linewidth=1.6, label=label, **mark
            )
            if band.low is not None and band.high is not None:
                axes.fill_between(steps, band.low, band.high, color=color, alpha=0.15, linewidth=0)
        _dress(axes, dataset, "updates", unit[dataset])
    _legend(figure)
    return _png(figure)


# Inside -------------------------------------------------------------------------------------


def _interval(axes, found: dict, y: float, color: str, face: str) -> None:
    """A figure as a dot on its interval."""
    if found["ci95"] is not None:
        axes.plot(found["ci95"], [y, y], color=color, linewidth=5, alpha=0.3, solid_capstyle="butt")
    axes.plot(found["value"], y, "o", color=color, markerfacecolor=face, markersize=5)


def _look(i: int):
    """Colour and line of the i-th algorithm, the same in all pictures."""
    return COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)]


def _legend(figure) -> None:
    """One legend below all panels, which may lack some of the lines."""
    known = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    width = max(2, int(figure.get_figwidth() * 11 // (max(map(len, known)) + 8)))
    figure.legend(
        known.values(),
        known,
        loc="outside lower center",
        ncols=min(len(known), width),
        fontsize=8,
        frameon=False,
    )


def _figure(width: float, height: float):
    """A figure that needs no window; inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def _dress(axes, title: str, x: str, y: str) -> None:
    """What all panels share."""
    from matplotlib.ticker import EngFormatter

    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set_xlabel(x, fontsize=8, color="#555")
    axes.set_ylabel(y, fontsize=8, color="#555")
    if x == "updates":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelsize=8, color="#999")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999")


def _png(figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
