"""Data sets by name: D4RL's table, the cache, and `load`, which takes an id or a path.

`data/d4rl_scores.csv` holds D4RL's ids with reference scores, addresses, sizes and step limits; its
first line names the source. The cache is D4RL's own: the folder `D4RL_DATASET_DIR`, by default
~/.d4rl/datasets, with each file under the last part of its address. Minari's is
`MINARI_DATASETS_PATH`, by default ~/.minari/datasets.

Reading order: `D4RLEntry`, `d4rl_table` -> `locate` -> `load` -> `data_checksum`.
"""

import csv
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from ctrl_rl.registry import NotFound, nearest
from offline import d4rl, minari
from offline.episodes import Episodes, digest

MINARI_ID = re.compile(r"[-\w]+(/[-\w]+)+-v\d+")


@dataclass(frozen=True, kw_only=True)
class D4RLEntry:
    """A data set that D4RL names; None where its table has no number."""

    dataset: str
    family: str
    """gym, antmaze, maze2d, adroit, kitchen, bullet, minigrid, flow or carla."""
    ref_min: float | None
    """Episode return that counts as score 0: a random policy."""
    ref_max: float | None
    """Episode return that counts as score 100: an expert."""
    episode_length: int | None
    """Step limit of an episode."""
    obs_size: int | None
    action_size: int | None
    action_bound: float | None
    """Actions are within plus and minus this."""
    url: str

    @property
    def file_name(self) -> str:
        """Name in the cache: the last part of the address, as D4RL itself has it."""
        return self.url.rpartition("/")[2]


@lru_cache
def d4rl_table() -> dict[str, D4RLEntry]:
    """Id -> entry, in the table's order."""
    text = (files("offline") / "data" / "d4rl_scores.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    number = lambda kind, value: kind(value) if value else None  # noqa: E731
    return {
        row["dataset"]: D4RLEntry(
            dataset=row["dataset"],
            family=row["family"],
            ref_min=number(float, row["ref_min"]),
            ref_max=number(float, row["ref_max"]),
            episode_length=number(int, row["episode_length"]),
            obs_size=number(int, row["obs_size"]),
            action_size=number(int, row["action_size"]),
            action_bound=number(float, row["action_bound"]),
            url=row["url"],
        )
        for row in csv.DictReader(lines)
    }


def d4rl_folder() -> Path:
    """Where D4RL's files lie."""
    return Path(os.environ.get("D4RL_DATASET_DIR") or "~/.d4rl/datasets").expanduser()


def minari_folder() -> Path:
    """Where Minari's data sets lie."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser()


def is_minari_id(name: str) -> bool:
    """Whether it is written as one that can be downloaded: namespace/name-vN."""
    return MINARI_ID.fullmatch(name) is not None


def unknown(name: str) -> NotFound:
    """The error for a name that stands for nothing, with the nearest id of D4RL if one is near."""
    hint = nearest(name, d4rl_table())
    if "did you mean" not in hint:
        hint = "; ctrl-rl dataset list shows D4RL's ids, Minari's have a /"
    return NotFound(f"unknown data set {name!r}, and no such path{hint}")


def locate(dataset: str | Path) -> tuple[Path, D4RLEntry | None]:
    """Where a data set lies, and D4RL's entry if it is one of theirs.

    A path goes first; a file that has the very name of a D4RL file is taken for that, unless it
    says itself that it was written here.

    Raises:
        NotFound: neither a path nor a known id, with the nearest id.
        ValueError: a known id whose data is not on this machine, or not D4RL's.
    """
    name, path = str(dataset), Path(dataset).expanduser()
    table = d4rl_table()
    if path.exists():
        entry = {entry.file_name: entry for entry in table.values()}.get(path.name)
        return path, None if entry and d4rl.is_ours(path) else entry
    if name in table:
        path = d4rl_folder() / table[name].file_name
        if not path.is_file():
            raise ValueError(f"{name} is not in {d4rl_folder()}; ctrl-rl dataset download {name}")
        if d4rl.is_ours(path):
            raise ValueError(
                f"{path} was written by ctrl-rl dataset, it is not D4RL's {name}; give its path to "
                "use it, or move it away and download D4RL's"
            )
        return path, table[name]
    if (minari_folder() / name / "data").is_dir():
        return minari_folder() / name, None
    if isinstance(dataset, Path) or path.suffix or name.startswith((".", "/", "~")):
        raise NotFound(f"{name} does not exist")
    if is_minari_id(name):
        raise ValueError(f"{name} is not in {minari_folder()}; ctrl-rl dataset download {name}")
    raise unknown(name)


def load(
    dataset: str | Path,
    *,
    infos: Sequence[str] | bool = (),
    episode_length: int | None = None,
    obs_keys: Sequence[str] | None = None,
) -> Episodes:
    """Read a data set and check every number of it.

    Args:
        dataset: an id of D4RL or Minari, a D4RL-style file, or a Minari folder.
        infos: names of infos to read too; True for all.
        episode_length: where a file does not say where episodes were cut; None for D4RL's own
            limit, if it is one of theirs. Data that says so itself takes none.
        obs_keys: parts of a Minari data set's dict observation, in the order wanted.

    Returns:
        Episodes whose metadata names `dataset`, `file` and, for a file, its `sha256`. Of a folder
        it names the `digest` of what is there; where another one was recorded, that stays as
        `digest_recorded`.

    Raises:
        ValueError: it is not there, not of a known form, or something in it is wrong.
    """
    path, entry = locate(dataset)
    if path.is_dir():
        if not minari.is_dataset(path):
            raise ValueError(f"{path} is a folder without data/metadata.json: no Minari data set")
        if episode_length is not None:
            raise ValueError(f"{path} says where its episodes end: it takes no episode length")
        episodes = minari.read(path, infos=infos, obs_keys=obs_keys)
        metadata = episodes.metadata
        metadata.setdefault("dataset", metadata.get("dataset_id", path.name))
        metadata.pop("sha256", None)  # of a file that the folder was made from
        recorded, metadata["digest"] = metadata.get("digest"), digest(episodes)
        if recorded not in (None, metadata["digest"]):
            metadata["digest_recorded"] = recorded
        return episodes
    if obs_keys is not None:
        raise ValueError(f"{path} has one array of observations, so there are no parts to choose")
    widths, bounds = (None, None), None
    demonstrations, usual = entry is not None and entry.family == "kitchen", None
    if entry is not None:
        widths = (entry.obs_size, entry.action_size)
        if entry.action_bound is not None:
            bounds = (-entry.action_bound, entry.action_bound)
        usual = None if demonstrations else entry.episode_length
    episodes = d4rl.read(
        path,
        infos=infos,
        episode_length=episode_length,
        usual_length=usual,
        demonstrations=demonstrations,
        widths=widths,
        action_bounds=bounds,
    )
    if entry is not None:
        episodes.metadata["dataset"] = entry.dataset
    episodes.metadata.setdefault("dataset", path.stem)
    episodes.metadata["sha256"] = file_sha256(path)
    return episodes


def file_sha256(path: Path) -> str:
    """Checksum of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_checksum(dataset: str | Path) -> str:
    """Of the data as it lies there now: its file's bytes, or the digest of a Minari folder.

    Raises:
        ValueError: it is not there, or a folder that cannot be read.
    """
    path, _ = locate(dataset)
    return file_sha256(path) if path.is_file() else load(path).metadata["digest"]
