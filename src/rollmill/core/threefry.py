"""Computes Threefry-2x32 without loops, for programs on CPUs. The results equal the random bits of JAX.

Threefry comes from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). On a CPU, JAX compiles it
to a loop of five iterations. Training draws many small arrays, and for each array the loop runs about forty tiny
operations. Without the loop, there is one function of a few arrays, which XLA compiles to one kernel.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Distances in bits by which words are rotated in successive rounds of Threefry."""

PARITY = 0x1BD11BDA
"""Parity constant of Threefry's key schedule."""

TURNS = 5
"""Number of groups of four rounds in Threefry."""

MAX_CALLED = 2**14
"""Maximum number of elements of which the words are computed apart from the operations that use them.

XLA computes more of them on several cores, and uses them without storing them."""

CALL_ATTRIBUTES = {"inlineable": "false", "xla_cpu_small_call": "true"}
"""Attributes with which XLA compiles a function to one kernel on a CPU, instead of fusing it with its callers."""


class _Words:
    """An array of uint32 in a program that is being lowered, with the operators that `threefry` needs."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    def __add__(self, other: "_Words | int") -> "_Words":
        return _Words(stablehlo.add(self.value, self._like(other)))

    def __xor__(self, other: "_Words | int") -> "_Words":
        return _Words(stablehlo.xor(self.value, self._like(other)))

    def __or__(self, other: "_Words") -> "_Words":
        return _Words(stablehlo.or_(self.value, other.value))

    def __lshift__(self, distance: int) -> "_Words":
        return _Words(stablehlo.shift_left(self.value, self._like(distance)))

    def __rshift__(self, distance: int) -> "_Words":
        return _Words(stablehlo.shift_right_logical(self.value, self._like(distance)))

    def _like(self, other: "_Words | int") -> ir.Value:
        """Returns the value of other words, or a number repeated to the shape of these words."""
        if isinstance(other, _Words):
            return other.value
        return mlir.ir_constant(np.broadcast_to(np.uint32(other), _shape(self.value)))


Words = TypeVar("Words", jax.Array, _Words)


def threefry(key_0: Words, key_1: Words, count_0: Words, count_1: Words) -> tuple[Words, Words]:
    """Computes two random words from two key words and two counter words, element by element, as uint32.

    All words have the same shape.
    """
    keys = (key_0, key_1, key_0 ^ key_1 ^ PARITY)
    x, y = count_0 + key_0, count_1 + key_1
    for turn in range(TURNS):
        for distance in ROTATIONS[turn % 2]:
            x = x + y
            y = x ^ ((y << distance) | (y >> 32 - distance))
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + (turn + 1)
    return x, y


def unroll_threefry() -> None:
    """Makes CPU programs lowered from now on draw random bits without loops."""
    traced = mlir.lower_fun(_threefry_of_any_shape, multiple_results=True)

    def lowered(ctx: mlir.LoweringRuleContext, *words: ir.Value) -> Sequence[Any]:
        shape = ctx.avals_out[0].shape
        if not all(isinstance(size, int) for size in shape):  # of an exported program
            return traced(ctx, *words)
        if math.prod(shape) > MAX_CALLED:
            return _written(words, shape)
        return _called(ctx, words, shape)

    mlir.register_lowering(threefry2x32_p, lowered, platform="cpu")


def _threefry_of_any_shape(*words: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = jnp.broadcast_shapes(*(word.shape for word in words))
    return threefry(*(jnp.broadcast_to(word, shape) for word in words))


def _called(
    ctx: mlir.LoweringRuleContext, words: Sequence[ir.Value], shape: tuple[int, ...]
) -> Sequence[ir.Value]:
    """Calls a function that computes the random words.

    Otherwise, XLA would compute them anew, and compile their operations anew, wherever they are used.
    """
    module = ctx.module_context
    results: list[ir.Type] = [_type(shape)] * 2
    with ir.InsertionPoint.at_block_begin(module.module.body):
        function = func.FuncOp("threefry", ([word.type for word in words], results), visibility="private")
    module.symbol_table.insert(function)
    block = function.add_entry_block()
    with ir.InsertionPoint(block):
        func.ReturnOp(_written(list(block.arguments), shape))
    call = func.CallOp(results, ir.FlatSymbolRefAttr.get(function.name.value), list(words))
    attributes: dict[str, ir.Attribute] = {k: ir.StringAttr.get(v) for k, v in CALL_ATTRIBUTES.items()}
    call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(attributes)
    return list(call.results)


def _written(words: Sequence[ir.Value], shape: tuple[int, ...]) -> list[ir.Value]:
    """Writes the operations of `threefry`, because tracing them takes ten times longer.

    Most keys are derived from other keys. Each generation of keys is computed separately, because jaxlib 0.11
    takes minutes to compile several generations in one fused operation.
    """
    keys = stablehlo.OptimizationBarrierOp(words[:2]).results
    whole = [_Words(_broadcast(word, shape)) for word in (*keys, *words[2:])]
    return [word.value for word in threefry(*whole)]


def _broadcast(word: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    """Repeats an array of uint32 along leading axes, and along axes of size 1, to a shape."""
    own = _shape(word)
    if own == shape:
        return word
    axes = ir.DenseI64ArrayAttr.get(range(len(shape) - len(own), len(shape)))
    return stablehlo.broadcast_in_dim(_type(shape), word, axes)


def _shape(array: ir.Value) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(array.type).shape)


def _type(shape: tuple[int, ...]) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(shape, ir.IntegerType.get_unsigned(32))
