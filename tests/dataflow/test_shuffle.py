"""The sort-free permutation: a bijection for any size, and statistically a uniform one."""

import itertools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.dataflow import permutation
from rollmill.dataflow.minibatches import SHUFFLE_ROUNDS


@eqx.filter_jit
def shuffle(key, size):
    return permutation(key, size)


@eqx.filter_jit
def shuffles(seed, size, count):
    keys = jax.random.split(jax.random.key(seed), count)
    return jax.vmap(lambda key: permutation(key, size))(keys)


def chi_square(counts, expected):
    """The statistic in standard deviations from its mean, for cells that are nearly independent."""
    freedom = counts.size - 1
    statistic = np.sum((counts - expected) ** 2 / expected)
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 1000, 1024, 65536])
def test_every_element_appears_once(size):
    for seed in (0, 1):
        order = np.asarray(shuffle(jax.random.key(seed), size))
        assert order.dtype == np.uint32
        np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_the_key_decides():
    first = np.asarray(shuffle(jax.random.key(0), 1000))
    np.testing.assert_array_equal(first, np.asarray(shuffle(jax.random.key(0), 1000)))
    for seed in range(1, 6):
        # Two independent permutations agree in one place on average, whatever their size.
        assert np.sum(first == np.asarray(shuffle(jax.random.key(seed), 1000))) < 8


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_orders_are_equally_frequent(size):
    count = 24_000
    drawn = np.asarray(shuffles(1, size, count))
    orders = list(itertools.permutations(range(size)))
    codes, of_each = drawn @ (10 ** np.arange(size)), [np.dot(o, 10 ** np.arange(size)) for o in orders]
    counts = np.array([np.sum(codes == code) for code in of_each])
    assert counts.sum() == count
    assert chi_square(counts, count / len(orders)) < 4


@pytest.mark.parametrize("size", [5, 16, 31])
def test_every_element_lands_everywhere_equally_often(size):
    count = 20_000
    drawn = np.asarray(shuffles(2, size, count))
    for place in range(size):
        assert chi_square(np.bincount(drawn[:, place], minlength=size), count / size) < 5


@pytest.mark.parametrize("size", [5, 8])
def test_pairs_of_places_receive_every_pair_equally_often(size):
    count = 20_000
    drawn = np.asarray(shuffles(3, size, count)).astype(np.int64)
    for i, j in itertools.combinations(range(size), 2):
        pairs = np.bincount(drawn[:, i] * size + drawn[:, j], minlength=size**2).reshape(size, size)
        off_diagonal = pairs[~np.eye(size, dtype=bool)]
        assert np.trace(pairs) == 0
        assert chi_square(off_diagonal, count / off_diagonal.size) < 5


@pytest.mark.parametrize("size", [1000, 1024, 65536])
def test_order_is_not_kept(size):
    """Statistics of one large permutation, each within five of its standard deviations."""
    order = np.asarray(shuffle(jax.random.key(5), size)).astype(np.int64)
    deviation = 1 / np.sqrt(size)
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 5 * deviation
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 * deviation
    # Neighbours separate: their mean distance is that of random pairs, n / 3, and few stay neighbours.
    distance = np.abs(np.diff(order))
    assert abs(distance.mean() - size / 3) < 5 * size * deviation / np.sqrt(18) * 1.5
    assert np.sum(distance == 1) < 2 + 5 * np.sqrt(2)
    assert np.sum(order == np.arange(size)) < 1 + 5


def test_halves_are_mixed():
    """The first half of the places receives either half's elements equally often: hypergeometric."""
    size, count = 1024, 400
    drawn = np.asarray(shuffles(6, size, count))
    low = np.sum(drawn[:, : size // 2] < size // 2, axis=1)
    mean, deviation = size / 4, np.sqrt(size / 4 * 0.5 * 0.5 * size / (size - 1))
    assert abs(low.mean() - mean) < 5 * deviation / np.sqrt(count)
    assert 0.8 < low.std() / deviation < 1.2


def test_different_keys_are_independent():
    drawn = np.asarray(shuffles(7, 256, 64)).astype(np.float64)
    correlation = np.corrcoef(drawn)[np.triu_indices(64, 1)]
    assert np.abs(correlation).max() < 6 / np.sqrt(256)
    assert 0.8 < correlation.std() * np.sqrt(255) < 1.2


def test_vmap_over_keys_gives_each_key_its_own():
    keys = jax.random.split(jax.random.key(8), 3)
    together = eqx.filter_jit(jax.vmap(partial(permutation, size=12)))(keys)
    alone = jnp.stack([shuffle(key, 12) for key in keys])
    np.testing.assert_array_equal(np.asarray(together), np.asarray(alone))


def test_a_permutation_is_that_of_the_swap_or_not_shuffle():
    """Computed one by one from the paper's definition, with Python's integers."""

    def mix(word):
        word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
        word = (word ^ (word >> 13)) * 0xC2B2AE35 % 2**32
        return word ^ (word >> 16)

    for seed, size in ((0, 2), (1, 3), (2, 64), (3, 97), (4, 1000)):
        key = jax.random.key(seed)
        offsets, salts = np.asarray(jax.random.bits(key, (2, SHUFFLE_ROUNDS), jnp.uint32)).tolist()
        expected = []
        for place in range(size):
            for offset, salt in zip(offsets, salts, strict=True):
                partner = (offset - place) % size
                place = partner if mix(max(place, partner) ^ salt) >> 31 else place
            expected.append(place)
        assert permutation(key, size).tolist() == expected
