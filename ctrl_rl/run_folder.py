"""A run folder on disk, as everything but the run itself reads it; see `ctrl_rl.runs`."""

import csv
import json
import math
from pathlib import Path

from ctrl_rl.checkpoints import FORMAT, check_kinds

BEST_KEY = "eval/episode_return"
"""The figure that decides `best.pt`; higher is better."""

CONFIG_KINDS = {
    "task": str,
    "algo": str,
    "run": dict,
    "algo_config": dict,
    "task_config": dict,
    "metrics": dict,
    "spec": dict,
}
"""What every config.json holds."""


def read_config(folder: Path) -> dict:
    """The run's config.json.

    Raises:
        ValueError: not a run folder, a damaged one, or one of another format version.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).exists():
        raise ValueError(f"{folder} does not exist")
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.json")
    return parse_config(path.read_bytes(), path)


def parse_config(text: str | bytes, path: Path) -> dict:
    """A run's configuration out of the JSON that stands in `path`."""
    try:
        # Runs of earlier versions hold what JSON does not have.
        config = json.loads(text, parse_constant=lambda name: str(float(name)))
        found = config["format"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not the configuration of a run") from None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, this version reads {FORMAT}")
    check_kinds(config, CONFIG_KINDS, f"{path} is damaged: it")
    sizes = dict.fromkeys(("seed", "num_envs"), int | None)
    check_kinds(config["run"], sizes, f"{path} is damaged: its run")
    return config


def step_unit(config: dict) -> str:
    """What a run's steps are, from its config.json: "updates" of an offline run, or "env steps"."""
    return "updates" if "data" in config else "env steps"


def find_checkpoint(folder: Path, which: str | None = None) -> Path:
    """Path of "last", "best" or a step number; None for best, or last where there is none.

    Raises:
        ValueError: not a run folder, or no such checkpoint, with those there are.
    """
    read_config(folder)
    checkpoints = Path(folder) / "checkpoints"
    for name in (which,) if which else ("best", "last"):
        path = checkpoints / (f"step-{name}.pt" if name.isdigit() else f"{name}.pt")
        if path.is_file():
            return path
    paths = [path for path in checkpoints.glob("*.pt") if not path.stem.startswith("replay-")]
    names = [path.stem.removeprefix("step-") for path in paths]
    names.sort(key=lambda name: (name.isdigit(), int(name) if name.isdigit() else 0, name))
    if not names:
        raise ValueError(f"{folder} has no checkpoint yet")
    raise ValueError(f"{folder} has no checkpoint {which!r}; there are {', '.join(names)}")


def read_metrics(folder: Path, up_to: float = math.inf) -> list[dict[str, float]]:
    """Rows of metrics.csv with step <= `up_to`; absent figures are left out of a row.

    A last line that a kill cut in two is skipped.

    Raises:
        ValueError: a figure that is no number, or a row without a step.
    """
    path = Path(folder) / "metrics.csv"
    if not path.is_file():
        return []
    rows = []
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(whole.splitlines())
    for line in reader:
        try:
            row = {key: float(value) for key, value in line.items() if key and value}
            row["step"] = int(row["step"])
        except KeyError:
            raise ValueError(f"{path} is damaged: line {reader.line_num} has no step") from None
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path} is damaged: line {reader.line_num}: {error}") from None
        if row["step"] <= up_to:
            rows.append(row)
    return rows
