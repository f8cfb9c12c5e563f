"""Draws gymnax environments: classic control problems, and environments observed as planes."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import spaces

from rollmill.core.drawing import Drawing
from rollmill.core.types import Params, State
from rollmill.envs.cartpole import CartPoleParams
from rollmill.envs.drawings.boards import draw_channels
from rollmill.envs.drawings.classic import draw_acrobot, draw_cartpole, draw_mountain_car, draw_pendulum
from rollmill.gpus.jax_settings import standard_promotion

Draw = Callable[[State, Params], Drawing]

MAX_SQUARES = 2**14
"""Squares and channels up to which planes are drawn."""


def draw_of(name: str, source: Any, observation_space: spaces.Space) -> Draw | None:
    """Returns the function that draws a gymnax environment, given its id and object, or None if it has none."""
    if name in _CLASSIC:
        return _CLASSIC[name]
    shape = observation_space.shape if isinstance(observation_space, spaces.Box) else ()
    if len(shape) not in (2, 3) or math.prod(shape) > MAX_SQUARES:
        return None

    def draw(state: State, params: Params) -> Drawing:
        with standard_promotion():
            planes = np.asarray(source.get_obs(state, params))
        return draw_channels(np.atleast_3d(planes))

    return draw


def _cartpole(state: Any, params: Any) -> Drawing:
    half_length = getattr(params, "length", CartPoleParams().pole_half_length)
    sizes = SimpleNamespace(position_limit=params.x_threshold, pole_half_length=half_length)
    return draw_cartpole(float(state.x), float(state.theta), sizes)


def _mountain_car(state: Any, params: Any) -> Drawing:
    return draw_mountain_car(float(state.position), params)


_CLASSIC: dict[str, Draw] = {
    "CartPole-v1": _cartpole,
    "Acrobot-v1": lambda state, params: draw_acrobot(float(state.joint_angle1), float(state.joint_angle2)),
    "Pendulum-v1": lambda state, params: draw_pendulum(float(state.theta)),
    "MountainCar-v0": _mountain_car,
    "MountainCarContinuous-v0": _mountain_car,
}
