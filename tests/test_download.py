"""A download that is broken off goes on; garbage and another file are refused."""

import http.server
import sys
import threading
import types
from pathlib import Path

import pytest
from recordings import family_arrays, write_hdf5

from offline import download as module
from offline.datasets import file_sha256
from offline.download import download, download_minari
from offline.inspection import checksum_path


class Server:
    """A local web server with moods.

    Attributes:
        content: what it serves.
        tag: its ETag; None for no mark at all.
        breaks: after how many bytes of an answer each of the next connections ends.
        ranges: whether it understands `Range`.
        asked: the `Range` header of each request, or None.
    """

    def __init__(self, content: bytes) -> None:
        self.content, self.tag = content, '"one"'
        self.breaks: list[int] = []
        self.ranges, self.status = True, 200
        self.asked: list[str | None] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                wanted = self.headers.get("Range")
                outer.asked.append(wanted)
                if outer.status != 200:
                    self.send_error(outer.status)
                    return
                content, start = outer.content, 0
                same = self.headers.get("If-Range") == outer.tag
                if wanted and outer.ranges and same:
                    start = int(wanted.removeprefix("bytes=").rstrip("-"))
                    if start >= len(content):
                        self.send_response(416)
                        self.send_header("Content-Range", f"bytes */{len(content)}")
                        self.end_headers()
                        return
                    self.send_response(206)
                    end = len(content) - 1
                    self.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
                else:
                    self.send_response(200)
                if outer.tag:
                    self.send_header("ETag", outer.tag)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                most = outer.breaks.pop(0) if outer.breaks else len(content)
                self.wfile.write(content[start : start + most])

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/gym_mujoco_v2/hopper_medium-v2.hdf5"


@pytest.fixture
def server(tmp_path):
    """It serves a whole file."""
    path = write_hdf5(tmp_path / "original.hdf5", family_arrays("gym", (300, 200)))
    found = Server(path.read_bytes())
    yield found
    found.server.shutdown()
    found.server.server_close()


def names() -> list[str]:
    return sorted(p.name for p in Path("cache").iterdir())


PATH = Path("cache/x.hdf5")


def test_a_file_comes_whole_with_its_checksum(server):
    seen = []
    assert (
        download(server.url, PATH, lambda have, total: seen.append((have, total))) == "downloaded"
    )
    assert PATH.read_bytes() == server.content
    assert names() == ["x.hdf5", "x.hdf5.sha256"]
    assert checksum_path(PATH).read_text() == f"{file_sha256(PATH)}  x.hdf5\n"
    assert seen[-1] == (len(server.content), len(server.content))
    assert download(server.url, PATH) == "there"
    assert len(server.asked) == 1


def test_a_connection_that_breaks_half_way_goes_on(server):
    half = len(server.content) // 2
    server.breaks = [half, 100]
    assert download(server.url, PATH, pause_s=0) == "downloaded"
    assert PATH.read_bytes() == server.content
    assert server.asked == [None, f"bytes={half}-", f"bytes={half + 100}-"]


def test_a_connection_may_break_often_as_long_as_it_brings_something(server):
    server.breaks = [500] * 3 * module.ATTEMPTS
    assert download(server.url, PATH, pause_s=0) == "downloaded"
    assert len(server.asked) == 3 * module.ATTEMPTS + 1
    assert PATH.read_bytes() == server.content


def test_a_later_command_goes_on_where_an_earlier_gave_up(server):
    server.breaks = [1000] + [0] * 10
    with pytest.raises(OSError, match="1000 bytes are kept, the same command goes on"):
        download(server.url, PATH, pause_s=0)
    assert not PATH.exists() and names() == ["x.hdf5.part", "x.hdf5.part.tag"]
    assert len(server.asked) == 1 + module.ATTEMPTS - 1
    server.breaks, server.asked = [], []
    assert download(server.url, PATH) == "downloaded"
    assert server.asked == ["bytes=1000-"]
    assert PATH.read_bytes() == server.content


def test_a_kill_after_the_last_byte_costs_nothing(server):
    Path("cache").mkdir()
    Path("cache/x.hdf5.part").write_bytes(server.content)
    Path("cache/x.hdf5.part.tag").write_text(server.tag)
    assert download(server.url, PATH) == "downloaded"
    assert server.asked == [f"bytes={len(server.content)}-"]
    assert PATH.read_bytes() == server.content


