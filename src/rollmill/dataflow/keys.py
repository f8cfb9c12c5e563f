"""Random keys of a training: all derive from its root key."""

import jax
from jaxtyping import Array, Int

from rollmill.core.types import Key

START, COLLECT, LEARN = 0, 1, 2
"""Uses of keys that are derived from the training's root key."""


def iteration_key(key: Key, iteration: Int[Array, ""] | int, use: int) -> Key:
    """The key of one loop of an iteration; `key` is the training's root key."""
    return jax.random.fold_in(jax.random.fold_in(key, use), iteration)
