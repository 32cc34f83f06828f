"""Files that survive a kill or a full disk, and hold nothing but data.

A file is written under a temporary name, synced and renamed, so that its own name always stands
for something whole. A checkpoint holds tensors and plain Python values only, so that it is read
without running any code in it.
"""

import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

FORMAT = 1
"""Version of checkpoints and of config.json; another one is refused."""

MIN_FREE_BYTES = 256 * 2**20
"""Free disk a run asks for before it starts."""


def plain(value, where: str = "checkpoint"):
    """A copy of `value` made of tensors, dict, list, tuple, str, int, float, bool and None.

    Tensors come back detached, on the CPU, without the rest of a shared storage.

    Raises:
        TypeError: anything else (a numpy float is no float), naming where it stands.
    """
    if type(value) in (str, int, float, bool, type(None)):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        whole = value.numel() * value.element_size() == value.untyped_storage().nbytes()
        return value if whole else value.clone()
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{where}: key {key!r} is neither text nor an integer")
        return {k: plain(v, f"{where}.{k}") for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(v, f"{where}.{i}") for i, v in enumerate(value))
    raise TypeError(f"{where} holds a {type(value).__module__}.{type(value).__qualname__}")


def save_checkpoint(path: Path, content: dict) -> None:
    """Write `content` so that `path` always holds either the old or the whole new file.

    Raises:
        TypeError: a value that `plain` refuses; nothing is written.
        OSError: the disk is full or unwritable; the old file stands.
    """
    try:
        with replacing(path, "wb") as file:
            torch.save(plain({"format": FORMAT, **content}), file)
    except RuntimeError as error:  # torch reports a full disk as an error of its own
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def load_checkpoint(path: Path, kinds: dict | None = None) -> dict:
    """Read a checkpoint; tensors on the CPU. No code in the file is run.

    Args:
        path: the file.
        kinds: key -> type of what it must hold; no dict among them may be empty.

    Raises:
        ValueError: no such file, not a checkpoint, damaged, or of another format version.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself skips the checksums
            if broken := archive.testzip():
                raise ValueError(f"wrong checksum of {broken}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch would advise to run whatever is in it
        raise ValueError(
            f"{path} is not a checkpoint of ctrl-rl: it holds something other than data"
        ) from None
    except Exception as error:  # torch raises many kinds for many sorts of damage
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} is damaged or not a checkpoint: {reason}") from None
    if not isinstance(content, dict) or "format" not in content:
        raise ValueError(f"{path} is not a checkpoint of ctrl-rl")
    if content["format"] != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {content['format']}, this version reads {FORMAT}"
        )
    check_kinds(content, kinds or {}, f"{path} is damaged: it")
    for key in kinds or {}:
        if content[key] == {}:
            raise ValueError(f"{path} is damaged: its {key} is empty")
    return content


def check_kinds(content: dict, kinds: dict, who: str) -> None:
    """Refuse content without a key of `kinds`, or with a value of another type under it.

    Raises:
        ValueError: `who` holds none; the first such key.
    """
    for key, kind in kinds.items():
        if key not in content or not isinstance(content[key], kind):
            raise ValueError(f"{who} holds no {key} ({getattr(kind, '__name__', kind)})")


def make_folder(folder: Path) -> None:
    """Make a folder, with its parents, and see that a run can be written there.

    Raises:
        ValueError: it cannot be written, or its disk is too full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / ".writable") as file:
            file.write("x")
        (folder / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror or error}") from None
    check_free(folder)


def check_free(folder: Path, more: int = 0) -> None:
    """See that a run that writes `more` bytes than usual finds room.

    Raises:
        ValueError: the disk of `folder` is too full.
    """
    free, needed = shutil.disk_usage(folder).free, MIN_FREE_BYTES + more
    if free < needed:
        raise ValueError(
            f"only {free / 2**20:.0f} MiB free for {folder}; a run needs {needed >> 20} MiB"
        )


class replacing:
    """A file opened under a temporary name that takes its real one when all went well."""

    def __init__(self, path: Path, mode: str = "w") -> None:
        self.path, self.mode = path, mode
        self.temporary = path.with_name(path.name + ".tmp")

    def __enter__(self):
        self.file = open(self.temporary, self.mode)
        return self.file

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self.file.flush()
                os.fsync(self.file.fileno())
        except OSError:
            kind = OSError
            raise
        finally:
            self.file.close()
            if kind is not None:
                self.temporary.unlink(missing_ok=True)
        if kind is None:
            os.replace(self.temporary, self.path)
            _sync_folder(self.path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut; Windows has no such call."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one go."""
    with replacing(path) as file:
        file.write(text)


# States -------------------------------------------------------------------------------------


def check_like(saved, like, where: str, rows_may_differ: bool = False) -> None:
    """Refuse a state that lacks a key of `like`, or holds another kind or size under one.

    Args:
        saved: a state out of a checkpoint.
        like: the same state as it stands before it is loaded.
        where: its name, for errors.
        rows_may_differ: whether tensors may have any number of rows.

    Raises:
        ValueError: the first such key.
    """
    if isinstance(like, dict) and isinstance(saved, dict):
        for key, value in like.items():
            if key not in saved:
                raise ValueError(f"its {where} lacks {key}")
            check_like(saved[key], value, f"{where}.{key}", rows_may_differ)
    elif isinstance(like, torch.Tensor) and isinstance(saved, torch.Tensor):
        here, there = like.shape[rows_may_differ:], saved.shape[rows_may_differ:]
        if (saved.dtype, saved.ndim, there) != (like.dtype, like.ndim, here):
            raise ValueError(
                f"its {where} is {saved.dtype} {tuple(saved.shape)}, "
                f"not {like.dtype} {tuple(like.shape)}"
            )
    elif like is not None and type(saved) is not type(like):
        raise ValueError(f"its {where} is of type {type(saved).__name__}")


def take_weights(learner, state: dict, *names: str) -> None:
    """Load what another run of the same kind of learner has under these names.

    Args:
        learner: has a module, or a dictionary of normalisers, as an attribute of each name.
        state: the other learner's `state_dict()`.
        names: keys of `state`.

    Raises:
        ValueError: one is missing, or has other sizes; what stands before it was loaded.
    """
    for name in names:
        part, saved = getattr(learner, name), state.get(name)
        try:
            if not isinstance(part, dict):
                part, saved = {"": part}, {"": saved}
            elif not isinstance(saved, dict) or saved.keys() != part.keys():
                raise ValueError(f"its {name} are others: normalize_obs differs")
            for key, module in part.items():
                check_like(saved[key], module.state_dict(), f"{name}.{key}".rstrip("."))
                module.load_state_dict(saved[key])
        except (ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())
            raise ValueError(f"cannot start from a run with other networks: {text}") from None
