"""Random keys and bits: threefry in unsigned integers, bit for bit JAX's streams.

What a key's primitive does is traced anew on the key's data, by JAX's own functions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_prng_impl

from rollmill.fusion.equation import Equation, Rule
from rollmill.fusion.ir import Node
from rollmill.fusion.making import Making
from rollmill.fusion.rearranging import rearranged, reshaped
from rollmill.fusion.refusals import NotLowered
from rollmill.fusion.rules.shapes import stacked
from rollmill.fusion.values import (
    NodeArray,
    Scalars,
    Value,
    is_key,
    no_nodes,
    positions,
)

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Of threefry's rounds, by turns (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""

PARITY = 0x1BD11BDA

WORD = np.dtype(np.uint32)


def check_threefry(dtype: Any) -> None:
    """Refuses other random generators."""
    threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
    if dtype != threefry:
        raise NotLowered(f"random keys of the kind {dtype}; only JAX's default, threefry2x32, is said in kernels")


def _of_data(making: Making, function: Callable[..., Any], *values: Value) -> Value:
    """What a function of arrays gives."""
    structs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    (result,) = making.read(jax.make_jaxpr(function)(*structs), values, making)
    return result


def _each_key(making: Making, keys: Value, function: Callable[[Value, tuple[int, ...]], Value]) -> Value:
    """`function(data of one key, its index)` of every key, stacked."""
    data = making.key_data(keys)
    found = [function(Scalars(data.nodes[(*at, ...)], WORD), at) for at in np.ndindex(*keys.shape)]
    if not keys.shape:
        return found[0]
    whole = stacked(making, found)
    return reshaped(making, whole, (*keys.shape, *found[0].shape))


def _bits(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    (keys,) = values
    check_threefry(keys.dtype)
    width, shape = equation.params["bit_width"], tuple(equation.params["shape"])
    draw = lambda data: threefry_prng_impl.random_bits(data, width, shape)
    return [_each_key(making, keys, lambda data, at: _of_data(making, draw, data))]


def _split(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    (keys,) = values
    check_threefry(keys.dtype)
    shape = tuple(equation.params["shape"])
    divide = lambda data: threefry_prng_impl.split(data, shape)
    found = _each_key(making, keys, lambda data, at: _of_data(making, divide, data))
    return [making.keys(making.scalars(found), equation.dtype)]


def _fold_in(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    keys, numbers = values
    check_threefry(keys.dtype)
    places = [np.broadcast_to(positions(value.shape), equation.shape) for value in values]
    fold_in = lambda data, number: threefry_prng_impl.fold_in(data, number.astype(jnp.uint32))

    def fold(data: Value, at: tuple[int, ...]) -> Value:
        return _of_data(making, fold_in, data, rearranged(making, numbers, places[1][(*at, ...)]))

    found = _each_key(making, rearranged(making, keys, places[0]), fold)
    return [making.keys(making.scalars(found), equation.dtype)]


def _seed(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    check_threefry(equation.dtype)
    (seeds,) = values
    found = []
    for at in np.ndindex(*seeds.shape):
        seed = rearranged(making, seeds, positions(seeds.shape)[(*at, ...)])
        found.append(_of_data(making, threefry_prng_impl.seed, seed))
    whole = reshaped(making, stacked(making, found), (*seeds.shape, 2))
    return [making.keys(making.scalars(whole), equation.dtype)]


def _wrap(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    check_threefry(equation.dtype)
    return [making.keys(making.scalars(values[0]), equation.dtype)]


def _unwrap(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    assert is_key(values[0].dtype)
    check_threefry(values[0].dtype)
    return [making.key_data(values[0])]


def _threefry(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Two words of key and two of counter to two random words, element by element."""
    shape = equation.shape
    words: list[NodeArray] = [np.broadcast_to(making.scalars(value).nodes, shape) for value in values]
    found = no_nodes(shape), no_nodes(shape)
    for at in np.ndindex(*shape):
        found[0][at], found[1][at] = threefry(making, *(nodes[at] for nodes in words))
    return [Scalars(nodes, WORD) for nodes in found]


def threefry(making: Making, key_0: Node, key_1: Node, count_0: Node, count_1: Node) -> tuple[Node, Node]:
    """Threefry-2x32 with 20 rounds."""
    add, xor = (lambda a, b: making.apply("add", a, b)), (lambda a, b: making.apply("xor", a, b))
    keys = (key_0, key_1, xor(xor(key_0, key_1), making.constant(PARITY, WORD)))
    x, y = add(count_0, key_0), add(count_1, key_1)
    for turn in range(5):
        for distance in ROTATIONS[turn % 2]:
            x = add(x, y)
            y = xor(x, _rotated(making, y, distance))
        x = add(x, keys[(turn + 1) % 3])
        y = add(y, add(keys[(turn + 2) % 3], making.constant(turn + 1, WORD)))
    return x, y


def _rotated(making: Making, word: Node, distance: int) -> Node:
    left = making.apply("shift_left", word, making.constant(distance, WORD))
    right = making.apply("shift_right_logical", word, making.constant(32 - distance, WORD))
    return making.apply("or", left, right)


RULES: dict[str, Rule] = {
    "random_bits": _bits,
    "random_split": _split,
    "random_fold_in": _fold_in,
    "random_seed": _seed,
    "random_wrap": _wrap,
    "random_unwrap": _unwrap,
    "threefry2x32": _threefry,
}
