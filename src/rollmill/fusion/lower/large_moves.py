"""Rearranges large arrays: an element of the result is an element of the operand at another index."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.dynamic_index import select
from rollmill.fusion.lower.element_index import (
    ElementIndex,
    clamp_index,
    divide_index,
    is_at,
    node_of,
    plus,
    times,
)
from rollmill.fusion.lower.large_arrays import element_of, everywhere, lazy_array, logical_and
from rollmill.fusion.lower.values import LoweringError, Start, Value

Source = Callable[[Lowering, tuple[Start, ...], tuple[int, ...], Mapping[str, Any]], Sequence[Start]]
"""Function that converts an index of the result to an index of the operand: `(context, index, operand shape,
parameters) -> index`."""


def _of_broadcast(ctx: Lowering, at: tuple[Start, ...], shape: tuple[int, ...], params: Mapping[str, Any]):
    axes = zip(shape, params["broadcast_dimensions"], strict=True)
    return [0 if size == 1 else at[axis] for size, axis in axes]


def _of_slice(ctx: Lowering, at: tuple[Start, ...], shape: tuple[int, ...], params: Mapping[str, Any]):
    firsts, steps = params["start_indices"], params["strides"] or [1] * len(shape)
    parts = zip(at, firsts, steps, strict=True)
    return [plus(ctx, times(ctx, own, step), first) if first or step != 1 else own for own, first, step in parts]


def _of_transpose(ctx: Lowering, at: tuple[Start, ...], shape: tuple[int, ...], params: Mapping[str, Any]):
    order = list(params["permutation"])
    return [at[order.index(axis)] for axis in range(len(shape))]


def _of_reverse(ctx: Lowering, at: tuple[Start, ...], shape: tuple[int, ...], params: Mapping[str, Any]):
    mirrored = lambda own, size: plus(ctx, times(ctx, own, -1), size - 1)
    pairs = enumerate(zip(at, shape, strict=True))
    return [mirrored(own, size) if axis in params["dimensions"] else own for axis, (own, size) in pairs]


def _of_tile(ctx: Lowering, at: tuple[Start, ...], shape: tuple[int, ...], params: Mapping[str, Any]):
    return [divide_index(ctx, own, size)[1] for own, size in zip(at, shape, strict=True)]


SOURCES: dict[str, Source] = {
    "broadcast_in_dim": _of_broadcast,
    "slice": _of_slice,
    "transpose": _of_transpose,
    "rev": _of_reverse,
    "tile": _of_tile,
}
IN_ORDER = ("squeeze", "expand_dims")
"""Primitives that keep the elements in row-major order."""


def lower_move(
    ctx: Lowering, primitive: str, value: Value, shape: tuple[int, ...], params: Mapping[str, Any]
) -> Value:
    """Lowers a primitive that rearranges a large array. Elements of the result are computed only when they are
    read.
    """
    if primitive in IN_ORDER or (primitive == "reshape" and params["dimensions"] is None):
        return reshaped_elements(ctx, value, shape)
    if primitive not in SOURCES:
        raise LoweringError(f"this operation does not support arrays as large as {value.shape}")
    source = SOURCES[primitive]

    def element(at: Lowering, index: ElementIndex) -> Any:
        axes = source(at, index.axes(at), value.shape, params)
        return element_of(at, value, ElementIndex(value.shape, axes=axes))

    return lazy_array(ctx, shape, value.dtype, element, everywhere(ctx, value))


def reshaped_elements(ctx: Lowering, value: Value, shape: tuple[int, ...]) -> Value:
    """Reshapes a large array, whose elements are computed only when they are read."""
    element = lambda at, index: element_of(at, value, index.reshaped(at, value.shape))
    return lazy_array(ctx, shape, value.dtype, element, everywhere(ctx, value))


def leading_of(ctx: Lowering, value: Value, place: Start) -> Value:
    """Returns the part of an array at an index along its first axis. The index is in bounds."""
    within = lambda at, index: ElementIndex(value.shape, axes=[place, *index.axes(at)])
    return lazy_array(
        ctx, value.shape[1:], value.dtype, lambda at, index: element_of(at, value, within(at, index))
    )


def part_of(ctx: Lowering, value: Value, axis: int, first: int, shape: tuple[int, ...]) -> Value:
    """Returns a contiguous part of an array along one axis, beginning at index `first`."""

    def element(at: Lowering, index: ElementIndex) -> Any:
        axes = list(index.axes(at))
        axes[axis] = plus(at, axes[axis], first)
        return element_of(at, value, ElementIndex(value.shape, axes=axes))

    return lazy_array(ctx, shape, value.dtype, element)


def block_of_large(ctx: Lowering, value: Value, starts: Sequence[Start], sizes: Sequence[int]) -> Value:
    """Returns the block of an array with shape `sizes` and first index `starts`, which must be in bounds.

    The elements of a large block are computed only when they are read.
    """

    def element(at: Lowering, index: ElementIndex) -> Any:
        places = [plus(at, start, own) for start, own in zip(starts, index.axes(at), strict=True)]
        return element_of(at, value, ElementIndex(value.shape, axes=places))

    return lazy_array(ctx, sizes, value.dtype, element)


def beside(ctx: Lowering, values: Sequence[Value], axis: int, shape: tuple[int, ...]) -> Value:
    """Concatenates large arrays along an axis. Elements of the result are computed only when they are read."""
    firsts = np.cumsum([0, *(value.shape[axis] for value in values)]).tolist()

    def element(at: Lowering, index: ElementIndex) -> Any:
        axes = index.axes(at)

        def of(number: int) -> Any:
            own = clamp_index(at, plus(at, axes[axis], -firsts[number]), values[number].shape[axis])
            place = ElementIndex(values[number].shape, axes=[*axes[:axis], own, *axes[axis + 1 :]])
            return element_of(at, values[number], place)

        if isinstance(own := axes[axis], int):
            return of(int(np.searchsorted(firsts, own, side="right")) - 1)
        node = of(0)
        for number in range(1, len(values)):
            behind = at.apply("ge", own, node_of(at, firsts[number]))
            node = select(at, behind, of(number), node)
        return node

    return lazy_array(ctx, shape, values[0].dtype, element)


def with_padding(
    ctx: Lowering, value: Value, fill: Node, config: Sequence[tuple[int, int, int]], shape: tuple[int, ...]
) -> Value:
    """Pads an array with the value `fill` around its elements and between them."""

    def element(at: Lowering, index: ElementIndex) -> Any:
        places, checks = [], []
        for own, size, (low, _, between) in zip(index.axes(at), value.shape, config, strict=True):
            place = plus(at, own, -low)
            if between:
                place, rest = _spread(at, place, between + 1)
                checks.append(is_at(at, rest, 0))
            places.append(clamp_index(at, place, size))
            checks.append(is_at(at, places[-1], place))
        if any(check is False for check in checks):
            return fill
        node = element_of(at, value, ElementIndex(value.shape, axes=places))
        inside = reduce(lambda one, other: logical_and(at, one, other), checks, None)
        return node if inside is None else select(at, inside, node, fill)

    return lazy_array(ctx, shape, value.dtype, element)


def _spread(ctx: Lowering, place: Start, step: int) -> tuple[Start, Start]:
    """Returns the quotient and the remainder of a position, which may be negative."""
    if isinstance(place, int):
        return divmod(place, step)
    number = lambda n: ctx.constant(n, np.int32)
    whole, rest = ctx.apply("div", place, number(step)), ctx.apply("rem", place, number(step))
    # Division truncates towards zero, but a negative position that is not a multiple has a nonzero remainder and
    # is not read.
    return whole, rest
