"""Observations as float32 vectors: what each leaf of a space becomes before the first layer."""

import functools
import math
import operator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float

from rollmill.core.spaces import unsupported
from rollmill.core.types import Observation


class Leaf(NamedTuple):
    """How one leaf of an observation is encoded; hashable, so that a network can hold it statically.

    `path` leads to the leaf through dictionaries and tuples. `categories` and `starts` have one entry
    for each element of a categorical leaf and are empty for numbers, which are multiplied by `scale`.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    categories: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    scale: float = 1.0
    image: bool = False

    @property
    def size(self) -> int:
        """How many numbers the encoded leaf has."""
        return sum(self.categories) if self.categories else math.prod(self.shape)


def leaves(space: spaces.Space, path: tuple[str | int, ...] = ()) -> tuple[Leaf, ...]:
    """The leaves of an observation space in the order in which `flatten` joins them.

    Raises:
        UsageError: if a part of the space has no fixed shape.
    """
    match space:
        case spaces.Dict():
            return tuple(leaf for name, part in space.spaces.items() for leaf in leaves(part, (*path, name)))
        case spaces.Tuple():
            return tuple(leaf for i, part in enumerate(space.spaces) for leaf in leaves(part, (*path, i)))
        case spaces.Discrete():
            return (Leaf(path, (), (int(space.n),), (int(space.start),)),)
        case spaces.MultiDiscrete():
            starts = np.broadcast_to(space.start, space.shape)
            return (Leaf(path, space.shape, _integers(space.nvec), _integers(starts)),)
        case spaces.MultiBinary():
            return (Leaf(path, space.shape),)
        case spaces.Box():
            return (Leaf(path, space.shape, scale=_scale(space), image=len(space.shape) == 3),)
    raise unsupported(space)


def flatten(space: spaces.Space, observation: Observation) -> Float[Array, " size"]:
    """One observation as a float32 vector of length `flat_size(space)`.

    `Discrete` and `MultiDiscrete` become one-hot, counted from their `start`; other leaves are cast
    and raveled, and a uint8 `Box` that reaches 255 is divided by 255. Parts are joined in the order
    of the space.
    """
    return join(leaves(space), observation)


def flat_size(space: spaces.Space) -> int:
    """The length of `flatten(space, observation)`."""
    return sum(leaf.size for leaf in leaves(space))


def join(parts: tuple[Leaf, ...], observation: Observation) -> Float[Array, " size"]:
    """The given leaves of an observation, each encoded and raveled, as one float32 vector."""
    return jnp.concatenate([jnp.zeros(0, jnp.float32), *(encode(leaf, observation).reshape(-1) for leaf in parts)])


def encode(leaf: Leaf, observation: Observation) -> Float[Array, "..."]:
    """The leaf's part of an observation in float32: numbers in their own shape, categories as one vector."""
    value = functools.reduce(operator.getitem, leaf.path, observation)
    if leaf.categories:
        return _one_hot(leaf, value).astype(jnp.float32)
    numbers = jnp.asarray(value).astype(jnp.float32)
    return numbers if leaf.scale == 1.0 else numbers * leaf.scale


def _one_hot(leaf: Leaf, value: Array) -> Bool[Array, " size"]:
    # Each output knows the element that it watches and the value at which it is one.
    element = np.repeat(np.arange(len(leaf.categories)), leaf.categories)
    watched = np.concatenate([start + np.arange(n) for start, n in zip(leaf.starts, leaf.categories, strict=True)])
    return value.astype(jnp.int32).reshape(-1)[element] == jnp.asarray(watched, jnp.int32)


def _scale(space: spaces.Box) -> float:
    # Planes of zeros and ones come as uint8 too: only the full range is taken for brightness.
    return 1.0 / 255.0 if space.dtype == np.uint8 and np.max(space.high, initial=0) == 255 else 1.0


def _integers(values: np.ndarray) -> tuple[int, ...]:
    return tuple(int(value) for value in values.reshape(-1))
