"""Handles `gymnasium.spaces` in JAX: shapes, dtypes, sampling and membership.

Only this module converts the 64-bit defaults of Gymnasium (`Discrete` is int64) to 32-bit types.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import Key

SUPPORTED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)

MAX_NUMBERS = 16
"""Numbers of a space that a message shows. Of a longer array, it shows the first and the last three."""
MAX_SPACE_TEXT = 240
"""Maximum number of characters of a space in a message."""


def map_space(function: Callable[..., Any], space: spaces.Space, *elements: Any) -> Any:
    """Calls `function(leaf, *parts)` for each leaf of a space, with its parts of the elements, or of batches.

    Returns the results as dictionaries and tuples like those of the space.
    """
    match space:
        case spaces.Dict():
            return {
                name: map_space(function, part, *(each[name] for each in elements))
                for name, part in space.spaces.items()
            }
        case spaces.Tuple():
            return tuple(map_space(function, *parts) for parts in zip(space.spaces, *elements, strict=True))
    return function(space, *elements)


def leaf_spaces(space: spaces.Space, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], spaces.Space]]:
    """Yields each leaf of a space, with the names and indices that lead to it."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in inner:
            yield from leaf_spaces(part, (*path, key))
    else:
        yield path, space


def part_at(element: Any, path: tuple[Any, ...]) -> Any:
    """Returns the part of an element, or of a batch of elements, at the path of a leaf."""
    return functools.reduce(operator.getitem, path, element)


