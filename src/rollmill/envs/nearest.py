"""The nearest of many points in the plane, exactly, in little memory.

`jax.lax.top_k` sorts whole rows on a GPU and compares with a callback on CPU. Where few neighbours are asked for,
as many passes that each take the least distance are two to six times as fast on both; and a block of places at a
time keeps the distances in the cache, and the memory that they take from growing with the square of the points.

Shape letters: `M` places, `N` points, `K` points that are found for each place.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MOST_PASSES = 16
"""Where more points are asked for, `top_k` finds them."""

MOST_PAIRS = 2**17
"""Distances that are held at once, of one environment."""


def nearest(
    places: Float[Array, "2 M"],
    points: Float[Array, "2 N"],
    *,
    where: Bool[Array, " N"],
    exclude: Int[Array, " M"] | None = None,
    count: int = 1,
) -> tuple[Int[Array, "M K"], Bool[Array, "M K"], Float[Array, "M K"]]:
    """Of each place the `count` nearest points, nearest first; of equals the lower index.

    Args:
        places: both coordinates of each.
        points: both coordinates of each.
        where: which points count.
        exclude: of each place the index of one point that does not count for it, such as itself.
        count: `K`, at most `N`.

    Returns:
        Indices, whether there are as many points (any index where there are not), and squared distances.
    """
    num_places, num_pairs = places.shape[1], places.shape[1] * points.shape[1]
    exclude = jnp.full(num_places, -1) if exclude is None else exclude
    num_blocks = -(-num_pairs // MOST_PAIRS)
    if num_blocks == 1:
        return _search(places, points, where, exclude, count)
    size = -(-num_places // num_blocks)
    missing = num_blocks * size - num_places
    blocks = jnp.pad(places, ((0, 0), (0, missing))).reshape(2, num_blocks, size).swapaxes(0, 1)
    excluded = jnp.pad(exclude, (0, missing)).reshape(num_blocks, size)
    found = jax.lax.map(lambda block: _search(block[0], points, where, block[1], count), (blocks, excluded))
    indices, exists, distance = (leaf.reshape(-1, count)[:num_places] for leaf in found)
    return indices, exists, distance


def _search(
    places: Float[Array, "2 M"],
    points: Float[Array, "2 N"],
    where: Bool[Array, " N"],
    exclude: Int[Array, " M"],
    count: int,
) -> tuple[Int[Array, "M K"], Bool[Array, "M K"], Float[Array, "M K"]]:
    squares = jnp.square(points[:, :, None] - places[:, None, :])
    number = jax.lax.broadcasted_iota(exclude.dtype, squares.shape[1:], 0)
    counts = where[:, None] & (number != exclude[None])
    distance = jnp.where(counts, squares[0] + squares[1], jnp.inf)
    if count > MOST_PASSES:
        closeness, indices = jax.lax.top_k(-distance.T, count)
        return indices, closeness > -jnp.inf, -closeness
    return _take_least(distance, number, count)


def _take_least(
    distance: Float[Array, "N M"], number: Int[Array, "N M"], count: int
) -> tuple[Int[Array, "M K"], Bool[Array, "M K"], Float[Array, "M K"]]:
    """One pass for each neighbour; along the first axis, which vectorises."""
    # Compiled twice, a distance may be rounded twice as well; behind the barrier all passes see the same.
    distance = jax.lax.optimization_barrier(distance)
    indices, least = [], []
    for _ in range(count):
        least.append(jnp.min(distance, axis=0))
        found = jnp.where(distance == least[-1][None], number, number.shape[0])
        indices.append(jnp.min(found, axis=0))
        distance = jnp.where(number == indices[-1][None], jnp.inf, distance)
    return jnp.stack(indices, axis=1), jnp.stack(least, axis=1) < jnp.inf, jnp.stack(least, axis=1)
