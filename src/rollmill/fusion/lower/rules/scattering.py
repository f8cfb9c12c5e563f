"""Writing blocks of arrays: updates that move, and scatters."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.dynamic_index import Start, check_selects, select, start_of
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.indexing import Cells, cells, is_clamped, window_start
from rollmill.fusion.lower.values import LoweringError, NodeArray, RowArray, Value

Combine = Callable[[Any, Any], Any]
"""`(what is there, what is written) -> what is there then`; nodes, or keys."""

COMBINATIONS = {"add": "add", "sub": "sub", "mul": "mul", "min": "min", "max": "max"}
"""Ending of a scatter's name to the operation that combines old and new."""


def _dynamic_update_slice(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    value, block, *indices = values
    return [with_block(ctx, value, block, [ctx.scalar(index) for index in indices])]


def with_block(ctx: Lowering, value: Value, block: Value, indices: Sequence[Node]) -> Value:
    """Returns a value with a block written at these indices, or as near to them as it fits."""
    most = [size - own for size, own in zip(value.shape, block.shape, strict=True)]
    starts = [start_of(ctx, index, m, clamp=True)[0] for index, m in zip(indices, most, strict=True)]
    before, after = _alike(ctx, value, block, whole_rows=most[-1:] == [0])
    nodes = before.nodes.copy()
    write(ctx, nodes, after.nodes, starts[: nodes.ndim], None, _replaced)
    return before.again(nodes)


def with_element(ctx: Lowering, value: Value, element: Value, index: Node) -> Value:
    """Returns a value with an element along the first axis written at an index, which is in bounds."""
    before, after = _alike(ctx, value, element, whole_rows=len(element.shape) > 0)
    nodes = before.nodes.copy()
    start = start_of(ctx, index, len(nodes) - 1, clamp=True)[0]
    write(ctx, nodes, after.nodes[None], [start] + [0] * (nodes.ndim - 1), None, _replaced)
    return before.again(nodes)


def _alike(ctx: Lowering, value: Value, block: Value, *, whole_rows: bool) -> tuple[Cells, Cells]:
    """Returns an array and its updates, both as rows or both as scalars."""
    if whole_rows and (isinstance(value, RowArray) or isinstance(block, RowArray)):
        value, block = ctx.rows(value), ctx.rows(block)
    return cells(ctx, value, whole_rows=whole_rows), cells(ctx, block, whole_rows=whole_rows)


def _replaced(before: Any, written: Any) -> Any:
    return written


def write(
    ctx: Lowering,
    nodes: NodeArray,
    block: NodeArray,
    starts: Sequence[Start],
    inside: Node | None,
    combine: Combine,
) -> None:
    """Writes a block into an array of nodes with as many axes, in place, at starts in bounds.

    `combine` returns an element's new value. If there is a node `inside`, it decides whether the block is written
    at all.
    """
    # A start that is known is one candidate; for another, every position is one at which the block fits.
    places = [range(size - own + 1) for size, own in zip(nodes.shape, block.shape, strict=True)]
    choices = [[start] if isinstance(start, int) else own for start, own in zip(starts, places, strict=True)]
    check_selects(int(np.prod([len(own) for own in choices])) * block.size)
    # At most one candidate is the start, so each combines with the array as it was before.
    before = nodes.copy()
    for first in itertools.product(*choices):
        here = _is_here(ctx, starts, first, inside)
        for at in np.ndindex(*block.shape):
            place = tuple(a + b for a, b in zip(first, at, strict=True))
            written = combine(before[place], block[at])
            nodes[place] = written if here is None else select(ctx, here, written, nodes[place])


def _is_here(ctx: Lowering, starts: Sequence[Start], first: Sequence[int], inside: Node | None) -> Node | None:
    """Returns whether a block begins at these places, or None if it surely does."""
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
    """Returns a scatter's dimension numbers under the names of a gather."""

    start_index_map: tuple[int, ...]
    operand_batching_dims: tuple[int, ...]
    start_indices_batching_dims: tuple[int, ...]


def _scatter(kind: str) -> Rule:
    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        if not kind and equation.params.get("update_jaxpr") is not None:
            raise LoweringError("a scatter that applies a function of the caller's; use jnp.where")
        return [_scattered(ctx, equation, values, kind)]

    return rule


def _scattered(ctx: Lowering, equation: Equation, values: Sequence[Value], kind: str) -> Value:
    numbers = equation.params["dimension_numbers"]
    value, indices, updates = values[0], ctx.scalars(values[1]).nodes, values[2]
    clamp = _is_moved_inside(equation.params["mode"])
    before, after = _alike(ctx, value, updates, whole_rows=_keeps_rows(value, updates, numbers))
    nodes = before.nodes.copy()
    # Axes of the window go last: an index of the scatter then takes a whole block.
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
    # In the order of the indices: of equal ones, a later write combines with an earlier one's result.
    for at in np.ndindex(*indices.shape[:-1]):
        starts, inside = window_start(ctx, value.shape, whole, reading, at, indices[at], clamp=clamp)
        # A constant means that the block is known to lie out of bounds, where nothing is written.
        if inside is None or inside.op != "constant":
            write(ctx, nodes, moved[(*at, ...)].reshape(sizes), starts[: nodes.ndim], inside, combine)
    return before.again(nodes)


def _combination(ctx: Lowering, kind: str) -> Combine:
    if not kind:
        return _replaced
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
