"""Which nodes only matter to some environments, so that a block in which there are none may leave them out.

What a new episode begins with is needed where the last one has ended, which in most blocks is nowhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollmill.fusion.ir import Node

LEAST_COST = 64
"""Operations that are worth a branch."""


class Guard(NamedTuple):
    """Nodes that are read only where a condition holds."""

    condition: Node
    nodes: tuple[Node, ...]
    """In order; none is read by anything but each other and the sides of selects that the condition chooses."""
    results: tuple[Node, ...]
    """Those that the selects choose."""


def guards(nodes: Sequence[Node], outputs: Sequence[Node]) -> list[Guard]:
    """The guards of a program that are worth a branch; no two share a node.

    Args:
        nodes: of a program, operands first.
        outputs: of the program, which are read whatever the condition.
    """
    users = _users(nodes)
    taken: set[Node] = set()
    found = []
    for condition in _conditions(nodes):
        guard = _guard(condition, nodes, users, set(outputs) | taken)
        if sum(map(_cost, guard.nodes)) >= LEAST_COST:
            found.append(guard)
            taken |= set(guard.nodes)
    return found


def _conditions(nodes: Sequence[Node]) -> list[Node]:
    """The scalar conditions of selects, each once."""
    chosen = [node.operands[0] for node in nodes if node.op == "select" and node.operands[0].width is None]
    return list(dict.fromkeys(chosen))


def _users(nodes: Sequence[Node]) -> dict[Node, list[tuple[Node, int]]]:
    users: dict[Node, list[tuple[Node, int]]] = {node: [] for node in nodes}
    for node in nodes:
        for place, operand in enumerate(node.operands):
            users[operand].append((node, place))
    return users


def _guard(
    condition: Node, nodes: Sequence[Node], users: dict[Node, list[tuple[Node, int]]], needed: set[Node]
) -> Guard:
    chooses = lambda node, place: node.op == "select" and node.operands[0] is condition and place == 1
    late = _after(condition, nodes)
    inside: set[Node] = set()
    for node in reversed(nodes):
        if node in needed or node in late or node.op in ("input", "constant", "uniform"):
            continue
        if all(user in inside or chooses(user, place) for user, place in users[node]):
            inside.add(node)
    ordered = tuple(node for node in nodes if node in inside)
    results = tuple(node for node in ordered if any(chooses(*use) for use in users[node]))
    return Guard(condition, ordered, results)


def _after(condition: Node, nodes: Sequence[Node]) -> set[Node]:
    """The condition, what it is computed from, the selects that it decides, and what is computed from these."""
    before = {condition}
    for node in reversed(nodes):
        if node in before:
            before.update(node.operands)
    after: set[Node] = set()
    for node in nodes:
        decided = node.op == "select" and node.operands[0] is condition
        if decided or not after.isdisjoint(node.operands):
            after.add(node)
    return before | after


def _cost(node: Node) -> float:
    """Operations of a node, about."""
    if node.op == "loop":
        loop = node.attributes[0]
        return (loop.turns or 10) * sum(map(_cost, loop.body.nodes()))
    if node.op in ("input", "constant", "uniform", "item"):
        return 0
    return float(node.width or 1)
