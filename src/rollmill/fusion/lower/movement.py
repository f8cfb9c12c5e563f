"""Lowers operations that rearrange elements, such as slicing and transposing."""

from typing import NamedTuple

import numpy as np

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.columns import slice_row
from rollmill.fusion.lower.context import Lowering, check_columns
from rollmill.fusion.lower.element_index import ElementIndex
from rollmill.fusion.lower.large_arrays import element_of
from rollmill.fusion.lower.large_moves import leading_of, reshaped_elements
from rollmill.fusion.lower.values import (
    MAX_COLUMNS,
    NARROW,
    Concat,
    Const,
    LoweringError,
    RowArray,
    ScalarArray,
    Uniform,
    Value,
    fill_nodes,
    is_large,
    no_nodes,
    positions,
)

MAX_PIECES = 8
"""Maximum number of contiguous pieces of rows. With more, rows are split into scalars."""


def gather_static(ctx: Lowering, value: Value, places: np.ndarray, fill: Node | None = None) -> Value:
    """Returns the elements of a value at known row-major indices `places`, in the shape of `places`.

    An index of -1 stands for `fill`. Raises a `LoweringError` if rows that are too wide would have to be split.
    """
    if is_large(value):
        return _of_large(ctx, value, places, fill)
    pick = lambda array: array.reshape(-1)[places.reshape(-1)].reshape(places.shape)
    filling = bool(np.any(places < 0))
    if isinstance(value, RowArray | Concat):
        return _of_rows(ctx, value, places, fill)
    if filling:
        # The fill value is appended, so that index -1 selects it.
        numbers = ctx.scalars(value).nodes.reshape(-1)
        nodes = no_nodes(numbers.size + 1)
        nodes[:-1], nodes[-1] = numbers, fill
        return ScalarArray(nodes[places.reshape(-1)].reshape(places.shape), value.dtype)
    match value:
        case Const(array):
            return Const(pick(array))
        case Uniform(array, before):
            return Uniform(array, pick(positions(value.shape) if before is None else before))
        case ScalarArray(nodes, dtype):
            return ScalarArray(pick(nodes), dtype)
    raise TypeError(f"expected a value that was expanded before, got {type(value).__name__}")


def _of_large(ctx: Lowering, value: Value, places: np.ndarray, fill: Node | None) -> ScalarArray:
    """Returns a few elements of a large array."""
    read = lambda place: fill if place < 0 else element_of(ctx, value, ElementIndex(value.shape, flat=int(place)))
    return fill_nodes(places.shape, value.dtype, lambda at: read(places[at]))


def index_columns(ctx: Lowering, value: Value, first: int, width: int) -> Value:
    """Returns `width` columns of a value along its last axis, beginning at column `first`."""
    return gather_static(ctx, value, positions(value.shape)[..., first : first + width])


def index_leading(ctx: Lowering, value: Value, at: int) -> Value:
    """Returns the part of a value at a known index along its first axis."""
    if is_large(value):
        return leading_of(ctx, value, at)
    return gather_static(ctx, value, positions(value.shape)[at, ...])


def reshape_value(ctx: Lowering, value: Value, shape: tuple[int, ...]) -> Value:
    """Reshapes a value during lowering, without any operation in the kernel."""
    if is_large(value):
        return reshaped_elements(ctx, value, shape)
    return gather_static(ctx, value, positions(value.shape).reshape(shape))


def permute_axes(ctx: Lowering, value: Value, axes: tuple[int, ...]) -> Value:
    """Permutes the axes of a value during lowering, without any operation in the kernel."""
    return gather_static(ctx, value, positions(value.shape).transpose(axes))


def concatenate_last_axis(ctx: Lowering, values: list[Value]) -> Value:
    """Concatenates values along their last axis during lowering."""
    parts = [part for value in values for part in (value.parts if isinstance(value, Concat) else (value,))]
    # Empty parts are left out, unless all are empty, because a shape is needed.
    parts = [part for part in parts if part.shape[-1]] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, RowArray) for part in parts):
        return Concat(tuple(parts))
    return ScalarArray(np.concatenate([ctx.scalars(part).nodes for part in parts], axis=-1), parts[0].dtype)


# --- rows -----------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Source of a range of adjacent columns."""

    part: int
    """Index of the part among the concatenated parts, or -1 for the fill value."""
    row: int
    first: int


