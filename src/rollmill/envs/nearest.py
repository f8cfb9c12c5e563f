"""The nearest of many points in the plane, exactly, in little memory.

`jax.lax.top_k` sorts whole rows on a GPU, and calls a function for each row on CPU. Where few points are asked
for, it is faster on both to take one after the other from the least of each group of points (a tournament); and a
block of places at a time keeps the distances in the cache, and their memory from growing with the square of the
points.

Shape letters: `M` places, `N` points, `K` points that are found for each place; `C` groups of `c` points.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MOST_TAKEN = 16
"""Where more points are asked for, `top_k` finds them."""

MOST_PAIRS = 2**18
"""Distances that are held at once, of one environment."""


class Nearest(NamedTuple):
    """The nearest points of each place, nearest first."""

    index: Int[Array, "M K"]
    exists: Bool[Array, "M K"]
    """Whether there are as many points; any index and infinity where there are not."""
    squared_distance: Float[Array, "M K"]


def nearest(
    places: tuple[Float[Array, " M"], Float[Array, " M"]],
    points: tuple[Float[Array, " N"], Float[Array, " N"]],
    *,
    where: Bool[Array, " N"],
    exclude: Int[Array, " M"] | None = None,
    count: int = 1,
) -> Nearest:
    """The `count` nearest points of each place; of equals, the one with the lower index comes first.

    Args:
        places: both coordinates.
        points: both coordinates.
        where: which points count.
        exclude: of each place the index of one point that does not count for it, such as itself.
        count: `K`, at most `N`.
    """
    # Otherwise what places are made of, sines and cosines, would be computed for every pair.
    places, points = jax.lax.optimization_barrier((places, points))
    num_places, num_pairs = places[0].size, places[0].size * points[0].size
    exclude = jnp.full(num_places, -1) if exclude is None else exclude
    num_blocks = -(-num_pairs // MOST_PAIRS)
    if num_blocks == 1:
        return _search(places, points, where, exclude, count)
    size = -(-num_places // num_blocks)
    missing = num_blocks * size - num_places
    blocks = jax.tree.map(lambda row: jnp.pad(row, (0, missing)).reshape(num_blocks, size), (places, exclude))
    found = jax.lax.map(lambda block: _search(block[0], points, where, block[1], count), blocks)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, count)[:num_places], found)


def _search(
    places: tuple[Float[Array, " M"], Float[Array, " M"]],
    points: tuple[Float[Array, " N"], Float[Array, " N"]],
    where: Bool[Array, " N"],
    exclude: Int[Array, " M"],
    count: int,
) -> Nearest:
    dx, dy = (point[:, None] - place[None] for point, place in zip(points, places, strict=True))
    number = jax.lax.broadcasted_iota(exclude.dtype, dx.shape, 0)
    counts = where[:, None] & (number != exclude[None])
    distance = jnp.where(counts, jnp.square(dx) + jnp.square(dy), jnp.inf)
    if count > MOST_TAKEN:
        closeness, index = jax.lax.top_k(-distance.T, count)
        return Nearest(index, closeness > -jnp.inf, -closeness)
    # Compiled twice, a distance may be rounded twice as well; behind the barrier all see the same.
    distance = jax.lax.optimization_barrier(distance)
    index, least = _least(distance) if count == 1 else _tournament(distance, count)
    return Nearest(index.T, jnp.isfinite(least.T), least.T)


def _least(distance: Float[Array, "N M"]) -> tuple[Int[Array, "1 M"], Float[Array, "1 M"]]:
    least = jnp.min(distance, axis=0, keepdims=True)
    return _first(distance == least)[None], least


def _tournament(distance: Float[Array, "N M"], count: int) -> tuple[Int[Array, "K M"], Float[Array, "K M"]]:
    """Takes the least of all `count` times; each time, only the group that it came from is looked at again.

    Points are taken in the order of (distance, index), so those that are left come after the last in it.
    """
    groups = _grouped(distance)
    leasts = jnp.min(groups, axis=1)
    member = jax.lax.broadcasted_iota(jnp.int32, groups.shape[1:], 0)
    contest = jax.lax.broadcasted_iota(jnp.int32, leasts.shape, 0)
    taken = [(jnp.full(distance.shape[1], -1), jnp.full(distance.shape[1], -1.0))]
    for _ in range(count):
        least = jnp.min(leasts, axis=0)
        group = _first(leasts == least[None])
        members = jnp.take_along_axis(groups, group[None, None], axis=0, mode="promise_in_bounds")[0]
        index = member + group[None] * groups.shape[1]
        best = _come_after(members, index, *taken[-1]) & (members == least[None])
        winner = jnp.min(jnp.where(best, index, distance.shape[0] - 1), axis=0)
        taken.append((winner, least))
        rest = jnp.where(_come_after(members, index, winner, least), members, jnp.inf)
        leasts = jnp.where(contest == group[None], jnp.min(rest, axis=0)[None], leasts)
    indices, distances = zip(*taken[1:], strict=True)
    return jnp.stack(indices), jnp.stack(distances)


def _grouped(distance: Float[Array, "N M"]) -> Float[Array, "C c M"]:
    """Of about equally many members and groups, a power of two; filled up with points that are nowhere."""
    size = 2 ** round(math.log2(distance.shape[0]) / 2)
    missing = -distance.shape[0] % size
    padded = jnp.pad(distance, ((0, missing), (0, 0)), constant_values=jnp.inf)
    return padded.reshape(-1, size, distance.shape[1])


def _come_after(
    distance: Float[Array, "c M"], index: Int[Array, "c M"], last: Int[Array, " M"], least: Float[Array, " M"]
) -> Bool[Array, "c M"]:
    return (distance > least[None]) | ((distance == least[None]) & (index > last[None]))


def _first(found: Bool[Array, "N M"]) -> Int[Array, " M"]:
    """The first row of each column that is True; the last where none is."""
    row = jax.lax.broadcasted_iota(jnp.int32, found.shape, 0)
    return jnp.min(jnp.where(found, row, found.shape[0] - 1), axis=0)
