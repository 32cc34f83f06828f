"""Show versions, processor, rendering, compiler and GPU, for bug reports."""

import os
import shutil
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Nothing to set."""


def main(args: Doctor) -> dict:
    """Try each part that depends on the machine and print what came of it."""
    from ctrl_rl.checkpoints import MIN_FREE_BYTES
    from ctrl_rl.provenance import provenance

    found = provenance()
    lines = {**found["versions"], "commit": found["commit"] or "not a checkout"}
    lines |= found["hardware"]
    import torch

    lines["torch threads"] = torch.get_num_threads()
    lines["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "not set")
    lines["gpu"] = (
        ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        or "none that torch can use"
    )
    lines["compiler"] = next(
        (path for name in ("c++", "g++", "clang++", "cl") if (path := shutil.which(name))),
        "none: training runs uncompiled; install g++",
    )
    lines["rendering"] = _rendering()
    lines["video"] = _video()
    free = shutil.disk_usage(".").free
    lines["free disk here"] = f"{free / 2**30:.1f} GiB" + (
        "" if free > MIN_FREE_BYTES else ": too little for a run"
    )
    lines["commands"] = _commands()
    for name, value in lines.items():
        print(f"{name:<16} {value}")
    return {"config": {}, "found": lines}


def _rendering() -> str:
    """Whether a picture comes out."""
    from ctrl_rl.making import make

    env = make("Pendulum-v0", 1)
    try:
        picture = env.frame(0)
        return f"works, MUJOCO_GL={os.environ.get('MUJOCO_GL', 'glfw')}, {picture.shape[1::-1]}"
    except ValueError as reason:
        return f"none: {reason}"
    finally:
        env.close()


def _video() -> str:
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as reason:
        return f"none: {reason}"


def _commands() -> str:
    from ctrl_rl import registry

    return ", ".join(registry.names("commands"))
