"""Loops over the elements of large arrays: reductions, argmax and argmin."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.element_index import ElementIndex
from rollmill.fusion.lower.large_arrays import element_of, lazy_array
from rollmill.fusion.lower.loops import emit_loop
from rollmill.fusion.lower.values import Const, ScalarArray, Start, Value, alone

Better = Callable[[Lowering, Node, Node], Node]
"""Function that returns whether a later element is better than the best so far, `(context, element, best) ->
Node`."""


def reduced_elements(ctx: Lowering, op: str, value: Value, axes: Sequence[int], neutral: Any) -> Value:
    """Reduces a large array along some axes with the operation `op`, element by element."""
    kept = [axis for axis in range(len(value.shape)) if axis not in axes]
    start = Const(np.asarray(neutral).astype(value.dtype))

    def element(at: Lowering, index: ElementIndex) -> Node:
        read = _along(value, axes, dict(zip(kept, index.axes(at), strict=True)))

        def turn(inside: Lowering, place: Node, now: list[Value]) -> list[Value]:
            total = inside.apply(op, inside.scalar(now[0]), read(inside, place))
            return [ScalarArray(alone(total), value.dtype)]

        (total,) = emit_counted_loop(at, int(np.prod([value.shape[axis] for axis in axes])), [start], turn)
        return at.scalar(total)

    return lazy_array(ctx, [value.shape[axis] for axis in kept], value.dtype, element, by_loops=True)


def first_best_element(ctx: Lowering, is_better: Better, value: Value, axis: int, dtype: Any) -> Value:
    """Returns the indices of the first maximum or minimum along an axis of a large array."""
    kept = [own for own in range(len(value.shape)) if own != axis]

    def element(at: Lowering, index: ElementIndex) -> Node:
        read = _along(value, [axis], dict(zip(kept, index.axes(at), strict=True)))

        def turn(inside: Lowering, place: Node, now: list[Value]) -> list[Value]:
            best, node = inside.scalar(now[0]), read(inside, place)
            better = is_better(inside, node, best)
            best = inside.apply("select", better, node, best)
            found = inside.apply("select", better, place, inside.scalar(now[1]))
            return [ScalarArray(alone(best), value.dtype), ScalarArray(alone(found), np.dtype(np.int32))]

        first = ScalarArray(alone(read(at, at.constant(0, np.int32))), value.dtype)
        _, found = emit_counted_loop(at, value.shape[axis], [first, Const(np.zeros((), np.int32))], turn)
        return at.region.emit("convert", at.scalar(found), dtype=dtype)

    return lazy_array(ctx, [value.shape[own] for own in kept], dtype, element, by_loops=True)


def emit_counted_loop(
    ctx: Lowering, turns: int, start: list[Value], turn: Callable[[Lowering, Node, list[Value]], list[Value]]
) -> list[Value]:
    """Emits a loop of `turns` iterations, and returns the last carried values. `turn` gets the index of the
    iteration.
    """

    def body(at: Lowering, now: list[Value]) -> list[Value]:
        place = at.scalar(now[0])
        following = at.apply("add", place, at.constant(1, np.int32))
        return [ScalarArray(alone(following), np.dtype(np.int32)), *turn(at, place, list(now[1:]))]

    _, *after = emit_loop(ctx, body, None, [Const(np.zeros((), np.int32)), *start], turns)
    return after


def _along(value: Value, axes: Sequence[int], kept: dict[int, Start]) -> Callable[[Lowering, Node], Node]:
    """Returns the function that reads the n-th element along some axes."""
    ordered = sorted(axes)

    def read(at: Lowering, place: Node) -> Node:
        if not kept:
            return element_of(at, value, ElementIndex(value.shape, flat=place))
        own = ElementIndex([value.shape[axis] for axis in ordered], flat=place).axes(at)
        places = kept | dict(zip(ordered, own, strict=True))
        return element_of(at, value, ElementIndex(value.shape, axes=[places[n] for n in range(len(value.shape))]))

    return read
