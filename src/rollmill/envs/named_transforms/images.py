"""Transforms of images. Images in uint8 are transformed in integers, so NumPy and JAX give identical results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces as gymnasium_spaces

from rollmill.core.errors import UsageError
from rollmill.core.spaces import space_text
from rollmill.envs.named_transforms.definition import Spaces, Transform, bad_argument, box_of, count_of
from rollmill.envs.named_transforms.observations import bounds_of, channel_axis, mapped_box

LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue, of ITU-R BT.601."""
LUMINANCE_256 = (77, 150, 29)
"""Weights of red, green and blue in 256ths."""


def grey(argument: str, spaces: Spaces) -> Transform:
    """Converts RGB images to their brightness, without a channel axis (ITU-R BT.601)."""
    if argument:
        raise bad_argument("grey", argument, "it takes no argument", "grey")
    space = _image(spaces.observation, "grey", ranks=(3,))
    axis = channel_axis(space.shape)
    if space.shape[axis] != 3:
        raise UsageError(
            "the transform grey needs images with three colours in the first or last axis, got the observation "
            f"space {space_text(space)}."
        )
    exact = space.dtype == np.uint8

    def brightness(xp: Any, image: Any) -> Any:
        colours = [xp.take(image, number, axis=axis) for number in range(3)]
        if exact:
            whole = [
                colour.astype(np.int32) * np.int32(w) for colour, w in zip(colours, LUMINANCE_256, strict=True)
            ]
            return ((whole[0] + whole[1] + whole[2] + np.int32(128)) >> np.int32(8)).astype(np.uint8)
        return sum(colour * colour.dtype.type(w) for colour, w in zip(colours, LUMINANCE, strict=True))

    low, high = bounds_of(space)
    shape = tuple(np.delete(space.shape, axis))
    return mapped_box(spaces, np.full(shape, low.min()), np.full(shape, high.max()), brightness)


def resize(argument: str, spaces: Spaces) -> Transform:
    """Resizes images to SIZE x SIZE or HEIGHTxWIDTH pixels. Each pixel is the mean of the area that it covers."""
    sizes = [count_of(text) for text in argument.split("x")]
    height, width = (*sizes, *sizes)[:2] if len(sizes) <= 2 else (None, None)
    if height is None or width is None:
        expected = "it needs a SIZE or HEIGHTxWIDTH in pixels"
        raise bad_argument("resize", argument, expected, "resize:84 or resize:84x96")
    space = _image(spaces.observation, "resize", ranks=(2, 3))
    exact = space.dtype == np.uint8
    axis = channel_axis(space.shape) if len(space.shape) == 3 else None
    first, second = [number for number in range(len(space.shape)) if number != axis]
    rows, columns = (_shares(space.shape[old], new) for old, new in ((first, height), (second, width)))
    if exact:
        rows, columns = _in_256ths(rows), _in_256ths(columns)
    low, high = (bound.dtype.type(limit) for bound, limit in _limits(space))

    def resized(xp: Any, image: Any) -> Any:
        channels_first = image if axis is None else xp.moveaxis(image, axis, 0)
        product = _matmul(xp, _matmul(xp, rows, channels_first.astype(np.float32)), columns.T)
        if exact:  # all values are integers below 2^24, which float32 represents exactly
            product = xp.floor((product + np.float32(2**15)) * np.float32(2**-16))
        pixels = xp.clip(product.astype(image.dtype), low, high)
        return pixels if axis is None else xp.moveaxis(pixels, 0, axis)

    shape = list(space.shape)
    shape[first], shape[second] = height, width
    return mapped_box(spaces, np.full(shape, low), np.full(shape, high), resized)


def _image(space: gymnasium_spaces.Space, name: str, *, ranks: tuple[int, ...]) -> gymnasium_spaces.Box:
    box = box_of(space, name, ranks=ranks, hint="it is for images")
    if box.dtype != np.uint8 and not np.issubdtype(box.dtype, np.floating):
        raise UsageError(
            f"the transform {name} needs images of uint8 or floating-point numbers, got {space_text(space)}."
        )
    return box


def _limits(space: gymnasium_spaces.Box) -> list[tuple[np.ndarray, Any]]:
    low, high = bounds_of(space)
    return [(low, low.min()), (high, high.max())]


def _shares(old: int, new: int) -> np.ndarray:
    """Returns `[new, old]`, the share of each old pixel in the area of each new pixel."""
    edges = np.arange(new + 1) * (old / new)
    pixels = np.arange(old)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.maximum(covered, 0) * (new / old)).astype(np.float32)


def _in_256ths(shares: np.ndarray) -> np.ndarray:
    """Rounds shares to integer multiples of 1/256 that add up to 1. The largest fractions are rounded up."""
    exact = shares.astype(np.float64) * 256
    whole = np.floor(exact)
    missing = np.rint(256 - whole.sum(axis=1)).astype(int)
    order = np.argsort(whole - exact, axis=1, kind="stable")
    for row, count in enumerate(missing):
        whole[row, order[row, :count]] += 1
    return whole.astype(np.float32)


def _matmul(xp: Any, left: Any, right: Any) -> Any:
    """Returns a matrix product in full float32, because GPUs use lower precision by default."""
    if xp is jnp:
        return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)
    return np.matmul(left, right)
