"""Machine code for image convolutions and the gradients of their kernels.

Accumulators stay in registers, so each loaded pixel and each loaded vector of weights is used several times. A
program processes its images one after the other, so that data it reads again stays in the core's cache.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax
import jax.numpy as jnp
from llvmlite import ir

from rollmill.fusion.backends.cpu.builder import BYTE, FLOAT32, FLOATS, INT64, Emitter, Value
from rollmill.fusion.backends.cpu.convolution_plan import KernelGradientPlan, Pair, Phase, ResultPlan
from rollmill.fusion.backends.cpu.ffi import NativeKernel, new_program
from rollmill.fusion.backends.cpu.memory import ALIGNMENT
from rollmill.fusion.backends.cpu.target import processor

FLOAT = FLOATS["float32"]
BYTES = 4
"""Bytes of a float32 element."""

SUMS = {16: 24, 8: 12, 4: 24}
"""Number of accumulator registers for each number of lanes of a vector. Other registers hold operands."""
VECTORS = {16: 4, 8: 2, 4: 4}
"""Maximum number of output vectors computed together, for each number of lanes of a vector."""
UNROLL = 4
"""Maximum number of products of a sum in one iteration of its loop."""

PROGRAM_OPERATIONS = 2e6
"""Minimum number of operations of a program, below which starting another core would take longer."""
MAX_PARTS = 16
"""Maximum number of partial sums of a kernel's gradient. It does not depend on the number of cores, so that
results do not either."""
SUMMED_VECTORS = 8192
"""Minimum number of vectors that a program adds up."""
TOGETHER_BYTES = 2**18
"""Bytes of the images that are processed before accumulators are stored, about the size of a core's cache."""


class Blocks(NamedTuple):
    """Size of a block of accumulators in registers: `numbers` scalars times `vectors` vectors."""

    numbers: int
    vectors: int


def result_code(plan: ResultPlan) -> NativeKernel:
    """Returns the machine code of a convolution.

    Its operands are the images, and the kernel's weights reordered by phase and flattened.
    """
    programs = _programs(plan.batch, plan.operations)
    emit, (image, kernel, result), number, scratch = new_program(processor().lanes, 3)
    images, size = _Images(plan.image, plan.padding), _size(plan.result)
    with _share(emit, number, programs, plan.batch) as (n, _):
        source = images.read(emit, _move(emit, image, (n, images.size)), scratch, emit.integer(1))
        own = _move(emit, result, (n, size))
        _clear(emit, own, size)
        part = 0
        for phase in plan.phases:
            rows, columns = map(len, phase.taps)
            if rows and columns:
                _write_phase(emit, plan, phase, images, source, emit.at(kernel, part, FLOAT), own)
            part += rows * columns * plan.image[2] * plan.result[2]
    emit.builder.ret_void()
    shape = jax.ShapeDtypeStruct((plan.batch, *plan.result), jnp.float32)
    return NativeKernel(emit.module, programs, images.scratch, (shape,), written_out=True)


class _Line(NamedTuple):
    """Adjacent result positions to which one row of a phase's taps contributes."""

    width: int
    """Size of a row of taps, over all inputs."""
    source: int
    """Distance between the inputs of adjacent places."""
    place: int
    """Distance between adjacent places."""
    outputs: int


