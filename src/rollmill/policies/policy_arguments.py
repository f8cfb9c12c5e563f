"""Checks the arguments of a policy (observations, masks and memories, single or in batches) against their shapes.

Shape letter: `*batch` leading axes of any number, none for a single observation.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.schema import coerce
from rollmill.core.spaces import possible_choices
from rollmill.core.types import Key
from rollmill.dataflow import Graph
from rollmill.tree_search.positions import Position

Shape = tuple[int, ...]


def extra_input_struct(graph: Graph) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes of the policy's inputs besides the observation, for ONE environment state
    (`dataflow.ActionMask`).
    """
    state, _ = jax.eval_shape(graph.start_environment, jax.random.key(0), jnp.int32(0))
    return jax.eval_shape(graph.action_mask, state)


def mask_struct(graph: Graph) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shape of the action mask for one observation: a dictionary for multi-agent policies, or `()`
    without masks.
    """
    known = extra_input_struct(graph)
    return known.action_mask if isinstance(known, Position) else known


def possible_mask(space: spaces.Space) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shape of an action mask for a space: a dictionary for a multi-agent space, or `()` if actions
    cannot be masked.
    """
    if isinstance(space, spaces.Dict):
        parts = {name: possible_mask(part) for name, part in space.spaces.items()}
        return {name: part for name, part in parts.items() if not isinstance(part, tuple)}
    choices = possible_choices(space)
    return () if choices is None else jax.ShapeDtypeStruct(choices.shape, np.dtype(bool))


def as_batch(name: str, expected: PyTree[jax.ShapeDtypeStruct], value: Any) -> tuple[PyTree, Shape]:
    """Converts an argument to arrays with the expected dtypes, and returns them with their common leading axes.

    `expected` holds the shapes and dtypes of one element, in nested dictionaries and tuples. `value` contains JAX
    or NumPy arrays, lists or scalars, with any number of leading axes. If the structure, a shape or a dtype does
    not fit, a `UsageError` is raised that calls the argument `name`, such as `the observation`.
    """
    shapes: dict[str, Shape] = {}
    arrays = _over(name, expected, value, shapes)
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{path} {list(shape)}" for path, shape in shapes.items())
        raise UsageError(f"the parts of {name} must have the same leading axes, got {found}.")
    return arrays, next(iter(shapes.values()), ())


def same_batch(name: str, expected: PyTree[jax.ShapeDtypeStruct], value: Any, batch: Shape) -> PyTree:
    """Converts an argument as `as_batch` does, and checks that it has one element for each observation of
    `batch`.
    """
    arrays, found = as_batch(name, expected, value)
    if found != batch and jax.tree.leaves(expected):
        raise UsageError(
            f"{name} has the leading axes {list(found)}, but the observation has the leading axes {list(batch)}."
        )
    return arrays


def check_finite(name: str, tree: PyTree) -> None:
    """Raises a `UsageError` with position and value if an element is NaN or infinite. Skips traced arrays.

    The error calls the arrays `name`, such as `the observation`.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.core.Tracer) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        array = np.asarray(leaf)
        if np.isfinite(array).all():
            continue
        place = np.argwhere(~np.isfinite(array))[0].tolist()
        where = f"{name}{jax.tree_util.keystr(path)}{place if place else ''}"
        raise UsageError(
            f"{where} is {array[tuple(place)]}, expected a finite number. The policy's action would be "
            "meaningless. hint: fix the source of this value, or replace it on purpose (numpy.nan_to_num)."
        )


def check_categories(name: str, space: spaces.Space, value: PyTree) -> None:
    """Raises a `UsageError` with position and value if a category is not in its space. Skips traced arrays.

    Networks would encode it as a vector of zeros. `value` has any number of leading axes.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            check_categories(f"{name}[{key!r}]", part, value[key])
        return
    limits = _category_limits(space)
    if limits is None or isinstance(value, jax.core.Tracer):
        return
    low, high = limits
    array = np.asarray(value)
    outside = (array < low) | (array > high)
    if outside.any():
        place = np.argwhere(outside)[0].tolist()
        least, most = (np.broadcast_to(bound, array.shape)[tuple(place)] for bound in (low, high))
        raise UsageError(
            f"{name}{place or ''} is {array[tuple(place)]}, which must lie between {least} and {most} in the "
            "observation space."
        )


