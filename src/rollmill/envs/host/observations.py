"""Copies observations of host environments to the rows of a batch."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.core.spaces import struct
from rollmill.envs.host.casting import fitted
from rollmill.envs.host.layout import leaves

Write = Callable[[PyTree[np.ndarray], int, Any], None]
"""`write(batch, i, observation)`."""


def writer(space: spaces.Space) -> Write:
    """A function that writes one observation to row `i` of a batch, cast to the batch's dtypes.

    A row is written completely or, if the observation does not match the space, not at all. Shapes that NumPy
    would broadcast are refused too, and whole numbers that the batch cannot hold (`CastError`).
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
        batch[i] = fitted(observation, dtype)

    return write


def _writer_of_arrays(shape: tuple[int, ...], dtype: np.dtype) -> Write:
    is_whole = dtype.kind in "iu"

    def write(batch: Any, i: int, observation: Any) -> None:
        actual = observation.shape if isinstance(observation, np.ndarray) else np.shape(observation)
        if actual != shape:
            raise _wrong_shape(actual, shape)
        batch[i] = fitted(observation, dtype) if is_whole else observation

    return write


def _writer_of_parts(space: spaces.Space) -> Write:
    kinds = list(leaves(space, struct(space)))

    def write(batch: PyTree[np.ndarray], i: int, observation: Any) -> None:
        parts = [fitted(part, kind.dtype) for kind, part in zip(kinds, leaves(space, observation), strict=True)]
        for kind, part in zip(kinds, parts, strict=True):
            if part.shape != kind.shape:
                raise _wrong_shape(part.shape, kind.shape)
        for array, part in zip(leaves(space, batch), parts, strict=True):
            array[i] = part

    return write


def _wrong_shape(actual: tuple[int, ...], expected: tuple[int, ...]) -> ValueError:
    return ValueError(f"an observation has the shape {actual}; the observation space says {expected}.")
