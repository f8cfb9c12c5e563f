"""Records pictures of host environments, one after every reset and step."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from jaxtyping import UInt8

from rollmill.core.errors import UsageError
from rollmill.core.types import HostEnvironment
from rollmill.envs.host.environment import StartByName, StartPython
from rollmill.envs.host.parallel import StartParallel


class Film(NamedTuple):
    """The pictures that a camera has recorded, in order."""

    frames: list[tuple[UInt8[np.ndarray, "H W 3"], float | None]]
    """Recorded pictures, each with the environment's frames per second, if known."""
    problems: list[str]
    """Reason why rendering failed, if it did."""


class Camera(gymnasium.Wrapper):
    """A wrapper around a Gymnasium environment that adds a picture to a film after every reset and step.

    The environment must have `render_mode="rgb_array"`. If rendering fails, the episode continues without
    pictures.
    """

    def __init__(self, env: gymnasium.Env, film: Film) -> None:
        gymnasium.Wrapper.__init__(self, env)
        self._film = film

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Starts an episode of the environment, and records a picture."""
        result = self.env.reset(seed=seed, options=options)
        _look(self.env, self._film)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """Takes an action in the environment, and records a picture."""
        result = self.env.step(action)
        _look(self.env, self._film)
        return result


class ParallelCamera:
    """A wrapper around a PettingZoo environment that adds a picture to a film after every reset and step.

    See `Camera` for the arguments.
    """

    def __init__(self, env: Any, film: Film) -> None:
        self._env, self._film = env, film

    @property
    def agents(self) -> list[Any]:
        """Agents that act in the next step."""
        return self._env.agents

    def reset(self, seed: int | None = None) -> tuple[Any, Any]:
        """Starts an episode of the environment, and records a picture."""
        result = self._env.reset(seed=seed)
        _look(self._env, self._film)
        return result

    def step(self, actions: dict[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Takes a step of the environment, and records a picture."""
        result = self._env.step(actions)
        _look(self._env, self._film)
        return result

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()


def _look(env: Any, film: Film) -> None:
    """Adds a picture of the environment to the film, or the reason why rendering failed."""
    if film.problems:
        return
    mode = getattr(env, "render_mode", None)
    if mode != "rgb_array":
        film.problems.append(f"it was created with render_mode={mode!r}")
        return
    try:
        picture = np.asarray(env.render())
    except (Exception, SystemExit) as error:  # the errors of a failed drawing depend on the environment's library
        film.problems.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        film.problems.append(f"its picture is {picture.dtype} {list(picture.shape)}, expected uint8 [H, W, 3]")
        return
    fps = env.metadata.get("render_fps")
    film.frames.append((picture, float(fps) if isinstance(fps, int | float) and fps > 0 else None))


def film_environment(env: HostEnvironment, film: Film) -> HostEnvironment:
    """Returns a host environment whose copies record a picture after every reset and step.

    Many environments draw with Pygame. Unless `SDL_AUDIODRIVER` is set, Pygame is kept from opening an audio
    device, because it would print warnings of ALSA if there is none.

    Raises:
        UsageError: its copies do not have the interface of Gymnasium or PettingZoo.
    """
    start = env.start.start if isinstance(env.start, StartByName) else env.start
    if not isinstance(start, StartPython | StartParallel):
        way_out = "gymnasium:ID (env= in Python) plays in the Gymnasium environment with the same spaces"
        if env.name.startswith("robots:"):
            way_out = f"{env.name} (env= in Python) plays in it with the physics of this package"
        raise UsageError(
            f"{env.name} cannot be rendered: it is not a Gymnasium or PettingZoo environment in Python. hint: use "
            f"--env {way_out}."
        )
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    make: Callable[[], Any] = start.make
    camera = Camera if isinstance(start, StartPython) else ParallelCamera
    return env._replace(start=replace(start, make=lambda: camera(make(), film)))
