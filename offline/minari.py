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

import h5py
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
from offline.hdf5 import opened, put

FORMATS = ("hdf5", "arrow", "parquet")
MAIN = "main_data.hdf5"
VERSION = "0.5.4"
"""Version of Minari whose layout this is; its own reader asks for it."""

STEPS = ("rewards", "terminations", "truncations")

Tree = dict[str, np.ndarray]
"""Leaf name -> array; the name of an undivided space is ""."""


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
        infos: names of infos to read too; True for all of the first episode's.
        obs_keys: parts of a dict observation, in the order wanted; None for all, by name.
        widths: columns of observations and actions to insist on.
        action_bounds: lowest and highest action; None for those of the data set's action space.

    Raises:
        ValueError: no data set, or one that is damaged or of a kind that is not read; one line with
            file, episode, key and row.
    """
    path = Path(path)
    folder = path / "data" if (path / "data").is_dir() else path
    about = _read_json(folder / "metadata.json")
    kind = about.get("data_format", "hdf5")
    if kind not in FORMATS:
        raise ValueError(f"{folder / 'metadata.json'}: data_format {kind!r}; known: {FORMATS}")
    parts: list[dict[str, Any]] = []
    order: list[list] = []
    repaired: list[int] = []
    source = _hdf5_episodes(folder) if kind == "hdf5" else _arrow_episodes(folder, kind)
    for number, where, episode in source:
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
        ValueError: it exists already, its parent does not, or an unknown format.
        OSError: the disk is full; nothing of that name is left.
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
    folder.mkdir(parents=True)
    try:
        save = _write_hdf5 if data_format == "hdf5" else _write_arrow
        save(folder, episodes, data_format)
        about = _about(path.name, episodes, data_format)
        about["dataset_size"] = round(
            sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6, 1
        )
        write_text(folder / "metadata.json", json.dumps(about))
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


# Reading -----------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {path.parent} is no Minari data set")
    try:
        found = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is no JSON text") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object")
    return found


def _hdf5_episodes(folder: Path) -> Iterator[tuple[int, Path, dict[str, Any]]]:
    """(number, name for errors, arrays) of each episode, in order of the number."""
    path = folder / MAIN
    with opened(path) as file:
        for number, name in _numbered(file, r"episode_(\d+)"):
            where, group = path / name, _group(path, file, name)
            for key in ("observations", "actions", *STEPS):
                if key not in group:
                    raise ValueError(f"{where}: no {key!r}; it holds {', '.join(group)}")
            try:
                tree = {key: _hdf5_tree(group[key]) for key in (*STEPS, "observations", "actions")}
                tree["infos"] = _hdf5_tree(group["infos"]) if "infos" in group else {}
            except OSError as error:
                raise ValueError(f"{where} is damaged: {error}") from None
            flat = {key: tree[key].get("", np.empty(0)) for key in STEPS}
            yield number, where, tree | flat | {"final_unknown": "final_unknown" in group.attrs}


def _group(path: Path, file: h5py.File, name: str) -> Any:
    """A group of a file; h5py's types know no more."""
    if not isinstance(file[name], h5py.Group):
        raise ValueError(f"{path}: {name} is no group")
    return file[name]


def _hdf5_tree(item: Any) -> Tree:
    if isinstance(item, h5py.Dataset):
        return {"": item[()]}
    found: Tree = {}
    visit = lambda k, x: found.update({k: x[()]}) if isinstance(x, h5py.Dataset) else None  # noqa: E731
    item.visititems(visit)
    return found


