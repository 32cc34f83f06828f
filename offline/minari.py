"""Minari data sets, read and written without the package of that name (their layout of 0.5).

A folder with `data/metadata.json` and the episodes beside it, in one of two forms:

    hdf5             data/main_data.hdf5 with groups episode_0, episode_1, ...
    arrow, parquet   data/<episode>/part-0.arrow and data/<episode>/metadata.json

An episode has `observations` (n + 1, ...), `actions` (n, ...), `rewards`, `terminations`,
`truncations` (n,) and `infos` (n + 1, ...). In the second form all columns have n + 1 rows and
the last of the shorter ones is padding. An episode with n observations lacks what followed its last
step: it is taken, with `final_known` False, and named in the metadata.

Observations that are a dict (or tuple) are laid side by side in the order of their names, nested
names with a slash, or as `obs_keys` says; the order stands in the metadata as `obs_order`. A part
of more than one dimension is flattened row by row.

Not read: pictures, text, discrete actions; the last row of `infos`, which belongs to the
observation after the last step; options and seeds of single episodes.

What we write has Box spaces, no pictures, and our own metadata under "ctrl_rl"; an episode whose
final observation is not known carries the mark `final_unknown`.

Reading order: `read` -> `write`.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctrl_rl.checkpoints import write_text
from offline.arrays import (
    check_bounds,
    check_lengths,
    check_width,
    flags,
    numbers,
    series,
    vectors,
)
from offline.episodes import Episodes
from offline.minari_files import (
    STEPS,
    Tree,
    arrow_episodes,
    hdf5_episodes,
    read_json,
    write_arrow,
    write_hdf5,
)

FORMATS = ("hdf5", "arrow", "parquet")
VERSION = "0.5.4"
"""Version of Minari whose layout this is; its own reader asks for it."""


def is_dataset(path: Path) -> bool:
    """Whether a folder looks like one."""
    return (path / "data" / "metadata.json").is_file() or (path / "metadata.json").is_file()


def read(
    path: Path,
    *,
    infos: Sequence[str] | bool = (),
    obs_keys: Sequence[str] | None = None,
    widths: tuple[int | None, int | None] = (None, None),
    action_bounds: tuple[Any, Any] | None = None,
) -> Episodes:
    """Read a whole data set.

    Args:
        path: its folder, the one that holds `data`, or `data` itself.
        infos: names of infos to read too; True for all of the first episode's that are numbers.
        obs_keys: parts of a dict observation, in the order wanted; None for all, by name.
        widths: columns of observations and actions to insist on.
        action_bounds: lowest and highest action; None for those of the data set's action space.

    Raises:
        ValueError: no data set, or one that is damaged or of a kind that is not read; one line with
            file, episode, key and row.
    """
    path = Path(path)
    folder = path / "data" if (path / "data").is_dir() else path
    about = read_json(folder / "metadata.json")
    parts: list[dict[str, Any]] = []
    order: list[list] = []
    repaired: list[int] = []
    for number, where, episode in _episodes(folder, about):
        reward = series(where, "rewards", episode["rewards"])
        steps = len(reward)
        ends = {key: flags(where, key, episode[key]) for key in STEPS[1:]}
        check_lengths(where, {"rewards": steps} | {k: len(v) for k, v in ends.items()})
        obs, found = _joined(where, "observations", episode["observations"], obs_keys)
        action, _ = _joined(where, "actions", episode["actions"], None)
        check_lengths(where, {"rewards": steps, "actions": len(action)})
        if order and [name for name, _ in found] != [name for name, _ in order]:
            raise ValueError(f"{where}: observations have the parts {found}, before {order}")
        order = found
        known = len(obs) == steps + 1 and not episode["final_unknown"]
        if len(obs) == steps:
            obs = np.concatenate([obs, obs[-1:]])
            repaired.append(number)
        if len(obs) != steps + 1:
            raise ValueError(
                f"{where}: observations has {len(obs)} rows, {steps} steps need {steps + 1}"
            )
        for key, flag in ends.items():
            if flag[:-1].any():
                row = int(np.argmax(flag))
                raise ValueError(f"{where}: {key}, row {row} ends the episode before its last step")
        check_width(where, "observations", obs, widths[0])
        check_width(where, "actions", action, widths[1])
        if parts:
            check_width(where, "observations", obs, parts[0]["obs"].shape[1])
            check_width(where, "actions", action, parts[0]["action"].shape[1])
        names = list(parts[0]["infos"]) if parts else infos
        part = {"obs": obs, "action": action, "reward": reward, "final_known": known}
        part |= {"terminated": ends["terminations"][-1], "truncated": ends["truncations"][-1]}
        part["infos"] = _chosen_infos(where, episode["infos"], names, steps)
        parts.append(part)
    if len(parts) != about.get("total_episodes", len(parts)):
        raise ValueError(
            f"{folder}: {len(parts)} episodes are there, metadata.json counts "
            f"{about['total_episodes']}"
        )
    if not parts:
        raise ValueError(f"{folder}: there is no episode")
    metadata = _metadata(about)
    metadata["file"] = path.name
    if order != [["", parts[0]["obs"].shape[1]]]:
        metadata["obs_order"] = order
    if repaired:
        metadata["final_obs_missing"] = repaired
    action = np.concatenate([part["action"] for part in parts])
    check_bounds(folder, "actions", action, action_bounds or metadata.get("action_bounds"))
    rewards = {part["reward"].dtype for part in parts}
    return Episodes(
        obs=np.concatenate([part["obs"] for part in parts]),
        action=action,
        reward=np.concatenate([part["reward"] for part in parts], dtype=max(rewards)),
        lengths=np.array([len(part["reward"]) for part in parts], np.int64),
        **{
            flag: np.array([part[flag] for part in parts], bool)
            for flag in ("terminated", "truncated", "final_known")
        },
        infos={
            name: np.concatenate([part["infos"][name] for part in parts])
            for name in parts[0]["infos"]
        },
        metadata=metadata,
    )


def write(path: Path, episodes: Episodes, data_format: str = "hdf5") -> None:
    """Write a data set as a new folder; `read` gives back equal episodes.

    The folder takes its name only when it is whole.

    Args:
        path: the folder; its name becomes the data set's id, with "-v0" if it has no version.
        episodes: what to write.
        data_format: "hdf5", or "arrow" or "parquet", for which pyarrow is needed.

    Raises:
        ValueError: it exists already, its parent does not, an unknown format, or the disk is full;
            nothing of that name is left.
    """
    path = Path(path)
    if data_format not in FORMATS:
        raise ValueError(f"data_format must be one of {', '.join(FORMATS)}, not {data_format!r}")
    if path.exists():
        raise ValueError(f"{path} exists already")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path.absolute().parent} is no folder")
    part = path.with_name(path.name + ".tmp")
    shutil.rmtree(part, ignore_errors=True)
    folder = part / "data"
    try:
        folder.mkdir(parents=True)
        save = write_hdf5 if data_format == "hdf5" else write_arrow
        save(folder, episodes, data_format)
        about = _about(path.name, episodes, data_format)
        about["dataset_size"] = round(
            sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6, 1
        )
        write_text(folder / "metadata.json", json.dumps(about))
        os.replace(part, path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def schema(path: Path) -> dict[str, dict[str, Any]]:
    """Key -> shape and type of the arrays of the first episode, padding cut off.

    Raises:
        ValueError: no data set, or a damaged one.
    """
    folder = path / "data" if (path / "data").is_dir() else path
    for _, _, episode in _episodes(folder, read_json(folder / "metadata.json")):
        found = {}
        for key, values in episode.items():
            leaves = values if isinstance(values, dict) else {"": values}
            for name, leaf in leaves.items():
                if isinstance(leaf, np.ndarray):
                    entry = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
                    found[f"{key}/{name}".rstrip("/")] = entry
        return found
    raise ValueError(f"{folder}: there is no episode")


# Reading -----------------------------------------------------------------------------------------


def _episodes(folder: Path, about: dict) -> Iterator[tuple[int, Path, dict[str, Any]]]:
    """The episodes in whatever form they are stored."""
    kind = about.get("data_format", "hdf5")
    if kind not in FORMATS:
        raise ValueError(f"{folder / 'metadata.json'}: data_format {kind!r}; known: {FORMATS}")
    return hdf5_episodes(folder) if kind == "hdf5" else arrow_episodes(folder, kind)


def _joined(
    where: Path, key: str, tree: Tree, wanted: Sequence[str] | None
) -> tuple[np.ndarray, list[list]]:
    """Leaves side by side (rows, d) float32, and [name, width] of each."""
    natural = lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]  # noqa: E731
    names = sorted(tree, key=natural) if wanted is None else list(wanted)
    columns = []
    for name in names:
        if name not in tree:
            raise ValueError(f"{where}: no part {name!r} in {key}; there are: {', '.join(tree)}")
        full, values = f"{key}/{name}".rstrip("/"), tree[name]
        if values.dtype.kind not in "biuf":
            raise ValueError(f"{where}: {full} holds {values.dtype}, not numbers")
        if values.dtype.kind in "iu" and (values.ndim == 1 or values.dtype == np.uint8):
            what = "pictures" if values.ndim > 2 else "discrete values"
            raise ValueError(f"{where}: {full} holds {what} ({values.dtype}), which are not read")
        size = int(np.prod(values.shape[1:]))
        columns.append(vectors(where, full, values.reshape(len(values), size)))
    check_lengths(where, {f"{key}/{n}": len(c) for n, c in zip(names, columns, strict=True)})
    joined = columns[0] if len(columns) == 1 else np.concatenate(columns, 1)
    return joined, [[n, c.shape[1]] for n, c in zip(names, columns, strict=True)]


def _chosen_infos(where: Path, tree: Tree, wanted: Sequence[str] | bool, steps: int) -> Tree:
    """One row per step: an info stands beside the observation it was given with."""
    if wanted is True:  # those that are numbers, a row per step: a text is nothing to learn from
        good = lambda x: x.dtype.kind in "biuf" and x.ndim and len(x) in (steps, steps + 1)  # noqa: E731
        return {name: values[:steps] for name, values in tree.items() if good(values)}
    names = list(wanted or ())
    for name in names:
        if name not in tree:
            raise ValueError(f"{where}: no infos/{name}; there are: {', '.join(tree) or 'none'}")
        if not tree[name].ndim or len(tree[name]) not in (steps, steps + 1):
            raise ValueError(f"{where}: infos/{name} has not one row for each of {steps} steps")
        numbers(where, f"infos/{name}", tree[name], tree[name].dtype)
    return {name: tree[name][:steps] for name in names}


def _metadata(about: dict) -> dict[str, Any]:
    """Ours as it was written; else what others' files say of use."""
    if isinstance(about.get("ctrl_rl"), dict):
        return dict(about["ctrl_rl"])
    names = ("dataset_id", "algorithm_name", "code_permalink", "ref_min_score", "ref_max_score")
    found = {name: about[name] for name in names if about.get(name) is not None}
    try:
        if about.get("env_spec"):
            found["env"] = json.loads(about["env_spec"])["id"]
        space = json.loads(about["action_space"])
        if space["type"] == "Box":
            clean = lambda bound: [v if np.isfinite(v) else None for v in np.ravel(bound).tolist()]  # noqa: E731
            found["action_bounds"] = [clean(space["low"]), clean(space["high"])]
    except (KeyError, TypeError, ValueError):
        pass  # a description that is missing or odd: the arrays speak for themselves
    return found


# Writing -----------------------------------------------------------------------------------------


def _about(name: str, episodes: Episodes, data_format: str) -> dict[str, Any]:
    """Contents of metadata.json."""
    bounds = episodes.metadata.get("action_bounds") or [[None] * episodes.action_size] * 2
    infinite = float("inf")
    low = [-infinite if v is None else v for v in bounds[0]]
    high = [infinite if v is None else v for v in bounds[1]]
    about = {
        "total_episodes": episodes.num_episodes,
        "total_steps": episodes.num_steps,
        "data_format": data_format,
        "jpeg_encoding": False,
        "observation_space": _box([-infinite] * episodes.obs_size, [infinite] * episodes.obs_size),
        "action_space": _box(low, high),
        "dataset_id": name if re.search(r"-v\d+$", name) else f"{name}-v0",
        "minari_version": VERSION,
        "ctrl_rl": episodes.metadata,
    }
    for key in ("algorithm_name", "ref_min_score", "ref_max_score"):
        if key in episodes.metadata:
            about[key] = episodes.metadata[key]
    return about


def _box(low: list[float], high: list[float]) -> str:
    space = {"type": "Box", "dtype": "float32", "shape": [len(low)], "low": low, "high": high}
    return json.dumps(space)
