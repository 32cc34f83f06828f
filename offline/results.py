"""Results of a benchmark on disk: one JSON file per data set, algorithm and seed.

    FOLDER/results/<data set>/<algorithm>/s<seed>.json

    schema      1
    dataset     id of what was learned from
    algo        algorithm, as `ctrl-rl list algos` has it
    variant     settings other than the algorithm's own, {name: text}; part of what it is called
    seed        of initial weights, minibatches and evaluation
    steps       gradient updates
    env         where it was evaluated, with versions
    comparable  whether that is the simulator that the data's published scores come from
    normalized  whether scores are D4RL scores (0 random, 100 expert) or plain returns
    curve       [[updates, mean return, D4RL score or null], ...], an evaluation each
    last, best  score of the last evaluation, largest score
    config      the algorithm's settings
    data        what was learned from: checksum, counts, what was done to it
    versions    of the packages

Reading order: `Result` -> `write` -> `read` -> `load`.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctrl_rl.checkpoints import write_text

SCHEMA = 1
"""Version of the files; another one is refused."""

KINDS = {
    "dataset": str,
    "algo": str,
    "variant": dict,
    "seed": int,
    "steps": int,
    "env": str,
    "comparable": bool,
    "normalized": bool,
    "curve": list,
    "last": float,
    "best": float,
    "config": dict,
    "data": dict,
    "versions": dict,
}
"""What a file must hold, but for its schema."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished training; fields as in the module's docstring.

    Raises:
        ValueError: a score that is not finite, a curve that is none, or a last or best score that
            is not the curve's.
    """

    dataset: str
    algo: str
    variant: dict[str, str] = dataclasses.field(default_factory=dict)
    seed: int
    steps: int
    env: str
    comparable: bool
    normalized: bool
    curve: list[list]
    last: float
    best: float
    config: dict = dataclasses.field(default_factory=dict)
    data: dict = dataclasses.field(default_factory=dict)
    versions: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        scores = curve_scores(self.curve, self.normalized)
        if self.curve[-1][0] != self.steps:
            raise ValueError(
                f"the curve ends at update {self.curve[-1][0]:,}, steps says {self.steps:,}"
            )
        for name, found in (("last", scores[-1]), ("best", max(scores))):
            if getattr(self, name) != found:
                raise ValueError(f"{name} is {getattr(self, name)}, the curve's is {found}")

    @property
    def label(self) -> str:
        """The algorithm with its variant's settings, as `--algo` takes it."""
        return " ".join([self.algo, *(f"{k}={v}" for k, v in self.variant.items())])

    @property
    def checksum(self) -> str | None:
        """Of the data: its file's sha256, or the digest of a folder."""
        return checksum(self.data)

    def score(self, report: str) -> float:
        """The "last" or the "best" score."""
        return {"last": self.last, "best": self.best}[report]


def checksum(data: Mapping[str, Any]) -> str | None:
    """What tells data from other data, in what is recorded of it; None where nothing does."""
    return data.get("sha256") or data.get("digest")


def curve_scores(curve: Sequence[Sequence], normalized: bool) -> list[float]:
    """The score of each evaluation.

    Raises:
        ValueError: no evaluation, one that is no [updates, return, score], updates that do not
            grow, or a score that is not finite.
    """
    if not curve:
        raise ValueError("there is no evaluation")
    scores, before = [], -1
    for i, point in enumerate(curve):
        if not isinstance(point, (list, tuple)) or len(point) != 3:
            raise ValueError(f"evaluation {i} is not [updates, return, score]: {point!r}")
        score = point[2] if normalized else point[1]
        if not isinstance(score, (int, float)) or not math.isfinite(score):
            raise ValueError(f"evaluation {i} has the score {score!r}")
        if not isinstance(point[0], int) or point[0] <= before:
            raise ValueError(f"evaluation {i} is at update {point[0]!r}, after {before}")
        scores.append(float(score))
        before = point[0]
    return scores


def path_of(folder: Path, dataset: str, label: str, seed: int) -> Path:
    """Where the file of a cell lies in a benchmark's folder."""
    return Path(folder) / "results" / safe_name(dataset) / safe_name(label) / f"s{seed}.json"


def safe_name(text: str) -> str:
    """A data set or an algorithm as the name of a folder."""
    return re.sub(r"[^\w.,=+-]+", "_", text)


def write(result: Result, folder: Path) -> Path:
    """Put a result into a benchmark's folder, in the place of an older one of its cell."""
    path = path_of(folder, result.dataset, result.label, result.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA} | dataclasses.asdict(result)
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path


def read(path: Path) -> Result:
    """A result from its file.

    Raises:
        ValueError: not such a file, one of another version, or a damaged one, with the key.
    """
    try:
        content = json.loads(Path(path).read_bytes())
        schema = content.pop("schema")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not the result of a benchmark") from None
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema}, this version reads {SCHEMA}")
    content.setdefault("variant", {})
    for key, kind in KINDS.items():
        value = content.get(key)
        number = kind is float and type(value) is int
        if key not in content or not (type(value) is kind or number):
            raise ValueError(f"{path} is damaged: it holds no {key} ({kind.__name__})")
    if unknown := sorted(set(content) - set(KINDS)):
        raise ValueError(f"{path} holds {unknown[0]}, which this version does not know")
    try:
        return Result(**content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def load(folder: Path) -> dict[tuple[str, str], tuple[Result, ...]]:
    """All results of a benchmark: (data set, algorithm) -> its seeds in order.

    Raises:
        ValueError: no results there, a file that is none, a cell that is there twice, or seeds of
            one algorithm that cannot be averaged: of other lengths, environments, scales or data.
    """
    paths = sorted((Path(folder) / "results").glob("*/*/*.json"))
    if not paths:
        raise ValueError(f"{folder} holds no results of ctrl-rl offline bench")
    groups: dict[tuple[str, str], dict[int, tuple[Path, Result]]] = {}
    for path in paths:
        result = read(path)
        group = groups.setdefault((result.dataset, result.label), {})
        if result.seed in group:
            raise ValueError(f"{path} and {group[result.seed][0]} are the same cell")
        for other_path, other in group.values():
            pairs = {
                key: (getattr(result, key), getattr(other, key))
                for key in ("steps", "env", "comparable", "normalized")
            }
            pairs["data checksum"] = result.checksum, other.checksum
            for key, (ours, theirs) in pairs.items():
                if ours != theirs:
                    raise ValueError(
                        f"{path} has {key} {ours!r}, {other_path.name} beside it {theirs!r}: they "
                        "are no seeds of one experiment"
                    )
        group[result.seed] = (path, result)
    return {key: tuple(group[seed][1] for seed in sorted(group)) for key, group in groups.items()}
