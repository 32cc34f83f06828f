"""Pictures of one world, without a window.

MuJoCo draws through OpenGL. On Linux without a display the context comes from EGL, else from
OSMesa; `MUJOCO_GL` overrides the choice. Nothing here is imported before a picture is asked for,
so that training never needs OpenGL.
"""

import atexit
import ctypes.util
import os
import platform
from pathlib import Path

import mujoco
import numpy as np

from robots.sim import mujoco_warnings

WIDTH, HEIGHT = 640, 480  # [pixels]
SAMPLES = 0  # per pixel; software OpenGL needs three times as long for smooth edges

REMEDY = (
    "install a software OpenGL, e.g. Debian's libegl1 or libosmesa6, or set MUJOCO_GL to egl, "
    "osmesa or glfw"
)


class CannotRender(ValueError):
    """No picture can be made here; the message names the remedy."""


def gl_backend() -> str:
    """Which of "egl", "osmesa", "glfw" would give the context here, and is set in `MUJOCO_GL`.

    Raises:
        CannotRender: Linux without a display, EGL and OSMesa, or rendering switched off.
    """
    asked = os.environ.get("MUJOCO_GL", "").lower()
    if asked in ("disable", "disabled", "off", "false", "0"):
        raise CannotRender(f"rendering is switched off by MUJOCO_GL={asked}")
    if asked in ("egl", "osmesa", "glfw"):
        return asked
    if platform.system() != "Linux" or display_present():
        return "glfw"
    for name, library in (("egl", "EGL"), ("osmesa", "OSMesa")):
        if ctypes.util.find_library(library):
            os.environ["MUJOCO_GL"] = name  # for libraries that are imported later
            return name
    raise CannotRender(f"no display and neither EGL nor OSMesa: {REMEDY}")


def display_present() -> bool:
    """Whether a window could open."""
    if platform.system() != "Linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


class Renderer:
    """Draws states of one model.

    The camera is the model's own named "track", or one that follows the first body if that body
    can travel, or one that stands still.

    Args:
        model: compiled model; its picture settings are not changed.
        width: [pixels]
        height: [pixels]

    Raises:
        CannotRender: no OpenGL.
    """

    def __init__(self, model: mujoco.MjModel, width: int = WIDTH, height: int = HEIGHT) -> None:
        self.model, self.data = model, mujoco.MjData(model)
        offscreen = model.vis.global_
        offscreen.offwidth = max(offscreen.offwidth, width)
        offscreen.offheight = max(offscreen.offheight, height)
        model.vis.quality.offsamples = SAMPLES
        self.window = mujoco.MjrRect(0, 0, width, height)
        self.pixels = np.zeros((height, width, 3), np.uint8)
        self.gl = _open_context(gl_backend(), width, height)
        self.gl.make_current()
        self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        self.scene = mujoco.MjvScene(model, maxgeom=2000)
        self.option, self.camera = mujoco.MjvOption(), make_camera(model)
        atexit.register(self.close)  # before MuJoCo ends its display, which fails afterwards

    def draw(self, qpos: np.ndarray, caption: str = "") -> np.ndarray:
        """The world at `qpos` (nq,) as (H, W, 3) uint8, a fresh array; caption at the top left."""
        self.data.qpos[:] = qpos
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_comPos(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)
        mujoco.mjv_updateScene(
            self.model,
            self.data,
            self.option,
            None,
            self.camera,
            mujoco.mjtCatBit.mjCAT_ALL,
            self.scene,
        )
        self.gl.make_current()
        mujoco.mjr_render(self.window, self.scene, self.context)
        if caption:
            mujoco.mjr_overlay(
                mujoco.mjtFont.mjFONT_NORMAL,
                mujoco.mjtGridPos.mjGRID_TOPLEFT,
                self.window,
                caption.strip(),
                "",
                self.context,
            )
        mujoco.mjr_readPixels(self.pixels, None, self.window, self.context)
        return self.pixels[::-1].copy()

    def close(self) -> None:
        """Free the OpenGL context."""
        atexit.unregister(self.close)
        self.context.free()
        self.gl.free()


