"""A policy on film: frames of one environment into an mp4 file."""

import math
import os
from pathlib import Path

from ctrl_rl.policy import check_fits


class CannotFilm(ValueError):
    """No video can be made here; the message says why and what to install."""


def record(policy, env, path: Path, seconds: float, max_fps: float = 30.0) -> float:
    """Play the policy from a reset and write what row 0 looks like, in real time.

    Args:
        policy: as `load_policy` gives it.
        env: an environment with `frame`; it is reset first.
        path: the mp4 file (H.264), replaced only when the new one is whole.
        seconds: length.
        max_fps: frames per second at most; every k-th step is shown.

    Returns:
        Frames per second of the file.

    Raises:
        CannotFilm: no rendering or no encoder on this machine.
    """
    check_fits(policy, env.spec)
    if not hasattr(env, "frame"):
        raise CannotFilm(f"{env.spec.task} has no pictures")
    every = max(1, math.ceil(1.0 / (env.spec.step_dt * max_fps) - 1e-9))
    fps = 1.0 / (env.spec.step_dt * every)
    receive = getattr(policy, "receive", None)
    obs = env.reset()
    policy.reset()
    try:
        first = env.frame(0)
        writer = _writer(path, first.shape[1], first.shape[0], fps)
    except (ValueError, NotImplementedError, ImportError, OSError, RuntimeError) as error:
        raise CannotFilm(" ".join(str(error).split())) from None
    temporary = path.with_suffix(".tmp.mp4")
    try:
        writer.send(first)
        for step in range(1, round(seconds / env.spec.step_dt) + 1):
            result = env.step(policy(obs).to(env.device))
            if receive is not None:
                receive(result.reward)
            obs = result.obs
            policy.reset((result.terminated | result.truncated).nonzero().flatten())
            if step % every == 0:
                writer.send(env.frame(0))
        writer.close()
        os.replace(temporary, path)
    except OSError as error:  # a broken pipe: the encoder died, its last words are in the message
        raise CannotFilm(f"the encoder failed: {' '.join(str(error).split())[:200]}") from None
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)
    return fps


def _writer(path: Path, width: int, height: int, fps: float):
    """imageio-ffmpeg's generator that takes frames, started."""
    import imageio_ffmpeg

    writer = imageio_ffmpeg.write_frames(
        str(path.with_suffix(".tmp.mp4")),
        (width, height),
        fps=fps,  # pyright: ignore[reportArgumentType] -- ffmpeg takes fractions too
        codec="libx264",
        quality=7,
        macro_block_size=2,
        ffmpeg_log_level="error",
        output_params=["-movflags", "+faststart"],
    )
    writer.send(None)
    return writer
