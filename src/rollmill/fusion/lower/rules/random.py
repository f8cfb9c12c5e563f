"""Lowers random keys and bits to Threefry on unsigned integers, with bitwise the same results as JAX.

Primitives on keys are traced again as JAX functions of the key data.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_prng_impl

from rollmill.core.types import is_key
from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.element_index import ElementIndex
from rollmill.fusion.lower.large_arrays import broadcast_index, element_of, is_too_large
from rollmill.fusion.lower.movement import gather_static, reshape_value
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.shapes import stack_values
from rollmill.fusion.lower.values import (
    ComputedArray,
    LoweringError,
    NodeArray,
    ScalarArray,
    Value,
    no_nodes,
    positions,
)
from rollmill.lowerings.threefry import PARITY, ROTATIONS, TURNS

WORD = np.dtype(np.uint32)


def check_threefry(dtype: Any) -> None:
    """Raises a `LoweringError` for a random generator other than Threefry."""
    threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
    if dtype != threefry:
        raise LoweringError(
            f"random keys of type {dtype} are not supported in kernels, only threefry2x32, the default of JAX"
        )


def _of_data(ctx: Lowering, function: Callable[..., Any], *values: Value) -> Value:
    """Returns the results of a function of arrays."""
    structs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    # The implementation in JAX is traced down to 32-bit integers, so the random bits are identical.
    (result,) = ctx.read(jax.make_jaxpr(function)(*structs), values, ctx)
    return result


def _each_key(ctx: Lowering, keys: Value, function: Callable[[Value, tuple[int, ...]], Value]) -> Value:
    """Applies `function(data of one key, its index)` to every key, and stacks the results."""
    data = ctx.key_data(keys)
    found = [function(ScalarArray(data.nodes[(*at, ...)], WORD), at) for at in np.ndindex(*keys.shape)]
    if not keys.shape:
        return found[0]
    whole = stack_values(ctx, found)
    return reshape_value(ctx, whole, (*keys.shape, *found[0].shape))


def _bits(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    (keys,) = values
    check_threefry(keys.dtype)
    width, shape = equation.params["bit_width"], tuple(equation.params["shape"])
    draw = lambda data: threefry_prng_impl.random_bits(data, width, shape)
    return [_each_key(ctx, keys, lambda data, at: _of_data(ctx, draw, data))]


def _split(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    (keys,) = values
    check_threefry(keys.dtype)
    shape = tuple(equation.params["shape"])
    divide = lambda data: threefry_prng_impl.split(data, shape)
    found = _each_key(ctx, keys, lambda data, at: _of_data(ctx, divide, data))
    return [ctx.keys(ctx.scalars(found), equation.dtype)]


def _fold_in(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    keys, numbers = values
    check_threefry(keys.dtype)
    places = [np.broadcast_to(positions(value.shape), equation.shape) for value in values]
    fold_in = lambda data, number: threefry_prng_impl.fold_in(data, number.astype(jnp.uint32))

    def fold(data: Value, at: tuple[int, ...]) -> Value:
        return _of_data(ctx, fold_in, data, gather_static(ctx, numbers, places[1][(*at, ...)]))

    found = _each_key(ctx, gather_static(ctx, keys, places[0]), fold)
    return [ctx.keys(ctx.scalars(found), equation.dtype)]


def _seed(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    check_threefry(equation.dtype)
    (seeds,) = values
    found = []
    for at in np.ndindex(*seeds.shape):
        seed = gather_static(ctx, seeds, positions(seeds.shape)[(*at, ...)])
        found.append(_of_data(ctx, threefry_prng_impl.seed, seed))
    whole = reshape_value(ctx, stack_values(ctx, found), (*seeds.shape, 2))
    return [ctx.keys(ctx.scalars(whole), equation.dtype)]


def _wrap(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    check_threefry(equation.dtype)
    return [ctx.keys(ctx.scalars(values[0]), equation.dtype)]


def _unwrap(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    assert is_key(values[0].dtype)
    check_threefry(values[0].dtype)
    return [ctx.key_data(values[0])]


def _threefry(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Maps two key words and two counter words to two random words, element by element."""
    shape = equation.shape
    if is_too_large(shape):
        return _threefry_of_large(ctx, shape, values)
    words: list[NodeArray] = [np.broadcast_to(ctx.scalars(value).nodes, shape) for value in values]
    found = no_nodes(shape), no_nodes(shape)
    for at in np.ndindex(*shape):
        found[0][at], found[1][at] = threefry(ctx, *(nodes[at] for nodes in words))
    return [ScalarArray(nodes, WORD) for nodes in found]


def _threefry_of_large(ctx: Lowering, shape: tuple[int, ...], values: Sequence[Value]) -> list[Value]:
    """Returns random words, each computed by its readers."""
    drawn: dict[Any, tuple[Node, Node]] = {}

    def word(number: int, at: Lowering, index: ElementIndex) -> Node:
        key = (at.region, index.key)
        if key not in drawn:
            own = (element_of(at, value, broadcast_index(at, index, value.shape)) for value in values)
            drawn[key] = threefry(at, *own)
        return drawn[key][number]

    return [ComputedArray(shape, WORD, partial(word, number)) for number in range(2)]


def threefry(ctx: Lowering, key_0: Node, key_1: Node, count_0: Node, count_1: Node) -> tuple[Node, Node]:
    """Computes the random bits of Threefry-2x32 with 20 rounds, as nodes of a program."""
    add, xor = (lambda a, b: ctx.apply("add", a, b)), (lambda a, b: ctx.apply("xor", a, b))
    keys = (key_0, key_1, xor(xor(key_0, key_1), ctx.constant(PARITY, WORD)))
    # The key schedule: two words of the key, and their parity, of which two are added after every four rounds.
    x, y = add(count_0, key_0), add(count_1, key_1)
    for turn in range(TURNS):
        for distance in ROTATIONS[turn % 2]:
            x = add(x, y)
            y = xor(x, _rotate(ctx, y, distance))
        x = add(x, keys[(turn + 1) % 3])
        y = add(y, add(keys[(turn + 2) % 3], ctx.constant(turn + 1, WORD)))
    return x, y


def _rotate(ctx: Lowering, word: Node, distance: int) -> Node:
    left = ctx.apply("shift_left", word, ctx.constant(distance, WORD))
    right = ctx.apply("shift_right_logical", word, ctx.constant(32 - distance, WORD))
    return ctx.apply("or", left, right)


RULES: dict[str, Rule] = {
    "random_bits": _bits,
    "random_split": _split,
    "random_fold_in": _fold_in,
    "random_seed": _seed,
    "random_wrap": _wrap,
    "random_unwrap": _unwrap,
    "threefry2x32": _threefry,
}
