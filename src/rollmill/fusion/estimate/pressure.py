"""Estimates register pressure and code size of a program on a GPU from its nodes, before compilation.

Both are per thread, with 16 environments per warp: a scalar is one register, and a row of `width` columns is
`width / 2` registers.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollmill.fusion.estimate.cost import FREE, instructions_of
from rollmill.fusion.ir import Node, Program, total_of
from rollmill.fusion.opt.branches import guarded_regions
from rollmill.fusion.opt.segments import segments_of

IN_MEMORY = ("constant", "uniform")
"""Operations whose results are read where they are needed, and so take no register in between."""

LANES_OF_A_NUMBER = 2
"""Lanes of a warp for each of its 16 environments."""


class Pressure(NamedTuple):
    """Estimates for one thread of a rollout's kernel."""

    operations: int
    """Nodes of a step's program, those in the bodies of loops once."""
    live: int
    """Registers that hold what is still read, where they are most."""
    instructions: int
    """Instructions that every step executes. The body of a loop counts once."""
    products: int
    """Matrix products with rows, which take compilers longest."""
    guarded: int
    """Instructions behind branches that a block takes where one of its environments needs it."""
    looped: int = 0
    """Those of `instructions` in the bodies of loops."""


def pressure_of(program: Program) -> Pressure:
    """Returns the register pressure and the code size of a program, in the order in which it is written."""
    nodes = [node for segment in segments_of(program.nodes()) for node in segment.nodes]
    guarded = {node for region in guarded_regions(nodes, program.outputs) for node in region.nodes}
    total, rare = sum(map(_instructions, nodes)), sum(map(_instructions, guarded))
    looped = sum(_instructions(node) for node in nodes if node.op == "loop" and node not in guarded)
    return Pressure(total_of(nodes), _peak(nodes, program.outputs), total - rare, _products(nodes), rare, looped)


def _peak(nodes: Sequence[Node], outputs: Sequence[Node]) -> int:
    """Returns the maximum of live registers. Inputs live from the start, outputs to the end."""
    # Later entries win, so this is the last place at which each is read.
    last = {operand: at for at, node in enumerate(nodes) for operand in node.operands}
    last |= dict.fromkeys(outputs, len(nodes))
    # By the place of the last user, behind which a register is free again.
    freed: list[list[Node]] = [[] for _ in range(len(nodes) + 1)]
    for node in nodes:
        if node in last:
            freed[last[node]].append(node)
    # Inputs are carried from step to step, so all of them are live from the start.
    live = sum(_registers(node) for node in nodes if node.op == "input")
    most = live
    for at, node in enumerate(nodes):
        live += 0 if node.op == "input" else _registers(node)
        most = max(most, live + _inside(node))
        live -= sum(map(_registers, freed[at]))
    return most


def _products(nodes: Sequence[Node]) -> int:
    """Counts matrix products, those in loops once."""
    bodies = [node.attributes[0].body.nodes() for node in nodes if node.op == "loop"]
    return sum(node.op == "dot" for node in nodes) + sum(map(_products, bodies))


def _registers(node: Node) -> int:
    """Returns the registers of a node's result or a loop's carry."""
    if node.op in IN_MEMORY or node.op == "item":
        return 0
    if node.op == "loop":
        return sum(map(_registers, node.attributes[0].body.outputs))
    return 1 if node.width is None else -(-node.width // LANES_OF_A_NUMBER)


def _inside(node: Node) -> int:
    """Returns the most that a loop's body takes, beyond what it carries."""
    if node.op != "loop":
        return 0
    body = node.attributes[0].body
    return max(0, _peak(body.nodes(), body.outputs) - _registers(node))


def _instructions(node: Node) -> int:
    if node.op == "loop":
        body, condition, _ = node.attributes[0]
        inside = [*body.nodes(), *([] if condition is None else condition.nodes())]
        return sum(map(_instructions, inside))
    return 0 if node.op in FREE else instructions_of(node, LANES_OF_A_NUMBER)
