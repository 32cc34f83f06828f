"""What a result was made with: versions, commit and hardware."""

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch


def provenance() -> dict:
    """Versions, commit and hardware, for a result that someone wants to repeat."""
    versions = {"python": platform.python_version()}
    for name in ("ctrl-rl", "torch", "numpy", "mujoco", "mujoco-warp", "onnxruntime"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "commit": _commit(), "hardware": _hardware()}


def _commit() -> str | None:
    """Commit of the checkout this package stands in, "+" if it was changed; None elsewhere."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    git = lambda *words: subprocess.run(  # noqa: E731
        ("git", "-C", str(root), *words), capture_output=True, text=True, timeout=10
    ).stdout.strip()
    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "-uno") else "") if commit else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _hardware() -> dict:
    """Processor, usable cores, memory, accelerator."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    hardware = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": platform.processor(),
        "cores": cores,
    }
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        hardware["cpu"] = found.group(1) if found else hardware["cpu"]
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        hardware["memory_gib"] = round(total / 2**30, 1)
    except (OSError, ValueError):
        pass
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name(0)
    return hardware
