"""Copies the observations of host environments to the rows of a batch."""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.core.spaces import struct
from rollmill.envs.host.numbers import cast_exactly

Write = Callable[[PyTree[np.ndarray], int, Any], None]
"""`write(batch, i, observation)`."""


def writer(space: spaces.Space) -> Write:
    """Returns a function that writes one observation to row `i` of a batch, cast to the batch's dtypes.

    If the observation does not match the space, the row is left unchanged. Shapes that NumPy would broadcast are
    also rejected, and integers that the batch cannot hold raise a `CastError`.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _writer_of_parts(space)
    kind = struct(space)
    if not kind.shape:
        return _writer_of_numbers(kind.dtype)
    return _writer_of_arrays(kind.shape, kind.dtype)


def _writer_of_numbers(dtype: np.dtype) -> Write:
    if dtype.kind not in "iu":
        return operator.setitem

    def write(batch: Any, i: int, observation: Any) -> None:
        batch[i] = cast_exactly(observation, dtype)

    return write


def _writer_of_arrays(shape: tuple[int, ...], dtype: np.dtype) -> Write:
    is_whole = dtype.kind in "iu"

    def write(batch: Any, i: int, observation: Any) -> None:
        actual = observation.shape if isinstance(observation, np.ndarray) else np.shape(observation)
        if actual != shape:
            raise _wrong_shape(actual, shape)
        batch[i] = cast_exactly(observation, dtype) if is_whole else observation

    return write


def _writer_of_parts(space: spaces.Space) -> Write:
    kinds = struct(space)
    paths = list(_paths(space))
    parts_of = [(path, _at(kinds, path)) for path in paths]
    expected = [(path, kind.shape, kind.dtype) for path, kind in parts_of]
    tuples = list(_tuples(space))

    def write(batch: PyTree[np.ndarray], i: int, observation: Any) -> None:
        for path, length in tuples:
            if len(_at(observation, path)) != length:
                raise ValueError(
                    f"an observation has {len(_at(observation, path))} parts, expected a Tuple of {length}."
                )
        parts = []
        for path, shape, dtype in expected:
            part = _at(observation, path)
            if not isinstance(part, np.ndarray) or part.dtype != dtype:
                part = cast_exactly(part, dtype)
            if part.shape != shape:
                raise _wrong_shape(part.shape, shape)
            parts.append(part)
        for path, part in zip(paths, parts, strict=True):
            _at(batch, path)[i] = part

    return write


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    """Returns the part of an element, or of a batch, at a path of keys and positions."""
    for key in path:
        value = value[key]
    return value


def _paths(space: spaces.Space, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each leaf, in the order of `leaves`."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield path
        return
    for key, part in _items(space):
        yield from _paths(part, (*path, key))


def _tuples(space: spaces.Space, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yields the path and the length of each `Tuple`."""
    if isinstance(space, spaces.Tuple):
        yield path, len(space.spaces)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in _items(space):
            yield from _tuples(part, (*path, key))


def _items(space: Any) -> Iterable[tuple[Any, spaces.Space]]:
    return space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)


def _wrong_shape(actual: tuple[int, ...], expected: tuple[int, ...]) -> ValueError:
    return ValueError(f"an observation has the shape {actual}, expected {expected} by the observation space.")
