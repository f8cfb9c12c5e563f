"""Nearest points against a sort of all distances: ties, missing points, blocks, many neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.envs import nearest_neighbours as module
from rollmill.envs.nearest_neighbours import nearest


def expected(places, points, where, exclude, count):
    distance = ((points[:, None].astype(np.float64) - places[:, :, None]) ** 2).sum(axis=0)
    distance[:, ~where] = np.inf
    distance[np.arange(len(exclude)), exclude] = np.inf
    order = np.argsort(distance, axis=1, kind="stable")[:, :count]
    return order, np.take_along_axis(distance, order, axis=1)


@pytest.mark.parametrize(
    ("num_points", "count", "most_pairs"),
    [
        (9, 1, 10**6),
        (9, 8, 10**6),
        (2, 2, 10**6),
        (40, 16, 10**6),
        (40, 17, 10**6),
        (41, 5, 500),
        (41, 20, 500),
        (40, 3, 1),
    ],
)
def test_whole_numbers_with_many_ties(num_points, count, most_pairs, monkeypatch):
    monkeypatch.setattr(module, "MAX_PAIRS", most_pairs)
    rng = np.random.default_rng(count)
    points = rng.integers(0, 4, size=(3, 2, num_points)).astype(np.float32)
    where = rng.random((3, num_points)) < 0.7
    itself = jnp.arange(num_points)
    find = jax.jit(
        jax.vmap(lambda at, w: nearest((at[0], at[1]), (at[0], at[1]), where=w, exclude=itself, count=count))
    )
    indices, exists, distance = jax.device_get(find(points, where))
    for e in range(3):
        order, far = expected(points[e], points[e], where[e], np.arange(num_points), count)
        np.testing.assert_array_equal(exists[e], np.isfinite(far))
        np.testing.assert_array_equal(distance[e], far)
        np.testing.assert_array_equal(indices[e][exists[e]], order[exists[e]])


def test_places_that_are_no_points():
    places = jnp.asarray([0.0, 5, 9]), jnp.zeros(3)
    points = jnp.asarray([1.0, 4, 8, 8]), jnp.asarray([0.0, 0, 1, 1])
    indices, exists, distance = nearest(places, points, where=jnp.asarray([True, False, True, True]), count=2)
    np.testing.assert_array_equal(indices, [[0, 2], [2, 3], [2, 3]])
    np.testing.assert_array_equal(distance, [[1, 65], [10, 10], [2, 2]])
    assert exists.all()
