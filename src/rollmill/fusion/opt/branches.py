"""Finds nodes that only some environments need, so that a block without such environments can skip them.

For example, the first state of a new episode is needed only if the last episode has ended. In most steps, no
environment of a block needs it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollmill.fusion.ir import ANYWHERE, Node

MIN_COST = 64
"""Minimum number of operations that are worth a branch."""


class GuardedRegion(NamedTuple):
    """Nodes that are needed only if a condition is true."""

    condition: Node
    nodes: tuple[Node, ...]
    """The nodes in order. They are used only by each other, and by selects that choose them if the condition is
    true."""
    results: tuple[Node, ...]
    """The nodes that selects choose."""


def guarded_regions(nodes: Sequence[Node], outputs: Sequence[Node]) -> list[GuardedRegion]:
    """Returns the regions of a program that are worth a branch. They do not overlap.

    `nodes` lists operands before their users. Outputs are always needed.
    """
    users, needed = _users(nodes), set(outputs)
    regions = []
    for condition, selects in _decisions(nodes).items():
        # most regions are not worth a branch, which is quickly found out
        if not _is_worth_a_branch(_read_by_chosen(selects, users, needed)):
            continue
        # The region is computed before the first of its selects, so no node in it may depend on any of them. If
        # one select of a condition feeds the chosen side of another, that side stays outside.
        inside = _read_by_chosen(selects, users, needed | _find_decided(selects, nodes))
        if _is_worth_a_branch(inside):
            regions.append(_region(condition, inside, nodes, users))
            # Regions do not overlap: nodes of one region count as needed for the others. Nor does a region contain
            # the condition of an earlier region, because each would have to precede the other.
            needed |= inside | {condition}
    return regions


def _decisions(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Returns the scalar conditions of selects, each with the selects that it decides."""
    decisions: dict[Node, list[Node]] = {}
    for node in nodes:
        if node.op == "select" and node.operands[0].width is None:
            decisions.setdefault(node.operands[0], []).append(node)
    return decisions


def _users(nodes: Sequence[Node]) -> dict[Node, list[tuple[Node, int]]]:
    users: dict[Node, list[tuple[Node, int]]] = {node: [] for node in nodes}
    for node in nodes:
        for place, operand in enumerate(node.operands):
            users[operand].append((node, place))
    return users


def _read_by_chosen(
    selects: Sequence[Node], users: dict[Node, list[tuple[Node, int]]], needed: set[Node]
) -> set[Node]:
    """Returns the nodes that only the chosen sides of these selects read, directly or indirectly.

    Nodes that are needed in both cases are left out.
    """
    inside: set[Node] = set()
    # Only the side for a true condition: a branch is taken if any environment needs it, so the other side is
    # nearly always computed.
    pending = [select.operands[1] for select in selects]
    while pending:
        node = pending.pop()
        if node in inside or node in needed or node.op in ANYWHERE:
            continue
        # A node belongs to the region once all of its users do. Operands are visited again after each user that
        # joins, so the order of visits does not matter.
        if all(user in inside or _chooses(selects[0].operands[0], user, place) for user, place in users[node]):
            inside.add(node)
            pending.extend(node.operands)
    return inside


def _chooses(condition: Node, user: Node, place: int) -> bool:
    return user.op == "select" and user.operands[0] is condition and place == 1


def _find_decided(selects: Sequence[Node], nodes: Sequence[Node]) -> set[Node]:
    """Returns these selects and all nodes computed from them, which come after the nodes that they select from."""
    after = set(selects)
    for node in nodes:
        if not after.isdisjoint(node.operands):
            after.add(node)
    return after


def _is_worth_a_branch(nodes: set[Node]) -> bool:
    return sum(map(_cost, nodes)) >= MIN_COST


def _region(
    condition: Node, inside: set[Node], nodes: Sequence[Node], users: dict[Node, list[tuple[Node, int]]]
) -> GuardedRegion:
    ordered = tuple(node for node in nodes if node in inside)
    results = tuple(node for node in ordered if any(_chooses(condition, *use) for use in users[node]))
    return GuardedRegion(condition, ordered, results)


def _cost(node: Node) -> float:
    """Operations of a node, about."""
    if node.op == "loop":
        loop = node.attributes[0]
        return (loop.trip_count or 10) * sum(map(_cost, loop.body.nodes()))
    if node.op in (*ANYWHERE, "item"):
        return 0
    return float(node.width or 1)
