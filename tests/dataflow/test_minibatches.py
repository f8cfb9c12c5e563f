"""Minibatches: every row once an epoch, and the same ones wherever the environments lie."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.core.errors import UsageError
from rollmill.dataflow import Batch, Loops, choose_num_shards, minibatch_gather, shuffled_rows
from wordings import raises


def loops(**sizes):
    small = Loops(
        1, num_envs=16, num_steps=6, epochs=1, num_minibatches=3, num_shards=8, minibatch_items="samples"
    )
    return small._replace(**sizes)


@eqx.filter_jit
def rows_of(seed, index, num_steps, sizes):
    return shuffled_rows(jax.random.key(seed), index, sizes)


def time_and_env(rows, index):
    """Rows `t * E + e` of a place that holds the environments `index`, as pairs (t, global index)."""
    rows = np.asarray(rows).astype(np.int64)
    return np.stack([rows // len(index), np.asarray(index)[rows % len(index)]], axis=-1)


def as_sets(pairs):
    return [set(map(tuple, minibatch)) for minibatch in pairs]


@pytest.mark.parametrize(
    ("num_envs", "num_steps", "num_minibatches", "by_sequence", "expected"),
    [
        (64, 64, 4, False, 64),
        (2048, 10, 32, False, 64),  # never more than 64
        (48, 10, 4, False, 8),  # 48 / 16 x 10 = 30 does not divide by 4
        (5, 100, 5, False, 1),  # no power of two above 1 divides 5
        (100, 100, 10, False, 4),
        (64, 7, 4, True, 16),  # whole sequences: a shard needs at least 4 environments
        (8, 7, 8, True, 1),
        (8, 8, 1, True, 8),
        (1, 128, 4, False, 1),
    ],
)
def test_the_most_shards_that_fit_are_chosen(num_envs, num_steps, num_minibatches, by_sequence, expected):
    assert choose_num_shards(num_envs, num_steps, num_minibatches, by_sequence=by_sequence) == expected


@pytest.mark.parametrize("by_sequence", [False, True])
def test_chosen_shards_are_the_largest_power_of_two_by_the_definition(by_sequence):
    for num_envs, num_steps, num_minibatches in np.ndindex(40, 6, 7):
        sizes = (num_envs + 1, num_steps + 1, num_minibatches + 1)
        rows = sizes[0] * (1 if by_sequence else sizes[1])
        fitting = [n for n in (1, 2, 4, 8, 16, 32, 64) if rows % (n * sizes[2]) == 0 and sizes[0] % n == 0]
        if fitting:
            assert choose_num_shards(*sizes, by_sequence=by_sequence) == max(fitting)
        else:
            with raises("do-not-divide-into-num"):
                choose_num_shards(*sizes, by_sequence=by_sequence)


def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do():
    with pytest.raises(UsageError) as error:
        choose_num_shards(10, 10, 9, by_sequence=False)
    assert str(error.value) == (
        "100 samples (num_envs x num_steps) cannot be divided into num_minibatches=9 equal parts. "
        "Nearest values that divide them: 5 or 10."
    )
    with raises("do-not-divide-into-num", "12", "sequences (num_envs)", "5", "4 or 6"):
        choose_num_shards(12, 100, 5, by_sequence=True)


def test_the_offer_is_honest_for_batches_of_any_size():
    for num_envs, num_steps in ((1, 1), (1, 3), (2**20 + 1, 2)):
        with pytest.raises(UsageError) as error:
            choose_num_shards(num_envs, num_steps, 2**22 + 3, by_sequence=False)
        offered = str(error.value).partition("Nearest values that divide them: ")[2].rstrip(".").split(" or ")
        assert offered != [""]
        for size in offered:
            assert choose_num_shards(num_envs, num_steps, int(size), by_sequence=False) >= 1


@pytest.mark.parametrize(
    "sizes", [{}, {"num_shards": 1}, {"num_shards": 16}, {"num_minibatches": 12}, {"num_minibatches": 1}]
)
def test_an_epoch_covers_every_row_once(sizes):
    sizes = loops(**sizes)
    index = jnp.arange(16, dtype=jnp.int32)
    rows = np.asarray(rows_of(0, index, 6, sizes))
    assert rows.shape == (sizes.num_minibatches, 96 // sizes.num_minibatches)
    np.testing.assert_array_equal(np.sort(rows.ravel()), np.arange(96))


def test_every_minibatch_takes_the_same_share_of_every_shard():
    index = jnp.arange(16, dtype=jnp.int32)
    for minibatch in time_and_env(rows_of(1, index, 6, loops()), index):
        np.testing.assert_array_equal(np.bincount(minibatch[:, 1] // 2, minlength=8), np.full(8, 96 // 3 // 8))


def test_steps_and_environments_are_mixed_within_a_shard():
    """Where a minibatch takes half of a shard, each step and environment is in it half of the time."""
    sizes = loops(num_envs=4, num_shards=1, num_minibatches=2)
    index = jnp.arange(4, dtype=jnp.int32)
    keys = jax.random.split(jax.random.key(2), 2000)
    drawn = eqx.filter_jit(jax.vmap(lambda key: shuffled_rows(key, index, sizes)[0]))(keys)
    frequency = np.bincount(np.asarray(drawn).ravel(), minlength=24) / 2000
    np.testing.assert_allclose(frequency, 0.5, atol=5 * 0.5 / np.sqrt(2000))


def test_shards_and_epochs_have_orders_of_their_own():
    index = jnp.arange(16, dtype=jnp.int32)
    sizes = loops(num_minibatches=1)
    first, second = (time_and_env(rows_of(seed, index, 6, sizes), index)[0].reshape(8, 12, 2) for seed in (0, 1))
    local = [tuple(map(tuple, np.stack([s[:, 0], s[:, 1] % 2], axis=-1))) for s in first]
    assert len(set(local)) == 8
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("places", [2, 4, 8])
@pytest.mark.parametrize("items", ["samples", "sequences"])
def test_a_place_sees_exactly_its_part_of_each_minibatch_of_the_whole(places, items):
    each = 6 if items == "samples" else 1
    sizes = loops(
        num_envs=32, num_shards=8, num_minibatches=2 if items == "sequences" else 3, minibatch_items=items
    )
    index = jnp.arange(32, dtype=jnp.int32)
    whole = as_sets(time_and_env(rows_of(3, index, each, sizes), index))
    found = [set() for _ in whole]
    for part in jnp.split(index, places):
        rows = rows_of(3, part, each, sizes)
        assert rows.shape == (sizes.num_minibatches, each * 32 // sizes.num_minibatches // places)
        held = set(np.asarray(part).tolist())
        for ours, of_whole, so_far in zip(as_sets(time_and_env(rows, part)), whole, found, strict=True):
            assert ours == {row for row in of_whole if row[1] in held}
            so_far |= ours
    assert found == whole


def mixed_tree(steps, envs):
    grid = np.arange(steps * envs * 6).reshape(steps, envs, 6)
    return {
        "float32": jnp.asarray(grid[..., 0] * 0.5 - 3, jnp.float32),
        "nan": jnp.full((steps, envs), jnp.nan, jnp.float32),
        "int32": jnp.asarray(-grid[..., 1], jnp.int32),
        "uint32": jnp.asarray(grid[..., 1] + 2**31, jnp.uint32),
        "bool": jnp.asarray(grid[..., 2] % 5 == 0),
        "uint8": jnp.asarray(grid[..., :4] % 256, jnp.uint8).reshape(steps, envs, 2, 2),
        "bfloat16": jnp.asarray(grid[..., :3], jnp.bfloat16),
        "image": jnp.asarray(grid, jnp.float32).reshape(steps, envs, 3, 1, 2),
        "empty": jnp.zeros((steps, envs, 0), jnp.float32),
        "nothing": (),
    }


@pytest.mark.parametrize("names", [None, ("bool", "uint8"), ("image",)], ids=str)
def test_packed_rows_are_the_rows(names):
    tree = mixed_tree(5, 4)
    tree = tree if names is None else {name: tree[name] for name in names}
    rows = jnp.array([19, 0, 7, 7, 12], jnp.uint32)
    taken = eqx.filter_jit(lambda tree, rows: minibatch_gather(Batch(tree), loops())(rows))(tree, rows)
    assert taken.sequences == ()
    assert jax.tree.structure(taken.samples) == jax.tree.structure(tree)
    for leaf, got in zip(jax.tree.leaves(tree), jax.tree.leaves(taken.samples), strict=True):
        plain = np.asarray(leaf).reshape(20, *leaf.shape[2:])[np.asarray(rows)]
        assert got.dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(got), plain)


def test_sequences_are_cut_whole_with_what_belongs_to_them():
    tree = mixed_tree(5, 4)
    memory = {"hidden": jnp.arange(12, dtype=jnp.float32).reshape(4, 3)}
    rows = jnp.array([2, 0], jnp.uint32)
    taken = minibatch_gather(Batch(tree, memory), loops(minibatch_items="sequences"))(rows)
    np.testing.assert_array_equal(np.asarray(taken.sequences["hidden"]), [[6, 7, 8], [0, 1, 2]])
    for leaf, got in zip(jax.tree.leaves(tree), jax.tree.leaves(taken.samples), strict=True):
        assert got.dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(leaf)[:, [2, 0]].swapaxes(0, 1))
