"""Converts a policy's actions for host environments: clips them to their bounds and casts them to the space's
dtype.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.core.errors import UsageError
from rollmill.core.spaces import SUPPORTED, map_space, space_text, unsupported_space
from rollmill.core.text import format_count


def fit_to_space(space: spaces.Space, actions: PyTree[np.ndarray], num_envs: int) -> PyTree[np.ndarray]:
    """Clips a batch of actions to the bounds of each `Box`, and casts it to the space's dtypes.

    Args:
        space: space of one action.
        actions: leaves `[num_envs, ...]`.
        num_envs: number of environments.

    Raises:
        UsageError: a leaf has another shape.
    """
    return map_space(partial(_fit_leaf, num_envs), space, actions)


def _fit_leaf(num_envs: int, space: spaces.Space, actions: Any) -> np.ndarray:
    if not isinstance(space, SUPPORTED):
        raise unsupported_space(space)
    array = np.asarray(actions)
    if array.shape != (num_envs, *(space.shape or ())):
        raise UsageError(
            f"actions have the shape {array.shape}, expected {(num_envs, *(space.shape or ()))} for "
            f"{format_count(num_envs, 'action')} of {space_text(space)}."
        )
    if isinstance(space, spaces.Box):
        return np.minimum(np.maximum(array, space.low), space.high).astype(space.dtype, copy=False)
    # a copy, because an environment may keep its action, and the caller may reuse the array
    return array.astype(space.dtype)


def element_splitter(space: spaces.Space) -> Callable[[PyTree[np.ndarray]], Iterator[Any]]:
    """Returns a function that splits a batch of actions into single actions, one for each environment."""
    match space:
        case spaces.Dict():
            names = list(space.spaces)
            parts = [element_splitter(space.spaces[name]) for name in names]
            return lambda batch: (
                dict(zip(names, values, strict=True))
                for values in zip(
                    *(split(batch[name]) for name, split in zip(names, parts, strict=True)), strict=True
                )
            )
        case spaces.Tuple():
            parts = [element_splitter(part) for part in space.spaces]
            return lambda batch: zip(*(split(b) for split, b in zip(parts, batch, strict=True)), strict=True)
        case spaces.Discrete():
            # Gymnasium checks a Python integer 1 us faster than a NumPy integer
            return lambda batch: iter(batch.tolist())
    return iter


def replace_illegal_actions(space: spaces.Space, actions: Any, mask: Any, rng: np.random.Generator) -> Any:
    """Replaces random actions of host environments by random legal actions.

    Args:
        space: space of one action.
        actions: a batch drawn from the space, leaves `[n, ...]`. In a multi-agent environment, a dictionary of
            kinds.
        mask: the legal actions, or None if all actions are legal.
        rng: generator of the replacements.
    """
    if isinstance(mask, dict):
        assert isinstance(space, spaces.Dict)
        legal = {kind: _draw_legal(space[kind], by_agent, rng) for kind, by_agent in mask.items()}
        return {**actions, **legal}
    return actions if mask is None else _draw_legal(space, mask, rng)


def _draw_legal(space: spaces.Space, mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a random action for each copy, `[n, ...]`, among the actions that `mask` allows."""
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    return np.where(mask, rng.random(mask.shape), -1).argmax(axis=-1) + space.start
