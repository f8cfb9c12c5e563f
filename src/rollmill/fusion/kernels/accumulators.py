"""Plans the accumulators of a gradient kernel: a few matrix tiles that tensor cores update sample by sample.

An outer product per sample, summed over samples, is one product of two tall matrices. Results with few rows share
a tile if they are multiplied by the same row. A plain sum of rows is a product with ones. Shape letters: `N`
samples, `O` rows and `I` columns of a tile.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rollmill.fusion.ir import Node
from rollmill.fusion.kernels.leaves import Leaf
from rollmill.fusion.kernels.sums import Sum
from rollmill.fusion.opt.skinny_matmul import MAX_SKINNY

Side = tuple[Node | None, ...]
"""One side of an outer product: a single row, or scalars side by side. None stands for the constant one."""


class TilePart(NamedTuple):
    """The part of an accumulator tile that holds one result, such as the gradient of one weight matrix."""

    offset: int
    """Index of the result's first element in the vector of all results."""
    first_row: int
    rows: int
    columns: int
    stride: int
    """Number of elements between consecutive rows of the result."""
    turned: bool = False
    """Whether the tile holds the transposed result."""

    @property
    def strides(self) -> tuple[int, int]:
        """Strides of this part in the result, between consecutive rows and between consecutive columns, in
        elements.
        """
        return (1, self.stride) if self.turned else (self.stride, 1)


class TileTerm(NamedTuple):
    """The two sides of a matrix product `[O, N] x [N, I]`, summed over samples.

    The side with fewer elements is on the left.
    """

    left: Side
    right: Side

    @property
    def nodes(self) -> list[Node]:
        """The program nodes on both sides of the product."""
        return [node for node in (*self.left, *self.right) if node is not None]


class Tile(NamedTuple):
    """A matrix `[O, I]` that adds up outer products over samples and, within each sample, over positions."""

    terms: list[TileTerm]
    """One product for each position within a sample. All have the same widths."""
    parts: list[TilePart]

    @property
    def rows(self) -> int:
        """Number of rows of the matrix, the width of the products' left sides."""
        return width_of(self.terms[0].left)

    @property
    def columns(self) -> int:
        """Number of columns of the matrix, the width of the products' right sides."""
        return width_of(self.terms[0].right)


class Accumulators(NamedTuple):
    """All sums that a gradient kernel accumulates."""

    tiles: list[Tile]
    numbers: list[tuple[int, Node]]
    """Scalar sums: the index in the vector of all results, and the node that is summed."""
    size: int
    """Number of elements in the vector of all results."""


def accumulators_of(sums: Sequence[Sum], outputs: Sequence[Node]) -> Accumulators:
    """Returns the accumulators for sums over samples of a program's outputs."""
    offsets, size = [], 0
    for each in sums:
        # In the order of the results. Results that no program computes take no space in the vector.
        offsets.append(size)
        size += each.size if each.is_computed else 0
    tiles, numbers = _Tiles(), []
    computed = [(offset, each) for offset, each in zip(offsets, sums, strict=True) if each.is_computed]
    for offset, each in computed:
        if each.pairs:
            _add_blocks(tiles, offset, each, outputs)
    for offset, each in computed:
        for leaf in each.leaves:
            nodes = [outputs[place] for place in leaf.places]
            if leaf.width is None:
                numbers += [(offset + n, node) for n, node in enumerate(nodes)]
            for n, node in enumerate(nodes if leaf.width is not None else ()):
                # After all products, because a tile may then already have this row on its right, to which a one
                # can be added.
                tiles.add_row(offset + n * (leaf.width or 0), node)
            offset += math.prod(leaf.shape)
    return Accumulators(tiles.tiles, numbers, size)


def _add_blocks(tiles: "_Tiles", offset: int, each: Sum, outputs: Sequence[Node]) -> None:
    """Adds a sum of products block by block: vectors of several leaves have a block for each pair of leaves."""
    stride, (left, right) = each.shape[1], each.pairs[0]
    row = 0
    for i, above in enumerate(left):
        column = 0
        for j, beside in enumerate(right):
            terms = [TileTerm(_side(pair.left[i], outputs), _side(pair.right[j], outputs)) for pair in each.pairs]
            tiles.add_products(offset + row * stride + column, terms, stride)
            column += beside.shape[0]
        row += above.shape[0]


def is_row(side: Side) -> bool:
    """Returns whether one side of an outer product is a row rather than scalars."""
    return len(side) == 1 and side[0] is not None and side[0].width is not None


def width_of(side: Side) -> int:
    """Returns the number of elements on one side of an outer product."""
    node = side[0]
    return node.width if node is not None and node.width is not None else len(side)


def _side(leaf: Leaf, outputs: Sequence[Node]) -> Side:
    return tuple(outputs[place] for place in leaf.places)


class _Tiles:
    def __init__(self) -> None:
        self.tiles: list[Tile] = []

    def add_products(self, offset: int, terms: Sequence[TileTerm], stride: int) -> None:
        """Adds a sum of outer products of two sides. Skinny sides share tiles.

        `stride` is the distance between two rows of the result.
        """
        # Scalars go to the left to share a tile. The result is then transposed when it is stored.
        turned = any(is_row(left) for left, _ in terms) and not any(is_row(right) for _, right in terms)
        if turned:
            terms = [TileTerm(right, left) for left, right in terms]
        rows, columns = width_of(terms[0].left), width_of(terms[0].right)
        for n, tile in enumerate(self.tiles):
            # If the rows on the right are equal, as for the gradients of a layer's weights and bias, one product
            # computes both.
            alike = [own.right for own in tile.terms] == [term.right for term in terms]
            if alike and all(_fits(own.left, term.left) for own, term in zip(tile.terms, terms, strict=True)):
                part = TilePart(offset, tile.rows, rows, columns, stride, turned)
                beside = [
                    TileTerm((*own.left, *term.left), own.right)
                    for own, term in zip(tile.terms, terms, strict=True)
                ]
                self.tiles[n] = Tile(beside, [*tile.parts, part])
                return
        self.tiles.append(Tile(list(terms), [TilePart(offset, 0, rows, columns, stride, turned)]))

    def add_row(self, offset: int, row: Node) -> None:
        """Accumulates the sum of a row, as its product with one."""
        self.add_products(offset, [TileTerm((None,), (row,))], row.width or 1)


def _fits(side: Side, more: Side) -> bool:
    """Returns whether scalars of two sides can share a tile."""
    return not is_row(side) and not is_row(more) and len(side) + len(more) <= MAX_SKINNY
