"""Estimates the register pressure and code size of a program on a GPU, before compiling it.

Both are per thread, with 16 environments per warp. A scalar takes one register, and a row of `width` columns takes
`width / 2` registers.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollmill.fusion.estimate.cost import FREE, instructions_of
from rollmill.fusion.ir import Node, Program, count_nodes
from rollmill.fusion.opt.branches import guarded_regions
from rollmill.fusion.opt.segments import segments_of

IN_MEMORY = ("constant", "uniform")
"""Operations whose results are read from memory when they are needed, and so occupy no registers in between."""

LANES_OF_A_NUMBER = 2
"""Threads of a warp for each of its 16 environments."""


class Pressure(NamedTuple):
    """Estimated size of a rollout kernel, per thread."""

    num_operations: int
    """Number of nodes of a step's program, counting loop bodies once."""
    live_registers: int
    """Maximum number of registers whose values are still needed at one point of the program."""
    num_instructions: int
    """Number of instructions that every step executes, counting loop bodies once."""
    num_products: int
    """Number of matrix products with rows, which take longest to compile."""
    guarded_instructions: int
    """Number of instructions behind branches. A block takes a branch only if one of its environments needs it."""


def estimate_pressure(program: Program) -> Pressure:
    """Estimates the register pressure and code size of a program, with nodes in the order of its kernel."""
    nodes = [node for segment in segments_of(program.nodes()) for node in segment.nodes]
    guarded = {node for region in guarded_regions(nodes, program.outputs) for node in region.nodes}
    total, rare = sum(map(_instructions, nodes)), sum(map(_instructions, guarded))
    return Pressure(count_nodes(nodes), _peak(nodes, program.outputs), total - rare, _products(nodes), rare)


def _peak(nodes: Sequence[Node], outputs: Sequence[Node]) -> int:
    """Returns the maximum of live registers. Inputs live from the start, outputs to the end."""
    # Later entries win, so these are the last uses.
    last = {operand: at for at, node in enumerate(nodes) for operand in node.operands}
    last |= dict.fromkeys(outputs, len(nodes))
    # Grouped by last use, after which a register is free again.
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
    """Returns the maximum number of registers that a loop's body needs in addition to its carried values."""
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
