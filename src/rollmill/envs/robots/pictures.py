"""Renders robots with the MuJoCo renderer and OpenGL, or draws their geoms if OpenGL is not available."""

import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from rollmill.core.drawing import Circle, Drawing, Line, Point, Polygon, Shape
from rollmill.physics import RobotState

WIDTH, HEIGHT = 480, 360
PLATFORMS = ("egl", "osmesa")
"""Platforms for OpenGL without a window, in the order in which they are tried."""
BACKGROUND, GROUND = "#dce6ef", "#b9c4cd"
COLOURS = ("#c8702a", "#3f6f9f", "#5b8c3e", "#8c5b9c")
"""Colours of the trees of bodies, in the order of their roots."""


@dataclass(frozen=True)
class ViewAngle:
    """Direction and distance from which a camera looks at the first body of a robot."""

    distance: float
    """Distance of the camera, in metres."""
    azimuth: float = 90.0
    elevation: float = -20.0
    """Angle in degrees, as in MuJoCo. At an azimuth of 90, the camera looks along the y axis."""
    height: float | None = None
    """Height of the point that the camera looks at (m). Default: the height of the body."""
    follows: bool = True
    """Whether the camera moves along with the body."""
    ahead: float = 0.0
    """Position along x that the camera looks at, if it does not follow the body (m)."""


def drawing_of(
    source: Any, view: ViewAngle | None = None
) -> Callable[[Any, Any], Drawing | UInt8[np.ndarray, "H W 3"]]:
    """Returns a function that draws a task's state, for the field `draw` of environments.

    Args:
        source: the robot as an MJCF string, the path of a file, or a `mujoco.MjModel`, whose appearance is not
            changed.
        view: camera position, by default far enough to show the whole robot.
    """
    camera = RobotCamera(source, view)
    return lambda state, params: camera.picture(robot_of(state))


def robot_of(state: Any) -> RobotState:
    """Returns the state of the robot within the state of a task."""
    return state if isinstance(state, RobotState) else state.robot


class RobotCamera:
    """Renders the states of one robot. OpenGL is started when the first picture is taken."""

    def __init__(self, source: Any, view: ViewAngle | None):
        self.source, self.chosen = source, view

    def picture(self, robot: RobotState) -> Drawing | UInt8[np.ndarray, "H W 3"]:
        """Returns a picture of a robot's state as pixels, or as shapes if OpenGL is not available."""
        mujoco, compiled, data = self._scene
        data.qpos[:] = np.asarray(robot.positions, float)
        mujoco.mj_kinematics(compiled, data)
        mujoco.mj_camlight(compiled, data)
        if self._renderer is not None:
            return self._renderer.pixels(data, self._target(data), self.view)
        return _draw_geoms(mujoco, compiled, data, self._target(data), self.view)

    @cached_property
    def _scene(self) -> tuple[Any, Any, Any]:
        mujoco: Any = importlib.import_module("mujoco")
        compiled = self.source if isinstance(self.source, mujoco.MjModel) else _paint(mujoco, self.source)
        return mujoco, compiled, mujoco.MjData(compiled)

    @cached_property
    def view(self) -> ViewAngle:
        """Direction and distance from which the robot is seen."""
        return self.chosen or ViewAngle(distance=2.0 * float(self._scene[1].stat.extent))

    @cached_property
    def _renderer(self) -> "_Renderer | None":
        mujoco, compiled, _ = self._scene
        chosen = os.environ.get("MUJOCO_GL", "").lower()
        for platform in PLATFORMS if chosen in ("", "glfw") else (chosen,):
            try:
                return _Renderer(mujoco, compiled, platform)
            # there is no driver, no library, or another kind of context, each with its own exceptions
            except Exception:
                continue
        return None

    def _target(self, data: Any) -> np.ndarray:
        place = np.array(data.xpos[1]) if self.view.follows else np.array([self.view.ahead, 0.0, 0.0])
        if self.view.height is not None:
            place[2] = self.view.height
        return place


def _paint(mujoco: Any, source: str | Path) -> Any:
    """Returns a model for pictures: with colours, a sky, a light, and a floor that nothing touches."""
    is_text = isinstance(source, str) and source.lstrip().startswith("<")
    spec = mujoco.MjSpec.from_string(source) if is_text else mujoco.MjSpec.from_file(str(source))
    types = mujoco.mjtTexture, mujoco.mjtBuiltin
    sky = {"type": types[0].mjTEXTURE_SKYBOX, "builtin": types[1].mjBUILTIN_GRADIENT, "width": 64, "height": 64}
    spec.add_texture(name="sky", rgb1=_rgb(BACKGROUND), rgb2=[1.0, 1.0, 1.0], **sky)
    tiles = {"type": types[0].mjTEXTURE_2D, "builtin": types[1].mjBUILTIN_CHECKER, "width": 128, "height": 128}
    spec.add_texture(name="tiles", rgb1=_rgb(GROUND), rgb2=_rgb("#c6d0d8"), **tiles)
    textures = [""] * int(mujoco.mjtTextureRole.mjNTEXROLE)
    textures[int(mujoco.mjtTextureRole.mjTEXROLE_RGB)] = "tiles"
    spec.add_material(name="tiles", textures=textures, texrepeat=[1, 1], texuniform=True)
    spec.worldbody.add_light(pos=[0, -2, 6], dir=[0, 0.3, -1], type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL)
    plane = mujoco.mjtGeom.mjGEOM_PLANE
    if not any(geom.type == plane for geom in spec.geoms):
        spec.worldbody.add_geom(type=plane, size=[0, 0, 1], contype=0, conaffinity=0)
    for geom in spec.geoms:
        if geom.type == plane:
            geom.material = "tiles"
    # small values, for renderers without a GPU
    spec.visual.quality.shadowsize, spec.visual.quality.offsamples = 1024, 2
    compiled = spec.compile()
    roots = sorted({int(root) for root in compiled.body_rootid[1:]})
    for index in range(compiled.ngeom):
        body = int(compiled.geom_bodyid[index])
        if body and compiled.geom_matid[index] < 0:
            colour = COLOURS[roots.index(int(compiled.body_rootid[body])) % len(COLOURS)]
            compiled.geom_rgba[index] = [*_rgb(colour), 1.0]
    return compiled


