"""Operations on large arrays: elements that are computed where they are read are those of whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_compare import QUICKLY
from fused_runs import join, split

from rollmill.fusion import evaluate, lower_function
from rollmill.fusion.lower.values import MemoryArray, is_output, nodes_of_write

lax, random = jax.lax, jax.random
SHAPE, SAMPLES = (36, 40), 5


def moves(board, i, j, key):
    other = board.T.reshape(SHAPE)
    return [
        board.T[j, i],
        board[::-1, ::-1][i, j],
        board[2:30:3, 1::2][i // 4, j // 2],
        jnp.pad(board, ((1, 2), (0, 3)), constant_values=7)[i, j],
        lax.pad(board, 5, ((-2, 1, 1), (1, -3, 0)))[2 * i, jnp.minimum(j, 36)],
        jnp.concatenate([board, other, board[:1]])[2 * i, j],
        jnp.tile(board, (2, 1))[i + 20, j],
        jnp.roll(board, 5, axis=1)[i, j],
        jnp.roll(board, i, axis=0)[j % 36, j],
        board.reshape(60, 24)[i, j // 2],
        jnp.broadcast_to(board[0], (40, 40))[i, j],
        board[jnp.arange(36)[:, None], jnp.arange(40)[None, ::-1]][i, j],
        jnp.split(board, 2)[1][i // 2, j],
    ]


def reductions(board, i, j, key):
    is_even = board % 2 == 0
    return [
        board.sum(),
        board.max(axis=0)[j],
        (board * 2).min(axis=1)[i],
        jnp.argmax(board),
        jnp.argmin(board, axis=0)[j],
        is_even.any(),
        is_even.all(axis=1)[i],
        jnp.sum(jnp.where(is_even, 1, 0)),
        jnp.sum(board.astype(jnp.float32) / 100),
        jnp.argmax(jnp.where(is_even, -1.5, board.astype(jnp.float32)), axis=1)[i],
    ]


def indices(board, i, j, key):
    table = jnp.arange(100) * 3 % 17
    return [
        board[i - 50, j + 50],
        board.at[i - 50, j].get(mode="fill", fill_value=-9),
        lax.dynamic_slice(board, (i - 3, j + 38), (3, 4)),
        table[board % 100][i, j],
        board[:, j][i],
        board[jnp.array([1, 30, 2])][:, j],
        jnp.take_along_axis(board, jnp.argsort(jnp.arange(40))[None], axis=1)[0, j],
    ]


def draws(board, i, j, key):
    return [
        random.bits(key, SHAPE)[i, j],
        random.uniform(key, SHAPE)[i, j],
        random.randint(key, SHAPE, -3, 100)[i, j],
        random.normal(key, SHAPE)[i, j],
        random.bernoulli(key, 0.3, SHAPE).sum(),
        lax.dynamic_slice(random.uniform(key, SHAPE), (i, j), (3, 4)),
    ]


def writes(board, i, j, key):
    places = jnp.stack([i, i + 1, i, i + 100])
    after = board.at[i, j].add(100)
    found = [
        after[i, j],
        after.at[places, j].set(jnp.arange(4))[i, j],
        after.at[places, j].add(jnp.arange(4))[i, j],
        after.at[places, j].min(-jnp.arange(4)).sum(),
        after.at[i - 40, j].set(5)[i, j],
        after.at[jnp.minimum(i, 30)].set(jnp.arange(40))[i, j],
        lax.dynamic_update_slice(after, jnp.full((20, 30), 3), (i, j))[i + 1, j],
        jnp.zeros(SHAPE).at[i, j].set(2.0).at[0, 0].multiply(3.0).sum(),
        jnp.where(i > 3, after, board.T.reshape(SHAPE))[i, j],
    ]
    return found, jnp.where(i > 5, after.at[0, :3].set(1), jnp.where(j > 20, board * 2, jnp.flip(board)[0, 0]))


def outputs_of(function, board, *others):
    """The small results of a function and its new board, by a program for large arrays in memory."""

    def step(board, *others):
        found = function(board, *others)
        return (found[1], found[0]) if isinstance(found, tuple) else (board, found)

    structs = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (board, *others)]
    lowered = lower_function(step, structs, carried=True)
    kinds = jax.tree.leaves(lowered.inputs, is_leaf=is_output)
    assert isinstance(kinds[0], MemoryArray)
    inputs = [x for kind, array in zip(kinds[1:], others, strict=True) for x in split(kind, array)]
    memory, slots = board.reshape(SAMPLES, -1), lowered.prologue().slots
    run = jax.jit(
        lambda *own: evaluate(lowered.program, own, slots, block=SAMPLES, memories=[memory]),
        compiler_options=QUICKLY,
    )
    found = run(*inputs)
    expected = jax.jit(jax.vmap(step), compiler_options=QUICKLY)(board, *others)
    after, results = lowered.outputs
    count = sum(len(nodes_of_write(write)) for write in after.writes)
    small = list(found[count:])
    return [join(value, small, [], SAMPLES) for value in results], expected[1]


@pytest.mark.parametrize("function", [moves, reductions, indices, draws, writes])
def test_elements_are_those_of_whole_arrays(function):
    drawn = np.random.default_rng(3)
    board = jnp.asarray(drawn.integers(-50, 50, (SAMPLES, *SHAPE)), jnp.int32)
    i, j = (jnp.asarray(drawn.integers(0, most, SAMPLES), jnp.int32) for most in (28, 37))
    keys = random.split(random.key(1), SAMPLES)
    with jax.numpy_dtype_promotion("standard"):
        found, expected = outputs_of(function, board, i, j, keys)
    for number, (mine, right) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6, err_msg=f"result {number}")


def test_a_table_that_only_a_whole_array_is_written_from_is_kept():
    table = np.random.default_rng(4).integers(0, 99, 2_000).astype(np.int32)
    structs = jax.ShapeDtypeStruct((2_000,), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    lowered = lower_function(lambda board, anew: (jnp.where(anew, table, board),), structs, carried=True)
    (write,) = lowered.outputs[0].writes
    (slot,) = write.program.slots()
    np.testing.assert_array_equal(lowered.prologue().slots[slot].reshape(-1), table)
