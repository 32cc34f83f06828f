"""HDF5 files, opened and read so that whatever is wrong becomes one line.

Reading order: `opened` -> `get` -> `put` -> `made`.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import h5py
import numpy as np

COMPRESSION = 4
"""gzip level, as D4RL's files have."""

CHUNK_BYTES = 1 << 20
"""Size of the blocks an array is compressed in [bytes]."""


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """An HDF5 file for reading; whatever is wrong with it becomes one line.

    Raises:
        ValueError: no such file, no HDF5, or truncated.
    """
    if not path.is_file():
        raise ValueError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}")
    if not h5py.is_hdf5(path):
        with open(path, "rb") as raw:
            start = raw.read(16)
        raise ValueError(f"{path} is not an HDF5 file: it begins with {start!r}")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} is truncated or damaged: {_reason(error)}") from None
    with file:
        yield file


def get(path: Path, file: h5py.Group, key: str) -> np.ndarray:
    """The whole array under `key`.

    Raises:
        ValueError: it is missing, no array, or damaged.
    """
    where = f"{file.name or ''}/{key}".lstrip("/")
    if key not in file:
        raise ValueError(f"{path}: no dataset {where!r}; it holds {', '.join(file) or 'nothing'}")
    try:
        found = file[key]
    except KeyError:
        raise ValueError(f"{path}: {where} is a link to what is not there") from None
    if not isinstance(found, h5py.Dataset):
        raise ValueError(f"{path}: {where} is a group, not an array")
    if found.dtype.kind not in "biuf":
        raise ValueError(f"{path}: {where} holds {found.dtype}, not numbers")
    try:
        return found[()]
    except OSError as error:
        raise ValueError(f"{path}: {where} is damaged: {_reason(error)}") from None


def put(file: h5py.Group, key: str, values: np.ndarray) -> None:
    """Compressed in blocks of whole rows, so that reading touches each once."""
    row = max(values.nbytes // len(values), 1)
    chunk = (min(len(values), max(CHUNK_BYTES // row, 1)), *values.shape[1:])
    options = {"compression": "gzip", "compression_opts": COMPRESSION, "shuffle": True}
    file.create_dataset(key, data=values, chunks=chunk, **options)


@contextmanager
def made(raw: IO[bytes], **options) -> Iterator[h5py.File]:
    """A new HDF5 file that is written into `raw` when all of it is there.

    It is made in memory, which takes as much as the file will: where the disk fills up while HDF5
    itself writes to it, HDF5 crashes the process.

    Raises:
        OSError: the disk is full.
    """
    image = io.BytesIO()
    with h5py.File(image, "w", **options) as file:
        yield file
    raw.write(image.getbuffer())


def _reason(error: OSError) -> str:
    """What HDF5 says, in its brackets."""
    text = str(error)
    return text[text.find("(") + 1 : text.rfind(")")] if "(" in text else text
