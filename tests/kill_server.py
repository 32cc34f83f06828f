"""Forks a training per request from a process that holds torch and the learners, and kills it.

A child begins where everything is imported, so that fifty kills take a minute. The server never
makes a MuJoCo Batch: one made before a fork hangs in the child. Nor does it see a GPU, for which
torch starts threads that a child has not.

A line of JSON in, {"words", "log", "kill"}: what stands behind `ctrl-rl`, a file for what the
child prints, and when it dies by SIGKILL, one of

    None             never
    ["after", s]     s seconds after the fork
    ["byte", n]      before byte n of all that it writes under temporary names

and a line of JSON out, {"status", "seconds", "bytes"}: exit status or minus the signal, how long
the child lived, how many of those bytes it wrote.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


class Server:
    """The server's process, as tests see it."""

    def __init__(self) -> None:
        code = "import kill_server; kill_server.serve()"
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )

    def run(self, *words: str, log: Path, kill=None) -> dict:
        """What became of one training."""
        assert self.process.stdin and self.process.stdout
        request = {"words": [*words], "log": str(log), "kill": kill}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 120)[0], "no answer in 120 s"
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()  # the end of its input ends it, and its child with it
        try:
            self.process.wait(10)
        finally:
            self.process.kill()


# In the server's process --------------------------------------------------------------------


class Counted:
    """A file that ends its process before byte `limit` of all counted files."""

    written, limit = 0, None

    def __init__(self, file) -> None:
        self.file = file

    def write(self, data) -> int:
        if Counted.limit is not None and Counted.written + len(data) > Counted.limit:
            self.file.write(data[: Counted.limit - Counted.written])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        Counted.written += len(data)
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def serve() -> None:
    """Answer requests until the input ends."""
    from ctrl_rl import checkpoints, cli, curves, registry

    for name in registry.names("algos"):
        module = registry.load("algos", name)
        if hasattr(module, "LOG_EVERY"):
            module.LOG_EVERY = 32  # the off-policy learners are asked for checkpoints as often
    curves.draw_run = lambda folder: None  # most of the time of so short a run
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        first = f"train Pendulum-v0 --total-steps 64 --num-envs 1 --video-s 0 --run-dir {folder}/r"
        cli.main(first.split())  # imports the rest
    enter = checkpoints.replacing.__enter__

    def counted(self):
        self.file = Counted(enter(self))
        return self.file

    checkpoints.replacing.__enter__ = counted  # pyright: ignore
    for line in sys.stdin:
        request = json.loads(line)
        kind, when = request["kill"] or (None, None)
        reader, writer = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for number, target in ((0, nothing), (1, log), (2, log)):
                os.dup2(target, number)
            Counted.limit = when if kind == "byte" else None
            status = 1
            try:
                status = cli.main(["--debug", *request["words"]])
                sys.stdout.flush()
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os.write(writer, str(Counted.written).encode())
                os._exit(status)
        os.close(writer)
        ends = began + (when if kind == "after" else 100)
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.0005)
            if time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)
        _, status = ended
        written = int(os.read(reader, 100) or 0)
        os.close(reader)
        answer = {"status": os.waitstatus_to_exitcode(status), "bytes": written}
        print(json.dumps(answer | {"seconds": time.monotonic() - began}), flush=True)
