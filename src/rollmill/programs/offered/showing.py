"""Renders states of an environment as pixels or text, by the render modes of Gymnasium."""

from typing import Any

import numpy as np

from rollmill.core.drawing import Drawing
from rollmill.core.errors import UsageError
from rollmill.core.types import Environment
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.pictures import rasterise

PIXELS = 480
"""Pixels of the longer side of a drawing."""


def render_modes(env: Environment) -> list[str]:
    """Returns the modes in which an environment can be shown."""
    return [mode for mode, shows in (("rgb_array", env.draw), ("ansi", env.render)) if shows is not None]


def check_render_mode(env: Environment, mode: str | None) -> None:
    """Raises a `UsageError` if an environment cannot be shown in a mode."""
    modes = render_modes(env)
    if mode is not None and mode not in modes:
        possible = (
            f"it must be {' or '.join(modes)}" if modes else "the environment has neither `draw` nor `render`"
        )
        raise UsageError(f"{env.name}: render_mode={mode!r} is not supported: {possible}.")


def show(env: Environment, mode: str | None, state: Any) -> Any:
    """Returns a state as pixels `[height, width, 3]` or as text, or None without a mode."""
    with attribute_to_user_code(f"{env.name}: render"):
        if mode == "ansi" and env.render is not None:
            return env.render(state, env.params)
        if mode == "rgb_array" and env.draw is not None:
            drawn = env.draw(state, env.params)
            return rasterise(drawn, PIXELS) if isinstance(drawn, Drawing) else np.asarray(drawn)
    return None
