"""Prioritised experience replay (Schaul et al., ICLR 2016): sampling in proportion to priorities.

Priorities lie in blocks with stored sums. A draw reads all sums and one block. A change recomputes the sums of the
blocks it touches exactly, so that rounding errors do not accumulate.

Shape letters: `W` environments of a shard, `B` samples drawn from a shard.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rollmill.core.types import Key

BLOCK = 128
"""Number of priorities in a block."""

ALMOST_ONE = 1 - 2.0**-20
"""Factor that keeps a draw below the total in spite of rounding."""

SMALLEST_ERROR = 1e-6
"""Number added to errors, so that every transition can be drawn again."""


class Priorities(eqx.Module):
    """Priorities of ONE environment's replay ring, by row. Rows that cannot be drawn have priority 0."""

    values: Float[Array, "*W blocks block"]
    sums: Float[Array, "*W blocks"]
    """Sum of the priorities of each block."""
    highest: Float[Array, "*W"]
    """Highest priority so far."""


def empty_priorities(capacity: int) -> Priorities:
    """Returns the priorities of ONE environment's replay ring before the first step."""
    blocks = -(-capacity // BLOCK)
    return Priorities(jnp.zeros((blocks, BLOCK)), jnp.zeros(blocks), jnp.float32(1))


def with_values(
    priorities: Priorities, environment: Int[Array, " N"], row: Int[Array, " N"], values: Float[Array, " N"]
) -> Priorities:
    """Sets the priorities of some rows of several environments. Priorities have leaves `[E, ...]`.

    Entries of `environment` equal to `E` are ignored. Rows that occur twice must have equal values.
    """
    block, place = row // BLOCK, row % BLOCK
    changed = priorities.values.at[environment, block, place].set(values, mode="drop")
    sums = changed.at[environment, block].get(mode="clip").sum(axis=-1)
    return Priorities(
        changed,
        priorities.sums.at[environment, block].set(sums, mode="drop"),
        priorities.highest.at[environment].max(values, mode="drop"),
    )


def draw_by_priority(
    key: Key, priorities: Priorities, drawable: Int[Array, " W"], *, count: int, weight_exponent: float
) -> tuple[Int[Array, " B"], Int[Array, " B"], Float[Array, " B"]]:
    """Draws `count` items of one shard by stratified sampling.

    Priorities have leaves `[W, ...]`. Each ring has `drawable` rows that can be drawn. A row drawn with
    probability `p` from `n` has the weight `(n p)^-weight_exponent`. Returns environments, rows and importance
    weights.
    """
    ends = jnp.cumsum(priorities.sums.reshape(-1))
    total, blocks = ends[-1], priorities.sums.shape[1]
    offsets = (
        (jnp.arange(count, dtype=jnp.float32) + jax.random.uniform(key, (count,))) / count * total * ALMOST_ONE
    )
    block = jnp.searchsorted(ends, offsets, side="right", method="scan_unrolled")
    block = jnp.minimum(block, ends.size - 1).astype(jnp.int32)
    environment = block // blocks
    values = priorities.values.reshape(-1, BLOCK)[block]
    within = jnp.cumsum(values, axis=1)
    rest = offsets - (ends - priorities.sums.reshape(-1))[block]
    rest = jnp.clip(rest, 0, within[:, -1] * ALMOST_ONE)
    place = jnp.minimum(jnp.sum(within <= rest[:, None], axis=1, dtype=jnp.int32), BLOCK - 1)
    priority = jnp.take_along_axis(values, place[:, None], axis=1)[:, 0]
    row = block % blocks * BLOCK + place
    weight = (jnp.sum(drawable).astype(jnp.float32) * priority / total) ** -weight_exponent
    # Because of rounding, a draw may end at a row that must not be drawn, which then gets the weight 0.
    return environment, row, jnp.where(priority > 0, weight, 0)
