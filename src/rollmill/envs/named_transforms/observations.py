"""Transforms of observations that are vectors, images or categories."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces as gymnasium_spaces

from rollmill.core.errors import UsageError
from rollmill.core.spaces import box_bounds, leaf_spaces, part_at, space_text, struct, unsupported_space
from rollmill.envs.named_transforms.definition import Spaces, Transform, bad_argument, box_of, count_of


def frame_stack(argument: str, spaces: Spaces) -> Transform:
    """Stacks the last N observations, with the oldest first.

    An episode begins with N copies of its first observation. Vectors and images without channels get a new first
    axis. Images with channels are joined along the channel axis.
    """
    count = count_of(argument)
    if count is None:
        raise bad_argument("frame-stack", argument, "N must be an integer of at least 1", "frame-stack:4")
    hint = "flatten or one-hot first converts it to a vector"
    space = box_of(spaces.observation, "frame-stack", ranks=(1, 2, 3), hint=hint)
    axis = channel_axis(space.shape) if len(space.shape) == 3 else None

    def joined(xp: Any, frames: Any) -> Any:
        return frames if axis is None else xp.concatenate([frames[i] for i in range(count)], axis=axis)

    def begin(xp: Any, observation: Any) -> Any:
        frames = xp.stack([observation] * count)
        return joined(xp, frames), frames

    def observe(xp: Any, memory: Any, observation: Any) -> Any:
        frames = xp.concatenate([memory[1:], observation[None]])
        return joined(xp, frames), frames

    low, high = (joined(np, np.stack([bound] * count)) for bound in bounds_of(space))
    stacked = gymnasium_spaces.Box(low, high, dtype=low.dtype.type)
    return Transform(stacked, spaces.action, begin=begin, observe=observe)


def flatten(argument: str, spaces: Spaces) -> Transform:
    """Flattens an observation to one vector: numeric parts as float32, and categories as one-hot vectors.

    A single `Box` keeps its dtype.
    """
    if argument:
        raise bad_argument("flatten", argument, "it takes no argument", "flatten")
    space = spaces.observation
    if isinstance(space, gymnasium_spaces.Box):
        low, high = (bound.reshape(-1) for bound in bounds_of(space))
        return mapped_box(spaces, low, high, lambda xp, observation: observation.reshape(-1))
    return _encode(spaces)


def one_hot(argument: str, spaces: Spaces) -> Transform:
    """Encodes a category as a one-hot vector, and several categories as one-hot vectors in a row."""
    if argument:
        raise bad_argument("one-hot", argument, "it takes no argument", "one-hot")
    if not isinstance(spaces.observation, gymnasium_spaces.Discrete | gymnasium_spaces.MultiDiscrete):
        raise UsageError(
            f"the transform one-hot needs Discrete or MultiDiscrete observations, got {spaces.observation}. "
            "hint: flatten converts observations with several parts to a vector."
        )
    return _encode(spaces)


def keep(argument: str, spaces: Spaces) -> Transform:
    """Keeps the elements of a vector with the given indices, which count from 0, and hides all others."""
    space = box_of(spaces.observation, "keep", ranks=(1,), hint="put flatten or one-hot before it")
    indices = [int(text) if text.isascii() and text.isdigit() else -1 for text in argument.split(",")]
    size = space.shape[0]
    if len(set(indices)) < len(indices) or not all(0 <= index < size for index in indices):
        expected = f"it needs different indices from 0 to {size - 1}, separated by commas"
        raise bad_argument("keep", argument, expected, "keep:0,2" if size > 2 else "keep:0")
    low, high = (bound[indices] for bound in bounds_of(space))
    return mapped_box(spaces, low, high, lambda xp, observation: xp.stack([observation[i] for i in indices]))


def time_observation(argument: str, spaces: Spaces) -> Transform:
    """Appends the time to a vector: the steps of the episode so far divided by `argument`, at most 1."""
    steps = count_of(argument)
    if steps is None:
        raise bad_argument(
            "time",
            argument,
            "STEPS must be an integer of at least 1, such as the length of the longest episode",
            "time:500",
        )
    space = box_of(spaces.observation, "time", ranks=(1,), hint="put flatten or one-hot before it")
    if not np.issubdtype(space.dtype, np.floating):
        raise UsageError(
            "the transform time needs a vector of floating-point numbers, got the observation space "
            f"{space_text(space)}."
        )

    def timed(xp: Any, observation: Any, elapsed: Any) -> Any:
        share = xp.minimum(elapsed.astype(np.float32) / np.float32(steps), np.float32(1))
        return xp.concatenate([observation, share[None].astype(observation.dtype)])

    def begin(xp: Any, observation: Any) -> Any:
        elapsed = xp.zeros((), np.int32)
        return timed(xp, observation, elapsed), elapsed

    def observe(xp: Any, memory: Any, observation: Any) -> Any:
        elapsed = xp.asarray(memory + 1, np.int32)
        return timed(xp, observation, elapsed), elapsed

    low, high = bounds_of(space)
    low, high = np.append(low, low.dtype.type(0)), np.append(high, high.dtype.type(1))
    return Transform(
        gymnasium_spaces.Box(low, high, dtype=low.dtype.type), spaces.action, begin=begin, observe=observe
    )


def bounds_of(space: gymnasium_spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds of a space, converted to the dtype that its elements have in JAX (at most 32 bits)."""
    return box_bounds(space, struct(space).dtype)