def _rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def _opengl(platform: str) -> Any:
    """Returns the MuJoCo module for an OpenGL platform."""
    if platform == "egl":
        return importlib.import_module("mujoco.egl")
    if platform == "osmesa":
        return importlib.import_module("mujoco.osmesa")
    raise ImportError(f"MUJOCO_GL={platform} is not supported.")


class _Renderer:
    """The MuJoCo renderer in an OpenGL context without a window."""

    def __init__(self, mujoco: Any, compiled: Any, platform: str):
        self.mujoco, self.compiled = mujoco, compiled
        context: Any = _opengl(platform).GLContext(WIDTH, HEIGHT)
        context.make_current()
        self.opengl = context
        self.context = mujoco.MjrContext(compiled, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        self.scene = mujoco.MjvScene(compiled, maxgeom=1000)
        self.rectangle = mujoco.MjrRect(0, 0, WIDTH, HEIGHT)

    def pixels(self, data: Any, target: np.ndarray, view: ViewAngle) -> UInt8[np.ndarray, "H W 3"]:
        """Returns a picture of the robot in a configuration."""
        mujoco, camera = self.mujoco, self.mujoco.MjvCamera()
        camera.lookat, camera.distance = target, view.distance
        camera.azimuth, camera.elevation = view.azimuth, view.elevation
        self.opengl.make_current()
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self.compiled, data, mujoco.MjvOption(), None, camera, everything, self.scene)
        mujoco.mjr_render(self.rectangle, self.scene, self.context)
        pixels = np.empty((HEIGHT, WIDTH, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, self.rectangle, self.context)
        return pixels[::-1].copy()


# --- drawings -----------------------------------------------------------------------------------------


def _draw_geoms(mujoco: Any, compiled: Any, data: Any, target: np.ndarray, view: ViewAngle) -> Drawing:
    """Returns the geoms as flat shapes in a parallel projection, farthest first."""
    turned, up = math.radians(view.azimuth), math.radians(-view.elevation)
    right = np.array([math.sin(turned), -math.cos(turned), 0.0])
    ahead = np.array([math.cos(turned) * math.cos(up), math.sin(turned) * math.cos(up), -math.sin(up)])
    upwards = np.cross(right, ahead)
    half = view.distance * math.tan(math.radians(22.5))
    wide = half * WIDTH / HEIGHT

    def seen(place: np.ndarray) -> Point:
        away = place - target
        return float(away @ right), float(away @ upwards)

    horizon = float(-target[2] * upwards[2]) + 0.4 * half
    floor = Polygon(((-wide, -half), (wide, -half), (wide, horizon), (-wide, horizon)), GROUND)
    shapes: list[Shape] = [floor]
    solid = [index for index in range(compiled.ngeom) if compiled.geom_bodyid[index]]
    for index in sorted(solid, key=lambda index: -float(data.geom_xpos[index] @ ahead)):
        shapes.append(_shape(mujoco, compiled, data, index, seen))
    return Drawing(-wide, -half, wide, half, shapes, background=BACKGROUND)


def _shape(mujoco: Any, compiled: Any, data: Any, index: int, seen: Callable[[np.ndarray], Point]) -> Shape:
    """Returns a geom as a shape."""
    place, rotation = data.geom_xpos[index], data.geom_xmat[index].reshape(3, 3)
    size, kind = compiled.geom_size[index], int(compiled.geom_type[index])
    colour = "#" + "".join(f"{round(255 * value):02x}" for value in compiled.geom_rgba[index, :3])
    kinds = mujoco.mjtGeom
    if kind == int(kinds.mjGEOM_CAPSULE):
        ends = [seen(place + sign * size[1] * rotation[:, 2]) for sign in (-1, 1)]
        return Line(ends, 2 * float(size[0]), colour)
    if kind == int(kinds.mjGEOM_CYLINDER):
        angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
        rim = [size[0] * (np.cos(a) * rotation[:, 0] + np.sin(a) * rotation[:, 1]) for a in angles]
        corners = [seen(place + one + sign * size[1] * rotation[:, 2]) for one in rim for sign in (-1, 1)]
        return Polygon(_hull(corners), colour)
    if kind == int(kinds.mjGEOM_BOX):
        signs = [np.array([x, y, z]) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]
        return Polygon(_hull([seen(place + rotation @ (sign * size)) for sign in signs]), colour)
    radius = size[0] if kind == int(kinds.mjGEOM_SPHERE) else compiled.geom_rbound[index]
    return Circle(seen(place), float(radius), colour)


def _hull(points: list[Point]) -> list[Point]:
    """Returns the corners of the smallest convex polygon around points (Andrew's monotone chain)."""
    ordered = sorted(set(points))
    chains: list[list[Point]] = []
    for sequence in (ordered, ordered[::-1]):
        chain: list[Point] = []
        for point in sequence:
            while len(chain) > 1 and _turn(chain[-2], chain[-1], point) <= 0:
                chain.pop()
            chain.append(point)
        chains.append(chain[:-1])
    return chains[0] + chains[1]


def _turn(a: Point, b: Point, c: Point) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
