"""Slices columns out of rows where the rows are computed, because kernels cannot slice a row."""

from rollmill.fusion.ir import OPERATIONS, TYPED, Node, Region
from rollmill.fusion.lower.values import LoweringError


def slice_row(region: Region, row: Node, first: int, width: int) -> Node:
    """Returns `width` columns of a row, beginning at column `first`, as a row.

    A matrix product is sliced by using fewer columns of its matrix, and arithmetic by slicing its operands. Raises
    a `LoweringError` if the row is an input or the result of a loop.
    """
    cuts: dict[Node, Node] = {}
    pending = [row]
    while pending:  # iterative, and each node only once, because rows may have several readers
        node = pending[-1]
        before = [operand for operand in _parts(node) if operand not in cuts]
        if before and node not in cuts:
            pending.extend(before)
            continue
        pending.pop()
        if node not in cuts:
            cuts[node] = _cut(region, node, [cuts[part] for part in _parts(node)], first, width)
    return cuts[row]


def _parts(node: Node) -> tuple[Node, ...]:
    """Operands that have to be cut before a node can be."""
    return node.operands if node.width is not None and (node.op in OPERATIONS or node.op in TYPED) else ()


def _cut(region: Region, node: Node, parts: list[Node], first: int, width: int) -> Node:
    if node.width is None or (first == 0 and width == node.width):
        return node  # a scalar is equal in all columns
    if parts:
        return region.emit(node.op, *parts, dtype=node.dtype, width=width, attributes=node.attributes)
    match node.op:
        case "dot":
            slot, row, column, size, transposed = node.attributes
            # Fewer columns of the matrix, so the product itself becomes cheaper.
            attributes = (slot, row, column + first, size, transposed)
            return region.emit("dot", *node.operands, dtype=node.dtype, width=width, attributes=attributes)
        case "uniform":
            slot, place = node.attributes
            return region.uniform(slot, place + first, node.dtype, width)
        case "stack":
            own = node.operands[first : first + width]
            return region.emit("stack", *own, dtype=node.dtype, width=width)
        case "splat":
            return region.emit("splat", *node.operands, dtype=node.dtype, width=width)
    raise LoweringError(
        f"a slice takes {width} of the {node.width} columns of an input row, which is not supported. Pass the "
        "parts as separate arrays"
    )
