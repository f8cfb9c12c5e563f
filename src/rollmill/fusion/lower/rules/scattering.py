"""Lowers dynamic updates and scatters, which write blocks of arrays."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.dynamic_index import check_selects, select, start_of
from rollmill.fusion.lower.element_index import ElementIndex, clamp_index, is_at, plus, times
from rollmill.fusion.lower.large_arrays import (
    MAX_WRITES,
    element_of,
    is_too_large,
    lazy_array,
    logical_and,
    with_cell,
)
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.indexing import Cells, cells, is_clamped, window_start
from rollmill.fusion.lower.values import LoweringError, NodeArray, RowArray, Start, Value, is_large

Combine = Callable[[Any, Any], Any]
"""Function that returns the new value of an element, given its old value and the value to write. Both are nodes or
random keys."""

MAX_CELLS = 16
"""Maximum number of elements of a block that are written one by one into a large array."""

COMBINATIONS = {"add": "add", "sub": "sub", "mul": "mul", "min": "min", "max": "max"}
"""Operations that combine old and new values, by the suffix of the scatter primitive's name."""


def _dynamic_update_slice(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    value, block, *indices = values
    return [with_block(ctx, value, block, [ctx.scalar(index) for index in indices])]


def with_block(ctx: Lowering, value: Value, block: Value, indices: Sequence[Node]) -> Value:
    """Returns a value with a block written at these indices, clamped so that the block fits."""
    most = [size - own for size, own in zip(value.shape, block.shape, strict=True)]
    starts = [start_of(ctx, index, m, clamp=True)[0] for index, m in zip(indices, most, strict=True)]
    if is_large(value) or is_too_large(value.shape):
        return _with_block_in_large(ctx, value, block, starts, None, _replace)
    before, after = _alike(ctx, value, block, whole_rows=most[-1:] == [0])
    nodes = before.nodes.copy()
    write(ctx, nodes, after.nodes, starts[: nodes.ndim], None, _replace)
    return before.again(nodes)


def with_element(ctx: Lowering, value: Value, element: Value, index: Node) -> Value:
    """Returns a value with a part written at an index along its first axis. The index is in bounds."""
    before, after = _alike(ctx, value, element, whole_rows=len(element.shape) > 0)
    nodes = before.nodes.copy()
    start = start_of(ctx, index, len(nodes) - 1, clamp=True)[0]
    write(ctx, nodes, after.nodes[None], [start] + [0] * (nodes.ndim - 1), None, _replace)
    return before.again(nodes)


def _with_block_in_large(
    ctx: Lowering, value: Value, block: Value, starts: Sequence[Start], inside: Node | None, combine: Combine
) -> Value:
    """Returns a large array with a block written at starts in bounds, where `inside` holds."""
    if int(np.prod(block.shape)) > MAX_CELLS:
        return _with_large_block(ctx, value, block, starts, inside, combine)
    for at in np.ndindex(*block.shape):
        written = element_of(ctx, block, ElementIndex(block.shape, axes=at))
        place = ElementIndex(value.shape, axes=[plus(ctx, a, b) for a, b in zip(starts, at, strict=True)])
        if combine is not _replace:
            written = combine(element_of(ctx, value, place), written)
        value = with_cell(ctx, value, place, written, inside)
    return value


def _with_large_block(
    ctx: Lowering, value: Value, block: Value, starts: Sequence[Start], inside: Node | None, combine: Combine
) -> Value:
    """Returns a large array with the elements of a block written at a position."""

    def element(at: Lowering, index: ElementIndex) -> Any:
        places, here = [], inside
        for own, start, size in zip(index.axes(at), starts, block.shape, strict=True):
            place = plus(at, own, times(at, start, -1))
            places.append(clamp_index(at, place, size))
            check = is_at(at, places[-1], place)
            if check is False:
                return element_of(at, value, index)
            here = logical_and(at, check, here)
        before = element_of(at, value, index)
        written = combine(before, element_of(at, block, ElementIndex(block.shape, axes=places)))
        return written if here is None else select(at, here, written, before)

    return lazy_array(ctx, value.shape, value.dtype, element)


def _alike(ctx: Lowering, value: Value, block: Value, *, whole_rows: bool) -> tuple[Cells, Cells]:
    """Returns an array and its updates, both as rows or both as scalars."""
    if whole_rows and (isinstance(value, RowArray) or isinstance(block, RowArray)):
        value, block = ctx.rows(value), ctx.rows(block)
    return cells(ctx, value, whole_rows=whole_rows), cells(ctx, block, whole_rows=whole_rows)


def _replace(before: Any, written: Any) -> Any:
    return written


def write(
    ctx: Lowering,
    nodes: NodeArray,
    block: NodeArray,
    starts: Sequence[Start],
    inside: Node | None,
    combine: Combine,
) -> None:
    """Writes a block into an array of nodes of the same rank, in place. The starts are in bounds.

    `combine(old, new)` returns the new value of an element. If the node `inside` is given, the block is written
    only if it is true.
    """
    # A constant start is the only candidate. For other starts, each position at which the block fits is a
    # candidate.
    places = [range(size - own + 1) for size, own in zip(nodes.shape, block.shape, strict=True)]
    choices = [[start] if isinstance(start, int) else own for start, own in zip(starts, places, strict=True)]
    check_selects(int(np.prod([len(own) for own in choices])) * block.size)
    # At most one candidate is the start, so each combines with the original array.
    before = nodes.copy()
    for first in itertools.product(*choices):
        here = _is_here(ctx, starts, first, inside)
        for at in np.ndindex(*block.shape):
            place = tuple(a + b for a, b in zip(first, at, strict=True))
            written = combine(before[place], block[at])
            nodes[place] = written if here is None else select(ctx, here, written, nodes[place])


def _is_here(ctx: Lowering, starts: Sequence[Start], first: Sequence[int], inside: Node | None) -> Node | None:
    """Returns whether a block begins at these positions, or None if this is certain."""
    checks = [] if inside is None else [inside]
    for start, place in zip(starts, first, strict=True):
        if not isinstance(start, int):
            checks.append(ctx.apply("eq", start, ctx.constant(place, np.int32)))
    if not checks:
        return None
    whole = checks[0]
    for check in checks[1:]:
        whole = ctx.apply("and", whole, check)
    return whole


# --- scatter --------------------------------------------------------------------------------------------


class _Reading(NamedTuple):
    """The dimension numbers of a scatter, under the names that a gather uses."""

    start_index_map: tuple[int, ...]
    operand_batching_dims: tuple[int, ...]
    start_indices_batching_dims: tuple[int, ...]


def _scatter(kind: str) -> Rule:
    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        if not kind and equation.params.get("update_jaxpr") is not None:
            raise LoweringError("a scatter with a user-defined function is not supported. Use jnp.where")
        return [_scatter_small(ctx, equation, values, kind)]

    return rule


def _scatter_small(ctx: Lowering, equation: Equation, values: Sequence[Value], kind: str) -> Value:
    numbers = equation.params["dimension_numbers"]
    if is_large(values[0]) or is_too_large(values[0].shape):
        return _scatter_in_large(ctx, equation, values, kind)
    value, indices, updates = values[0], ctx.scalars(values[1]).nodes, values[2]
    clamp = _is_moved_inside(equation.params["mode"])
    before, after = _alike(ctx, value, updates, whole_rows=_keeps_rows(value, updates, numbers))
    nodes = before.nodes.copy()
    # Axes of the window come last, so that an index of the scatter selects a whole block.
    windows = [axis for axis in numbers.update_window_dims if axis < after.nodes.ndim]
    moved = np.moveaxis(after.nodes, windows, range(after.nodes.ndim - len(windows), after.nodes.ndim))
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = iter(moved.shape[moved.ndim - len(windows) :])
    sizes = [1 if d in dropped else next(kept) for d in range(nodes.ndim)]
    reading = _Reading(
        numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    )
    combine = _combination(ctx, kind)
    whole = [*sizes, *value.shape[nodes.ndim :]]
    # In the order of the indices: if indices are equal, a later write combines with the result of an earlier
    # write.
    for at in np.ndindex(*indices.shape[:-1]):
        starts, inside = window_start(ctx, value.shape, whole, reading, at, indices[at], clamp=clamp)
        # A constant means that the block is certainly out of bounds, so nothing is written.
        if inside is None or inside.op != "constant":
            write(ctx, nodes, moved[(*at, ...)].reshape(sizes), starts[: nodes.ndim], inside, combine)
    return before.again(nodes)


def _scatter_in_large(ctx: Lowering, equation: Equation, values: Sequence[Value], kind: str) -> Value:
    """Returns a large array with blocks written one after the other."""
    numbers = equation.params["dimension_numbers"]
    value, indices, updates = values[0], ctx.scalars(values[1]).nodes, values[2]
    clamp = _is_moved_inside(equation.params["mode"])
    windows = list(numbers.update_window_dims)
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = iter(updates.shape[axis] for axis in windows)
    sizes = [1 if d in dropped else next(kept) for d in range(len(value.shape))]
    count = int(np.prod(indices.shape[:-1]))
    if count > MAX_WRITES:
        raise LoweringError(
            f"a scatter writes {count} blocks of a large array of shape {value.shape}, more than the limit of "
            f"{MAX_WRITES}"
        )
    reading = _Reading(
        numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    )
    for at in np.ndindex(*indices.shape[:-1]):
        starts, inside = window_start(ctx, value.shape, sizes, reading, at, indices[at], clamp=clamp)
        if inside is None or inside.op != "constant":
            block = _block_of(ctx, updates, at, windows, tuple(sizes), dropped)
            value = _with_block_in_large(ctx, value, block, starts, inside, _combination(ctx, kind))
    return value


def _block_of(
    ctx: Lowering,
    updates: Value,
    batch: tuple[int, ...],
    windows: Sequence[int],
    sizes: tuple[int, ...],
    dropped: Any,
) -> Value:
    """Returns the block of a scatter's updates that one index vector writes, with all axes of the array."""

    def element(at: Lowering, index: ElementIndex) -> Any:
        inside = iter([own for d, own in enumerate(index.axes(at)) if d not in dropped])
        places, rest = [], iter(batch)
        for axis in range(len(updates.shape)):
            places.append(next(inside) if axis in windows else next(rest))
        return element_of(at, updates, ElementIndex(updates.shape, axes=places))

    return lazy_array(ctx, sizes, updates.dtype, element)


def _combination(ctx: Lowering, kind: str) -> Combine:
    if not kind:
        return _replace
    return lambda before, written: ctx.apply(COMBINATIONS[kind], before, written)


def _is_moved_inside(mode: Any) -> bool:
    """Returns whether writes out of bounds are clamped rather than dropped."""
    return is_clamped(mode) and getattr(mode, "name", "") == "CLIP"


def _keeps_rows(value: Value, updates: Value, numbers: Any) -> bool:
    """Returns whether whole rows are written."""
    last = len(value.shape) - 1
    touched = {
        *numbers.scatter_dims_to_operand_dims,
        *numbers.inserted_window_dims,
        *numbers.operand_batching_dims,
    }
    is_last = numbers.update_window_dims[-1:] == (len(updates.shape) - 1,)
    return last not in touched and is_last and updates.shape[-1] == value.shape[-1]


RULES: dict[str, Rule] = {
    "dynamic_update_slice": _dynamic_update_slice,
    "scatter": _scatter(""),
    **{f"scatter{dash}{kind}": _scatter(kind) for kind in COMBINATIONS for dash in "-_"},
}
