"""Pictures and video, and machines that can make neither (O-45)."""

import os
import subprocess
import sys

import imageio_ffmpeg
import numpy as np
import pytest
import torch

import ctrl_rl
from ctrl_rl import cli, video
from robots import render

SHORT = (
    "Pendulum-v0 --num-envs 4 --total-steps 64 --algo.num-steps 16 --algo.hidden 8"
    " --eval-episodes 2 --task.max-episode-steps 20 --run-dir r --video-s 0.5"
).split()


@pytest.fixture(scope="module")
def can_render():
    env = ctrl_rl.make("Pendulum-v0", 1)
    try:
        env.frame(0)
    except ValueError as reason:
        pytest.skip(f"this machine has no OpenGL: {reason}")
    finally:
        env.close()


class Still:
    """Does nothing."""

    group, device = "actor", torch.device("cpu")

    def __init__(self, env):
        self.spec = env.spec

    def __call__(self, obs):
        return torch.zeros(len(obs["actor"]), self.spec.action_size)

    def reset(self, rows=None):
        pass


@pytest.mark.parametrize("task", ["Pendulum-v0", "CartPole-SwingUp-v0", "Go1-Velocity-Flat-v0",
                                  "HalfCheetah-v5"])  # fmt: skip
def test_a_frame_shows_the_row_it_is_asked_for_and_changes_nothing(can_render, task):
    env = ctrl_rl.make(task, 2, threads=1)
    before = env.state_dict()
    first, second = env.frame(0), env.frame(1)
    assert first.shape == (480, 640, 3) and first.dtype == np.uint8
    assert len(np.unique(first.reshape(-1, 3), axis=0)) > 50  # a scene, not one colour
    differs = lambda a, b: (a != b).any(-1).sum()  # noqa: E731
    # software OpenGL draws some edge pixels of its first picture otherwise
    assert differs(first, second) > 500 and differs(first, env.frame(0)) < 50
    after = env.state_dict()
    assert all(torch.equal(before["obs"][k], after["obs"][k]) for k in before["obs"])
    env.close()


def test_the_pendulum_s_picture_follows_its_angle(can_render):
    env = ctrl_rl.make("Pendulum-v0", 1)
    orange = lambda: np.argwhere(  # noqa: E731
        (lambda p: (p[..., 0] > 120) & (p[..., 2] < 70) & (p[..., 0] > 1.8 * p[..., 1]))(
            env.frame(0).astype(int)
        )
    ).mean(0)
    env.sim.qpos[:] = 0.0  # upright: above the hinge
    up = orange()
    env.sim.qpos[:] = np.pi
    down = orange()
    env.sim.qpos[:] = np.pi / 2  # counter-clockwise: to the left
    left = orange()
    assert up[0] < left[0] < down[0] and left[1] < up[1] - 40 and abs(up[1] - down[1]) < 10


def test_a_video_has_the_length_and_rate_it_says(can_render, tmp_path):
    env = ctrl_rl.make("CartPole-SwingUp-v0", 1)  # 50 steps per second: every second is shown
    fps = video.record(Still(env), env, tmp_path / "v.mp4", seconds=0.6)
    assert fps == pytest.approx(25.0)
    frames = imageio_ffmpeg.read_frames(str(tmp_path / "v.mp4"))
    meta = next(frames)
    assert meta["fps"] == pytest.approx(25.0) and meta["source_size"] == (640, 480)
    assert meta["codec"] == "h264" and sum(1 for _ in frames) == 16  # the first, then 15
    assert [p.name for p in tmp_path.iterdir()] == ["v.mp4"]


def test_an_encoder_that_dies_leaves_the_old_video(can_render, tmp_path, monkeypatch):
    path = tmp_path / "v.mp4"
    path.write_bytes(b"old")

    def dies(*args):
        yield
        raise OSError("no space left")

    monkeypatch.setattr(video, "_writer", lambda *a: (w := dies(), next(w))[0])
    env = ctrl_rl.make("Pendulum-v0", 1)
    with pytest.raises(video.CannotFilm, match="the encoder failed: no space left"):
        video.record(Still(env), env, path, 0.2)
    assert path.read_bytes() == b"old"


def test_a_policy_that_asks_for_its_rewards_hears_each(monkeypatch, tmp_path):
    class Receives(Still):
        told = []

        def receive(self, reward):
            self.told.append(float(reward))

    def writer(path, *size):
        path.with_suffix(".tmp.mp4").touch()
        while True:
            yield

    def started(*args):
        found = writer(*args)
        next(found)
        return found

    env = ctrl_rl.make("Pendulum-v0", 1)
    monkeypatch.setattr(env, "frame", lambda row: np.zeros((2, 2, 3), np.uint8))
    monkeypatch.setattr(video, "_writer", started)
    video.record(Receives(env), env, tmp_path / "v.mp4", 4 * env.spec.step_dt)
    assert len(Receives.told) == 4 and all(reward < 0 for reward in Receives.told)


def test_without_opengl_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(render.platform, "system", lambda: "Linux")
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(render.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(render.CannotRender, match="libegl1 or libosmesa6"):
        render.gl_backend()
    monkeypatch.setattr(
        render.ctypes.util, "find_library", lambda name: "x" if name == "OSMesa" else None
    )
    assert render.gl_backend() == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert render.gl_backend() == "egl"
    monkeypatch.setenv("MUJOCO_GL", "off")
    with pytest.raises(render.CannotRender, match="switched off by MUJOCO_GL=off"):
        render.gl_backend()


def test_training_without_opengl_says_why_and_goes_on(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MUJOCO_GL", "off")
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
    assert cli.main(["train", *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [x for x in lines if "no video" in x] == [
        "no video: rendering is switched off by MUJOCO_GL=off"
    ]
    assert not (tmp_path / "r/video.mp4").exists() and (tmp_path / "r/report.html").exists()


def test_training_imports_no_opengl():
    code = (
        "import sys, torch, ctrl_rl; from ctrl_rl import ppo; "
        "ppo.train(ppo.PPOConfig(total_steps=64, num_steps=16, hidden=(8,)), "
        "ctrl_rl.make('Hopper-v5', 4)); assert 'robots.render' not in sys.modules; "
        "assert not any(m.startswith('OpenGL') for m in sys.modules)"
    )
    clean = {k: v for k, v in os.environ.items() if k != "MUJOCO_GL"}  # set by other tests
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr


def test_training_ends_with_a_video(can_render, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("ctrl_rl.curves.draw_run", lambda folder: None)
    assert cli.main(["train", *SHORT]) == 0
    assert next(imageio_ffmpeg.read_frames(str(tmp_path / "r/video.mp4")))["duration"] > 0.4
    assert "src=video.mp4" in (tmp_path / "r/report.html").read_text()