def test_a_server_that_ignores_ranges_is_asked_for_all(server):
    server.ranges, server.breaks = False, [1000]
    assert download(server.url, PATH, pause_s=0) == "downloaded"
    assert PATH.read_bytes() == server.content


def test_halves_of_two_versions_are_never_joined(server):
    server.breaks = [1000] + [0] * 10
    with pytest.raises(OSError):
        download(server.url, PATH, pause_s=0)
    server.breaks, server.tag = [], '"two"'
    server.content = b"\x89HDF\r\n\x1a\n" + b"x" * 5000
    with pytest.raises(ValueError, match="truncated or damaged"):
        download(server.url, PATH)  # all of the second, which is no whole file
    assert names() == []
    server.tag, server.asked = None, []  # nothing to know a version by: begin anew
    Path("cache/x.hdf5.part").write_bytes(b"old")
    server.content = Path("original.hdf5").read_bytes()
    assert download(server.url, PATH) == "downloaded"
    assert server.asked == [None] and PATH.read_bytes() == server.content


def test_a_mark_does_not_outlive_its_version(server):
    server.breaks = [1000] + [0] * 10
    with pytest.raises(OSError):
        download(server.url, PATH, pause_s=0)
    server.tag, server.breaks = None, [700] * 20
    with pytest.raises(OSError, match="700 bytes are kept"):
        download(server.url, PATH, pause_s=0)
    assert names() == ["x.hdf5.part"]


def test_garbage_is_refused_and_not_kept(server):
    server.content = b"<html>moved</html>"
    with pytest.raises(ValueError, match="what came is unusable.*not an HDF5 file.*<html>moved"):
        download(server.url, PATH)
    assert names() == []
    server.status = 404
    with pytest.raises(ValueError, match="the server answers 404 Not Found"):
        download(server.url, PATH)
    assert names() == []
    with pytest.raises(ValueError, match="ftp://x is no http address"):
        download("ftp://x", PATH)


def test_nobody_listens():
    with pytest.raises(OSError, match="0 bytes are kept"):
        download("http://127.0.0.1:9/x.hdf5", PATH, pause_s=0)


def test_another_file_than_the_first_time_is_refused(server):
    download(server.url, PATH)
    PATH.unlink()
    other = write_hdf5(Path("other.hdf5"), family_arrays("gym", (10, 20)))
    server.content = other.read_bytes()
    with pytest.raises(ValueError, match="is not what it was"):
        download(server.url, PATH)
    assert not PATH.exists()
    PATH.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match="differs from the checksum recorded"):
        download(server.url, PATH)


def test_a_file_that_was_put_there_by_hand_gets_its_checksum(server):
    Path("cache").mkdir()
    PATH.write_bytes(server.content)
    assert download(server.url, PATH) == "there"
    assert checksum_path(PATH).is_file() and not server.asked
    PATH.with_name("y.hdf5").write_bytes(server.content[:2000])
    with pytest.raises(ValueError, match="y.hdf5 is truncated"):
        download(server.url, PATH.with_name("y.hdf5"))


def test_minari_ids_go_through_the_package(monkeypatch):
    folder = Path("root/toy/walk-v0")
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ValueError, match=r"pip install 'ctrl-rl\[data\]'"):
        download_minari("toy/walk-v0", folder)
    package = types.ModuleType("minari")

    def fetch(name):
        assert name == "toy/walk-v0"
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "metadata.json").write_text("{}")

    package.download_dataset = fetch
    monkeypatch.setitem(sys.modules, "minari", package)
    assert download_minari("toy/walk-v0", folder) == "downloaded"
    assert "walk-v0/data/metadata.json" in checksum_path(folder).read_text()
    assert download_minari("toy/walk-v0", folder) == "there"
    (folder / "data" / "metadata.json").write_text("[]")
    with pytest.raises(ValueError, match="differs from the checksum"):
        download_minari("toy/walk-v0", folder)

    def refuse(name):
        raise ConnectionError("no route\nto host")

    package.download_dataset = refuse
    with pytest.raises(OSError, match="could not download it: no route to host"):
        download_minari("toy/run-v0", Path("root/toy/run-v0"))
