"""Writes requirements.lock: the exact versions that `make demo`, `make test` and CI install.

Run by `make lock`. Installs the package with its development extra into a throw-away environment
and writes what came out, without local versions (torch==2.13.0, not 2.13.0+cpu) and without
hashes, so that the lock holds wherever the same version comes as another build.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"

PINS = ("torch==2.13.0", "mujoco==3.17.0", "mujoco-warp==3.17.0")
"""Chosen by hand: results are compared between machines with these."""

HEADER = """\
# Made by tools/lock.py from pyproject.toml with the extra "dev"; do not edit.
# torch is installed first and alone (see the Makefile), so that a CPU build at hand is kept.
"""


def public(line: str) -> str:
    """A line of `pip freeze` without its local version: "a==1.0+cpu" -> "a==1.0"."""
    name, _, version = line.partition("==")
    return f"{name}=={version.partition('+')[0]}"


def freeze() -> list[str]:
    """Install into an empty environment; its `name==version` lines."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", PINS[0]], check=True)
        subprocess.run([*pip, "install", *PINS, f"{ROOT}[dev]"], check=True)
        subprocess.run([*pip, "check"], check=True)
        command = [*pip, "freeze", "--exclude", "ctrl-rl", "--exclude", "pip"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(
            "\n"
        )


def main() -> int:
    """Write the lock."""
    lines = sorted({public(line) for line in freeze() if "==" in line}, key=str.lower)
    LOCK.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{LOCK.name}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
