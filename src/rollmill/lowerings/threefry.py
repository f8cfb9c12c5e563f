"""Computes Threefry-2x32 without loops of XLA, for programs on CPUs. The results equal the random bits of JAX.

Threefry comes from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). On a CPU, JAX compiles it
to a loop of five iterations. Training draws many small arrays, and for each array the loop runs about forty tiny
operations. With this module, programs call machine code instead, which is compiled only once. If there is none for
a machine, programs contain one fused operation for each array. It has no loop, but takes longer to compile.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config  # JAX has no public context manager for this setting
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Distances in bits by which words are rotated in successive rounds of Threefry."""

PARITY = 0x1BD11BDA
"""Parity constant of Threefry's key schedule."""

TURNS = 5
"""Number of groups of four rounds in Threefry."""

THREEFRY_CALL = "rollmill_threefry"
"""Name under which XLA knows the machine code."""

TYPED_CALL = 4
"""Version of the interface by which XLA calls it (`CustomCallApiVersion.API_VERSION_TYPED_FFI`)."""

MAX_CODED = 2**16
"""Maximum number of words that machine code computes, on one core. XLA divides more among several cores."""


def threefry(ctx: mlir.LoweringRuleContext, *words: ir.Value) -> list[ir.Value]:
    """Lowers two key words and two counter words to two random words, element by element, as uint32.

    Most keys are derived from other keys. Each generation of keys is computed separately, because jaxlib 0.11
    takes minutes to compile several generations in one fused operation.
    """
    # Operations of the program are written directly, because tracing a function of JAX takes ten times longer.
    shape = ctx.avals_out[0].shape
    spread = lambda word: _broadcast(word, shape)
    number = cache(lambda value: mlir.ir_constant(np.broadcast_to(np.uint32(value), shape)))
    key_0, key_1 = stablehlo.OptimizationBarrierOp(words[:2]).results
    parity = mlir.ir_constant(np.broadcast_to(np.uint32(PARITY), _shape(key_0)))
    keys = [spread(key) for key in (key_0, key_1, stablehlo.xor(stablehlo.xor(key_0, key_1), parity))]
    x, y = stablehlo.add(spread(words[2]), keys[0]), stablehlo.add(spread(words[3]), keys[1])
    for turn in range(TURNS):
        for distance in ROTATIONS[turn % 2]:
            x = stablehlo.add(x, y)
            left = stablehlo.shift_left(y, number(distance))
            right = stablehlo.shift_right_logical(y, number(32 - distance))
            y = stablehlo.xor(x, stablehlo.or_(left, right))
        x = stablehlo.add(x, keys[(turn + 1) % 3])
        y = stablehlo.add(stablehlo.add(y, keys[(turn + 2) % 3]), number(turn + 1))
    return [x, y]


def _broadcast(word: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    """Repeats an array of uint32 along leading axes, and along axes of size 1, to a shape."""
    own = _shape(word)
    if own == shape:
        return word
    repeated = ir.RankedTensorType.get(shape, ir.IntegerType.get_unsigned(32))
    axes = ir.DenseI64ArrayAttr.get(range(len(shape) - len(own), len(shape)))
    return stablehlo.broadcast_in_dim(repeated, word, axes)


def _shape(array: ir.Value) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(array.type).shape)


