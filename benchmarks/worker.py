"""The peer's half of the line protocol; standard library only, runs in any interpreter.

A worker script ends with `serve(run)`, where `run(config, tick)` builds what is measured and then
works for ever, calling `tick(work)` whenever an amount of work is done (one vectorised step, one
PPO iteration). `tick` lets it pass until the slice is over, then answers and waits for the next,
so whatever loop a library brings is measured as it is.

Lines are JSON. In: the config, then `{"seconds": s}` per slice; an end of input ends the worker.
Out: `{"ready": versions}` at the first tick, then `{"work": w, "wall_s": t}` per slice.

A script that has one answer to give ends with `answer(run)` instead: `run(config)` returns it.
"""

import importlib.metadata
import json
import os
import sys
import time


def serve(run, packages=()):
    """Read the config, run, answer slices; returns when the input ends.

    Args:
        run: `run(config, tick)`, see the module's docstring.
        packages: distributions whose versions are reported.
    """
    answers, line = _keep_stdout(), sys.stdin.readline()
    if not line:
        return
    try:
        run(json.loads(line), _Ticker(answers, versions(packages)))
    except EOFError:
        return


def answer(run, packages=()):
    """Read the config, write `run(config)` with the versions of `packages`, and end."""
    answers = _keep_stdout()
    result = run(json.loads(sys.stdin.readline()))
    answers.write(json.dumps({"result": result, "versions": versions(packages)}) + "\n")


def versions(packages):
    """Versions of the interpreter and of some distributions."""
    found = {p: importlib.metadata.version(p) for p in packages}
    return {"python": sys.version.split()[0], **found}


def _keep_stdout():
    """The protocol keeps the real stdout; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


class _Ticker:
    def __init__(self, answers, versions):
        self.answers, self.versions = answers, versions
        self.seconds = None
        self.work = 0
        self.start = 0.0

    def __call__(self, work):
        """Count `work`; at the end of a slice answer and wait. Raises EOFError at the end."""
        if self.seconds is None:
            self._answer({"ready": self.versions})
            return
        self.work += work
        wall = time.perf_counter() - self.start
        if wall >= self.seconds:
            self._answer({"work": self.work, "wall_s": wall})

    def _answer(self, message):
        self.answers.write(json.dumps(message) + "\n")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        self.seconds = json.loads(line)["seconds"]
        self.work = 0
        self.start = time.perf_counter()
