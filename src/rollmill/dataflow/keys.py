"""Random keys derived from the root key of a run."""

import jax
from jaxtyping import Array, Int

from rollmill.core.types import Key

START, COLLECT, LEARN = 0, 1, 2
"""Purposes of derived keys."""


def iteration_key(key: Key, iteration: Int[Array, ""] | int, use: int) -> Key:
    """Returns the key of one loop of an iteration, derived from the root key."""
    return jax.random.fold_in(jax.random.fold_in(key, use), iteration)