def rolled_threefry(
    key_0: jax.Array, key_1: jax.Array, count_0: jax.Array, count_1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the same as `threefry` with a loop over the rounds, which compiles faster and runs slower."""
    shape = jnp.broadcast_shapes(key_0.shape, key_1.shape, count_0.shape, count_1.shape)
    of_keys = jnp.broadcast_shapes((1,) * len(shape), key_0.shape, key_1.shape)
    key_0, key_1 = jnp.broadcast_to(key_0, of_keys), jnp.broadcast_to(key_1, of_keys)
    last = key_0 ^ key_1 ^ jnp.uint32(PARITY)
    distances = [(jnp.uint32(even), jnp.uint32(odd)) for even, odd in zip(*ROTATIONS, strict=True)]

    # A turn begins by adding key words, and the last key words are added after the loop, because XLA compiles
    # operations before a loop separately, and fuses operations after it with those that use the result.
    def turn(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, y, first, second, third = carry
        x, y = x + first, y + second + number.astype(jnp.uint32)
        is_even = number & 1 == 0
        for of_even, of_odd in distances:
            distance = lax.select(is_even, of_even, of_odd)
            x = x + y
            y = x ^ ((y << distance) | (y >> (32 - distance)))
        return x, y, second, third, first

    counts = (jnp.broadcast_to(count, shape) for count in (count_0, count_1))
    x, y, first, second, _ = lax.fori_loop(0, TURNS, turn, (*counts, key_0, key_1, last))
    return x + first, y + second + jnp.uint32(TURNS)


_is_rolled: ContextVar[bool] = ContextVar("is_rolled", default=False)


@contextmanager
def small_programs(platform: str = "cpu") -> Iterator[None]:
    """Context manager for programs that run only once, in which random numbers compile fast.

    On a CPU, they are drawn by loops. On a GPU, they are drawn by the JAX kernel, because XLA would take about
    two seconds to fuse the operations of all draws at the start of a run.
    """
    calls_kernel = getattr(config, "threefry_gpu_kernel_lowering", None) if platform == "gpu" else None
    before = _is_rolled.set(True)
    try:
        with nullcontext() if calls_kernel is None else calls_kernel(True):
            yield
    finally:
        _is_rolled.reset(before)


def unroll_threefry(register_code: Callable[[], bool] = lambda: False) -> None:
    """Makes CPU programs lowered from now on draw random bits by machine code, or else without loops.

    Exported programs contain no machine code, and those that leave sizes open contain loops. Without machine code,
    programs lowered inside `small_programs` contain loops as well.

    Args:
        register_code: registers machine code with XLA under the name `THREEFRY_CALL`, unless it is registered.
            Returns False if there is none.
    """
    # a jitted function is traced only once for equal shapes
    rolled = mlir.lower_fun(jax.jit(rolled_threefry, inline=True), multiple_results=True)

    def lowered(ctx: mlir.LoweringRuleContext, *words: ir.Value) -> Any:
        shape = ctx.avals_out[0].shape
        has_sizes = all(isinstance(size, int) for size in shape)
        if has_sizes and math.prod(shape) <= MAX_CODED and _is_local(ctx) and register_code():
            return _call(shape, words)
        return (threefry if has_sizes and not _is_rolled.get() else rolled)(ctx, *words)

    mlir.register_lowering(threefry2x32_p, lowered, platform="cpu")


def _is_local(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether a program runs only in this process, and no compiler divides its arrays among devices."""
    module, axes = ctx.module_context, ctx.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):
        is_whole = axes.manual_axes == frozenset(axes.mesh.axis_names)
    else:
        is_whole = getattr(axes, "num_devices", None) == 1
    return is_whole and not module.lowering_parameters.for_export


def _call(shape: tuple[int, ...], words: Sequence[ir.Value]) -> list[ir.Value]:
    """Lowers to a call of the machine code, whose two keys are scalars or have the shape of the result."""
    keys = words[:2]
    if any(_shape(key) for key in keys):
        keys = [_broadcast(key, shape) for key in keys]
    operands = [*keys, *(_broadcast(count, shape) for count in words[2:])]
    result = ir.RankedTensorType.get(shape, ir.IntegerType.get_unsigned(32))
    call = stablehlo.CustomCallOp(
        [result, result],
        operands,
        call_target_name=ir.StringAttr.get(THREEFRY_CALL),
        backend_config=ir.DictAttr.get({}),
        api_version=mlir.i32_attr(TYPED_CALL),
        operand_layouts=ir.ArrayAttr.get([_row_major(_shape(operand)) for operand in operands]),
        result_layouts=ir.ArrayAttr.get([_row_major(shape)] * 2),
    )
    return list(call.results)


def _row_major(shape: tuple[int, ...]) -> Any:
    """Returns the layout of an array in which the last axis changes fastest."""
    axes = np.arange(len(shape))[::-1].copy()
    return ir.DenseIntElementsAttr.get(axes, type=ir.IndexType.get())  # pyright: ignore[reportCallIssue, reportArgumentType]
