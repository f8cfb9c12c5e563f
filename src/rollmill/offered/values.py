"""Converts between JAX arrays and elements of Gymnasium spaces."""

from typing import Any

import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.core.errors import UsageError
from rollmill.core.spaces import map_space, space_text
from rollmill.envs.host.actions import fit_to_space
from rollmill.envs.host.layout import leaves


def element(space: spaces.Space, value: PyTree[Any]) -> Any:
    """Converts a value, or a batch of values, to an element of a Gymnasium space.

    The arrays own their data and have the dtypes of the space. A single element of a `Discrete` is a NumPy
    integer.
    """
    return map_space(lambda leaf, part: np.array(part, leaf.dtype)[()], space, value)


def as_owned_arrays(tree: PyTree[Any]) -> PyTree[Any]:
    """Returns a tree of NumPy arrays that own their data, with scalars as NumPy scalars."""
    match tree:
        case dict():
            return {name: as_owned_arrays(part) for name, part in tree.items()}
        case list() | tuple():
            return (
                type(tree)(map(as_owned_arrays, tree))
                if not hasattr(tree, "_fields")
                else type(tree)(*map(as_owned_arrays, tree))
            )
        case _:
            return np.array(tree)[()]


def batch_of_one(name: str, space: spaces.Space, action: Any) -> Any:
    """Returns a batch that contains a single action. See `single_action`."""
    return map_space(lambda leaf, part: part[None], space, single_action(name, space, action))


def single_action(name: str, space: spaces.Space, action: Any) -> Any:
    """Returns an action of the environment `name` as arrays. Raises a `UsageError` if it has another shape."""

    def as_array(leaf: spaces.Space, part: Any) -> np.ndarray:
        array = np.asarray(part)
        if array.shape != leaf.shape:
            raise UsageError(
                f"{name}: an action has the shape {array.shape}, expected {leaf.shape} for {space_text(leaf)}."
            )
        return array

    return map_space(as_array, space, action)


def checked_actions(name: str, space: spaces.Space, actions: Any, num_envs: int) -> Any:
    """Checks a batch of actions for a compiled step, and clips actions of a `Box` to its bounds.

    Args:
        name: name of the environment in messages.
        space: space of one action.
        actions: actions, with leaves `[num_envs, ...]`.
        num_envs: number of environments.

    Raises:
        UsageError: an action has another shape, is outside its space, or is not finite.
    """
    try:
        fitting = fit_to_space(space, actions, num_envs)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    for leaf, part in zip(leaves(space, space), leaves(space, actions), strict=True):
        _check_leaf(name, leaf, np.asarray(part))
    return fitting


def _check_leaf(name: str, space: spaces.Space, actions: np.ndarray) -> None:
    if isinstance(space, spaces.Box):
        if not np.isfinite(actions).all():
            raise UsageError(
                f"{name}: an action is {actions[~np.isfinite(actions)][0]}, expected a finite number."
            )
        return
    if actions.dtype.kind not in "iub":
        raise UsageError(
            f"{name}: an action of {space_text(space)} must be an integer, got an array of {actions.dtype}."
        )
    low, high = _choices(space)
    if outside := actions[(actions < low) | (actions >= high)].tolist():
        raise UsageError(f"{name}: the action {outside[0]} is outside {space_text(space)}.")


def _choices(space: spaces.Space) -> tuple[Any, Any]:
    """Returns the lowest choice of a discrete space, and the number after the highest."""
    match space:
        case spaces.Discrete():
            return space.start, space.start + space.n
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec
    return 0, 2
