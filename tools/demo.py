"""The main job from end to end: train, evaluate, export, verify; `make demo` runs it.

Interrupted, it goes on where it was: training from its last checkpoint, then the steps that are
not yet done. A finished step is named, with the file that says so; a run folder that is removed
starts from nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CLI = Path(sys.executable).parent / "ctrl-rl"


class Demo:
    """Runs the steps of one run folder.

    Args:
        task: task id.
        run: the run folder.
        train_flags: further flags of `ctrl-rl train`.
    """

    def __init__(self, task: str, run: Path, train_flags: list[str]) -> None:
        self.run = run
        self.record = run / "demo.json"
        # An interrupted training goes on; the folder's config.json holds its flags.
        start = [task, "--run-dir", str(run), *train_flags]
        begun = (run / "config.json").exists()
        self.steps = {
            "train": ["train", *(["--resume", str(run)] if begun else start)],
            "eval": ["eval", str(run)],
            "export": ["export", str(run)],
            "verify": ["verify", str(run)],
        }

    def done(self) -> dict[str, float]:
        """Step -> seconds it took."""
        return json.loads(self.record.read_text()) if self.record.exists() else {}

    def main(self) -> int:
        """Run what is left; the exit status of the first step that fails, or 0."""
        for number, (name, words) in enumerate(self.steps.items(), 1):
            head = f"[{number}/{len(self.steps)}] {name}"
            done = self.done()
            if name in done:
                print(f"{head}: done before, in {done[name]:.0f} s ({self.record})", flush=True)
                continue
            print(f"{head}: ctrl-rl {' '.join(words)}", flush=True)
            start = time.perf_counter()
            status = run_to_its_end(words)
            if status != 0:
                print(
                    f"{head}: failed with exit status {status}; the same command goes on here",
                    file=sys.stderr,
                )
                return status
            if name == "train" and not self._trained():
                print(f"{head}: interrupted; the same command goes on here", file=sys.stderr)
                return 130
            done[name] = round(time.perf_counter() - start, 1)
            self.record.write_text(json.dumps(done) + "\n")
        self._say_where()
        return 0

    def _trained(self) -> bool:
        """Whether training reached its last step; Ctrl-C leaves it earlier, with a checkpoint."""
        config = json.loads((self.run / "config.json").read_text())
        last_row = (self.run / "metrics.csv").read_text().splitlines()[-1]
        return int(last_row.split(",")[0]) >= config["run"]["total_steps"]

    def _say_where(self) -> None:
        done = self.done()
        print(f"\nAll steps done: {', '.join(f'{n} {s:.0f} s' for n, s in done.items())}.")
        for name, what in (
            ("report.html", "report: open it in a browser"),
            ("video.mp4", "video"),
            ("policy.onnx", "policy: the one file a robot needs"),
        ):
            path = (self.run / name).resolve()
            print(f"  {what}\n    {path}" if path.exists() else f"  {what}\n    was not made")
        print(f"Start from nothing: remove {os.path.relpath(self.run)}")


def run_to_its_end(words: list[str]) -> int:
    """Exit status of a command of `ctrl-rl`.

    Ctrl-C reaches the command as well, which leaves in its own time: training finishes its
    iteration and writes a checkpoint. (`subprocess.run` would kill it after a quarter of a second.)
    """
    process = subprocess.Popen([CLI, *words])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train, evaluate, export, verify.")
    parser.add_argument("--task", default="Go1-Velocity-Flat-v0", help="task id")
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="run folder")
    args, train_flags = parser.parse_known_args()
    return Demo(args.task, args.run, train_flags).main()


if __name__ == "__main__":
    sys.exit(main())
