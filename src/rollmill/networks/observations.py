"""Encodes observations as float32 vectors and images for the first layer of a network."""

import itertools
import math
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float

from rollmill.core.spaces import leaf_spaces, part_at, unsupported_space
from rollmill.core.types import Observation
from rollmill.networks import wide_inputs

ImageLayout: TypeAlias = Literal["auto", "channels_first", "channels_last"]

MAX_CHANNELS = 16
"""Maximum length of a first axis that `auto` takes for the channels of an image."""


class ObservationLeaf(NamedTuple):
    """Encoding of one leaf of an observation. It is hashable, so networks can hold it as a static field."""

    path: tuple[str | int, ...]
    """Dictionary keys and tuple indices that lead to the leaf."""
    shape: tuple[int, ...]
    categories: tuple[int, ...] = ()
    """Number of categories of each element, or empty for a numeric leaf."""
    starts: tuple[int, ...] = ()
    """First category of each element, or empty for a numeric leaf."""
    scale: float = 1.0
    """Factor by which a numeric leaf is multiplied."""
    image: bool = False
    """Whether the leaf is an image, a `Box` of rank 3."""
    channels_first: bool = False
    """Whether the axes of an image are (channels, height, width)."""

    @property
    def size(self) -> int:
        """Number of elements of the encoded leaf."""
        return sum(self.categories) if self.categories else math.prod(self.shape)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and number of channels of an image."""
        first, second, third = self.shape
        return (second, third, first) if self.channels_first else (first, second, third)


def leaves(space: spaces.Space) -> tuple[ObservationLeaf, ...]:
    """Returns the leaves of an observation space, in the order in which `flatten` concatenates them.

    Raises a `UsageError` if a part of the space has no fixed shape.
    """
    return tuple(_leaf(path, part) for path, part in leaf_spaces(space))


def _leaf(path: tuple[str | int, ...], space: spaces.Space) -> ObservationLeaf:
    match space:
        case spaces.Discrete():
            return ObservationLeaf(path, (), (int(space.n),), (int(space.start),))
        case spaces.MultiDiscrete():
            starts = np.broadcast_to(space.start, space.shape)
            return ObservationLeaf(path, space.shape, _integers(space.nvec), _integers(starts))
        case spaces.MultiBinary():
            return ObservationLeaf(path, space.shape)
        case spaces.Box():
            return ObservationLeaf(path, space.shape, scale=_scale(space), image=len(space.shape) == 3)
    raise unsupported_space(space)


def images(space: spaces.Space, layout: ImageLayout = "auto") -> tuple[ObservationLeaf, ...]:
    """Returns the image leaves of an observation space, with `channels_first` resolved."""
    parts = [leaf for leaf in leaves(space) if leaf.image]
    return tuple(leaf._replace(channels_first=has_channels_first(leaf.shape, layout)) for leaf in parts)


def resolve_layout(space: spaces.Space, layout: ImageLayout) -> ImageLayout:
    """Returns the common layout of a space's images for `auto`, or `layout` itself if there is none."""
    channels_first = {leaf.channels_first for leaf in images(space, layout)}
    if layout != "auto" or len(channels_first) != 1:
        return layout
    return "channels_first" if channels_first.pop() else "channels_last"


def has_channels_first(shape: tuple[int, ...], layout: ImageLayout = "auto") -> bool:
    """Returns whether axis 0 of an image is its channel axis, as in stacked frames of EnvPool and Gymnasium.

    With `auto`, axis 0 is the channel axis if its size is at most 16 and smaller than both other sizes, and the
    other two are equal or both greater than 16. For example, (4, 84, 84) and (3, 210, 160) have their channels
    first, whereas (84, 84, 4) and (10, 10, 16) have them last.
    """
    if layout != "auto":
        return layout == "channels_first"
    channels, height, width = shape
    return (
        channels <= MAX_CHANNELS
        and channels < min(height, width)
        and (height == width or min(height, width) > MAX_CHANNELS)
    )


def as_image(leaf: ObservationLeaf, observation: Observation) -> Float[Array, "height width channels"]:
    """Returns an image leaf of an observation in float32, with its channels last."""
    image = encode(leaf, observation)
    return jnp.moveaxis(image, 0, -1) if leaf.channels_first else image


def flatten(space: spaces.Space, observation: Observation) -> Float[Array, " size"]:
    """Encodes one observation as a float32 vector of length `flat_size(space)`.

    Leaves of `Discrete` and `MultiDiscrete` spaces become one-hot vectors, counted from their `start`. A uint8
    `Box` with bound 255 is divided by 255. All other leaves are cast. Leaves are flattened and concatenated in the
    order of the space.
    """
    return join(leaves(space), observation)


def flat_size(space: spaces.Space) -> int:
    """Returns the length of `flatten(space, observation)`."""
    return sum(leaf.size for leaf in leaves(space))


def join(parts: tuple[ObservationLeaf, ...], observation: Observation) -> Float[Array, " size"]:
    """Encodes several leaves of an observation, and concatenates them into one float32 vector."""
    return wide_inputs.joined([encode(leaf, observation).reshape(-1) for leaf in parts])


def encode(leaf: ObservationLeaf, observation: Observation) -> Float[Array, "..."]:
    """Encodes a leaf of an observation in float32. Numbers keep their shape, and categories become a vector."""
    value = part_at(observation, leaf.path)
    if leaf.categories:
        return _one_hot(leaf, value).astype(jnp.float32)
    numbers = jnp.asarray(value).astype(jnp.float32)
    return numbers if leaf.scale == 1.0 else numbers * leaf.scale


def _one_hot(leaf: ObservationLeaf, value: Array) -> Bool[Array, " size"]:
    # One output per category of each element, which is True for the category of the element. Elements with equal
    # numbers of categories are compared at once. On GPUs, gathering an element per output takes much longer.
    numbers = value.astype(jnp.int32).reshape(-1) - jnp.asarray(leaf.starts, jnp.int32)
    parts, first = [], 0
    for categories, run in itertools.groupby(leaf.categories):
        until = first + len(list(run))
        parts.append((numbers[first:until, None] == np.arange(categories, dtype=np.int32)[None, :]).reshape(-1))
        first = until
    return jnp.concatenate(parts)


def _scale(space: spaces.Box) -> float:
    # Planes of zeros and ones are uint8, too. Only a bound of 255 indicates brightness.
    return 1.0 / 255.0 if space.dtype == np.uint8 and np.max(space.high, initial=0) == 255 else 1.0


def _integers(values: np.ndarray) -> tuple[int, ...]:
    return tuple(int(value) for value in values.reshape(-1))
