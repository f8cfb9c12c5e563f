"""Casts Python scalars and weakly typed arrays that an environment returns to arrays of fixed dtypes.

`x * 0.5`, `reward=1.0` and `{"steps": 0}` are weakly typed in JAX: their dtype adapts to the other operand. A
`jax.lax.scan` cannot carry such values. Rollmill therefore casts them when it receives an environment.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.core.errors import UsageError
from rollmill.core.spaces import struct
from rollmill.core.types import Action, Environment, Key, Params, State, Timestep
from rollmill.envs.agents import reward_struct

FLAG = jax.ShapeDtypeStruct((), jnp.bool_)


def strongly_typed(env: Environment) -> Environment:
    """Makes reset and step of an environment return arrays of fixed dtypes instead of weakly typed leaves.

    A weakly typed observation gets the dtype of its space, and a weakly typed reward becomes float32. A weakly
    typed leaf of the state gets the dtype that it had before the step, if no information is lost: integers may
    become floats, but not the reverse. Otherwise, it keeps its own dtype. Strongly typed leaves are not changed,
    nor are results of another structure, which `check_types` reports.
    """
    observation_like, reward_like = _struct(env.observation_space), reward_struct(env)

    def reset(key: Key, params: Params) -> Any:
        returned = env.reset(key, params)
        if not isinstance(returned, tuple) or len(returned) != 2:
            return returned
        observation, state = returned
        return _strong(observation, observation_like), _strong(state)

    def step(key: Key, state: State, action: Action, params: Params) -> Any:
        timestep = env.step(key, state, action, params)
        if not isinstance(timestep, Timestep):
            return timestep
        return timestep._replace(
            observation=_strong(timestep.observation, observation_like),
            state=_strong(timestep.state, state),
            reward=_strong(timestep.reward, reward_like),
            terminated=_strong(timestep.terminated, FLAG),
            truncated=_strong(timestep.truncated, FLAG),
        )

    return env._replace(reset=reset, step=step)


def _struct(space: spaces.Space) -> PyTree:
    """Returns the types of an observation, or None for an unsupported space, which `check_types` reports."""
    try:
        return struct(space)
    except UsageError:
        return None


def _strong(tree: PyTree, like: PyTree | None = None) -> PyTree:
    """Casts weak leaves to the dtypes of `like` if that loses nothing, and otherwise to their own dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    templates = jax.tree.leaves(like) if jax.tree.structure(like) == structure else leaves
    return jax.tree.unflatten(structure, [_strong_leaf(a, b) for a, b in zip(leaves, templates, strict=True)])


def _strong_leaf(leaf: Any, like: Any) -> Any:
    if not is_weak(leaf):
        return leaf
    dtype, target = jnp.result_type(leaf), jnp.result_type(like)
    return jax.lax.convert_element_type(leaf, target if _widens(dtype, target) else dtype)


def is_weak(leaf: Any) -> bool:
    """Returns whether JAX treats the dtype of this leaf as weak."""
    return isinstance(leaf, bool | int | float) or bool(getattr(leaf, "weak_type", False))


def _widens(dtype: np.dtype, target: Any) -> bool:
    """Returns True for a cast from integer to integer or floating, or from floating to floating."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.issubdtype(target, jnp.integer) or jnp.issubdtype(target, jnp.floating)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(target, jnp.floating)