def _of_rows(ctx: Lowering, value: RowArray | Concat, places: np.ndarray, fill: Node | None) -> Value:
    # A zero-dimensional or empty result is not a row.
    if places.ndim == 0 or places.shape[-1] == 0:
        return _as_scalars(ctx, value, places, fill)
    lead, table = places.shape[:-1], places.reshape(-1, places.shape[-1])
    # All rows of the result are cut at the same columns, so that each piece consists of rows or of scalars.
    cuts = _cuts(value, table)
    # If there are many short runs, as after a transposition along columns, splitting rows is cheaper than many
    # pieces.
    if len(cuts) - 1 > max(MAX_PIECES, places.shape[-1] // NARROW):
        check_columns(value)
        return _as_scalars(ctx, value, places, fill)
    pieces = [_piece(ctx, value, table[:, a], b - a, lead, fill) for a, b in zip(cuts, cuts[1:], strict=False)]
    return concatenate_last_axis(ctx, pieces)


def _cuts(value: RowArray | Concat, table: np.ndarray) -> list[int]:
    """Returns the columns of a table at which consecutive indices begin in some row, and the end."""
    width = value.shape[-1]
    # A run continues if the next index is the next column of the same part and row, or another fill. An index is
    # `row * width + column`.
    ends = np.cumsum([part.shape[-1] for part in _parts(value)])
    part = np.where(table < 0, -1, np.searchsorted(ends, table % width, side="right"))
    row = np.where(table < 0, -1, table // width)
    step = np.where(table[:, 1:] < 0, 0, 1)
    breaks = (np.diff(table) != step) | (np.diff(part) != 0) | (np.diff(row) != 0)
    return [0, *(np.flatnonzero(breaks.any(axis=0)) + 1).tolist(), table.shape[1]]


def _parts(value: RowArray | Concat) -> tuple[Value, ...]:
    return value.parts if isinstance(value, Concat) else (value,)


def _piece(
    ctx: Lowering,
    value: RowArray | Concat,
    begins: np.ndarray,
    width: int,
    lead: tuple[int, ...],
    fill: Node | None,
) -> Value:
    """Returns the range of columns that begins at the given position of each row."""
    sources = [_source(value, int(place)) for place in begins]
    # A tile for fewer columns would be mostly padding, and adjacent scalars remain scalars.
    if width <= NARROW or all(_is_scalars(value, source) for source in sources):
        nodes = no_nodes((len(begins), width))
        for n, place in enumerate(begins):
            nodes[n] = [_number(ctx, value, int(place) + k if place >= 0 else -1, fill) for k in range(width)]
        return ScalarArray(nodes.reshape(*lead, width), value.dtype)
    rows = no_nodes(len(begins))
    for n, source in enumerate(sources):
        rows[n] = _run(ctx, value, source, width, fill)
    return RowArray(rows.reshape(lead), width, value.dtype)


def _source(value: RowArray | Concat, place: int) -> _Piece:
    if place < 0:
        return _Piece(-1, -1, -1)
    row, column = divmod(place, value.shape[-1])
    # All parts have the same rows, and follow each other along the columns.
    for number, part in enumerate(_parts(value)):
        if column < part.shape[-1]:
            return _Piece(number, row, column)
        column -= part.shape[-1]
    raise IndexError(place)


def _is_scalars(value: RowArray | Concat, source: _Piece) -> bool:
    return source.part >= 0 and not isinstance(_parts(value)[source.part], RowArray)


def _number(ctx: Lowering, value: RowArray | Concat, place: int, fill: Node | None) -> Node:
    source = _source(value, place)
    if source.part < 0:
        assert fill is not None
        return fill
    part = _parts(value)[source.part]
    if isinstance(part, RowArray):
        return ctx.column(part.nodes.reshape(-1)[source.row], source.first)
    return ctx.scalars(part).nodes.reshape(-1, part.shape[-1])[source.row, source.first]


def _run(ctx: Lowering, value: RowArray | Concat, source: _Piece, width: int, fill: Node | None) -> Node:
    """Returns a run of columns as a row."""
    if source.part < 0:
        assert fill is not None
        return ctx.region.emit("splat", fill, dtype=value.dtype, width=width)
    part = _parts(value)[source.part]
    if not isinstance(part, RowArray):
        nodes = ctx.scalars(part).nodes.reshape(-1, part.shape[-1])[source.row]
        own = ScalarArray(nodes[source.first : source.first + width], value.dtype)
        return ctx.rows(own).nodes[()]
    row = part.nodes.reshape(-1)[source.row]
    # Slicing a row at its computation costs less than splitting and assembling it.
    try:
        return slice_row(ctx.region, row, source.first, width)
    except LoweringError:
        if width > MAX_COLUMNS:
            raise
        columns = [ctx.column(row, source.first + k) for k in range(width)]
        return ctx.region.emit("stack", *columns, dtype=value.dtype, width=width)


def _as_scalars(ctx: Lowering, value: RowArray | Concat, places: np.ndarray, fill: Node | None) -> Value:
    numbers = no_nodes(places.size)
    for n, place in enumerate(places.reshape(-1)):
        numbers[n] = _number(ctx, value, int(place), fill)
    return ScalarArray(numbers.reshape(places.shape), value.dtype)
