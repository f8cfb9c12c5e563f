"""Random actions, uniform over the legal ones."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from rollmill.core.spaces import possible_choices, repeated, sample
from rollmill.core.types import Action, Environment, HostEnvironment, Key


def random_action(key: Key, env: Environment | HostEnvironment, mask: PyTree[Bool[Array, "..."]]) -> Action:
    """Draws a random action, uniform over the legal ones. Unbounded sides of a `Box` extend by one unit."""
    action = sample(key, env.action_space)
    if not env.agents:
        return action if isinstance(mask, tuple) else _draw_legal(key, env.action_space, mask)
    keys = jax.random.split(key, len(env.agents))
    masks = {} if isinstance(mask, tuple) else mask
    for kind, kind_key in zip(env.agents, keys, strict=True):
        if kind.name in masks:
            space = repeated(kind.action_space, kind.count)
            action[kind.name] = _draw_legal(kind_key, space, masks[kind.name])
    return action


def _draw_legal(key: Key, space: Any, mask: Bool[Array, "..."]) -> Action:
    """Draws from a `Discrete` or `MultiDiscrete` space, uniformly over the choices that `mask` allows."""
    possible = possible_choices(space)
    assert possible is not None
    pick = jax.random.categorical(key, jnp.where(mask & possible, 0.0, -jnp.inf))
    return pick + jnp.asarray(space.start, pick.dtype)
