"""Loops under `vmap`: each lane runs its own number of turns, and keeps what it carries once it has ended."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from code_runs import evaluate_by_code
from fused_runs import assert_same, both

from rollmill.fusion import evaluate

lax = jax.lax
TURNS = jnp.arange(5, dtype=jnp.int32)
WAYS = {"reference": evaluate, "machine code": evaluate_by_code}


def counted(start, bound):
    return lax.while_loop(lambda i: i < bound, lambda i: i + 1, start)


def halved(x, bound):
    return lax.while_loop(lambda c: c > bound, lambda c: c / 2, x)


def bounds(t):
    return jnp.stack([t % 5 + 1, t % 7 + 4])


def one_bound_each(t):
    return jax.vmap(counted)(jnp.array([0, 3]), bounds(t))


def lanes_of_lanes(t):
    return jax.vmap(jax.vmap(counted, (None, 0)), (0, None))(jnp.arange(3), bounds(t))


def lanes_along_the_second_axis(t):
    table = jnp.stack([bounds(t), bounds(t) + 2])
    run = lambda row: lax.while_loop(lambda c: c[0] < c[1].sum(), lambda c: (c[0] + 3, c[1] + 1), (0, row))
    return jax.vmap(run, 1, (0, 1))(table)


def for_each_its_own_range(t):
    add = lambda first, last, x: lax.fori_loop(first, last, lambda i, c: c * 2 + i, x)
    return jax.vmap(add)(bounds(t) // 2, bounds(t), bounds(t) * 10)


def floats(t):
    return jax.vmap(halved)(jnp.stack([t, 3 * t]).astype(jnp.float32), jnp.array([0.3, 2.0]))


def flags(t):
    """A carry of booleans and arrays beside a counter."""

    def lane(number, bound):
        seen = jnp.zeros(4, bool).at[number].set(True)
        advance = lambda c: (c[0] + 1, jnp.roll(c[1], 1) | (c[0] == 2), ~c[2])
        return lax.while_loop(lambda c: ~c[2] | (c[0] < bound), advance, (number, seen, number > 0))

    return jax.vmap(lane)(jnp.array([0, 1, 2]), jnp.stack([t, t % 3, 6 - t]))


def keys(t):
    fold = lambda key, count: lax.while_loop(
        lambda c: c[1] < count, lambda c: (jax.random.fold_in(*c), c[1] + 1), (key, 0)
    )
    return jax.vmap(fold)(jax.random.split(jax.random.key(0), 3), jnp.stack([t, t % 2, t % 3]))[0]


def inside_a_scan(t):
    def turn(carry, x):
        after = jax.vmap(counted)(carry % 4, bounds(t) + x)
        return after - x, after.sum()

    return lax.scan(turn, bounds(t), jnp.arange(4))


def inside_a_branch(t):
    one, other = lambda x: jax.vmap(counted)(x, bounds(t)), lambda x: x - 1
    return lax.cond(t % 2 == 0, one, other, bounds(t) // 3)


def around_a_branch(t):
    def lane(number, bound):
        double = lambda c: lax.switch(c % 3, [lambda v: v + 1, lambda v: v * 2, lambda v: v + 5], c)
        return lax.while_loop(lambda c: c < bound, double, number)

    return jax.vmap(lane)(jnp.array([0, 1]), bounds(t) * 4)


def loops_in_loops(t):
    def lane(bound):
        inner = lambda c: (c[0] + 1, c[1] + lax.while_loop(lambda i: i * i < c[0], lambda i: i + 1, 0))
        return lax.while_loop(lambda c: c[0] < bound, inner, (0, 0))

    return jax.vmap(lane)(bounds(t) * 2)


def lanes_as_a_row(t):
    """So many lanes that they are held as a row, beside numbers that all environments have in common."""
    x = (jnp.arange(40) * t % 11).astype(jnp.float32)
    add = lambda v, first: lax.fori_loop(
        first, first + t % 3 + jnp.int32(v > 5), lambda i, c: c + v * i.astype(jnp.float32), v
    )
    return jax.vmap(add)(x, jnp.arange(40) % 4)


def known_lanes(t):
    """Some lanes end at once, one after a number of turns that is known."""
    return jax.vmap(counted)(jnp.array([0, 9, 0]), jnp.stack([t, jnp.int32(5), jnp.int32(3)]))


def lanes_that_see_each_other(t):
    together = lambda v: (
        v - lax.psum(v, "lanes"),
        lax.pmax(v, "lanes"),
        lax.pmin(-v, "lanes"),
        lax.all_gather(v, "lanes"),
    )
    return jax.vmap(together, axis_name="lanes")(bounds(t))


FUNCTIONS = [
    one_bound_each,
    lanes_of_lanes,
    lanes_along_the_second_axis,
    for_each_its_own_range,
    floats,
    flags,
    keys,
    inside_a_scan,
    inside_a_branch,
    around_a_branch,
    loops_in_loops,
    lanes_as_a_row,
    known_lanes,
    lanes_that_see_each_other,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow_beyond(14)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_as_under_vmap(function, way):
    assert_same(*both(function, (TURNS,), evaluate=WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
def test_each_lane_counts_to_its_own_bound(way):
    found, _ = both(one_bound_each, (TURNS,), evaluate=WAYS[way])
    # A lane ends at its bound, 1 + t % 5 and 4 + t % 7, which both lie behind its start.
    np.testing.assert_array_equal(found, [[1, 4], [2, 5], [3, 6], [4, 7], [5, 8]])


@pytest.mark.parametrize("way", WAYS)
def test_each_lane_is_halved_down_to_its_own_bound(way):
    found, _ = both(floats, (TURNS,), evaluate=WAYS[way])
    # Halved until it is 0.3 at most: 1 and 2 end at 0.25, 3 at 0.1875, 4 at 0.25. Until it is 2 at most: 3 ends at
    # 1.5, 6 at 1.5, 9 at 1.125, 12 at 1.5.
    expected = [[0, 0], [0.25, 1.5], [0.25, 1.5], [0.1875, 1.125], [0.25, 1.5]]
    np.testing.assert_array_equal(found, expected)
