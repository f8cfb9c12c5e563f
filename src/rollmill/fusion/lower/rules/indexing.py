"""Lowers dynamic slices and gathers, which read blocks of arrays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.dynamic_index import (
    default_fill,
    dynamic_slice_by_select,
    is_in_memory,
    load_slice,
    select,
    start_of,
)
from rollmill.fusion.lower.element_index import ElementIndex, plus
from rollmill.fusion.lower.large_arrays import element_of, is_too_large, lazy_array
from rollmill.fusion.lower.large_moves import block_of_large, leading_of
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.values import (
    Const,
    LoweringError,
    NodeArray,
    RowArray,
    ScalarArray,
    Start,
    Uniform,
    Value,
    is_large,
    is_shared,
    no_nodes,
)


class Cells(NamedTuple):
    """The nodes of an array: one per element, or one per row if rows are not split."""

    nodes: NodeArray
    width: int | None
    dtype: Any

    def again(self, nodes: NodeArray) -> Value:
        """Returns a value of the same kind, made of the given nodes."""
        return ScalarArray(nodes, self.dtype) if self.width is None else RowArray(nodes, self.width, self.dtype)


def cells(ctx: Lowering, value: Value, *, whole_rows: bool) -> Cells:
    """Returns the nodes of an array. `whole_rows` keeps rows whole, for operations that do not affect the last
    axis.
    """
    if whole_rows and isinstance(value, RowArray):
        return Cells(value.nodes, value.width, value.dtype)
    return Cells(ctx.scalars(value).nodes, None, value.dtype)


def is_clamped(mode: Any) -> bool:
    """Returns whether a JAX indexing mode clamps indices that are out of bounds."""
    name = getattr(mode, "name", str(mode))
    if name not in ("CLIP", "PROMISE_IN_BOUNDS", "FILL_OR_DROP"):
        raise LoweringError(f"the indexing mode {name} is not supported")
    return name != "FILL_OR_DROP"


def _dynamic_slice(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    value, *indices = values
    sizes = equation.params["slice_sizes"]
    if len(indices) != len(sizes):
        raise LoweringError("kernels do not support shapes that are unknown during tracing")
    return [block_at(ctx, value, [ctx.scalar(index) for index in indices], sizes)]


def block_at(ctx: Lowering, value: Value, indices: Sequence[Node], sizes: Sequence[int]) -> Value:
    """Returns the block of a value that begins at these indices, clamped so that the block fits."""
    most = [size - block for size, block in zip(value.shape, sizes, strict=True)]
    starts = [start_of(ctx, index, m, clamp=True)[0] for index, m in zip(indices, most, strict=True)]
    if is_large(value) or (isinstance(value, Const | Uniform) and is_too_large(sizes)):
        return block_of_large(ctx, value, starts, sizes)
    if isinstance(value, Const | Uniform) and is_in_memory(value, starts, sizes):
        return ScalarArray(load_slice(ctx, value, starts, sizes), value.dtype)
    own = cells(ctx, value, whole_rows=most[-1:] == [0])
    rank = own.nodes.ndim
    return own.again(dynamic_slice_by_select(ctx, own.nodes, starts[:rank], sizes[:rank]))


def element_at(ctx: Lowering, value: Value, index: Node) -> Value:
    """Returns the part of a value at an index along its first axis. The index is in bounds."""
    if is_large(value) or (is_shared(value) and is_too_large(value.shape[1:])):
        return leading_of(ctx, value, index)
    first = [index] + [ctx.constant(0, np.int32)] * (len(value.shape) - 1)
    block = block_at(ctx, value, first, (1, *value.shape[1:]))
    if isinstance(block, RowArray):
        return RowArray(block.nodes[0, ...], block.width, block.dtype)
    return ScalarArray(ctx.scalars(block).nodes[0, ...], block.dtype)


# --- gather ---------------------------------------------------------------------------------------------


def _gather(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    if any(map(is_large, values)) or (is_too_large(equation.shape) and is_shared(values[0])):
        return [_gather_large(ctx, equation, values)]
    value, indices = values[0], ctx.scalars(values[1]).nodes
    numbers, sizes = equation.params["dimension_numbers"], tuple(equation.params["slice_sizes"])
    clamp = is_clamped(equation.params["mode"])
    fill = equation.params.get("fill_value")
    fill = default_fill(value.dtype) if fill is None and not clamp else fill
    whole = _keeps_rows(value, equation, numbers, sizes)
    own = None if isinstance(value, Const | Uniform) else cells(ctx, value, whole_rows=whole)
    rank = len(value.shape) if own is None else own.nodes.ndim
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    batch, window = indices.shape[:-1], [sizes[d] for d in range(rank) if d not in dropped]
    found = no_nodes((*batch, *window))
    for at in np.ndindex(*batch):
        starts, inside = window_start(ctx, value.shape, sizes, numbers, at, indices[at], clamp=clamp)
        block = _read(ctx, value, own, starts[:rank], sizes[:rank])
        if inside is not None:
            block = _fill(ctx, block, inside, ctx.constant(fill, value.dtype))
        found[(*at, ...)] = block.reshape(window)
    axes = numbers.offset_dims[: len(window)]
    found = np.moveaxis(found, range(len(batch), found.ndim), axes)
    return [ScalarArray(found, value.dtype) if own is None else own.again(found)]


def _gather_large(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> Value:
    """Returns a gather from, or by, large arrays. Its elements are computed by their readers."""
    value, indices = values[0], values[1]
    numbers, sizes = equation.params["dimension_numbers"], tuple(equation.params["slice_sizes"])
    clamp = is_clamped(equation.params["mode"])
    fill = equation.params.get("fill_value")
    fill = default_fill(value.dtype) if fill is None and not clamp else fill
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(value.shape)) if d not in dropped]

    def element(at: Lowering, index: ElementIndex) -> Any:
        axes = index.axes(at)
        batch = [own for axis, own in enumerate(axes) if axis not in numbers.offset_dims]
        offsets = dict(zip(window, (axes[axis] for axis in numbers.offset_dims), strict=True))
        vector = no_nodes(indices.shape[-1])
        for place in range(len(vector)):
            vector[place] = element_of(at, indices, ElementIndex(indices.shape, axes=[*batch, place]))
        starts, inside = window_start(at, value.shape, sizes, numbers, tuple(batch), vector, clamp=clamp)
        places = [plus(at, start, offsets.get(d, 0)) for d, start in enumerate(starts)]
        node = element_of(at, value, ElementIndex(value.shape, axes=places))
        return node if inside is None else select(at, inside, node, at.constant(fill, value.dtype))

    return lazy_array(ctx, equation.shape, value.dtype, element)


def _keeps_rows(value: Value, equation: Equation, numbers: Any, sizes: Sequence[int]) -> bool:
    """Returns whether a gather takes rows as wholes, and gives them as such."""
    last = len(value.shape) - 1
    touched = {*numbers.start_index_map, *numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    stays_last = numbers.offset_dims[-1:] == (len(equation.shape) - 1,)
    return isinstance(value, RowArray) and last not in touched and sizes[last] == value.shape[last] and stays_last


def window_start(
    ctx: Lowering,
    shape: Sequence[int],
    sizes: Sequence[int],
    numbers: Any,
    at: tuple[Start, ...],
    index: NodeArray,
    *,
    clamp: bool,
) -> tuple[list[Start], Node | None]:
    """Returns where a gather's window begins in the array, and a node for whether all of it is in bounds.

    The second result is None if the window is known to be in bounds. `sizes` are the sizes of the window along all
    axes, `at` is the number of the window, and `index` its index vector. `clamp` moves windows inside the array.
    """
    starts: list[Start] = [0] * len(shape)
    for d, batch in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        starts[d] = at[batch]
    checks = []
    for d, node in zip(numbers.start_index_map, index, strict=True):
        starts[d], inside = start_of(ctx, node, shape[d] - sizes[d], clamp=clamp)
        checks += [] if inside is None else [inside]
    if not checks:
        return starts, None
    whole = checks[0]
    for check in checks[1:]:
        whole = ctx.apply("and", whole, check)
    return starts, whole


def _read(
    ctx: Lowering, value: Value, own: Cells | None, starts: Sequence[Start], sizes: Sequence[int]
) -> NodeArray:
    if own is not None:
        return dynamic_slice_by_select(ctx, own.nodes, starts, sizes)
    assert isinstance(value, Const | Uniform)
    if is_in_memory(value, starts, sizes):
        return load_slice(ctx, value, starts, sizes)
    return dynamic_slice_by_select(ctx, ctx.scalars(value).nodes, starts, sizes)


def _fill(ctx: Lowering, block: NodeArray, inside: Node, fill: Node) -> NodeArray:
    found = no_nodes(block.shape)
    for at in np.ndindex(*block.shape):
        found[at] = select(ctx, inside, block[at], fill)
    return found


RULES: dict[str, Rule] = {"dynamic_slice": _dynamic_slice, "gather": _gather}
