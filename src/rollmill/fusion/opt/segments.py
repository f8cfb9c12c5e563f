"""Orders long programs by putting rows together and scalars together.

For every matrix product, Triton searches through everything that depends on it, and everything that those
operations depend on. In a program of 30,000 nodes this takes hours. The search stays within the branch that
contains the product, so scalars computed between two layers of products get a branch of their own.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from rollmill.fusion.ir import ANYWHERE, Node, count_nodes

MAX_NODES = 5_000
"""Maximum number of nodes of a program, including its loops, for which the order does not matter."""


class ProgramSegment(NamedTuple):
    """A part of a long program that computes either rows or scalars, or the whole of a short program."""

    of_rows: bool
    """Whether the nodes are rows, or computed directly from a row."""
    nodes: Sequence[Node]


def needs_segments(num_nodes: int) -> bool:
    """Returns whether the dependence analysis of Triton would take hours for a program with `num_nodes` nodes."""
    return num_nodes > MAX_NODES


def segments_of(nodes: Sequence[Node]) -> list[ProgramSegment]:
    """Divides the nodes of a program into segments, operands first.

    Long programs get as few segments as possible, beginning with rows. A short program is one segment.
    """
    if not needs_segments(count_nodes(nodes)):
        return [ProgramSegment(True, nodes)]
    # Sorting is stable, and an operand's level is never above its user's level, so operands still come first.
    level = _levels(nodes).__getitem__
    return [ProgramSegment(n % 2 == 0, tuple(own)) for n, own in groupby(sorted(nodes, key=level), key=level)]


def _levels(nodes: Sequence[Node]) -> dict[Node, int]:
    """Returns the number of changes between rows and scalars before each node. Rows have even levels."""
    levels: dict[Node, int] = {}
    for node in nodes:
        # As early as the operands allow, so that the first levels contain most nodes.
        before = max((levels[operand] for operand in node.operands), default=0)
        # Inputs, constants and uniform values cost nothing and are available from the start, so they end no
        # segment.
        stays = node.op in ANYWHERE or _is_of_rows(node) == (before % 2 == 0)
        levels[node] = before if stays else before + 1
    return levels


def _is_of_rows(node: Node) -> bool:
    """Returns whether a node is a row, or made of one."""
    if node.op == "loop":
        body, condition, _ = node.attributes[0]
        inside = [*body.nodes(), *([] if condition is None else condition.nodes())]
        return any(map(_is_of_rows, inside))
    return node.width is not None or any(operand.width is not None for operand in node.operands)
