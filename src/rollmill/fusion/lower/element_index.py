"""Indices of elements in large arrays, and arithmetic on them. An index is a known integer or a node."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.values import Start

INDEX = np.dtype(np.int32)


class ElementIndex:
    """Index of an element of an array, in row-major order or along each axis. Each form is computed on demand."""

    def __init__(
        self, shape: Sequence[int], *, flat: Start | None = None, axes: Sequence[Start] | None = None
    ) -> None:
        """Takes the index in row-major order, or the index along each axis."""
        self.shape = tuple(shape)
        self._flat, self._axes = flat, None if axes is None else tuple(axes)

    @property
    def key(self) -> Any:
        """Hashable key of the index. Indices with equal keys refer to the same element."""
        return self._flat if self._flat is not None else self._axes

    def flat(self, ctx: Lowering) -> Start:
        """Returns the element's index in row-major order, as an integer or a node."""
        if self._flat is None:
            total: Start = 0
            for size, place in zip(self.shape, self._axes or (), strict=True):
                total = plus(ctx, times(ctx, total, size), place)
            self._flat = total
        return self._flat

    def axes(self, ctx: Lowering) -> tuple[Start, ...]:
        """Returns the element's index along each axis, as integers or nodes."""
        if self._axes is None:
            rest, axes = self._flat if self._flat is not None else 0, []
            for size in self.shape[:0:-1]:
                whole, own = divide_index(ctx, rest, size)
                axes.append(own)
                rest = whole
            self._axes = tuple([*axes, rest][: len(self.shape)][::-1]) if self.shape else ()
        return self._axes

    def reshaped(self, ctx: Lowering, shape: Sequence[int]) -> "ElementIndex":
        """Returns the index of the same element after the array is reshaped."""
        return self if tuple(shape) == self.shape else ElementIndex(shape, flat=self.flat(ctx))


def times(ctx: Lowering, index: Start, factor: int) -> Start:
    """Multiplies an index, which is an integer or a node, by a constant factor."""
    if isinstance(index, int):
        return index * factor
    return ctx.apply("mul", index, ctx.constant(factor, INDEX))


def plus(ctx: Lowering, index: Start, other: Start) -> Start:
    """Adds two indices, each an integer or a node."""
    if isinstance(index, int) and isinstance(other, int):
        return index + other
    return ctx.apply("add", node_of(ctx, index), node_of(ctx, other))


def divide_index(ctx: Lowering, index: Start, size: int) -> tuple[Start, Start]:
    """Returns the quotient and remainder of a non-negative index divided by `size`."""
    if size == 1:
        return index, 0
    if isinstance(index, int):
        return divmod(index, size)
    number = lambda n: ctx.constant(n, INDEX)
    if size & (size - 1) == 0:
        whole = ctx.apply("shift_right_logical", index, number(size.bit_length() - 1))
        return whole, ctx.apply("and", index, number(size - 1))
    whole = ctx.apply("div", index, number(size))
    return whole, ctx.apply("sub", index, ctx.apply("mul", whole, number(size)))


def node_of(ctx: Lowering, index: Start) -> Node:
    """Converts an index, which is an integer or a node, to a node."""
    return ctx.constant(index, INDEX) if isinstance(index, int) else index


def is_at(ctx: Lowering, index: Start, other: Start) -> bool | Node:
    """Returns whether two indices are equal, as a bool if both are known and as a node otherwise."""
    if isinstance(index, int) and isinstance(other, int):
        return index == other
    return ctx.apply("eq", node_of(ctx, index), node_of(ctx, other))


def clamp_index(ctx: Lowering, index: Start, size: int) -> Start:
    """Clamps an index, which is an integer or a node, to the bounds of an axis."""
    if isinstance(index, int):
        return min(max(index, 0), size - 1)
    least = ctx.apply("max", index, ctx.constant(0, INDEX))
    return ctx.apply("min", least, ctx.constant(size - 1, INDEX))
