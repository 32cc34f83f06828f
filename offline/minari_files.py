"""Episodes of a Minari data set as they lie on disk: one HDF5 file, or Arrow files in folders.

What the arrays mean is `offline.minari`'s; here they are read as they are.

Reading order: `hdf5_episodes`, `arrow_episodes` -> `write_hdf5`, `write_arrow`.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ctrl_rl.checkpoints import write_text
from offline.episodes import Episodes
from offline.hdf5 import made, opened, put

MAIN = "main_data.hdf5"

STEPS = ("rewards", "terminations", "truncations")

Tree = dict[str, np.ndarray]
"""Leaf name -> array; the name of an undivided space is ""."""


def hdf5_episodes(folder: Path) -> Iterator[tuple[int, Path, dict[str, Any]]]:
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


def arrow_episodes(folder: Path, kind: str) -> Iterator[tuple[int, Path, dict[str, Any]]]:
    """As `hdf5_episodes`; the padding is cut off."""
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
        about = read_json(where / "metadata.json") if (where / "metadata.json").is_file() else {}
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

        return pyarrow.parquet.read_table(file, partitioning=None)  # pyright: ignore
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


def read_json(path: Path) -> dict:
    """A JSON object out of a file. Raises ValueError where there is none."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {path.parent} is no Minari data set")
    try:
        found = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is no JSON text") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object")
    return found


# Writing ----------------------------------------------------------------------------------------


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


def write_hdf5(folder: Path, episodes: Episodes, data_format: str) -> None:
    """All episodes in one file of an existing folder."""
    with open(folder / MAIN, "wb") as raw:
        with made(raw, track_order=True) as file:
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


def write_arrow(folder: Path, episodes: Episodes, data_format: str) -> None:
    """A folder per episode, in the form "arrow" or "parquet"."""
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
