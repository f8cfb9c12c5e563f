"""Pictures of host environments: each object hands over a picture after every reset and step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from jaxtyping import UInt8

from rollmill.core.errors import UsageError
from rollmill.core.types import HostEnvironment
from rollmill.envs.host.environment import StartByName, StartPython


class Film(NamedTuple):
    """The pictures of a camera, in order."""

    frames: list[tuple[UInt8[np.ndarray, "H W 3"], float | None]]
    """Each with the frames a second that suit the environment, if it says so."""
    problems: list[str]
    """The reason why there are no more pictures, if there is one."""


class Camera(gymnasium.Wrapper):
    """An environment whose pictures are kept.

    Args:
        env: the environment, made with `render_mode="rgb_array"`.
        film: receives the pictures; an environment that fails to draw itself is played on without.
    """

    def __init__(self, env: gymnasium.Env, film: Film) -> None:
        gymnasium.Wrapper.__init__(self, env)
        self._film = film

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Starts an episode."""
        result = self.env.reset(seed=seed, options=options)
        self._look()
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """Takes an action."""
        result = self.env.step(action)
        self._look()
        return result

    def _look(self) -> None:
        if self._film.problems:
            return
        if self.env.render_mode != "rgb_array":
            self._film.problems.append(f"it was made with render_mode={self.env.render_mode!r}")
            return
        try:
            picture = np.asarray(self.env.render())
        except Exception as error:  # what fails to draw depends on the environment's library
            self._film.problems.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            return
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            self._film.problems.append(f"a picture is {picture.dtype} {list(picture.shape)}, not uint8 [H, W, 3]")
            return
        fps = self.env.metadata.get("render_fps")
        self._film.frames.append((picture, float(fps) if isinstance(fps, int | float) and fps > 0 else None))


def filmed(env: HostEnvironment, film: Film) -> HostEnvironment:
    """The environment, whose copies put their pictures on a film.

    Raises:
        UsageError: its copies are no objects with Gymnasium's interface.
    """
    start = env.start.start if isinstance(env.start, StartByName) else env.start
    if not isinstance(start, StartPython):
        raise UsageError(
            f"{env.name} cannot be drawn: it is no Python object with Gymnasium's interface. hint: "
            "--env gymnasium:ID (env= in Python) plays in Gymnasium's environment of the same spaces."
        )
    make: Callable[[], gymnasium.Env] = start.make
    return env._replace(start=replace(start, make=lambda: Camera(make(), film)))
