"""Columns cut out of rows: the cut is made where a row comes from, for a row in a kernel cannot be cut."""

from rollmill.fusion.ir import Node, Region
from rollmill.fusion.operations import OPERATIONS, TYPED
from rollmill.fusion.refusals import NotLowered


def cut_row(region: Region, node: Node, first: int, width: int) -> Node:
    """Some columns of a row, as a row.

    A product is cut by taking fewer columns of the matrix; arithmetic is cut by cutting its operands.

    Raises:
        NotLowered: the row was handed in, or comes out of a loop.
    """
    if node.width is None or (first == 0 and width == node.width):
        return node  # a scalar is the same in all columns
    if node.op in OPERATIONS or node.op in TYPED:
        parts = [cut_row(region, operand, first, width) for operand in node.operands]
        return region.emit(node.op, *parts, dtype=node.dtype, width=width, attributes=node.attributes)
    match node.op:
        case "dot":
            slot, rows, columns, start, transposed = node.attributes
            attributes = (slot, rows, columns, start + first, transposed)
            return region.emit("dot", *node.operands, dtype=node.dtype, width=width, attributes=attributes)
        case "uniform":
            slot, place = node.attributes
            return region.uniform(slot, place + first, node.dtype, width)
        case "stack":
            own = node.operands[first : first + width]
            return region.emit("stack", *own, dtype=node.dtype, width=width)
        case "splat":
            return region.emit("splat", *node.operands, dtype=node.dtype, width=width)
    raise NotLowered(
        f"{width} of {node.width} columns are cut out of a row that is handed in as a whole; keep the parts as "
        "arrays of their own"
    )