def _write_phase(
    emit: Emitter, plan: ResultPlan, phase: Phase, images: "_Images", source: Value, kernel: Value, result: Value
) -> None:
    """Adds the products of a phase, one row of its taps at a time, because a row stays in the core's cache."""
    (_, _, inputs), (_, columns, outputs), lanes = plan.image, plan.result, emit.lanes
    line = _Line(len(phase.taps[1]) * inputs, plan.strides[1] * inputs, plan.spread[1] * outputs, outputs)
    vectors = _largest_divisor(outputs // lanes, VECTORS[lanes])
    row = images.columns * inputs
    source = emit.at(source, phase.source[0] * row + phase.source[1] * inputs, FLOAT)
    result = emit.at(result, (phase.first[0] * columns + phase.first[1]) * outputs, FLOAT)
    with _turns(emit, outputs // lanes // vectors) as block, _turns(emit, len(phase.taps[0])) as tap:
        weights = _move(emit, kernel, (tap, line.width * outputs), (block, vectors * lanes))
        tapped, own = _move(emit, source, (tap, row)), _move(emit, result, (block, vectors * lanes))
        with _turns(emit, phase.count[0]) as y:
            at = _move(emit, tapped, (y, plan.strides[0] * row))
            to = _move(emit, own, (y, plan.spread[0] * columns * outputs))
            _write_line(emit, line, phase.count[1], vectors, at, weights, to)


def _write_line(
    emit: Emitter, line: _Line, places: int, vectors: int, source: Value, weights: Value, to: Value
) -> None:
    """Accumulates the products of a row of positions, in blocks that fit registers and differ by at most one."""
    count = -(-places // (SUMS[emit.lanes] // vectors))
    width, wider = divmod(places, count)
    first = 0
    for number, numbers in ((wider, width + 1), (count - wider, width)):
        if not number:
            continue
        with _turns(emit, number) as turn:
            here = _move(emit, emit.at(source, first * line.source, FLOAT), (turn, numbers * line.source))
            there = _move(emit, emit.at(to, first * line.place, FLOAT), (turn, numbers * line.place))
            _write_places(emit, line, Blocks(numbers, vectors), here, weights, there)
        first += number * numbers


def _write_places(emit: Emitter, line: _Line, blocks: Blocks, source: Value, weights: Value, to: Value) -> None:
    unroll = _largest_divisor(line.width, UNROLL)

    def turn(index: Value, sums: list[Value]) -> list[Value]:
        at = _move(emit, source, (index, unroll))
        row = _move(emit, weights, (index, unroll * line.outputs))
        for step in range(unroll):
            numbers = [emit.at(at, number * line.source + step, FLOAT) for number in range(blocks.numbers)]
            sums = _with_products(emit, blocks, numbers, emit.at(row, step * line.outputs, FLOAT), sums)
        return sums

    spots = _spots(emit, blocks, to, line.place)
    sums = emit.sums(line.width // unroll, [emit.load(spot, FLOAT32) for spot in spots], turn)
    for spot, total in zip(spots, sums, strict=True):
        emit.store(total, spot, FLOAT32)


def _spots(emit: Emitter, blocks: Blocks, pointer: Value, step: int) -> list[Value]:
    """Returns the addresses of a block's sums."""
    return [
        emit.at(pointer, number * step + vector * emit.lanes, FLOAT)
        for number in range(blocks.numbers)
        for vector in range(blocks.vectors)
    ]


def _with_products(
    emit: Emitter, blocks: Blocks, numbers: Sequence[Value], row: Value, sums: Sequence[Value]
) -> list[Value]:
    """Adds one product to each sum of a block: the values at these positions times the vectors of a row."""
    vectors = [emit.load(emit.at(row, vector * emit.lanes, FLOAT), FLOAT32) for vector in range(blocks.vectors)]
    held = [emit.broadcast(emit.load_number(number, FLOAT32)) for number in numbers]
    return [
        emit.fma(held[number], vectors[vector], sums[number * blocks.vectors + vector])
        for number in range(blocks.numbers)
        for vector in range(blocks.vectors)
    ]


# --- the gradient of a kernel ----------------------------------------------------------------------------


def kernel_gradient_code(plan: KernelGradientPlan) -> NativeKernel:
    """Returns machine code for the gradient of a convolution kernel.

    Its operands are the images and the gradients of the convolution's result. Each program sums over its own
    images, so the output is `[programs, size]`.
    """
    programs = min(_programs(plan.batch, plan.operations), MAX_PARTS)
    emit, (image, gradient, parts), number, scratch = new_program(processor().lanes, 3)
    images, gradient_size = _Images(plan.image, plan.padding), _size(plan.gradient)
    size = _size((*plan.kernel, plan.image[2])) * plan.gradient[2]
    fit = max(1, TOGETHER_BYTES // (BYTES * (images.size + gradient_size)))
    together = min(fit, -(-plan.batch // programs))
    own = _move(emit, parts, (number, size))
    _clear(emit, own, size)
    with _share(emit, number, programs, plan.batch, together=together) as (n, count):
        source = images.read(emit, _move(emit, image, (n, images.size)), scratch, count)
        _write_products(emit, plan, images, source, _move(emit, gradient, (n, gradient_size)), own, count)
    emit.builder.ret_void()
    shape = jax.ShapeDtypeStruct((programs, size), jnp.float32)
    return NativeKernel(emit.module, programs, together * images.scratch, (shape,), written_out=True)


def _write_products(
    emit: Emitter,
    plan: KernelGradientPlan,
    images: "_Images",
    source: Value,
    gradient: Value,
    own: Value,
    count: Value,
) -> None:
    """Adds the products of `count` images to a program's part."""
    (_, _, inputs), (rows, columns, outputs), lanes = plan.image, plan.gradient, emit.lanes
    width, row = plan.kernel[1] * inputs, images.columns * inputs
    vectors = _largest_divisor(outputs // lanes, VECTORS[lanes])
    blocks = Blocks(_largest_divisor(width, SUMS[lanes] // vectors), vectors)
    with (
        _turns(emit, plan.kernel[0]) as tap,
        _turns(emit, outputs // lanes // vectors) as block,
        _turns(emit, width // blocks.numbers) as part,
    ):
        tapped = _move(emit, source, (tap, row), (part, blocks.numbers))
        own_gradient = _move(emit, gradient, (block, vectors * lanes))

        def turn(n: Value, y: Value, x: Value, sums: list[Value]) -> list[Value]:
            at = _move(emit, tapped, (n, images.step), (y, plan.strides[0] * row), (x, plan.strides[1] * inputs))
            numbers = [emit.at(at, number, FLOAT) for number in range(blocks.numbers)]
            vector = _move(emit, own_gradient, (n, _size(plan.gradient)), (y, columns * outputs), (x, outputs))
            return _with_products(emit, blocks, numbers, vector, sums)

        to = _move(emit, own, (tap, width * outputs), (part, blocks.numbers * outputs), (block, vectors * lanes))
        spots = _spots(emit, blocks, to, outputs)
        of_row = lambda n, y, sums: emit.sums(columns, sums, lambda x, now: turn(n, y, x, now))
        of_image = lambda n, sums: emit.sums(rows, sums, lambda y, now: of_row(n, y, now))
        sums = emit.sums(count, [emit.load(spot, FLOAT32) for spot in spots], of_image)
        for spot, total in zip(spots, sums, strict=True):
            emit.store(total, spot, FLOAT32)


def sum_code(parts: int, size: int) -> NativeKernel:
    """Returns machine code that sums an array `[parts, size]` over its parts, in a fixed order."""
    lanes = processor().lanes
    emit, (given, result), number, _ = new_program(lanes, 2)
    programs = max(1, parts * size // lanes // SUMMED_VECTORS)
    with _share(emit, number, programs, size // lanes) as (n, _):
        own = _move(emit, given, (n, lanes))
        total = emit.load(own, FLOAT32)
        for part in range(1, parts):
            total = emit.add(total, emit.load(emit.at(own, part * size, FLOAT), FLOAT32))
        emit.store(total, _move(emit, result, (n, lanes)), FLOAT32)
    emit.builder.ret_void()
    return NativeKernel(
        emit.module, programs, ALIGNMENT, (jax.ShapeDtypeStruct((size,), jnp.float32),), written_out=True
    )


# --- parts of both ---------------------------------------------------------------------------------------


class _Images:
    """Images with zero padding. Padded images are copied to memory near the core."""

    def __init__(self, image: tuple[int, int, int], padding: tuple[Pair, Pair]) -> None:
        (above, below), (before, after) = padding
        self._image, self._first = image, (above, before)
        self._is_copied = any(map(any, padding))
        self.columns = image[1] + before + after
        self.size = _size(image)
        self._whole = (image[0] + above + below) * self.columns * image[2]
        self.scratch = -(-self._whole * BYTES // ALIGNMENT) * ALIGNMENT if self._is_copied else ALIGNMENT
        """Bytes for each image."""

    @property
    def step(self) -> int:
        """Returns the distance between images."""
        return self.scratch // BYTES if self._is_copied else self.size

    def read(self, emit: Emitter, images: Value, scratch: Value, count: Value) -> Value:
        """Returns a pointer to `count` images with their padding."""
        if not self._is_copied:
            return images
        height, width, channels = self._image
        first = (self._first[0] * self.columns + self._first[1]) * channels
        with emit.loop(count) as n:
            own, image = _move(emit, scratch, (n, self.step)), _move(emit, images, (n, self.size))
            _clear(emit, own, self._whole)
            with _turns(emit, height) as y:
                to = _move(emit, emit.at(own, first, FLOAT), (y, self.columns * channels))
                _copy(emit, to, _move(emit, image, (y, width * channels)), width * channels)
        return scratch


@contextmanager
def _share(
    emit: Emitter, number: Value, programs: int, count: int, *, together: int = 1
) -> Iterator[tuple[Value, Value]]:
    """Returns the first item of a program and their number, in units of `together` items."""
    builder = emit.builder
    bound = lambda n: builder.udiv(builder.mul(n, emit.integer(count)), emit.integer(programs))
    first, end = bound(number), bound(builder.add(number, emit.integer(1)))
    with emit.loop(end, first=first, step=together) as n:
        left = builder.sub(end, n)
        is_last = builder.icmp_unsigned("<", left, emit.integer(together))
        yield n, builder.select(is_last, left, emit.integer(together))


@contextmanager
def _turns(emit: Emitter, count: int) -> Iterator[Value]:
    """Opens a loop, unless it would run once."""
    if count == 1:
        yield emit.integer(0)
        return
    with emit.loop(count) as index:
        yield index


def _move(emit: Emitter, pointer: Value, *steps: tuple[Value, int]) -> Value:
    """Returns the pointer moved by the dot product of counts and strides."""
    for index, step in steps:
        pointer = emit.at(pointer, emit.builder.mul(index, emit.integer(step)), FLOAT)
    return pointer


def _clear(emit: Emitter, pointer: Value, count: int) -> None:
    """Writes zeros."""
    arguments = pointer, ir.Constant(BYTE, 0), INT64(count * BYTES), ir.Constant(ir.IntType(1), 0)
    emit.call("llvm.memset.p0.i64", *arguments, result=ir.VoidType())


def _copy(emit: Emitter, to: Value, source: Value, count: int) -> None:
    arguments = to, source, INT64(count * BYTES), ir.Constant(ir.IntType(1), 0)
    emit.call("llvm.memcpy.p0.p0.i64", *arguments, result=ir.VoidType())


def _size(shape: tuple[int, int, int]) -> int:
    return shape[0] * shape[1] * shape[2]


def _programs(batch: int, operations: int) -> int:
    """Returns the number of programs that keeps all cores busy without making programs too small."""
    return max(1, batch // max(1, round(PROGRAM_OPERATIONS / max(operations, 1))))


def _largest_divisor(number: int, at_most: int) -> int:
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)
