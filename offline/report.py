"""Report of a benchmark: report.html, one page without network; report.md; report.json.

All three hold the same sections, made once from `offline.summary`. Each says which simulator and
which data its figures come from, and what may not be compared.

Reading order: `write` -> `sections` -> the renderers.
"""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ctrl_rl.checkpoints import replacing, write_text
from ctrl_rl.report import STYLE
from offline import pictures
from offline.summary import REPORTS, summarise

SOURCE = (
    "Agarwal et al., Deep reinforcement learning at the edge of the statistical precipice, 2021, "
    "arXiv:2108.13264"
)


@dataclass(frozen=True)
class Section:
    """A heading with a table, a picture or both."""

    title: str
    notes: Sequence[str] = ()
    """Paragraphs under the heading."""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    picture: tuple[str, bytes] | None = None
    """File name and PNG."""
    caption: Sequence[str] = field(default=())
    """Paragraphs at the end."""


def write(folder: Path) -> tuple[dict, list[Path]]:
    """Write the three files, and the pictures for the Markdown, into a benchmark's folder.

    Returns:
        What `summarise` found, and the files.

    Raises:
        ValueError: see `summarise`.
    """
    folder = Path(folder)
    found = summarise(folder)
    parts = sections(found)
    files = []
    for part in parts:
        if part.picture is not None:
            name, data = part.picture
            (folder / "pictures").mkdir(exist_ok=True)
            with replacing(folder / "pictures" / name, "wb") as file:
                file.write(data)
            files.append(folder / "pictures" / name)
    counts = [
        f"{len(found[key])} {one if len(found[key]) == 1 else many}"
        for key, one, many in (
            ("algos", "algorithm", "algorithms"),
            ("datasets", "data set", "data sets"),
        )
    ]
    title = f"Offline benchmark: {counts[0]} on {counts[1]}"
    kept = {k: v for k, v in found.items() if k != "folder"}  # the file may move with its folder
    for name, text in (
        ("report.html", to_html(title, parts)),
        ("report.md", to_markdown(title, parts)),
        ("report.json", json.dumps(kept, indent=1, allow_nan=False) + "\n"),
    ):
        write_text(folder / name, text)
        files.insert(0, folder / name)
    return found, files


def sections(found: dict) -> list[Section]:
    """All parts of the report, in order."""
    measured = measured_on(found)
    parts, aggregates = [_overview(found), *_missing(found)], found["aggregates"]
    if aggregates["last"]["tasks"]:
        parts.append(_aggregates(aggregates, measured))
    else:
        reasons = [f"{k}: {why}." for k, why in aggregates["last"]["left_out"].items()]
        parts.append(Section("Over data sets", ["No data set can be aggregated.", *reasons]))
    parts += [_scores(found, report, measured) for report in REPORTS]
    if aggregates["last"]["pairs"]:
        parts.append(_pairs(aggregates, measured))
    if aggregates["last"]["tasks"]:
        parts.append(_profiles(aggregates, measured))
    units = {
        name: "D4RL score" if of["normalized"] else "return"
        for name, of in found["datasets"].items()
    }
    drawn = pictures.draw_curves(found["curves"], found["algos"], units)
    note = "Mean over seeds; band: 95 % bootstrap interval at each evaluation."
    parts += [Section("Learning curves", picture=("curves.png", drawn), caption=[note, measured])]
    parts += [_settings(found), _sources(found)]
    return parts


def measured_on(found: dict) -> str:
    """One line that names simulator and data behind the figures."""
    envs: dict[str, list[str]] = {}
    for name, of in found["datasets"].items():
        envs.setdefault(" and ".join(of["env"]), []).append(name)
    places = [f"{env} ({', '.join(names)})" for env, names in envs.items()]
    text = f"Simulator: {'; '.join(places)}."
    other = [name for name, of in found["datasets"].items() if not of["comparable"]]
    if other:
        which = "" if len(other) == len(found["datasets"]) else f" for {', '.join(other)}"
        text += f" Not D4RL's{which}: such figures compare with each other alone."
    sums = []
    for name, of in found["datasets"].items():
        each = [(data["checksum"] or "no checksum")[:12] for data in of["data"]]
        sums.append(f"{name} ({' / '.join(each)})")
    return f"{text} Data: {', '.join(sums)}."


# Sections -----------------------------------------------------------------------------------


