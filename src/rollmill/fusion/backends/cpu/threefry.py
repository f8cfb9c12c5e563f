"""Computes Threefry-2x32 by machine code, for random numbers in programs that XLA compiles for a CPU."""

import functools
from collections.abc import Sequence

from llvmlite import ir

from rollmill.core.threefry import PARITY, ROTATIONS, TURNS
from rollmill.fusion.backends.cpu.builder import INT32, INT64, POINTER, Emitter, Value, read
from rollmill.fusion.backends.cpu.ffi import (
    BUFFER_DATA,
    BUFFER_DIMENSIONS,
    BUFFER_RANK,
    FRAME_ARGUMENTS,
    FRAME_RESULTS,
    begin_handler,
    register,
)

KEYS, COUNTS, WORDS = 2, 2, 2
"""Numbers of arrays: keys and counters, which are read, and random words, which are written."""


@functools.cache
def register_threefry(name: str) -> None:
    """Registers the machine code under a name with XLA, as a function of four arrays of uint32, two keys and two
    counters.

    The counters and both results have equal shapes, and both keys either have the same shape or are scalars.
    Raises `CannotFuse` if LLVM is not installed.
    """
    module = ir.Module("rollmill_threefry")
    shared, own = (_words_function(module, has_one_key=one) for one in (True, False))
    emit, frame = begin_handler(module)
    builder = emit.builder
    sides = [(FRAME_ARGUMENTS, n) for n in range(KEYS + COUNTS)] + [(FRAME_RESULTS, n) for n in range(WORDS)]
    buffers = [read(builder, read(builder, frame, side), 8 * n) for side, n in sides]
    size = _size(emit, buffers[-1])
    data = [read(builder, buffer, BUFFER_DATA) for buffer in buffers]
    null = ir.Constant(POINTER, None)
    with builder.if_then(builder.icmp_unsigned("==", size, INT64(0))):
        builder.ret(null)
    are_scalars = builder.icmp_unsigned("==", read(builder, buffers[0], BUFFER_RANK, INT64), INT64(0))
    with builder.if_else(are_scalars) as (scalars, others):
        with scalars:
            builder.call(shared, [*data, size])
        with others:
            builder.call(own, [*data, size])
    builder.ret(null)
    register(name, str(module))


def _size(emit: Emitter, buffer: Value) -> Value:
    """Emits the number of elements of a buffer."""
    builder = emit.builder
    rank, dimensions = read(builder, buffer, BUFFER_RANK, INT64), read(builder, buffer, BUFFER_DIMENSIONS)
    axis, size = emit.slot(INT64), emit.slot(INT64)
    builder.store(INT64(0), axis)
    builder.store(INT64(1), size)
    load = lambda slot: builder.load(slot, typ=INT64)
    with emit.repeat_while(lambda: builder.icmp_signed("<", load(axis), rank)):
        dimension = load(emit.at(dimensions, load(axis), INT64))
        builder.store(builder.mul(load(size), dimension), size)
        builder.store(builder.add(load(axis), INT64(1)), axis)
    return load(size)


def _words_function(module: ir.Module, *, has_one_key: bool) -> ir.Function:
    """Adds a function that computes all words, for one key or one key for each word. LLVM vectorises its loop."""
    kind = ir.FunctionType(ir.VoidType(), [POINTER] * (KEYS + COUNTS + WORDS) + [INT64])
    function = ir.Function(module, kind, "one_key" if has_one_key else "own_keys")
    function.linkage = "internal"
    *arrays, size = function.args
    for array in arrays[-WORDS:]:
        array.add_attribute("noalias")
    emit = Emitter(function, 1)
    builder = emit.builder
    load = lambda array, index: builder.load(emit.at(array, index, INT32), typ=INT32)
    shared = [load(array, INT64(0)) for array in arrays[:KEYS]] if has_one_key else None
    with emit.loop(size) as index:
        keys = shared or [load(array, index) for array in arrays[:KEYS]]
        counts = [load(array, index) for array in arrays[KEYS : KEYS + COUNTS]]
        for word, array in zip(_words(builder, keys, counts), arrays[-WORDS:], strict=True):
            builder.store(word, emit.at(array, index, INT32))
    builder.ret_void()
    return function


def _words(builder: ir.IRBuilder, pair: Sequence[Value], counts: Sequence[Value]) -> list[Value]:
    """Emits both words of a key and two counters."""
    keys = [*pair, builder.xor(builder.xor(*pair), INT32(PARITY))]
    x, y = map(builder.add, counts, pair)
    for turn in range(TURNS):
        for distance in ROTATIONS[turn % 2]:
            x = builder.add(x, y)
            rotated = builder.or_(builder.shl(y, INT32(distance)), builder.lshr(y, INT32(32 - distance)))
            y = builder.xor(x, rotated)
        x = builder.add(x, keys[(turn + 1) % 3])
        y = builder.add(builder.add(y, keys[(turn + 2) % 3]), INT32(turn + 1))
    return [x, y]
