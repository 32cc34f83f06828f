"""Refuses a wheel that holds more or less than the four packages and their data.

Used by .ci/run: `python tools/check_wheel.py dist/ctrl_rl-0.1.0-py3-none-any.whl`.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ctrl_rl", "robots", "sim2real", "offline")


def faults(names: list[str], tracked: list[str]) -> list[str]:
    """What is wrong with a wheel's content.

    Args:
        names: paths in the wheel.
        tracked: paths under version control.
    """
    inside = {n for n in names if ".dist-info/" not in n}
    wanted = {t for t in tracked if t.split("/")[0] in PACKAGES}
    return [
        *(f"{n} does not belong into the wheel" for n in sorted(inside - wanted)),
        *(f"{n} is missing in the wheel" for n in sorted(wanted - inside)),
    ]


def main() -> int:
    """Check the wheel that the command line names."""
    names = zipfile.ZipFile(sys.argv[1]).namelist()
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = faults(names, listing.stdout.splitlines())
    print("\n".join(found) or f"{Path(sys.argv[1]).name}: {len(names)} files, as it should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