def _category_limits(space: spaces.Space) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the lowest and the highest category of each element, or None for a space without categories."""
    match space:
        case spaces.Discrete():
            return np.asarray(space.start), np.asarray(space.start + space.n - 1)
        case spaces.MultiDiscrete():
            low = np.asarray(space.start, np.int64)  # a space of bytes would add modulo 256
            return low, low + space.nvec - 1
        case spaces.MultiBinary():
            return np.asarray(0), np.asarray(1)
    return None


def key_or_seed(key: Key | None, seed: Any) -> Key | None:
    """Returns the random key for a call that accepts either a key or a seed.

    Raises a `UsageError` if both are given, or if the seed does not fit into 32 bits.
    """
    if key is not None and seed is not None:
        raise UsageError("key and seed were both given, expected one of them.")
    if seed is None:
        return key
    if not 0 <= (number := coerce("seed", int, seed)) < 2**32:
        raise UsageError(f"seed={number} must lie between 0 and 2**32 - 1.")
    return jax.random.key(number)


def spread_key(key: Key, batch: Shape) -> Array:
    """Splits a key into one key for each element of a batch, `[*batch]`. For a single observation, returns the key
    itself.
    """
    return jax.random.split(key, batch) if batch else key


def is_traced(*trees: PyTree) -> bool:
    """Returns whether any leaf is a JAX tracer, as inside `jax.jit` and `jax.vmap`."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def holds_jax(*trees: PyTree) -> bool:
    """Returns whether any leaf is a JAX array."""
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(trees))


def on_host(tree: PyTree) -> PyTree:
    """Converts all leaves of a pytree to NumPy arrays."""
    return jax.tree.map(np.asarray, jax.device_get(tree))


def _over(name: str, expected: Any, given: Any, shapes: dict[str, Shape]) -> Any:
    if isinstance(expected, Mapping):
        if not isinstance(given, Mapping) or set(given) != set(expected):
            found = (
                f"the keys {', '.join(map(str, given))}" if isinstance(given, Mapping) else type(given).__name__
            )
            raise UsageError(
                f"{name} must be a dictionary with the keys {', '.join(map(str, expected))}, got {found}."
            )
        return {key: _over(f"{name}[{key!r}]", part, given[key], shapes) for key, part in expected.items()}
    if isinstance(expected, jax.ShapeDtypeStruct):
        array = _leaf(name, expected, given)
        shapes[name] = array.shape[: array.ndim - len(expected.shape)]
        return array
    if not isinstance(given, tuple | list) or len(given) != len(expected):
        found = f"{len(given)} parts" if isinstance(given, tuple | list) else type(given).__name__
        raise UsageError(f"{name} must be a tuple of {len(expected)} parts, got {found}.")
    return tuple(_over(f"{name}[{i}]", part, given[i], shapes) for i, part in enumerate(expected))


def _leaf(name: str, expected: jax.ShapeDtypeStruct, given: Any) -> Any:
    try:
        array = given if isinstance(given, jax.Array) else np.asarray(given)
    except (TypeError, ValueError) as error:
        raise _other(
            name, expected, f"a {type(given).__name__} that cannot be converted to an array ({error})"
        ) from error
    found = f"{array.dtype} {list(array.shape)}"
    if (kind := _kind(array.dtype)) is None or kind > (_kind(expected.dtype) or 0):
        raise _other(name, expected, found)
    if array.shape[max(array.ndim - len(expected.shape), 0) :] != expected.shape:
        raise _other(name, expected, found)
    converted = array.astype(expected.dtype)
    if kind == 1 and not isinstance(array, jax.Array) and not np.array_equal(converted, array):
        raise _other(name, expected, f"{found} with values from {array.min()} to {array.max()}")
    return converted


def _kind(dtype: Any) -> int | None:
    """Returns 0 for booleans, 1 for integers, 2 for floats, and None for anything else."""
    kinds = (np.bool_, jnp.integer, jnp.floating)
    return next((index for index, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), None)


def _other(name: str, expected: jax.ShapeDtypeStruct, found: str) -> UsageError:
    shape = ", ".join(map(str, expected.shape))
    batch = f"[..., {shape}]" if shape else "[...]"
    return UsageError(f"{name} is {found}, expected {expected.dtype} [{shape}], or a batch of these, {batch}.")
