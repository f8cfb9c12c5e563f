"""`xminigrid:ID`: grid worlds of XLand-MiniGrid (Nikulin et al., "XLand-MiniGrid: Scalable Meta-Reinforcement
Learning Environments in JAX", NeurIPS Datasets and Benchmarks 2024), version 0.9.

The tasks of XLand are rule sets in `params`, which may differ between environments. No rule sets are downloaded.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array

from rollmill.core.errors import unknown_name
from rollmill.core.types import Action, Environment, Key, Observation, Params, State, Timestep
from rollmill.envs.adapters import import_extra
from rollmill.envs.adapters.promotion import promoting
from rollmill.envs.options import like, unknown_option
from rollmill.envs.rare_resets import checked_ratio
from rollmill.gpus.jax_settings import standard_promotion

OPTIONS = ("height", "max_steps", "view_size", "width")
"""Parameters of XLand-MiniGrid that can be chosen."""


def make(name: str, *, one_hot: bool = True, reset_ratio: int = 1, **options: Any) -> Environment:
    """Makes the XLand-MiniGrid environment called `name`.

    Args:
        name: an id of XLand-MiniGrid, such as `MiniGrid-DoorKey-8x8`.
        one_hot: observe a plane of zeros and ones for each tile and each colour, `[view, view, tiles + colours]`,
            instead of their indices, `[view, view, 2]`.
        reset_ratio: see `rollmill.Environment`.
        **options: values of the parameters `max_steps`, `view_size`, `height` and `width`.

    Returns:
        The environment. Its time limit truncates episodes, and the agent sees the cells in front of it.

    Raises:
        UsageError: XLand-MiniGrid is not installed, or has no such environment or option.
    """
    xminigrid = import_extra("xminigrid", "xminigrid")
    if name not in xminigrid.registered_environments():
        raise unknown_name("xminigrid environment", name, xminigrid.registered_environments())
    with standard_promotion():
        source, params = xminigrid.make(name)
        params = params.replace(**_read_options(name, options, params))
        encode, space = _encoding(source.observation_shape(params), one_hot=one_hot)
        env = Environment(
            name=f"xminigrid:{name}",
            reset=_reset_of(source, encode),
            step=_step_of(source, encode),
            observation_space=space,
            action_space=spaces.Discrete(source.num_actions(params)),
            params=params,
            reset_ratio=checked_ratio(reset_ratio),
        )
        return promoting(env)


def _read_options(name: str, options: dict[str, Any], params: Any) -> dict[str, Any]:
    defaults = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    for option in options:
        if option not in OPTIONS:
            raise unknown_option(f"xminigrid:{name}", option, [*OPTIONS, "one_hot", "reset_ratio"])
    return {
        option: like(f"xminigrid:{name}", option, value, defaults[option]) for option, value in options.items()
    }


def _encoding(shape: tuple[int, int, int], *, one_hot: bool) -> tuple[Any, spaces.Box]:
    """Returns a function that encodes observations for the policy, and the space of its results."""
    constants = import_extra("xminigrid.core.constants", "xminigrid")
    num_tiles, num_colours = constants.NUM_TILES, constants.NUM_COLORS
    if not one_hot:
        return lambda tiles: tiles, spaces.Box(0, max(num_tiles, num_colours) - 1, shape, np.uint8)

    def planes(tiles: Array) -> Array:
        parts = (jax.nn.one_hot(tiles[..., 0], num_tiles), jax.nn.one_hot(tiles[..., 1], num_colours))
        return jnp.concatenate(parts, axis=-1)

    return planes, spaces.Box(0.0, 1.0, (*shape[:2], num_tiles + num_colours), np.float32)


def _reset_of(source: Any, encode: Any) -> Any:
    def reset(key: Key, params: Params) -> tuple[Observation, State]:
        first = source.reset(params, key)
        return encode(first.observation), first

    return reset


def _step_of(source: Any, encode: Any) -> Any:
    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        after = source.step(params, state, action)
        return Timestep(
            observation=encode(after.observation),
            state=after,
            reward=after.reward,
            terminated=after.discount == 0,
            truncated=after.state.step_num >= params.max_steps,
            info={},
        )

    return step
