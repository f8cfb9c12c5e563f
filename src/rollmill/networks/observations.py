"""Observations as float32 vectors: what each leaf of a space becomes before the first layer."""

import functools
import math
import operator
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float

from rollmill.core.spaces import unsupported
from rollmill.core.types import Observation

ImageLayout: TypeAlias = Literal["auto", "channels_first", "channels_last"]

MOST_CHANNELS = 16
"""A first axis that is longer than this is a height."""


class ObservationLeaf(NamedTuple):
    """How one leaf of an observation is encoded; hashable, so that a network can hold it statically.

    `path` leads to the leaf through dictionaries and tuples. `categories` and `starts` have one entry
    for each element of a categorical leaf and are empty for numbers, which are multiplied by `scale`.
    `channels_first` says of an image that its axes are (channels, height, width).
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    categories: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    scale: float = 1.0
    image: bool = False
    channels_first: bool = False

    @property
    def size(self) -> int:
        """How many numbers the encoded leaf has."""
        return sum(self.categories) if self.categories else math.prod(self.shape)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        first, second, third = self.shape
        return (second, third, first) if self.channels_first else (first, second, third)


def leaves(space: spaces.Space, path: tuple[str | int, ...] = ()) -> tuple[ObservationLeaf, ...]:
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
            return (ObservationLeaf(path, (), (int(space.n),), (int(space.start),)),)
        case spaces.MultiDiscrete():
            starts = np.broadcast_to(space.start, space.shape)
            return (ObservationLeaf(path, space.shape, _integers(space.nvec), _integers(starts)),)
        case spaces.MultiBinary():
            return (ObservationLeaf(path, space.shape),)
        case spaces.Box():
            return (ObservationLeaf(path, space.shape, scale=_scale(space), image=len(space.shape) == 3),)
    raise unsupported(space)


def images(space: spaces.Space, layout: ImageLayout = "auto") -> tuple[ObservationLeaf, ...]:
    """The leaves that can be convolved, each with the axis of its channels decided."""
    parts = [leaf for leaf in leaves(space) if leaf.image]
    return tuple(leaf._replace(channels_first=has_channels_first(leaf.shape, layout)) for leaf in parts)


def resolve_layout(space: spaces.Space, layout: ImageLayout) -> ImageLayout:
    """The layout that `auto` means for all images of a space; as it is where there are none, or they differ."""
    decided = {leaf.channels_first for leaf in images(space, layout)}
    if layout != "auto" or len(decided) != 1:
        return layout
    return "channels_first" if decided.pop() else "channels_last"


def has_channels_first(shape: tuple[int, ...], layout: ImageLayout = "auto") -> bool:
    """Whether axis 0 of an image holds its channels, as in stacked frames of EnvPool and Gymnasium.

    `auto` takes it for that where it is at most 16 and smaller than the two others, and these are equal or both
    above 16: (4, 84, 84) and (3, 210, 160) have their channels first, (84, 84, 4) and (10, 10, 16) last.
    """
    if layout != "auto":
        return layout == "channels_first"
    channels, height, width = shape
    return (
        channels <= MOST_CHANNELS
        and channels < min(height, width)
        and (height == width or min(height, width) > MOST_CHANNELS)
    )


def as_image(leaf: ObservationLeaf, observation: Observation) -> Float[Array, "height width channels"]:
    """The leaf's part of an observation in float32, its channels last."""
    image = encode(leaf, observation)
    return jnp.moveaxis(image, 0, -1) if leaf.channels_first else image


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


def join(parts: tuple[ObservationLeaf, ...], observation: Observation) -> Float[Array, " size"]:
    """The given leaves of an observation, each encoded and raveled, as one float32 vector."""
    return jnp.concatenate([jnp.zeros(0, jnp.float32), *(encode(leaf, observation).reshape(-1) for leaf in parts)])


def encode(leaf: ObservationLeaf, observation: Observation) -> Float[Array, "..."]:
    """The leaf's part of an observation in float32: numbers in their own shape, categories as one vector."""
    value = functools.reduce(operator.getitem, leaf.path, observation)
    if leaf.categories:
        return _one_hot(leaf, value).astype(jnp.float32)
    numbers = jnp.asarray(value).astype(jnp.float32)
    return numbers if leaf.scale == 1.0 else numbers * leaf.scale


def _one_hot(leaf: ObservationLeaf, value: Array) -> Bool[Array, " size"]:
    # Each output knows the element that it watches and the value at which it is one.
    element = np.repeat(np.arange(len(leaf.categories)), leaf.categories)
    watched = np.concatenate([start + np.arange(n) for start, n in zip(leaf.starts, leaf.categories, strict=True)])
    return value.astype(jnp.int32).reshape(-1)[element] == jnp.asarray(watched, jnp.int32)


def _scale(space: spaces.Box) -> float:
    # Planes of zeros and ones come as uint8 too: only the full range is taken for brightness.
    return 1.0 / 255.0 if space.dtype == np.uint8 and np.max(space.high, initial=0) == 255 else 1.0


def _integers(values: np.ndarray) -> tuple[int, ...]:
    return tuple(int(value) for value in values.reshape(-1))
