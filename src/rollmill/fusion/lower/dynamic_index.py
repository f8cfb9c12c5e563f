"""Reads blocks of arrays whose position differs between environments, through chains of selects or loads from
memory.

Letters: `d` an axis of the array.
"""

from collections.abc import Sequence

import numpy as np

from rollmill.core.types import is_key
from rollmill.fusion.ir import Node, is_float
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.values import (
    Const,
    KeyPair,
    LoweringError,
    NodeArray,
    Start,
    Uniform,
    Value,
    is_shared,
    no_nodes,
    positions,
)

FEW_PLACES = 8
"""Maximum number of possible positions of a block that is selected from an array shared by all environments. With
more, the block is loaded from memory."""

MAX_SELECTS = 16384
"""Maximum number of selects for one access."""


def start_of(ctx: Lowering, index: Node, most: int, *, clamp: bool) -> tuple[Start, Node | None]:
    """Returns a start index that is in bounds, and a node for whether the given index was in bounds.

    `most` is the largest start of a block along the axis. With `clamp`, indices out of bounds are clamped, and the
    second result is None. It is also None if the index is known to be in bounds.
    """
    if index.op == "constant":
        inside = min(max(int(index.value), 0), most)
        return inside, None if clamp or inside == index.value else ctx.constant(False, bool)
    wide = np.dtype(np.uint32 if index.dtype.kind == "u" else np.int32)
    number = index if index.dtype == wide else ctx.apply("convert", index, dtype=wide)
    limits = ctx.constant(0, wide), ctx.constant(most, wide)
    # Always clamped, because an access out of bounds must not read other memory, even if its result is dropped.
    held = ctx.apply("min", number, limits[1])
    if wide.kind == "i":
        held = ctx.apply("max", held, limits[0])
    inside = None if clamp else ctx.apply("eq", held, number)
    start = held if wide.kind == "i" else ctx.apply("convert", held, dtype=np.int32)
    return (0 if most == 0 else start), inside


def dynamic_slice_by_select(
    ctx: Lowering, nodes: NodeArray, starts: Sequence[Start], sizes: Sequence[int]
) -> NodeArray:
    """Returns the block of an array that begins at `starts`, selecting among all possible blocks."""
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        moved = np.moveaxis(nodes, axis, 0)
        if isinstance(start, int):
            block = moved[start : start + size]
        else:
            # Checked before the selects are created, because a large array would give millions of nodes.
            check_selects((len(moved) - size) * size * int(np.prod(moved.shape[1:])))
            windows = [moved[first : first + size] for first in range(len(moved) - size + 1)]
            block = _one_of(ctx, windows, start)
        nodes = np.moveaxis(block, 0, axis)
    return nodes


def _one_of(ctx: Lowering, windows: list[NodeArray], start: Node) -> NodeArray:
    """Halves the choices with each bit of the start, with the selects of a chain but fewer comparisons."""
    # After `bit` halvings, `windows[i]` is the selection for `start >> bit == i`. A window without a partner
    # stays, because its partner would begin out of bounds.
    bit = 0
    while len(windows) > 1:
        mask = ctx.constant(1 << bit, np.int32)
        odd = ctx.apply("ne", ctx.apply("and", start, mask), ctx.constant(0, np.int32))
        pairs = zip(windows[::2], windows[1::2], strict=False)
        halved = [_select(ctx, odd, second, first) for first, second in pairs]
        windows = halved + ([windows[-1]] if len(windows) % 2 else [])
        bit += 1
    return windows[0]


def _select(ctx: Lowering, condition: Node, one: NodeArray, other: NodeArray) -> NodeArray:
    chosen = no_nodes(one.shape)
    for at in np.ndindex(*one.shape):
        chosen[at] = select(ctx, condition, one[at], other[at])
    return chosen


def select(ctx: Lowering, condition: Node, one: Node | KeyPair, other: Node | KeyPair) -> Node | KeyPair:
    """Returns the node that selects one of two scalars, rows or keys."""
    if isinstance(one, KeyPair):
        assert isinstance(other, KeyPair)
        first = ctx.apply("select", condition, one.first, other.first)
        return KeyPair(first, ctx.apply("select", condition, one.second, other.second))
    assert isinstance(other, Node)
    return ctx.apply("select", condition, one, other)


def check_selects(count: int) -> None:
    """Raises a `LoweringError` if an access needs too many selects."""
    if count > MAX_SELECTS:
        raise LoweringError(
            f"an index that differs between environments would take {count} selects, more than the limit of "
            f"{MAX_SELECTS}. Index smaller arrays, or arrays that all environments share"
        )


# --- arrays in memory -------------------------------------------------------------------------------------


def is_in_memory(value: Value, starts: Sequence[Start], sizes: Sequence[int]) -> bool:
    """Returns whether to load a block from memory: the array is shared, and the block has many positions."""
    if not is_shared(value) or is_key(value.dtype):
        return False
    starts_of_axes = [
        size - block + 1 for size, block, start in zip(value.shape, sizes, starts, strict=True) if _moves(start)
    ]
    return int(np.prod(starts_of_axes, initial=1)) > FEW_PLACES


def _moves(start: Start) -> bool:
    return not isinstance(start, int)


def load_slice(ctx: Lowering, value: Const | Uniform, starts: Sequence[Start], sizes: Sequence[int]) -> NodeArray:
    """Loads the block of a shared array that begins at `starts`, element by element."""
    slot = ctx.prologue.slot(ctx.array(value))
    strides = [int(np.prod(value.shape[axis + 1 :])) for axis in range(len(value.shape))]
    begin = ctx.constant(0, np.int32)
    for start, stride in zip(starts, strides, strict=True):
        number = ctx.constant(start, np.int32) if isinstance(start, int) else start
        step = ctx.apply("mul", number, ctx.constant(stride, np.int32))
        begin = ctx.apply("add", begin, step)
    offsets = positions(value.shape)[tuple(slice(0, size) for size in sizes)]
    block = no_nodes(offsets.shape)
    for at in np.ndindex(*offsets.shape):
        place = ctx.apply("add", begin, ctx.constant(int(offsets[at]), np.int32))
        block[at] = ctx.region.emit("table", place, dtype=value.dtype, attributes=(slot,))
    return block


def default_fill(dtype: np.dtype) -> float | int | bool:
    """Returns the value that JAX uses for elements out of bounds if no fill value is given."""
    if dtype == np.bool_:
        return True
    if is_float(dtype):
        return float("nan")
    limits = np.iinfo(dtype)
    return int(limits.min if dtype.kind == "i" else limits.max)
