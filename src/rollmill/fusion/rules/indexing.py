"""Reading blocks of arrays: slices that move, and gathers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollmill.fusion.blocks import Start, block_of, default_fill, is_in_memory, loaded, select, start_of
from rollmill.fusion.equation import Equation, Rule
from rollmill.fusion.ir import Node
from rollmill.fusion.making import Making
from rollmill.fusion.refusals import NotLowered
from rollmill.fusion.values import Known, NodeArray, Rows, Scalars, Uniform, Value, no_nodes


class Cells(NamedTuple):
    """An array as one node for each number, or for each row where rows stay whole."""

    nodes: NodeArray
    width: int | None
    dtype: Any

    def again(self, nodes: NodeArray) -> Value:
        """Such nodes as a value."""
        return Scalars(nodes, self.dtype) if self.width is None else Rows(nodes, self.width, self.dtype)


def cells(making: Making, value: Value, *, whole_rows: bool) -> Cells:
    """The nodes of an array.

    Args:
        making: where nodes are made.
        value: the array.
        whole_rows: whether rows may stay as they are, because nothing happens along the last axis.
    """
    if whole_rows and isinstance(value, Rows):
        return Cells(value.nodes, value.width, value.dtype)
    return Cells(making.scalars(value).nodes, None, value.dtype)


def is_clamped(mode: Any) -> bool:
    """Whether an index out of bounds means the nearest inside."""
    name = getattr(mode, "name", str(mode))
    if name not in ("CLIP", "PROMISE_IN_BOUNDS", "FILL_OR_DROP"):
        raise NotLowered(f"indexing in the mode {name}")
    return name != "FILL_OR_DROP"


def _dynamic_slice(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    value, *indices = values
    sizes = equation.params["slice_sizes"]
    if len(indices) != len(sizes):
        raise NotLowered("a shape is not known while tracing")
    return [block_at(making, value, [making.scalar(index) for index in indices], sizes)]


def block_at(making: Making, value: Value, indices: Sequence[Node], sizes: Sequence[int]) -> Value:
    """The block of a value that begins at these indices, or as near to them as it fits."""
    most = [size - block for size, block in zip(value.shape, sizes, strict=True)]
    starts = [start_of(making, index, m, clamp=True)[0] for index, m in zip(indices, most, strict=True)]
    if isinstance(value, Known | Uniform) and is_in_memory(value, starts, sizes):
        return Scalars(loaded(making, value, starts, sizes), value.dtype)
    own = cells(making, value, whole_rows=most[-1:] == [0])
    rank = own.nodes.ndim
    return own.again(block_of(making, own.nodes, starts[:rank], sizes[:rank]))


def element_at(making: Making, value: Value, index: Node) -> Value:
    """The element along the first axis at an index, which is in bounds."""
    first = [index] + [making.constant(0, np.int32)] * (len(value.shape) - 1)
    block = block_at(making, value, first, (1, *value.shape[1:]))
    if isinstance(block, Rows):
        return Rows(block.nodes[0, ...], block.width, block.dtype)
    return Scalars(making.scalars(block).nodes[0, ...], block.dtype)


# --- gather ---------------------------------------------------------------------------------------------


def _gather(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    value, indices = values[0], making.scalars(values[1]).nodes
    numbers, sizes = equation.params["dimension_numbers"], tuple(equation.params["slice_sizes"])
    clamp = is_clamped(equation.params["mode"])
    fill = equation.params.get("fill_value")
    fill = default_fill(value.dtype) if fill is None and not clamp else fill
    whole = _keeps_rows(value, equation, numbers, sizes)
    own = None if isinstance(value, Known | Uniform) else cells(making, value, whole_rows=whole)
    rank = len(value.shape) if own is None else own.nodes.ndim
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    batch, window = indices.shape[:-1], [sizes[d] for d in range(rank) if d not in dropped]
    found = no_nodes((*batch, *window))
    for at in np.ndindex(*batch):
        starts, inside = window_start(making, value.shape, sizes, numbers, at, indices[at], clamp=clamp)
        block = _read(making, value, own, starts[:rank], sizes[:rank])
        if inside is not None:
            block = _filled(making, block, inside, making.constant(fill, value.dtype))
        found[(*at, ...)] = block.reshape(window)
    axes = numbers.offset_dims[: len(window)]
    found = np.moveaxis(found, range(len(batch), found.ndim), axes)
    return [Scalars(found, value.dtype) if own is None else own.again(found)]


def _keeps_rows(value: Value, equation: Equation, numbers: Any, sizes: Sequence[int]) -> bool:
    """Whether a gather takes rows as wholes, and gives them as such."""
    last = len(value.shape) - 1
    touched = {*numbers.start_index_map, *numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    stays_last = numbers.offset_dims[-1:] == (len(equation.shape) - 1,)
    return isinstance(value, Rows) and last not in touched and sizes[last] == value.shape[last] and stays_last


def window_start(
    making: Making,
    shape: Sequence[int],
    sizes: Sequence[int],
    numbers: Any,
    at: tuple[int, ...],
    index: NodeArray,
    *,
    clamp: bool,
) -> tuple[list[Start], Node | None]:
    """Where a gather's window begins in the array, and whether all of it is inside; None where that is sure.

    Args:
        making: where nodes are made.
        shape: of the array.
        sizes: of the window, along all axes of the array.
        numbers: a `jax.lax.GatherDimensionNumbers`.
        at: which of the windows.
        index: its index vector.
        clamp: whether windows are moved inside.
    """
    starts: list[Start] = [0] * len(shape)
    for d, batch in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        starts[d] = at[batch]
    checks = []
    for d, node in zip(numbers.start_index_map, index, strict=True):
        starts[d], inside = start_of(making, node, shape[d] - sizes[d], clamp=clamp)
        checks += [] if inside is None else [inside]
    if not checks:
        return starts, None
    whole = checks[0]
    for check in checks[1:]:
        whole = making.apply("and", whole, check)
    return starts, whole


def _read(
    making: Making, value: Value, own: Cells | None, starts: Sequence[Start], sizes: Sequence[int]
) -> NodeArray:
    if own is not None:
        return block_of(making, own.nodes, starts, sizes)
    assert isinstance(value, Known | Uniform)
    if is_in_memory(value, starts, sizes):
        return loaded(making, value, starts, sizes)
    return block_of(making, making.scalars(value).nodes, starts, sizes)


def _filled(making: Making, block: NodeArray, inside: Node, fill: Node) -> NodeArray:
    found = no_nodes(block.shape)
    for at in np.ndindex(*block.shape):
        found[at] = select(making, inside, block[at], fill)
    return found


RULES: dict[str, Rule] = {"dynamic_slice": _dynamic_slice, "gather": _gather}
