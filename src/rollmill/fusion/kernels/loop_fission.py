"""Splits a kernel's loop over samples into several loops. Sums that use the same matrix products share one.

For example, an actor and a critic without a shared torso would need the registers of both at once. They share only
the loss, which is a sum, so the kernel goes through the samples once for each network.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from rollmill.fusion.ir import Node, Program
from rollmill.fusion.kernels.accumulators import Accumulators, Tile

NOTHING: Mapping[int, Node] = MappingProxyType({})

CHEAP = ("input", "uniform", "splat", "stack")
"""Operations on rows that cost nothing to repeat."""


class Term(NamedTuple):
    """One term of a sum: a scalar node of a sample, times a factor."""

    factor: float
    node: Node


class SampleTurns(NamedTuple):
    """How a loop processes equal parts of a sample, such as agents, one after the other."""

    count: int = 1
    strides: Mapping[int, int] = MappingProxyType({})
    """Distance between the inputs of consecutive parts, in elements or rows of a leaf, by input position. All
    parts share the inputs that are not listed."""


class SampleLoop(NamedTuple):
    """One loop over the samples, and the sums that it accumulates."""

    tiles: dict[int, Tile]
    """Matrix sums, by the index of their tile in the kernel."""
    numbers: list[Node]
    carried: list[int]
    """Positions of the inputs that each iteration hands to the next."""
    turns: SampleTurns = SampleTurns()
    """Equal parts of a sample that are processed one after the other. The sums are written for the first part."""
    stored: Sequence[tuple[int, tuple[Node, ...]]] = ()
    """Rows of each sample that are written to memory, with their numbers. Each is a list of tiles."""


class FissionPlan(NamedTuple):
    """The loops into which a gradient kernel is split, and its scalar results as sums of terms."""

    loops: list[SampleLoop]
    numbers: list[tuple[int, list[Term]]]
    """Scalar results: the index in the vector of all results, and the terms of the sum."""


def plan_sample_loops(
    kept: Accumulators,
    program: Program,
    carried: Mapping[int, Node] = NOTHING,
    stored: Sequence[tuple[Node, ...]] = (),
) -> FissionPlan:
    """Assigns the accumulators of a gradient kernel to loops over the samples, so that no two loops use the same
    matrix product.

    `carried` maps the index of an input to the node that becomes this input in the next iteration. `stored` are
    rows of each sample that are written to memory.
    """
    # Sets are bits of an integer, because programs have tens of rows and tens of thousands of nodes.
    depends = _products(program, [program.inputs[place] for place in carried])
    # Disjoint sets of rows, as bits. Sums that need a row of the same set share a loop.
    parts: list[int] = []
    handed = {place: depends[program.inputs[place]] | depends[node] for place, node in carried.items()}
    for bits in handed.values():
        parts = _join(parts, bits)
    for tile in kept.tiles:
        parts = _join(parts, _of_tile(tile, depends))
    parts = functools.reduce(_join, [_of_nodes(row, depends) for row in stored], parts)
    terms = {node: _terms(Term(1.0, node), parts, depends) for _, node in kept.numbers}
    for each in terms.values():
        for term in each:
            parts = _join(parts, depends[term.node])
    own = lambda n: [(k, row) for k, row in enumerate(stored) if _part(parts, _of_nodes(row, depends)) == n]
    loops = [SampleLoop({}, [], [], stored=own(n)) for n in range(max(1, len(parts)))]
    for place, bits in handed.items():
        loops[_part(parts, bits)].carried.append(place)
    for n, tile in enumerate(kept.tiles):
        loops[_part(parts, _of_tile(tile, depends))].tiles[n] = tile
    for node in dict.fromkeys(term.node for each in terms.values() for term in each):
        loops[_part(parts, depends[node])].numbers.append(node)
    return FissionPlan(loops, [(offset, terms[node]) for offset, node in kept.numbers])


def _products(program: Program, carried: Sequence[Node]) -> dict[Node, int]:
    """Returns the rows and carried inputs that each node depends on, as bit masks."""
    rows: dict[Node, int] = {}
    count = 0
    first = set(carried)
    for node in dict.fromkeys([*carried, *program.nodes()]):
        bits = 0
        for operand in node.operands:
            bits |= rows[operand]
        # Only rows count, because they fill the registers. Scalars that several loops need are computed in each
        # loop.
        if node in first or (node.width is not None and node.op not in CHEAP):
            bits |= 1 << count
            count += 1
        rows[node] = bits
    return rows


def _of_tile(tile: Tile, depends: dict[Node, int]) -> int:
    return _of_nodes([node for term in tile.terms for node in term.nodes], depends)


def _of_nodes(nodes: Sequence[Node], depends: dict[Node, int]) -> int:
    return functools.reduce(operator.or_, [depends[node] for node in nodes], 0)


def _join(parts: Sequence[int], bits: int) -> list[int]:
    """Parts that have no row in common, with one that has these."""
    if not bits:
        return list(parts)
    apart = [part for part in parts if not part & bits]
    for part in parts:
        bits |= part if part & bits else 0
    return [*apart, bits]


def _part(parts: Sequence[int], bits: int) -> int:
    """Returns the part that these rows belong to, or the first if they need none."""
    return next((n for n, part in enumerate(parts) if part & bits), 0)


def _terms(term: Term, parts: Sequence[int], depends: dict[Node, int]) -> list[Term]:
    """Splits a sum into terms that each belong to one part, as far as possible."""
    factor, node = term
    # The node belongs to one part or to none, so splitting it would only give more terms.
    if sum(1 for part in parts if part & depends[node]) < 2:
        return [term]
    match node.op, node.operands:
        case ("add", (one, other)):
            terms = [Term(factor, one), Term(factor, other)]
        case ("sub", (one, other)):
            terms = [Term(factor, one), Term(-factor, other)]
        case ("neg", (one,)):
            terms = [Term(-factor, one)]
        # A constant factor moves out of the sum over samples. Sums are linear, so no other operation may move out.
        case ("mul", (one, other)) if "constant" in (one.op, other.op):
            one, other = (one, other) if one.op == "constant" else (other, one)
            terms = [Term(factor * one.value, other)]
        case _:
            return [term]
    return [each for part in terms for each in _terms(part, parts, depends)]