def _overview(found: dict) -> Section:
    rows = []
    for name, of in found["datasets"].items():
        data = " / ".join(_data(data) for data in of["data"])
        steps = " / ".join(f"{n:,}" for n in of["steps"])
        scale = "D4RL score" if of["normalized"] else "return"
        same = "yes" if of["comparable"] else "no"
        rows.append([name, " / ".join(of["env"]), data, steps, scale, same])
    header = ["data set", "evaluated in", "learned from", "updates", "scale", "D4RL's simulator"]
    seeds = sorted({len(cell["seeds"]) for cell in found["cells"]})
    note = (
        f"{len(found['datasets'])} data sets, {len(found['algos'])} algorithms, "
        f"{' to '.join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))} seeds. A D4RL score "
        "is 0 for a random policy and 100 for an expert. Last scores are those of the final "
        "evaluation, best scores each seed's largest: the second choose with the help of the "
        "simulator, so the two are never mixed."
    )
    return Section("What was measured", [note], header, rows)


def _data(data: dict) -> str:
    """Origin, checksum and size in a few words."""
    words = [data["origin"], f"checksum {data['checksum'][:12]}" if data["checksum"] else ""]
    words.append("" if data["transitions"] is None else f"{data['transitions']:,} transitions")
    return ", ".join(filter(None, words))


def _missing(found: dict) -> list[Section]:
    """Nothing is left out of a mean in silence."""
    if not found["missing"]:
        return []
    rows = [
        [cell["dataset"], cell["algo"], str(cell["seed"]), cell["error"] or "not trained"]
        for cell in found["missing"]
    ]
    note = "Means below are over the seeds that finished. One that failed is no better for it."
    return [Section("Missing", [note], ["data set", "algorithm", "seed", "why"], rows)]


def _scores(found: dict, report: str, measured: str) -> Section:
    """One report's table, each row beside the published figures of its kind."""
    rows, before = [], None
    for cell in found["cells"]:
        of = cell[report]
        one = "{:.1f}" if cell["normalized"] else "{:,.5g}"
        interval = "–" if of["ci95"] is None else " … ".join(map(one.format, of["ci95"]))
        figures = f"{one.format(of['value'])} ± {one.format(of['std'])}"
        beside = "; ".join(_beside(figure) for figure in of["published"])
        dataset = cell["dataset"] if cell["dataset"] != before else ""
        before = cell["dataset"]
        seeds = str(len(cell["seeds"]))
        rows.append([dataset, cell["algo"], seeds, figures, interval, beside or "–"])
    header = ["data set", "algorithm", "seeds", "mean ± std", "95 % interval", "published"]
    note = (
        "Mean and standard deviation (ddof 0) over seeds; interval: percentile bootstrap over "
        "seeds, too narrow for very few. A published figure is followed by its table and by what "
        "keeps it from being compared with ours."
    )
    return Section(f"{report.capitalize()} scores", [note], header, rows, caption=[measured])


def _beside(figure: dict) -> str:
    """A published figure in a few words: `60.4 ± 3.5 corl-gym (other simulator, data)`."""
    text = f"{figure['mean']:.1f}"
    if figure["std"] is not None:
        text += f" ± {figure['std']:.1f}"
    told = [f"other {', '.join(figure['kinds'])}"] if figure["kinds"] else []
    if figure["unknown"]:
        told.append(f"not known: {', '.join(figure['unknown'])}")
    return f"{text} {figure['table']}" + (f" ({'; '.join(told)})" if told else "")


def _over(aggregates: dict) -> str:
    """Data sets that count, and those that do not."""
    found = aggregates["last"]
    text = f"Over {', '.join(found['tasks'])}."
    for dataset, why in found["left_out"].items():
        text += f" Without {dataset}: {why}."
    return text


def _aggregates(aggregates: dict, measured: str) -> Section:
    rows = []
    for report, found in aggregates.items():
        for label, algo in found["algos"].items():
            figures = [_text(algo[name]) for name in pictures.NAMES]
            rows.append([report, label, str(len(algo["seeds"])), *figures])
    header = ["report", "algorithm", "seeds", *pictures.NAMES.values()]
    note = (
        f"{_over(aggregates)} IQM: mean of the middle half of all runs. Intervals: 95 %, "
        f"stratified bootstrap ({SOURCE})."
    )
    drawn = ("aggregates.png", pictures.draw_aggregates(aggregates))
    caption = ["Filled: last score; open: best score. Bars: 95 % intervals.", measured]
    return Section("Over data sets", [note], header, rows, drawn, caption)


