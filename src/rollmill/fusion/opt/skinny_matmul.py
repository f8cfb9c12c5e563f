"""Finds matrix products with few rows or few columns, so that they can be padded for tensor cores.

In a policy's first layer the rows are the observation's elements, and in its last layer the columns are the
actions. Computed as sums of rows, these products would take more registers than everything else together, because
every thread would hold its part of each row of the matrix.
"""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from rollmill.fusion.ir import Node

MAX_SKINNY = 16
"""Maximum number of rows or columns of a skinny product: the rows of a tensor core's smallest operand."""

FEWEST = 8
"""Number of columns of a tensor core's smallest operand."""


class ColumnDots(NamedTuple):
    """Dot products of one row with several uniform rows, combined into a product with few columns."""

    row: Node
    weights: tuple[Node, ...]
    """The uniform rows, in the order of the columns."""

    @property
    def columns(self) -> int:
        """Number of columns of the product. Padding columns are zero."""
        return FEWEST if len(self.weights) <= FEWEST else MAX_SKINNY


class Bias(NamedTuple):
    """A value added to a product: a uniform row, optionally times a scalar."""

    scalar: Node | None
    row: Node


class SkinnyMatmuls(NamedTuple):
    """The skinny products of a program, and the nodes that become part of them."""

    first: dict[Node, Bias | None]
    """Products of scalars with a matrix, each with its bias, or None. A bias becomes one more row of the
    matrix."""
    added: dict[Node, Node]
    """Maps the addition of a bias to the product that it belongs to."""
    heads: dict[Node, tuple[ColumnDots, int]]
    """Maps a dot product to the combined product, and to its column there."""
    absorbed: dict[Node, Node]
    """Maps multiplications that become part of a product to the operand that replaces them: the row of a dot
    product, or the scalar of a bias."""

    def joined(self, other: "SkinnyMatmuls") -> "SkinnyMatmuls":
        """Returns the union of two sets of skinny products."""
        return SkinnyMatmuls(
            self.first | other.first,
            self.added | other.added,
            self.heads | other.heads,
            self.absorbed | other.absorbed,
        )


def scattered_stacks(nodes: Sequence[Node], outputs: Sequence[Node], most: int) -> set[Node]:
    """Returns the rows built from scalars that only skinny products use, so that they can remain scalars.

    If anything else uses a row, it is built, and its products are ordinary products.
    """
    read = {operand for node in nodes if not is_stacked_product(node, most) for operand in node.operands}
    return {node for node in nodes if node.op == "stack"} - read - set(outputs)


def find_skinny_matmuls(
    nodes: Sequence[Node], outputs: Sequence[Node], scattered: Container[Node]
) -> SkinnyMatmuls:
    """Finds the matrix products of a program that have few rows or few columns.

    `nodes` lists operands before their users. Rows in `scattered` remain scalars (see `scattered_stacks`).
    """
    only_user = _only_users(nodes, outputs)
    heads, absorbed = _heads(nodes, only_user)
    products = SkinnyMatmuls({}, {}, heads, absorbed)
    for node in nodes:
        if is_stacked_product(node, MAX_SKINNY) and node.operands[0] in scattered:
            _find_first(node, only_user, products)
    return products


def _find_first(product: Node, only_user: Mapping[Node, Node], products: SkinnyMatmuls) -> None:
    """Records a product of stacked scalars, with its addend."""
    # A bias becomes an additional row, which must fit into the tile next to the others.
    user, has_room = only_user.get(product), len(product.operands[0].operands) < MAX_SKINNY
    addend = _addend(user, product, only_user) if user is not None and has_room else None
    products.first[product] = addend
    if user is not None and addend is not None:
        products.added[user] = product
        if addend.scalar is not None:
            products.absorbed[_other(user, product)] = addend.scalar


def _only_users(nodes: Sequence[Node], outputs: Sequence[Node]) -> dict[Node, Node]:
    """Returns the only node that reads each node which no other reads."""
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        for operand in node.operands:
            users.setdefault(operand, []).append(node)
    # The kernel reads outputs as well, so they cannot be absorbed.
    return {node: readers[0] for node, readers in users.items() if len(readers) == 1 and node not in outputs}


def _heads(
    nodes: Sequence[Node], only_user: Mapping[Node, Node]
) -> tuple[dict[Node, tuple[ColumnDots, int]], dict[Node, Node]]:
    sums: dict[Node, list[tuple[Node, Node]]] = {}
    absorbed: dict[Node, Node] = {}
    for node in nodes:
        # If another node reads the product of row and weights, it must be computed anyway.
        if node.op != "row_sum" or node.operands[0] not in only_user:
            continue
        if weighted_row := _find_weights(node.operands[0]):
            row, weight = weighted_row
            absorbed[node.operands[0]] = row
            sums.setdefault(row, []).append((node, weight))
    heads = {}
    for row, weighted in sums.items():
        # All sums over one row share a product, up to the number of columns of a tile.
        for n in range(0, len(weighted), MAX_SKINNY):
            head = ColumnDots(row, tuple(weight for _, weight in weighted[n : n + MAX_SKINNY]))
            heads |= {node: (head, column) for column, (node, _) in enumerate(weighted[n : n + MAX_SKINNY])}
    return heads, absorbed


def is_stacked_product(node: Node, most: int) -> bool:
    """Returns whether a node is the product of at most `most` scalars with rows of a matrix."""
    return node.op == "dot" and node.operands[0].op == "stack" and len(node.operands[0].operands) <= most


def _addend(user: Node, product: Node, only_user: Mapping[Node, Node]) -> Bias | None:
    """Returns the addend of a product if it can be a further row of the matrix, else None."""
    if user.op != "add":
        return None
    other = _other(user, product)
    # a scalar in all columns is not a row of a matrix
    if other.width != product.width:
        return None
    if other.op == "uniform":
        return Bias(None, other)
    if other.op == "mul" and only_user.get(other) is user:
        for scalar, row in (other.operands, other.operands[::-1]):
            if scalar.width is None and row.op == "uniform":
                return Bias(scalar, row)
    return None


def _other(user: Node, operand: Node) -> Node:
    """Returns the other of two operands."""
    return user.operands[0] if user.operands[1] is operand else user.operands[1]


def _find_weights(product: Node) -> tuple[Node, Node] | None:
    """Returns the row and the uniform row of their product."""
    if product.op != "mul" or product.width is None:
        return None
    for row, weight in (product.operands, product.operands[::-1]):
        if weight.op == "uniform" and row.op != "uniform" and row.width == weight.width == product.width:
            return row, weight
    return None
