"""Renders states of an environment as pixels or strings, in the render modes of Gymnasium."""

from typing import Any

import numpy as np

from rollmill.core.drawing import Drawing
from rollmill.core.errors import UsageError
from rollmill.core.types import Environment
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.pictures import rasterise

PIXELS = 480
"""Number of pixels of the longer side of a drawing."""


def render_modes(env: Environment) -> list[str]:
    """Returns the render modes that an environment supports."""
    return [mode for mode, shows in (("rgb_array", env.draw), ("ansi", env.render)) if shows is not None]


def check_render_mode(env: Environment, mode: str | None) -> None:
    """Raises a `UsageError` if an environment does not support a render mode."""
    modes = render_modes(env)
    if mode is not None and mode not in modes:
        possible = (
            f"it must be {' or '.join(modes)}" if modes else "the environment has neither `draw` nor `render`"
        )
        raise UsageError(f"{env.name}: render_mode={mode!r} is not supported: {possible}.")


def show(env: Environment, mode: str | None, state: Any) -> Any:
    """Renders a state for Gymnasium: pixels `[height, width, 3]` for `rgb_array`, a string for `ansi`.

    Returns None if `mode` is None.
    """
    with attribute_to_user_code(f"{env.name}: render"):
        if mode == "ansi" and env.render is not None:
            return env.render(state, env.params)
        if mode == "rgb_array" and env.draw is not None:
            drawn = env.draw(state, env.params)
            return rasterise(drawn, PIXELS) if isinstance(drawn, Drawing) else np.asarray(drawn)
    return None
