"""Splits a kernel's loop over samples: sums that use the same matrix products share a loop.

An actor and a critic with a torso each would need the registers of both at once. They share only the loss, a sum
of losses. So the kernel goes through its samples once for each network.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from rollmill.fusion.ir import Node, Program
from rollmill.fusion.kernels.accumulators import Accumulators, Tile

NOTHING: Mapping[int, Node] = MappingProxyType({})

CHEAP = ("input", "uniform", "splat", "stack")
"""Rows that cost nothing to have twice."""


class Term(NamedTuple):
    """A number of each sample, times a factor."""

    factor: float
    node: Node


class SampleTurns(NamedTuple):
    """The parts of a sample that a loop processes in turn."""

    count: int = 1
    strides: Mapping[int, int] = MappingProxyType({})
    """Numbers of a leaf, or rows, from an input of the first part to that of the next, by its place; other inputs
    are those of all parts."""


class SampleLoop(NamedTuple):
    """The sums that one loop over the samples accumulates."""

    tiles: dict[int, Tile]
    """Tiles by their numbers in the accumulators."""
    numbers: list[Node]
    carried: list[int]
    """Places of the inputs that it hands from each turn to the next."""
    turns: SampleTurns = SampleTurns()
    """Its sums are those of the first part."""


class FissionPlan(NamedTuple):
    """The loops of a kernel, and the positions of scalar sums."""

    loops: list[SampleLoop]
    numbers: list[tuple[int, list[Term]]]
    """Offsets in the vector of all results, and the sums that each is made of."""


def plan_sample_loops(kept: Accumulators, program: Program, carried: Mapping[int, Node] = NOTHING) -> FissionPlan:
    """Returns the minimum number of loops over the samples for these sums.

    `carried` maps the index of an input to the node that becomes this input in the next iteration.
    """
    # Integers as sets of bits: programs have tens of rows and tens of thousands of nodes.
    depends = _products(program, [program.inputs[place] for place in carried])
    # Sets of rows, as bits, that are disjoint: sums that need a row of the same set are gathered in one loop.
    parts: list[int] = []
    handed = {place: depends[program.inputs[place]] | depends[node] for place, node in carried.items()}
    for bits in handed.values():
        parts = _joined(parts, bits)
    for tile in kept.tiles:
        parts = _joined(parts, _of_tile(tile, depends))
    terms = {node: _terms(Term(1.0, node), parts, depends) for _, node in kept.numbers}
    for each in terms.values():
        for term in each:
            parts = _joined(parts, depends[term.node])
    loops = [SampleLoop({}, [], []) for _ in parts or [0]]
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
        # Only rows matter: they are what fills the registers. Scalars that several loops need are computed in
        # each.
        if node in first or (node.width is not None and node.op not in CHEAP):
            bits |= 1 << count
            count += 1
        rows[node] = bits
    return rows


def _of_tile(tile: Tile, depends: dict[Node, int]) -> int:
    bits = 0
    for term in tile.terms:
        for node in term.nodes:
            bits |= depends[node]
    return bits


def _joined(parts: Sequence[int], bits: int) -> list[int]:
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
    # It belongs to one part already, or to none; taken apart, it would only be more terms.
    if sum(1 for part in parts if part & depends[node]) < 2:
        return [term]
    match node.op, node.operands:
        case ("add", (one, other)):
            terms = [Term(factor, one), Term(factor, other)]
        case ("sub", (one, other)):
            terms = [Term(factor, one), Term(-factor, other)]
        case ("neg", (one,)):
            terms = [Term(-factor, one)]
        # A constant factor moves out of the sum over samples. Sums are linear, so nothing else is allowed here.
        case ("mul", (one, other)) if "constant" in (one.op, other.op):
            one, other = (one, other) if one.op == "constant" else (other, one)
            terms = [Term(factor * one.value, other)]
        case _:
            return [term]
    return [each for part in terms for each in _terms(part, parts, depends)]
