"""Exact nearest neighbours of many places among many points in the plane, in little memory.

`jax.lax.top_k` sorts whole rows on a GPU, and calls a function for each row on a CPU. For few neighbours, it is
faster to select them one by one from the minima of groups of points (a tournament). Places are processed in
blocks, so that distances stay in cache, and their memory does not grow with the square of the number of points.

Shape letters: `M` places, `N` points, `K` neighbours of each place, and `C` groups of `c` points.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAX_TAKEN = 16
"""Largest number of neighbours found by tournament. More are found by `top_k`."""

MAX_PAIRS = 2**18
"""Largest number of distances in memory at once, for one environment."""


class Nearest(NamedTuple):
    """Indices and distances of the points nearest to each place, nearest first."""

    index: Int[Array, "M K"]
    exists: Bool[Array, "M K"]
    """False for missing neighbours, whose index is arbitrary and whose distance is infinite."""
    squared_distance: Float[Array, "M K"]


def nearest(
    places: tuple[Float[Array, " M"], Float[Array, " M"]],
    points: tuple[Float[Array, " N"], Float[Array, " N"]],
    *,
    where: Bool[Array, " N"],
    exclude: Int[Array, " M"] | None = None,
    count: int = 1,
) -> Nearest:
    """Finds the `count` nearest points of each place. At equal distances, the lower index comes first.

    Places and points are given by their x and y coordinates. Only points that are True in the mask `where` are
    considered. For each place, `exclude` is the index of a point that is ignored, such as the place itself.
    `count` is `K`, at most `N`.
    """
    # Without the barrier, XLA would recompute the coordinates, including sines and cosines, for every pair.
    places, points = jax.lax.optimization_barrier((places, points))
    num_places, num_pairs = places[0].size, places[0].size * points[0].size
    exclude = jnp.full(num_places, -1) if exclude is None else exclude
    num_blocks = -(-num_pairs // MAX_PAIRS)
    if num_blocks == 1:
        return _search(places, points, where, exclude, count)
    size = -(-num_places // num_blocks)
    missing = num_blocks * size - num_places
    blocks = jax.tree.map(lambda row: jnp.pad(row, (0, missing)).reshape(num_blocks, size), (places, exclude))
    neighbours = jax.lax.map(lambda block: _search(block[0], points, where, block[1], count), blocks)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, count)[:num_places], neighbours)


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
    if count > MAX_TAKEN:
        closeness, index = jax.lax.top_k(-distance.T, count)
        return Nearest(index, closeness > -jnp.inf, -closeness)
    # Two kernels might round a distance differently. The barrier makes XLA compute it only once.
    distance = jax.lax.optimization_barrier(distance)
    index, least = _least(distance) if count == 1 else _tournament(distance, count)
    return Nearest(index.T, jnp.isfinite(least.T), least.T)


def _least(distance: Float[Array, "N M"]) -> tuple[Int[Array, "1 M"], Float[Array, "1 M"]]:
    least = jnp.min(distance, axis=0, keepdims=True)
    return _first(distance == least)[None], least


def _tournament(distance: Float[Array, "N M"], count: int) -> tuple[Int[Array, "K M"], Float[Array, "K M"]]:
    """Selects the minimum `count` times. After each, only the minimum of its group is recomputed.

    Invariant: points are selected in the order of (distance, index), so the remaining points come after the last
    selected one in that order.
    """
    groups = _group(distance)
    leasts = jnp.min(groups, axis=1)
    member = jax.lax.broadcasted_iota(jnp.int32, groups.shape[1:], 0)
    contest = jax.lax.broadcasted_iota(jnp.int32, leasts.shape, 0)
    selected = [(jnp.full(distance.shape[1], -1), jnp.full(distance.shape[1], -1.0))]
    for _ in range(count):
        least = jnp.min(leasts, axis=0)
        group = _first(leasts == least[None])
        members = jnp.take_along_axis(groups, group[None, None], axis=0, mode="promise_in_bounds")[0]
        index = member + group[None] * groups.shape[1]
        best = _come_after(members, index, *selected[-1]) & (members == least[None])
        winner = jnp.min(jnp.where(best, index, distance.shape[0] - 1), axis=0)
        selected.append((winner, least))
        remaining = jnp.where(_come_after(members, index, winner, least), members, jnp.inf)
        leasts = jnp.where(contest == group[None], jnp.min(remaining, axis=0)[None], leasts)
    indices, distances = zip(*selected[1:], strict=True)
    return jnp.stack(indices), jnp.stack(distances)


def _group(distance: Float[Array, "N M"]) -> Float[Array, "C c M"]:
    """Arranges distances in groups, padded with infinite distances.

    The size of a group is a power of two, and there are about as many groups as members of a group.
    """
    size = 2 ** round(math.log2(distance.shape[0]) / 2)
    missing = -distance.shape[0] % size
    padded = jnp.pad(distance, ((0, missing), (0, 0)), constant_values=jnp.inf)
    return padded.reshape(-1, size, distance.shape[1])


def _come_after(
    distance: Float[Array, "c M"], index: Int[Array, "c M"], last: Int[Array, " M"], least: Float[Array, " M"]
) -> Bool[Array, "c M"]:
    return (distance > least[None]) | ((distance == least[None]) & (index > last[None]))


def _first(matches: Bool[Array, "N M"]) -> Int[Array, " M"]:
    """Returns the index of the first True in each column, or the last row if there is none."""
    row = jax.lax.broadcasted_iota(jnp.int32, matches.shape, 0)
    return jnp.min(jnp.where(matches, row, matches.shape[0] - 1), axis=0)