def _arrow_episodes(folder: Path, kind: str) -> Iterator[tuple[int, Path, dict[str, Any]]]:
    """As `_hdf5_episodes`; the padding is cut off."""
    pyarrow = _import_pyarrow()
    names = [child.name for child in folder.iterdir() if child.is_dir()]
    for number, name in _numbered(names, r"(\d+)"):
        where = folder / name
        files = sorted(where.glob(f"*.{kind}"))
        if not files:
            raise ValueError(f"{where}: no file ends in .{kind}")
        try:
            table = pyarrow.concat_tables([_read_table(file, kind) for file in files])
        except (OSError, pyarrow.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{where} is damaged or not {kind}: {reason}") from None
        columns = {key: _column(where, table, key) for key in ("observations", "actions", *STEPS)}
        tree = {key: _arrow_tree(column) for key, column in columns.items()}
        infos = _column(where, table, "infos") if "infos" in table.column_names else None
        about = _read_json(where / "metadata.json") if (where / "metadata.json").is_file() else {}
        rows = len(table)
        steps = about.get("total_steps", rows - 1)
        if steps not in (rows - 1, rows) or steps < 0:
            raise ValueError(f"{where}: {rows} rows, but metadata.json counts {steps} steps")
        short: dict[str, Any] = {"actions": {k: v[:steps] for k, v in tree["actions"].items()}}
        short |= {key: tree[key][""][:steps] for key in STEPS}
        rest: dict[str, Any] = {"infos": {} if infos is None else _arrow_tree(infos)}
        rest["final_unknown"] = bool(about.get("final_unknown"))
        yield number, where, {"observations": tree["observations"], **short, **rest}


def _read_table(file: Path, kind: str):
    pyarrow = _import_pyarrow()
    if kind == "parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(file, partitioning=None)
    with pyarrow.OSFile(str(file)) as raw, pyarrow.ipc.open_file(raw) as reader:
        return reader.read_all()


def _column(where: Path, table, key: str):
    if key not in table.column_names:
        raise ValueError(f"{where}: no {key!r}; it holds {', '.join(table.column_names)}")
    return table[key].combine_chunks()


def _arrow_tree(column, shape: Sequence[int] = ()) -> Tree:
    """Leaves of a struct column; lists of fixed size become rows."""
    types = _import_pyarrow().types
    if hasattr(column, "chunks"):  # combine_chunks gives an array only in newer versions
        column = column.chunk(0)
    if types.is_struct(column.type):
        found: Tree = {}
        for i, field in enumerate(column.type):
            sizes = (field.metadata or {}).get(b"shape", b"").split(b",")
            inner = _arrow_tree(column.field(i), [int(size) for size in sizes if size])
            found |= {f"{field.name}/{k}".rstrip("/"): v for k, v in inner.items()}
        return found
    if types.is_fixed_size_list(column.type):
        values = column.flatten().to_numpy(zero_copy_only=False)
        return {"": values.reshape(len(column), *(shape or (column.type.list_size,)))}
    return {"": column.to_numpy(zero_copy_only=False)}


def _numbered(names, pattern: str) -> list[tuple[int, str]]:
    """Names that match, by their number; "episode_10" comes after "episode_9"."""
    found = ((re.fullmatch(pattern, name), name) for name in names)
    return sorted((int(match[1]), name) for match, name in found if match)


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
    names = list(tree) if wanted is True else list(wanted or ())
    for name in names:
        if name not in tree:
            raise ValueError(f"{where}: no infos/{name}; there are: {', '.join(tree) or 'none'}")
        if len(tree[name]) not in (steps, steps + 1):
            raise ValueError(f"{where}: infos/{name} has {len(tree[name])} rows for {steps} steps")
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


def _episode_arrays(episodes: Episodes) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """(number, arrays, whether the final observation is unknown) of each episode."""
    for e, (step, row, n) in enumerate(
        zip(episodes.step_starts, episodes.obs_starts, episodes.lengths, strict=True)
    ):
        flag = {key: np.zeros(n, bool) for key in STEPS[1:]}
        flag["terminations"][-1] = episodes.terminated[e]
        flag["truncations"][-1] = episodes.truncated[e]
        arrays = {
            "observations": episodes.obs[row : row + n + 1],
            "actions": episodes.action[step : step + n],
            "rewards": episodes.reward[step : step + n],
            **flag,
            "infos": {  # the row beside the last observation repeats the one before
                name: np.concatenate([values[step : step + n], values[step + n - 1 : step + n]])
                for name, values in episodes.infos.items()
            },
        }
        yield e, arrays, not episodes.final_known[e]


def _write_hdf5(folder: Path, episodes: Episodes, data_format: str) -> None:
    with open(folder / MAIN, "w+b") as raw:
        with h5py.File(raw, "w", track_order=True) as file:
            for e, arrays, final_unknown in _episode_arrays(episodes):
                group = file.create_group(f"episode_{e}")
                group.attrs["id"] = e
                group.attrs["total_steps"] = len(arrays["rewards"])
                if final_unknown:
                    group.attrs["final_unknown"] = True
                infos = arrays.pop("infos")
                for key, values in arrays.items():
                    put(group, key, values)
                for name, values in infos.items():
                    put(group, f"infos/{name}", values)
        raw.flush()
        os.fsync(raw.fileno())


def _write_arrow(folder: Path, episodes: Episodes, data_format: str) -> None:
    pa = _import_pyarrow()

    def rows(values: np.ndarray, pad: int = 0):
        values = np.concatenate([values, np.zeros_like(values[:1])]) if pad else values
        if values.ndim == 1:
            return pa.array(values)
        flat = np.ascontiguousarray(values).reshape(len(values), -1)
        kind = pa.list_(pa.from_numpy_dtype(flat.dtype), flat.shape[1])
        return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), type=kind)

    for e, arrays, final_unknown in _episode_arrays(episodes):
        infos = arrays.pop("infos")
        columns = {key: rows(v, pad=key != "observations") for key, v in arrays.items()}
        if infos:
            parts = {name: rows(values) for name, values in infos.items()}
            fields = [
                pa.field(
                    name,
                    part.type,
                    metadata={"shape": ",".join(map(str, infos[name].shape[1:]))}
                    if infos[name].ndim > 1
                    else None,
                )
                for name, part in parts.items()
            ]
            columns["infos"] = pa.StructArray.from_arrays(list(parts.values()), fields=fields)
        table = pa.table(columns)
        (folder / str(e)).mkdir()
        with open(folder / str(e) / f"part-0.{data_format}", "wb") as raw:
            if data_format == "parquet":
                import pyarrow.parquet

                pyarrow.parquet.write_table(table, raw)
            else:
                with pa.ipc.new_file(raw, table.schema) as writer:
                    writer.write_table(table)
            raw.flush()
            os.fsync(raw.fileno())
        about: dict[str, Any] = {"id": e, "total_steps": len(arrays["rewards"])}
        if final_unknown:
            about["final_unknown"] = True
        write_text(folder / str(e) / "metadata.json", json.dumps(about))


def _import_pyarrow():
    try:
        import pyarrow
    except ImportError:
        raise ValueError(
            "this form of a Minari data set needs pyarrow: pip install 'ctrl-rl[data]'"
        ) from None
    import pyarrow.types

    return pyarrow