def channel_axis(shape: tuple[int, ...]) -> int:
    """Returns the channel axis of an image: the first axis if it is the shortest, otherwise the last."""
    return 0 if shape[0] < min(shape[1:]) else 2


def _encode(spaces: Spaces) -> Transform:
    """Returns the transform to one float32 vector of all leaves in order."""
    leaves = tuple(leaf_spaces(spaces.observation))
    limits = [_limits(leaf) for _, leaf in leaves]
    low, high = (np.concatenate([pair[side] for pair in limits]).astype(np.float32) for side in (0, 1))
    encode = lambda xp, observation: xp.concatenate(
        [_vector(xp, leaf, part_at(observation, path)) for path, leaf in leaves]
    )
    return mapped_box(spaces, low, high, encode)


def _limits(space: gymnasium_spaces.Space) -> tuple[np.ndarray, np.ndarray]:
    match space:
        case gymnasium_spaces.Box():
            low, high = bounds_of(space)
            return low.reshape(-1), high.reshape(-1)
        case gymnasium_spaces.Discrete() | gymnasium_spaces.MultiDiscrete():
            size = len(_categories(space)[0])
        case gymnasium_spaces.MultiBinary():
            size = int(np.prod(space.shape))
        case _:
            raise unsupported_space(space)
    return np.zeros(size, np.float32), np.ones(size, np.float32)


def _vector(xp: Any, leaf: gymnasium_spaces.Space, value: Any) -> Any:
    if isinstance(leaf, gymnasium_spaces.Discrete | gymnasium_spaces.MultiDiscrete):
        element, category = _categories(leaf)
        values = xp.asarray(value).reshape(-1).astype(np.int32)
        return (values[element] == xp.asarray(category)).astype(np.float32)
    return xp.asarray(value).reshape(-1).astype(np.float32)


def _categories(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each element of the one-hot vector, the encoded element of the observation and its category."""
    sizes = np.atleast_1d(space.n if isinstance(space, gymnasium_spaces.Discrete) else space.nvec).reshape(-1)
    starts = np.broadcast_to(np.asarray(space.start).reshape(-1), sizes.shape)
    element = np.repeat(np.arange(sizes.size), sizes)
    category = np.concatenate([start + np.arange(size) for start, size in zip(starts, sizes, strict=True)])
    return element, category.astype(np.int32)


def mapped_box(spaces: Spaces, low: Any, high: Any, function: Callable[[Any, Any], Any]) -> Transform:
    """Returns a transform that maps each observation with a function `(xp, observation)` into a `Box`."""
    return Transform(
        gymnasium_spaces.Box(low, high, dtype=low.dtype.type),
        spaces.action,
        begin=lambda xp, observation: (function(xp, observation), ()),
        observe=lambda xp, memory, observation: (function(xp, observation), memory),
    )