def picture_model(path: Path) -> mujoco.MjModel:
    """Compile a model file for drawing; one without a sky gets sky, light and floor."""
    mujoco_warnings.install()
    model = mujoco.MjModel.from_xml_path(str(path))
    if (model.tex_type == mujoco.mjtTexture.mjTEXTURE_SKYBOX).any():
        return model
    return dress(mujoco.MjSpec.from_file(str(path))).compile()


def make_camera(model: mujoco.MjModel) -> mujoco.MjvCamera:
    """Where pictures and viewers look from."""
    camera = mujoco.MjvCamera()
    named = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    if named >= 0:
        camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, named
        return camera
    travels = model.njnt > 0 and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
    camera.azimuth, camera.elevation = 130.0, -18.0
    if travels:
        camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
        camera.trackbodyid = model.jnt_bodyid[0]
        camera.distance = 2.7 * model.stat.extent
    else:
        camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        camera.lookat[:] = model.stat.center
        camera.azimuth, camera.elevation = 90.0, -8.0
        camera.distance = 2.2 * model.stat.extent
    return camera


def dress(spec: mujoco.MjSpec) -> mujoco.MjSpec:
    """Give a bare model sky, light and a chequered floor; bodies and joints stay as they are."""
    sky = spec.add_texture(name="picture_sky", type=mujoco.mjtTexture.mjTEXTURE_SKYBOX)
    sky.builtin = mujoco.mjtBuiltin.mjBUILTIN_GRADIENT
    sky.rgb1, sky.rgb2 = (0.78, 0.86, 0.94), (0.98, 0.99, 1.0)
    sky.width, sky.height = 256, 256
    checker = spec.add_texture(name="picture_floor", type=mujoco.mjtTexture.mjTEXTURE_2D)
    checker.builtin = mujoco.mjtBuiltin.mjBUILTIN_CHECKER
    checker.mark = mujoco.mjtMark.mjMARK_EDGE
    checker.rgb1, checker.rgb2, checker.markrgb = (0.86,) * 3, (0.80,) * 3, (0.93,) * 3
    checker.width, checker.height = 256, 256
    floor = spec.add_material(name="picture_floor", texrepeat=(1, 1), texuniform=True)
    floor.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "picture_floor"
    for geom in spec.geoms:
        if geom.type == mujoco.mjtGeom.mjGEOM_PLANE and not geom.material:
            geom.material = "picture_floor"
            geom.rgba = (1, 1, 1, 1)
    spec.visual.headlight.ambient = (0.42,) * 3
    spec.visual.headlight.diffuse = (0.32,) * 3
    spec.visual.headlight.specular = (0.05,) * 3
    spec.visual.rgba.haze = (0.95, 0.97, 0.99, 1.0)
    spec.visual.quality.shadowsize = 1024
    spec.visual.map.shadowclip, spec.visual.map.znear = 3.0, 0.05  # no speckles in the shadow
    # Above the first body and with it, so that the shadow keeps its fine resolution.
    above = spec.bodies[1] if len(spec.bodies) > 1 else spec.worldbody
    light = above.add_light(pos=(-0.3, -0.45, 3), dir=(0.1, 0.15, -1.0))
    light.mode = mujoco.mjtCamLight.mjCAMLIGHT_TRACK
    light.type = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
    light.diffuse, light.castshadow = (0.55,) * 3, True
    return spec


def _open_context(backend: str, width: int, height: int):
    """The OpenGL context of a backend. MuJoCo's own choice was made when it was imported."""
    try:
        if backend == "egl":
            from mujoco.egl import GLContext
        elif backend == "osmesa":
            from mujoco.osmesa import GLContext
        else:
            from mujoco.glfw import GLContext
        return GLContext(width, height)
    except Exception as error:  # PyOpenGL raises many kinds for a missing or broken library
        text = " ".join(str(error).split()) or type(error).__name__
        raise CannotRender(f"OpenGL through {backend} fails ({text}): {REMEDY}") from None
