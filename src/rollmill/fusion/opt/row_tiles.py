"""Divides wide rows into tiles of a few columns, and their matrix products into products of tiles.

A kernel then holds only tiles of matrices at a time, and a layer of 256 or 512 units needs no more shared memory
than one of 64. Everything else about a program stays as it is, so any backend can compile the result.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from rollmill.fusion.ir import Node, Program
from rollmill.fusion.ir.operations import OPERATIONS, TYPED

Tiles = tuple[Node, ...]
"""A node, or the tiles of a wide row from left to right."""

TILE_REDUCTIONS = {"row_sum": "add", "row_max": "max", "row_min": "min"}
"""Reductions of rows, with the operations that combine the results of tiles."""


TILE = 64
"""Columns of a tile. A matrix of 64 x 64 takes 16 KB of shared memory."""


def largest_tiled_size(program: Program) -> int:
    """Returns the number of elements of the largest matrix in a program, or 0 if it cannot be read in tiles."""
    products = [node for node in program.nodes() if node.op == "dot"]
    sizes = [(node.operands[0].width or 1) * (node.width or 1) for node in products]
    return max(sizes, default=0) if divide_into_tiles(program, TILE) is not None else 0


class TiledProgram(NamedTuple):
    """A program whose rows have at most a given number of columns."""

    program: Program
    outputs: list[tuple[int, ...]]
    """Positions of the tiles of each output of the original program among the outputs."""


def divide_into_tiles(program: Program, width: int) -> TiledProgram | None:
    """Divides the rows of a program into tiles of at most `width` columns.

    Returns None if a wider row is an input or is used in a loop.
    """
    tiles = _Tiler(width)
    for node in program.nodes():
        if node.op in ("input", "loop") and any(map(tiles.is_wide, _rows_of(node))):
            return None
        tiles.add(node)
    outputs, places = [], []
    for node in program.outputs:
        own = tiles.of[node]
        places.append(tuple(range(len(outputs), len(outputs) + len(own))))
        outputs += own
    return TiledProgram(Program(program.inputs, tuple(outputs)), places)


def _rows_of(node: Node) -> Sequence[Node]:
    """Returns the nodes whose widths determine whether an input or a loop can remain unchanged."""
    if node.op == "input":
        return (node,)
    body, condition, _ = node.attributes[0]
    return [*node.operands, *body.nodes(), *(() if condition is None else condition.nodes())]


class _Tiler:
    """The tiles of the nodes so far. Equal tiles are one node."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._made: dict[tuple, Node] = {}
        self.of: dict[Node, Tiles] = {}

    def is_wide(self, node: Node) -> bool:
        """Returns whether a node is a row that has to be divided."""
        return node.width is not None and node.width > self._width

    def add(self, node: Node) -> None:
        """Adds a node, after its operands."""
        operands = [self.of[operand] for operand in node.operands]
        if self.is_wide(node):
            width = node.width or 0
            spans = [(first, min(self._width, width - first)) for first in range(0, width, self._width)]
            self.of[node] = tuple(self._tile(node, operands, *span) for span in spans)
        elif any(map(self.is_wide, node.operands)):
            self.of[node] = (self._reduce(node, operands[0]),)
        else:
            self.of[node] = (self._with(node, [own for (own,) in operands]),)

    def _tile(self, node: Node, operands: Sequence[Tiles], first: int, width: int) -> Node:
        """Returns the tile of a wide row that begins at a column."""
        match node.op:
            case "uniform":
                slot, place = node.attributes
                return self._make("uniform", [], (slot, place + first), node.dtype, width)
            case "splat":
                return self._make("splat", operands[0], (), node.dtype, width)
            case "stack":
                own = [part for (part,) in operands[first : first + width]]
                return self._make("stack", own, (), node.dtype, width)
            case "dot":
                return self._product(node, operands[0], first, width)
        assert node.op in OPERATIONS or node.op in TYPED, node
        own = [each[0] if len(each) == 1 else each[first // self._width] for each in operands]
        return self._make(node.op, own, node.attributes, node.dtype, width)

    def _product(self, node: Node, left: Tiles, first: int, width: int) -> Node:
        """Returns columns of a product, as the sum of products with the tiles of its row."""
        slot, row, column, size, transposed = node.attributes
        attributes = lambda n: (slot, row + n * self._width, column + first, size, transposed)
        products = [self._make("dot", [part], attributes(n), node.dtype, width) for n, part in enumerate(left)]
        return self._add("add", products, node.dtype, width)

    def _reduce(self, node: Node, row: Tiles) -> Node:
        """Returns a narrow node that reads a wide row."""
        if node.op == "dot":
            return self._product(node, row, 0, node.width or 0)
        if node.op == "column":
            tile, column = divmod(node.attributes[0], self._width)
            return self._make("column", [row[tile]], (column,), node.dtype, None)
        parts = [self._make(node.op, [part], (), node.dtype, None) for part in row]
        return self._add(TILE_REDUCTIONS[node.op], parts, node.dtype, None)

    def _add(self, op: str, parts: Sequence[Node], dtype: np.dtype, width: int | None) -> Node:
        return reduce(lambda one, other: self._make(op, [one, other], (), dtype, width), parts)

    def _with(self, node: Node, operands: Sequence[Node]) -> Node:
        """Returns a node with other operands, or the node itself if they are its own."""
        if tuple(operands) == node.operands:
            return node
        return self._make(node.op, operands, node.attributes, node.dtype, node.width)

    def _make(
        self, op: str, operands: Sequence[Node], attributes: tuple, dtype: np.dtype, width: int | None
    ) -> Node:
        key = (op, tuple(operands), attributes, dtype, width)
        if key not in self._made:
            self._made[key] = Node(op, tuple(operands), attributes, dtype, width)
        return self._made[key]