def format_path(path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf as subscripts, such as `['arm'][2]`."""
    return "".join(f"[{key!r}]" for key in path)


def space_text(space: spaces.Space) -> str:
    """Returns a space as messages show it, in one line. Long arrays and texts are shortened in the middle."""
    with np.printoptions(threshold=MAX_NUMBERS, linewidth=MAX_SPACE_TEXT):
        text = " ".join(str(space).split())
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.size > MAX_NUMBERS:
        text += f" of shape {space.shape}"
    return text if len(text) <= MAX_SPACE_TEXT else f"{text[: MAX_SPACE_TEXT - 80]} ... {text[-70:].lstrip()}"


def struct(space: spaces.Space) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shape and 32-bit dtype of one element of a space, as a pytree of `jax.ShapeDtypeStruct`."""
    return map_space(_leaf_struct, space)


def _leaf_struct(space: spaces.Space) -> jax.ShapeDtypeStruct:
    if not isinstance(space, SUPPORTED):
        raise unsupported_space(space)
    return jax.ShapeDtypeStruct(space.shape or (), _dtype(space))


def is_unbounded(space: spaces.Space) -> bool:
    """Returns whether all parts of a space are floating-point and have no bounds."""
    return all(
        isinstance(leaf, spaces.Box)
        and np.issubdtype(leaf.dtype, np.floating)
        and np.isneginf(leaf.low).all()
        and np.isposinf(leaf.high).all()
        for _, leaf in leaf_spaces(space)
    )


def sample(key: Key, space: spaces.Space) -> PyTree[Array]:
    """Draws one element of a space uniformly. A `Box` that lacks a bound extends one unit from the other bound."""
    match space:
        case spaces.Dict():
            keys = jax.random.split(key, len(space.spaces))
            return {name: sample(k, part) for k, (name, part) in zip(keys, space.spaces.items(), strict=True)}
        case spaces.Tuple():
            keys = jax.random.split(key, len(space.spaces))
            return tuple(sample(k, part) for k, part in zip(keys, space.spaces, strict=True))
        case spaces.Discrete():
            return jax.random.randint(key, (), int(space.start), int(space.start + space.n), _dtype(space))
        case spaces.MultiDiscrete():
            high = jnp.asarray(space.nvec + space.start, _dtype(space))
            return jax.random.randint(
                key, space.shape, jnp.asarray(space.start, _dtype(space)), high, _dtype(space)
            )
        case spaces.MultiBinary():
            return jax.random.bernoulli(key, 0.5, space.shape).astype(_dtype(space))
        case spaces.Box():
            return _sample_box(key, space)
    raise unsupported_space(space)


def contains(space: spaces.Space, value: PyTree[Array]) -> Bool[Array, ""]:
    """Returns whether `value`, structured like `struct(space)`, is an element of the space. Can be traced."""
    match space:
        case spaces.Dict():
            inside = [contains(part, value[name]) for name, part in space.spaces.items()]
        case spaces.Tuple():
            inside = [contains(part, v) for part, v in zip(space.spaces, value, strict=True)]
        case spaces.Discrete():
            inside = [(value >= int(space.start)) & (value < int(space.start + space.n))]
        case spaces.MultiDiscrete():
            low = jnp.asarray(space.start, value.dtype)
            inside = [jnp.all((value >= low) & (value < low + jnp.asarray(space.nvec, value.dtype)))]
        case spaces.MultiBinary():
            inside = [jnp.all((value == 0) | (value == 1))]
        case spaces.Box():
            low, high = map(jnp.asarray, box_bounds(space, value.dtype))
            inside = [jnp.all((value >= low) & (value <= high))]
        case _:
            raise unsupported_space(space)
    return jnp.all(jnp.stack(inside)) if inside else jnp.asarray(True)


def box_bounds(space: spaces.Box, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds of a `Box` in another dtype.

    Bounds outside the range of an integer dtype are clipped to it. Bounds that are too large for a floating-point
    dtype become infinite.
    """
    low, high = np.asarray(space.low), np.asarray(space.high)
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        low, high = (np.clip(bound, limits.min, limits.max) for bound in (low, high))
    with np.errstate(over="ignore"):
        return low.astype(dtype), high.astype(dtype)


def possible_choices(space: spaces.Space) -> np.ndarray | None:
    """Returns the mask of all choices of a discrete action space, or None for other spaces.

    The mask has the shape `[n]` for `Discrete`, or `[*shape, max(nvec)]` for `MultiDiscrete`, padded with False
    where `nvec` is smaller. An `action_mask` and the policy's logits have the same shape. In a multi-agent
    environment, masks are a dictionary of kinds, with an entry of this shape for each kind's space.
    """
    match space:
        case spaces.Discrete():
            return np.ones(int(space.n), bool)
        case spaces.MultiDiscrete():
            return np.arange(space.nvec.max()) < space.nvec[..., None]
    return None


def repeat_space(space: spaces.Space, count: int) -> spaces.Space:
    """Returns the space of `count` elements of `space`, as arrays with one more leading axis.

    A `Discrete` becomes a `MultiDiscrete`. The parts of a `Dict` or `Tuple` are repeated. Other kinds of spaces
    keep their kind.
    """
    match space:
        case spaces.Dict():
            return spaces.Dict({name: repeat_space(part, count) for name, part in space.spaces.items()})
        case spaces.Tuple():
            return spaces.Tuple([repeat_space(part, count) for part in space.spaces])
        case spaces.Discrete():
            return spaces.MultiDiscrete(
                np.full(count, space.n), space.dtype.type, start=np.full(count, space.start)
            )
        case spaces.MultiDiscrete():
            nvec, start = _rows(space.nvec, count), _rows(space.start, count)
            return spaces.MultiDiscrete(nvec, space.dtype.type, start=start)
        case spaces.MultiBinary():
            return spaces.MultiBinary((count, *space.shape))
        case spaces.Box():
            return spaces.Box(_rows(space.low, count), _rows(space.high, count), dtype=space.dtype.type)
    raise unsupported_space(space)


def unsupported_space(space: spaces.Space) -> UsageError:
    """Returns the error for a kind of space that has no JAX form with a fixed shape."""
    names = ", ".join(kind.__name__ for kind in SUPPORTED)
    return UsageError(f"the space {space_text(space)} has no fixed-shape JAX form. Supported spaces: {names}.")


def _dtype(space: spaces.Space) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(space.dtype)


def _rows(row: np.ndarray, count: int) -> np.ndarray:
    return np.broadcast_to(row, (count, *np.shape(row))).copy()


def _sample_box(key: Key, space: spaces.Box) -> Array:
    dtype = _dtype(space)
    if not np.issubdtype(dtype, np.floating):
        low, high = (np.asarray(bound, np.int64) for bound in (space.low, space.high))
        info = np.iinfo(np.int32)
        draw = jax.random.randint(
            key, space.shape, low.clip(info.min, info.max), (high + 1).clip(info.min, info.max)
        )
        return draw.astype(dtype)
    low = np.where(space.bounded_below, space.low, np.where(space.bounded_above, space.high - 1.0, -1.0))
    high = np.where(space.bounded_above, space.high, np.where(space.bounded_below, space.low + 1.0, 1.0))
    uniform = jax.random.uniform(key, space.shape, dtype)
    return jnp.asarray(low, dtype) + uniform * jnp.asarray(high - low, dtype)
