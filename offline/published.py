"""Published results as data: every figure with its source, protocol and spread.

`offline/data/published/*.csv`, one row per figure: table, dataset, algo (as printed), report (last:
the final evaluation; best: each seed's largest), mean, std over seeds, seeds, steps, source, note.
What the source does not state is empty. Figures are D4RL scores: 0 random, 100 expert.

    table                      what it is                                           source
    corl-gym, corl-maze2d,     ten algorithms, last and best, mean and standard     CORL
    corl-antmaze, corl-adroit  deviation (ddof 0) over four seeds
    corl-pretrain-*            six algorithms before online training                CORL
    corl-finetune-*            the same after a million more steps online           CORL
    diffuser-gym               twelve algorithms, each from its own paper           Diffuser
    por                        six of the fifteen results of POR: those that a      POR
                               source that could be read confirms

Each row names its source exactly. The steps of CORL's tables are those of its configurations.

`settings.json` beside them has the settings that the source ran a figure with, where they are known
and other than our algorithm's own: for each printed name those of all data sets, then what differs
in a family of D4RL, on a body and on one data set. Names that are no settings here are the source's
own, for what we have no counterpart for. The steps are not among them.
"""

import csv
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from ctrl_rl.registry import NotFound, nearest
from offline.datasets import d4rl_table

COLUMNS = (
    "table",
    "dataset",
    "algo",
    "report",
    "mean",
    "std",
    "seeds",
    "steps",
    "source",
    "note",
)

NAMES = {
    "bc": "BC",
    "bc top_fraction=0.1": "10% BC",
    "td3_bc": "TD3+BC",
    "iql": "IQL",
    "cql": "CQL",
    "por": "POR",
    "awac": "AWAC",
    "rebrac": "ReBRAC",
    "edac": "EDAC",
    "edac diversity=0": "SAC-N",
    "decision_transformer": "DT",
}
"""Our algorithm, with settings where the printed one has others than its own -> printed name."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One printed figure."""

    table: str
    dataset: str
    """D4RL id."""
    algo: str
    """As printed."""
    report: str | None
    """ "last" or "best"; None where the source does not say."""
    mean: float
    """D4RL score."""
    std: float | None
    """Over seeds; None where the source has none."""
    seeds: int | None
    steps: int | None
    """Gradient updates, with those online where the table is of online training."""
    source: str
    note: str


@lru_cache
def tables() -> dict[str, tuple[Published, ...]]:
    """Table -> its figures, in the order of the source."""
    found: dict[str, list[Published]] = {}
    folder = resources.files("offline") / "data" / "published"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".csv"):
            for cell in _read(file.name, file.read_text(encoding="utf-8")):
                found.setdefault(cell.table, []).append(cell)
    return {name: tuple(cells) for name, cells in found.items()}


def table(name: str) -> tuple[Published, ...]:
    """The figures of a table.

    Raises:
        NotFound: there is none of this name; the nearest is named.
    """
    known = tables()
    if name not in known:
        raise NotFound(f"unknown table {name!r}{nearest(name, known)}")
    return known[name]


def source_settings(cell: Published) -> dict | None:
    """Settings of a figure's source other than our algorithm's own; None where they are not known.

    A name that is no setting of ours stands for what the source did and we cannot.
    """
    known = _settings()
    if cell.table not in known["tables"] or cell.algo not in known["settings"]:
        return None
    given = known["settings"][cell.algo]
    entry, body = d4rl_table().get(cell.dataset), cell.dataset.partition("-")[0]
    family = "" if entry is None else entry.family
    found: dict = {}
    for name in ("all", family, body, cell.dataset):  # the particular goes above the general
        found |= given.get(name, {})
    return found


def find(dataset: str, algo: str, report: str) -> list[Published]:
    """What is printed for our algorithm on a data set, or on one that it stands in for.

    Args:
        dataset: id of what was learned from; "hopper-medium-v2" and a set of one's own called
            "hopper-medium" or "hopper-medium-v5" all find hopper-medium-v2.
        algo: our name, with its settings where they are not the algorithm's own.
        report: "last" or "best"; figures that say neither are found for both.
    """
    printed, stem = NAMES.get(algo), stem_of(dataset)
    return [
        cell
        for cells in tables().values()
        for cell in cells
        if cell.algo == printed
        and stem_of(cell.dataset) == stem
        and cell.report in (report, None)
        and not cell.table.startswith("corl-finetune")  # those went on learning online
    ]


def stem_of(dataset: str) -> str:
    """A data set's id without its version."""
    return re.sub(r"-v\d+$", "", dataset)


# Inside -------------------------------------------------------------------------------------


@lru_cache
def _settings() -> dict:
    """What `settings.json` holds: source, tables, and settings by printed name."""
    file = resources.files("offline") / "data" / "published" / "settings.json"
    return json.loads(file.read_text(encoding="utf-8"))


def _read(name: str, text: str) -> list[Published]:
    """Rows of one file.

    Raises:
        ValueError: other columns, a value that is none, or a figure that stands twice, with file
            and line.
    """
    reader = csv.DictReader(text.splitlines())
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{name} must have the columns {', '.join(COLUMNS)}")
    cells, seen = [], set()
    for row in reader:
        where = f"{name}, line {reader.line_num}"
        try:
            cell = Published(
                table=row["table"],
                dataset=row["dataset"],
                algo=row["algo"],
                report=row["report"] or None,
                mean=float(row["mean"]),
                std=float(row["std"]) if row["std"] else None,
                seeds=int(row["seeds"]) if row["seeds"] else None,
                steps=int(row["steps"]) if row["steps"] else None,
                source=row["source"],
                note=row["note"],
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if cell.report not in ("last", "best", None):
            raise ValueError(f"{where}: report is last, best or empty, not {cell.report!r}")
        key = (cell.table, cell.dataset, cell.algo, cell.report)
        if key in seen:
            raise ValueError(f"{where}: {' '.join(filter(None, key))} stands there twice")
        seen.add(key)
        cells.append(cell)
    return cells
