"""Downloads that can be broken off: they go on where they stopped, and are checked.

A file comes into `<name>.part` beside where it will lie; `<name>.part.tag` holds the server's mark
of its version (ETag or date). Started again, the download asks for the rest of that very version
(`Range` with `If-Range`, RFC 9110) and begins anew where the server cannot, or has another one. It
takes its name only when it is whole and an HDF5 file. Its checksum is recorded beside it at the
first download; a later one that gives something else is refused.

Reading order: `download` -> `_fetch`.
"""

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from ctrl_rl.checkpoints import write_text
from offline.datasets import file_sha256
from offline.hdf5 import opened
from offline.inspection import changed_files, checksum_of, checksum_path

ATTEMPTS = 5
"""Connections before a download is given up; each that brought something counts anew."""

PAUSE_S = 1.0
"""Wait before the second attempt [s]; doubled each time."""

TIMEOUT_S = 60.0
"""Longest silence of a server [s]."""

BLOCK = 1 << 18
"""Bytes read at a time."""


class Interrupted(OSError):
    """A connection that ended before the file did."""


def download(
    url: str,
    path: Path,
    progress: Callable[[int, int | None], None] | None = None,
    pause_s: float = PAUSE_S,
) -> str:
    """Fetch `url` to `path`, going on from an earlier attempt.

    Args:
        url: http or https address of an HDF5 file.
        path: where it shall lie; its folder is made.
        progress: called with bytes there and bytes in all, if known.
        pause_s: wait before the second attempt [s].

    Returns:
        "downloaded", or "there" if it was there already and is what was recorded.

    Raises:
        ValueError: what came is no HDF5 file, or not what came the first time; the server says no.
        OSError: the connection broke too often; what came is kept, and the same call goes on.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is no http address")
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded = checksum_path(path)
    if path.is_file():
        changed = changed_files(path)
        if changed:
            raise ValueError(
                f"{path} differs from the checksum recorded when it was downloaded; remove it and "
                "download it again"
            )
        if changed is None:
            _check_whole(path)
            write_text(recorded, checksum_of(path))
        return "there"
    part = path.with_name(path.name + ".part")
    tag = path.with_name(path.name + ".part.tag")
    failures = 0
    while True:
        before = part.stat().st_size if part.is_file() else 0
        try:
            _fetch(url, part, tag, progress)
            break
        except urllib.error.HTTPError as error:
            raise ValueError(f"{url}: the server answers {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            there = part.stat().st_size if part.is_file() else 0
            failures = 1 if there > before else failures + 1
            if failures >= ATTEMPTS:
                reason = getattr(error, "reason", None) or error
                raise OSError(
                    f"{url}: {reason}; {there} bytes are kept, the same command goes on"
                ) from None
            time.sleep(pause_s * 2 ** (failures - 1))
    try:
        _check_whole(part, url)
    except ValueError:
        part.unlink()
        tag.unlink(missing_ok=True)
        raise
    if recorded.is_file() and not recorded.read_text().startswith(file_sha256(part)):
        raise ValueError(
            f"{url} is not what it was: {recorded} holds the checksum of the first download; what "
            f"came now is {part}"
        )
    os.replace(part, path)
    tag.unlink(missing_ok=True)
    write_text(recorded, checksum_of(path))
    return "downloaded"


def download_minari(dataset: str, folder: Path) -> str:
    """Fetch a Minari data set by the package of that name, which knows its servers.

    Args:
        dataset: id, (namespace/)name-vN.
        folder: where Minari puts it.

    Returns:
        "downloaded", or "there".

    Raises:
        ValueError: the package is missing or refuses.
        OSError: it could not reach its server.
    """
    if (folder / "data").is_dir():
        if changed := changed_files(folder):
            raise ValueError(f"{folder / changed[0]} differs from the checksum of its download")
        return "there"
    try:
        import minari
    except ImportError:
        raise ValueError(
            f"{dataset} is a Minari data set: pip install 'ctrl-rl[data]' to download it"
        ) from None
    try:
        minari.download_dataset(dataset)
    except ValueError as error:
        raise ValueError(f"{dataset}: {error}") from None
    except Exception as error:  # the clients of its servers raise kinds of their own
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise OSError(f"{dataset}: minari could not download it: {reason}") from None
    if not (folder / "data").is_dir():
        raise ValueError(f"{dataset}: minari left nothing in {folder}")
    write_text(checksum_path(folder), checksum_of(folder))
    return "downloaded"


def _fetch(
    url: str, part: Path, tag: Path, progress: Callable[[int, int | None], None] | None
) -> None:
    """One connection: append to `part` until the server's file is whole."""
    have = part.stat().st_size if part.is_file() else 0
    version = tag.read_text() if have and tag.is_file() else None
    request = urllib.request.Request(url)
    if version:  # without a mark, nobody can tell that the rest belongs to the same file
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", version)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing beyond what we have: whole, or another file
            raise
        length = (error.headers.get("Content-Range") or "").rpartition("/")[2]
        if length.isdigit() and int(length) == have:
            return
        part.unlink()
        raise Interrupted("the server has a shorter file now") from None
    with answer:
        goes_on = answer.status == 206
        if goes_on:
            start = (answer.headers.get("Content-Range") or "").removeprefix("bytes ")
            if not start.startswith(f"{have}-"):
                part.unlink()
                raise Interrupted("the server sent another part than was asked for")
        else:
            have = 0
            mark = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            if mark and not mark.startswith("W/"):
                write_text(tag, mark)
            else:
                tag.unlink(missing_ok=True)
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else None
        with open(part, "ab" if goes_on else "wb") as file:
            while block := answer.read(BLOCK):
                file.write(block)
                have += len(block)
                if progress:
                    progress(have, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have < total:
        raise Interrupted(f"the connection ended after {have} of {total} bytes")


def _check_whole(path: Path, url: str | None = None) -> None:
    """Refuse what is no HDF5 file, or only the start of one."""
    try:
        with opened(path):
            pass
    except ValueError as error:
        raise ValueError(f"{url}: what came is unusable: {error}" if url else str(error)) from None
