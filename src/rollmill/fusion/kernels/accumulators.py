"""Accumulators of sums over samples: few tiles for tensor cores, kept while a kernel goes through its samples.

A result that is a product of two vectors of each sample is, summed, a product of two tall matrices. Vectors of
single numbers are skinny, and lie on the left of a tile beside others that are multiplied by the same row: the sum
of that row is its product with one. Shape letters: `N` samples, `I` and `O` rows and columns of a tile.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollmill.fusion.ir import Node
from rollmill.fusion.kernels.leaves import Leaf
from rollmill.fusion.kernels.sums import Sum
from rollmill.fusion.opt.skinny_matmul import MAX_SKINNY

Side = tuple[Node | None, ...]
"""One row; or numbers side by side, of which None stands for one."""


class TilePart(NamedTuple):
    """The part of a tile that belongs to one result."""

    offset: int
    """The place of the result's first number in the vector of all results."""
    first_row: int
    rows: int
    columns: int
    turned: bool = False
    """Whether it is the transposed result."""


class Tile(NamedTuple):
    """`[O, N] x [N, I]`: the sum over samples of the products of two sides, the right one by the left one.

    The skinny side is on the left: a tensor core's first operand has many rows.
    """

    left: Side
    right: Side
    parts: list[TilePart]


class Accumulators(NamedTuple):
    """All sums of a kernel."""

    tiles: list[Tile]
    numbers: list[tuple[int, Node]]
    """Offsets of single numbers."""
    size: int
    """Numbers of the vector of all results."""


def accumulators_of(sums: Sequence[Sum], outputs: Sequence[Node]) -> Accumulators:
    """The accumulators for the sums of a program's outputs."""
    offsets, size = [], 0
    for each in sums:
        # In the order of the results. Those that nothing computes take no place in the vector.
        offsets.append(size)
        size += each.size if each.is_computed else 0
    tiles, numbers = _Tiles(), []
    computed = [(offset, each) for offset, each in zip(offsets, sums, strict=True) if each.is_computed]
    for offset, each in computed:
        if each.right is not None:
            tiles.add_product(offset, _side(each.left, outputs), _side(each.right, outputs))
    for offset, each in computed:
        leaf, nodes = each.left, [outputs[place] for place in each.left.places]
        if each.right is None and leaf.width is None:
            numbers += [(offset + n, node) for n, node in enumerate(nodes)]
        elif each.right is None:
            for n, node in enumerate(nodes):
                # After all products: by then there may be a tile with this row on its right, which a one is added
                # to.
                tiles.add_row(offset + n * (leaf.width or 0), node)
    return Accumulators(tiles.tiles, numbers, size)


def is_row(side: Side) -> bool:
    """Whether a side is a row, and not numbers side by side."""
    return len(side) == 1 and side[0] is not None and side[0].width is not None


def width_of(side: Side) -> int:
    """Numbers of each sample."""
    node = side[0]
    return node.width if node is not None and node.width is not None else len(side)


def _side(leaf: Leaf, outputs: Sequence[Node]) -> Side:
    return tuple(outputs[place] for place in leaf.places)


class _Tiles:
    def __init__(self) -> None:
        self.tiles: list[Tile] = []

    def add_product(self, offset: int, left: Side, right: Side) -> None:
        """Adds the outer product of two sides; a skinny side shares a tile with others."""
        # Numbers go to the left, where they can share a tile with others; the result is then transposed when
        # stored.
        turned = is_row(left) and not is_row(right)
        if turned:
            left, right = right, left
        for n, tile in enumerate(self.tiles):
            # The same row on the right, such as the gradient of a layer for its weights and its bias: one product
            # does both.
            if tile.right == right and _fits(tile.left, left):
                part = TilePart(offset, len(tile.left), width_of(left), width_of(right), turned)
                self.tiles[n] = Tile((*tile.left, *left), right, [*tile.parts, part])
                return
        self.tiles.append(Tile(left, right, [TilePart(offset, 0, width_of(left), width_of(right), turned)]))

    def add_row(self, offset: int, row: Node) -> None:
        """Adds the sum of a row: its product with one."""
        self.add_product(offset, (None,), (row,))


def _fits(side: Side, more: Side) -> bool:
    """Whether numbers fit beside numbers."""
    return not is_row(side) and not is_row(more) and len(side) + len(more) <= MAX_SKINNY
