"""Jobs of test_workers.py, in a module that a new process imports quickly."""

import os
import signal
import sys
import time
from pathlib import Path

from ctrl_rl import workers


def note(job: Path) -> str | None:
    """Leave one file per try; what the name says happens."""
    tries = len(list(job.parent.glob(f"{job.name}.try*")))
    job.with_name(f"{job.name}.try{tries}").write_text(str(os.getpid()))
    if job.name.startswith("slow"):
        time.sleep(0.3)
    if job.name == "killed-once" and tries == 0 or job.name == "killed-always":
        os.kill(os.getpid(), signal.SIGKILL)
    if job.name == "broken":
        raise RuntimeError("no such luck")
    job.with_name(f"{job.name}.end").write_text(str(time.monotonic()))
    return "it went wrong" if job.name == "wrong" else None


def wait(job: Path) -> None:
    """Until Ctrl-C; then save."""
    job.write_text(str(os.getpid()))
    try:
        time.sleep(100)
    except KeyboardInterrupt:
        job.with_name(f"{job.name}.saved").write_text("x")
        raise


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    jobs = [Path(word) for word in sys.argv[1:]]
    workers.on_this_machine(wait, jobs, lambda job, line: None, at_once=2, retries=0)
