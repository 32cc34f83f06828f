"""Watch one world live: in MuJoCo's own window, or in a browser.

Both draw positions that are handed to them and collect the keys that were pressed; neither steps
the simulation.
"""

import math
import queue
from pathlib import Path
from typing import Protocol

import mujoco
import numpy as np

from robots import render


class CannotView(ValueError):
    """No window or browser view can be opened here; the message names the way out."""


class Viewer(Protocol):
    """What `ctrl-rl play` needs."""

    where: str
    """For people: a window, or an address."""

    def running(self) -> bool:
        """False once the viewer was closed."""
        ...

    def keys(self) -> list[str]:
        """Names of the keys pressed since the last call: "up", "space", "q" ..."""
        ...

    def show(self, qpos: np.ndarray, lines: list[tuple[str, str]]) -> None:
        """Draw positions (nq,), with a few lines of (name, value)."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


def open_viewer(path: Path, keys: dict[str, str], web: bool, port: int) -> Viewer:
    """Open a viewer of a model file.

    Args:
        path: MJCF to draw.
        keys: key -> what it does, for buttons and help.
        web: in a browser; otherwise a window.
        port: of the browser view; the next free one if it is taken.

    Raises:
        CannotView: no display, or mjviser is not installed.
    """
    model = render.picture_model(path)
    return WebViewer(model, keys, port) if web else WindowViewer(model)


class WindowViewer:
    """MuJoCo's passive viewer."""

    GLFW_KEYS = {262: "right", 263: "left", 264: "down", 265: "up", 32: "space"}

    def __init__(self, model: mujoco.MjModel) -> None:
        if not render.display_present():
            raise CannotView("no display to open a window on; try play --web, or watch video.mp4")
        import mujoco.viewer

        self.model, self.data = model, mujoco.MjData(model)
        self.pressed: queue.SimpleQueue = queue.SimpleQueue()
        try:
            self.handle = mujoco.viewer.launch_passive(
                model,
                self.data,
                key_callback=self._on_key,
                show_left_ui=False,
                show_right_ui=False,
            )
        except Exception as error:  # GLFW and the mac launcher raise kinds of their own
            raise CannotView(f"cannot open a window ({error}); try play --web") from None
        camera = render.make_camera(model)
        with self.handle.lock():
            for name in ("type", "fixedcamid", "trackbodyid", "distance", "azimuth", "elevation"):
                setattr(self.handle.cam, name, getattr(camera, name))
            self.handle.cam.lookat[:] = camera.lookat
        self.where = "a window"

    def _on_key(self, code: int) -> None:
        self.pressed.put(self.GLFW_KEYS.get(code) or chr(code).lower())

    def running(self) -> bool:
        """See `Viewer`."""
        return self.handle.is_running()

    def keys(self) -> list[str]:
        """See `Viewer`."""
        return _drain(self.pressed)

    def show(self, qpos: np.ndarray, lines: list[tuple[str, str]]) -> None:
        """See `Viewer`."""
        with self.handle.lock():
            self.data.qpos[:] = qpos
            mujoco.mj_forward(self.model, self.data)
        font, place = mujoco.mjtFontScale.mjFONTSCALE_150, mujoco.mjtGridPos.mjGRID_TOPLEFT
        names, values = ("\n".join(column) for column in zip(*lines, strict=True))
        self.handle.set_texts((font, place, names, values))
        self.handle.sync()

    def close(self) -> None:
        """See `Viewer`."""
        self.handle.close()


class WebViewer:
    """mjviser in a browser: mouse for the camera, keys and buttons for the command."""

    HOTKEYS = {
        "up": "arrowup",
        "down": "arrowdown",
        "left": "arrowleft",
        "right": "arrowright",
        "space": "space",
    }

    def __init__(self, model: mujoco.MjModel, keys: dict[str, str], port: int) -> None:
        try:
            import viser
            from mjviser import ViserMujocoScene
        except ImportError:
            raise CannotView(
                "the browser view needs the extra 'web': pip install 'ctrl-rl[web]'"
            ) from None
        self.model, self.data = model, mujoco.MjData(model)
        self.pressed: queue.SimpleQueue = queue.SimpleQueue()
        self.server = viser.ViserServer(host="127.0.0.1", port=port, verbose=False)
        self.scene = ViserMujocoScene(self.server, model, num_envs=1)
        self.text = self.server.gui.add_markdown("")
        for key, what in keys.items():
            hotkey = self.HOTKEYS.get(key, key.upper())
            button = self.server.gui.add_button(f"{what}  ({key})")
            command = self.server.gui.add_command(what, hotkey=hotkey)
            button.on_click(lambda _, key=key: self.pressed.put(key))
            command.on_trigger(lambda _, key=key: self.pressed.put(key))
        self._look(render.make_camera(model))
        self.where = f"http://localhost:{self.server.get_port()}"

    def _look(self, camera: mujoco.MjvCamera) -> None:
        """Start every visitor's camera where pictures are taken from.

        mjviser holds the first moving body at the origin.
        """
        model = self.model
        if camera.type == mujoco.mjtCamera.mjCAMERA_FIXED:
            distance, azimuth, elevation = 3.0 * model.stat.extent, 90.0, -12.0
            target = np.zeros(3) if self._tracks() else np.array(model.stat.center)
        else:
            distance, azimuth, elevation = camera.distance, camera.azimuth, camera.elevation
            target = np.zeros(3) if self._tracks() else np.array(camera.lookat)
        azimuth, elevation = math.radians(azimuth), math.radians(elevation)
        forward = np.array(
            (
                math.cos(elevation) * math.cos(azimuth),
                math.cos(elevation) * math.sin(azimuth),
                math.sin(elevation),
            )
        )

        @self.server.on_client_connect
        def _(client) -> None:
            client.camera.position = target - distance * forward
            client.camera.look_at = target

    def _tracks(self) -> bool:
        return self.model.njnt > 0 and self.model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE

    def running(self) -> bool:
        """A browser may come and go."""
        return True

    def keys(self) -> list[str]:
        """See `Viewer`."""
        return _drain(self.pressed)

    def show(self, qpos: np.ndarray, lines: list[tuple[str, str]]) -> None:
        """See `Viewer`."""
        self.data.qpos[:] = qpos
        mujoco.mj_kinematics(self.model, self.data)
        self.scene.update_from_mjdata(self.data)
        text = "\n".join(f"**{name}** {value}  " for name, value in lines)
        if self.text.content != text:
            self.text.content = text

    def close(self) -> None:
        """See `Viewer`."""
        self.server.stop()


def _drain(pressed: queue.SimpleQueue) -> list[str]:
    keys = []
    while not pressed.empty():
        keys.append(pressed.get_nowait())
    return keys