def _pairs(aggregates: dict, measured: str) -> Section:
    rows = []
    for report, found in aggregates.items():
        for pair in found["pairs"]:
            better = pair["better"] or "undecided"
            if pair["iqm_difference"]["ci95"] is None:
                better = "one seed decides nothing"
            figures = [_text(pair["probability"], ".2f"), _text(pair["iqm_difference"])]
            rows.append([report, pair["x"], pair["y"], *figures, better])
    header = ["report", "first", "second", "P(first > second)", "IQM difference", "better"]
    note = (
        f"{_over(aggregates)} How likely a run of the first beats one of the second on the same "
        "data set, ties counting half; better is the one whose IQM is larger with an interval of "
        "the difference that leaves out 0."
    )
    drawn = ("improvement.png", pictures.draw_pairs(aggregates))
    caption = ["Filled: last score; open: best score. Bars: 95 % intervals.", measured]
    return Section("Pairs", [note], header, rows, drawn, caption)


def _profiles(aggregates: dict, measured: str) -> Section:
    note = f"{_over(aggregates)} Share of all runs that score above τ; higher is better."
    drawn = ("profiles.png", pictures.draw_profiles(aggregates))
    caption = ["Bands: 95 % at each τ, stratified bootstrap.", measured]
    return Section("Performance profiles", [note], picture=drawn, caption=caption)


def _settings(found: dict) -> Section:
    rows = [
        [label, ", ".join(f"{k} {json.dumps(v)}" for k, v in settings.items()) or "–"]
        for label, settings in found["settings"].items()
    ]
    note = "Of the learner, and what was done to the data; a list of values where data sets differ."
    return Section("Settings", [note], ["algorithm", "settings"], rows)


def _sources(found: dict) -> Section:
    sources = {}
    for cell in found["cells"]:
        for report in REPORTS:
            for figure in cell[report]["published"]:
                sources[figure["source"]] = figure["table"]
                if figure["note"]:
                    sources[f"{figure['dataset']} {figure['algo']}: {figure['note']}"] = "note"
    rows = [[table, source] for source, table in sources.items()]
    if not rows:
        return Section("Published figures", ["None is known for these data sets and algorithms."])
    return Section("Published figures", (), ["table", "source"], rows)


def _text(figure: dict, form: str = ".1f") -> str:
    text = format(figure["value"], form)
    if figure["ci95"] is None:
        return text
    return f"{text} [{', '.join(format(v, form) for v in figure['ci95'])}]"


# Renderers ----------------------------------------------------------------------------------


def to_html(title: str, parts: Sequence[Section]) -> str:
    """One page; pictures stand in it."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    for part in parts:
        notes = "".join(f"<p class=soft>{html.escape(note)}</p>" for note in part.notes)
        table, picture = "", ""
        if part.rows:
            head = "".join(f"<th>{html.escape(name)}</th>" for name in part.header)
            lines = "".join(
                "<tr>" + "".join(_html_cell(cell) for cell in row) + "</tr>" for row in part.rows
            )
            table = f"<table><tr>{head}</tr>{lines}</table>"
        if part.picture is not None:
            data = base64.b64encode(part.picture[1]).decode()
            picture = f'<img alt="{html.escape(part.title)}" src="data:image/png;base64,{data}">'
        caption = "".join(f"<p class=soft>{html.escape(note)}</p>" for note in part.caption)
        body.append(
            f"<section><h2>{html.escape(part.title)}</h2>{notes}{table}{picture}{caption}</section>"
        )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<main>{''.join(body)}</main></html>\n"
    )


def _html_cell(text: str) -> str:
    """Figures stay on one line."""
    kind = " class=n" if len(text) < 26 else ""
    return f"<td{kind}>{html.escape(text)}</td>"


def to_markdown(title: str, parts: Sequence[Section]) -> str:
    """The same for a repository; pictures stand beside it in pictures/."""
    lines = [f"# {title}", ""]
    for part in parts:
        lines += [f"## {part.title}", ""]
        for note in part.notes:
            lines += [note, ""]
        if part.rows:
            lines.append("| " + " | ".join(part.header) + " |")
            lines.append("|" + "---|" * len(part.header))
            lines += ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |"
                      for row in part.rows]  # fmt: skip
            lines.append("")
        if part.picture is not None:
            lines += [f"![{part.title}](pictures/{part.picture[0]})", ""]
        for note in part.caption:
            lines += [note, ""]
    return "\n".join(lines).rstrip() + "\n"
