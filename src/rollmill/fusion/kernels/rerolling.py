"""Turns equal computations on parts of a sample, such as agents with shared weights, back into a loop.

The gradient of shared weights is a sum with one term for each part. If all terms are the same program with
different inputs, the kernel contains the program once and loops over the inputs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from rollmill.fusion.ir import Node, Program
from rollmill.fusion.kernels.accumulators import Tile, TileTerm
from rollmill.fusion.kernels.leaves import Leaf
from rollmill.fusion.kernels.loop_fission import FissionPlan, SampleLoop, SampleTurns, Term

Positions: TypeAlias = Mapping[int, tuple[Sequence[int], int]]
"""Maps each input to the positions of its leaf, and to its index among them."""


class PartsDiffer(Exception):
    """Raised if the parts of a sample, such as agents, are not computed by the same program."""


def reroll(plan: FissionPlan, program: Program, leaves: Sequence[Leaf]) -> FissionPlan:
    """Returns the plan of a gradient kernel with repeated computations turned back into loops, where possible.

    `leaves` are the leaves of a sample.
    """
    positions = {place: (leaf.places, n) for leaf in leaves for n, place in enumerate(leaf.places)}
    loops, sums = list(plan.loops), dict(plan.numbers)
    for n, loop in enumerate(plan.loops):
        own = set(loop.numbers)
        of_loop = {offset: [term for term in terms if term.node in own] for offset, terms in sums.items()}
        try:
            loops[n], first = _in_turns(loop, of_loop, program, positions)
        except PartsDiffer:
            continue
        for offset, terms in first.items():
            sums[offset] = [*(term for term in sums[offset] if term.node not in own), *terms]
    return FissionPlan(loops, list(sums.items()))


class _Sums(NamedTuple):
    """The sums of a loop, taken from its first part."""

    tiles: dict[int, Tile]
    numbers: dict[int, list[Term]]
    """Terms by the offsets of their sums."""


def _in_turns(
    loop: SampleLoop, numbers: Mapping[int, Sequence[Term]], program: Program, positions: Positions
) -> tuple[SampleLoop, dict[int, list[Term]]]:
    """Returns a loop over the parts, and its terms in each scalar sum."""
    counts = {len(tile.terms) for tile in loop.tiles.values()} - {1}
    if len(counts) != 1 or loop.carried:
        raise PartsDiffer
    parts = _Parts(counts.pop(), positions)
    for tile in loop.tiles.values():
        parts.match_terms(tile.terms)
    nodes = [*loop.numbers, *(node for tile in loop.tiles.values() for term in tile.terms for node in term.nodes)]
    whole, inputs = Program(program.inputs, tuple(nodes)), -1
    first = _Sums({}, {})
    while inputs != len(parts.strides):  # splitting sums may reveal more inputs of the parts
        inputs, depends = len(parts.strides), parts.dependences(whole)
        tiles = {n: parts.first_of_tile(tile, depends) for n, tile in loop.tiles.items()}
        first = _Sums(tiles, {offset: parts.first_of_sum(terms, depends) for offset, terms in numbers.items()})
    parts.check_inputs()
    own = list(dict.fromkeys(term.node for terms in first.numbers.values() for term in terms))
    return SampleLoop(first.tiles, own, [], SampleTurns(parts.count, parts.strides)), first.numbers


class _Parts:
    """Nodes of all parts that correspond to each other. Methods raise `PartsDiffer` if some do not."""

    def __init__(self, count: int, positions: Positions) -> None:
        self.count = count
        self.strides: dict[int, int] = {}
        """Distances from an input of the first part to the same input of the next part, by position."""
        self._positions = positions
        self._owners: dict[int, int] = {}
        """The part that an input belongs to, by its place."""
        self._matched: set[tuple[Node, ...]] = set()
        self._shared: set[Node] = set()
        """Nodes that all parts share."""

    def match_terms(self, terms: Sequence[TileTerm]) -> None:
        """Checks that the terms of a tile, one of each part, correspond to each other."""
        if len(terms) > 1:
            for sides in zip(*((*term.left, *term.right) for term in terms), strict=True):
                nodes = [node for node in sides if node is not None]
                if len(nodes) not in (0, self.count):
                    raise PartsDiffer
                if nodes:
                    self.match(nodes)

    def match(self, nodes: Iterable[Node]) -> None:
        """Checks that nodes, one of each part, are the same program of other inputs."""
        pending = [tuple(nodes)]
        while pending:
            each = pending.pop()
            if each in self._matched:
                continue
            self._matched.add(each)
            first = each[0]
            if all(node is first for node in each):
                self._shared.add(first)
            elif first.op == "input":
                self._match_inputs(each)
            elif first.op in ("constant", "uniform") or not all(_are_alike(first, node) for node in each):
                raise PartsDiffer
            else:
                pending.extend(zip(*(node.operands for node in each), strict=True))

    def _match_inputs(self, nodes: Sequence[Node]) -> None:
        """Checks that inputs lie in one leaf, equally far apart, and each belongs to one part."""
        found = [self._positions.get(node.attributes[0]) for node in nodes if node.op == "input"]
        if len(found) < self.count or found[0] is None or found[1] is None:
            raise PartsDiffer
        (leaf, first), stride = found[0], found[1][1] - found[0][1]
        places = [node.attributes[0] for node in nodes]
        apart = all(own == (leaf, first + n * stride) for n, own in enumerate(found))
        owned = all(self._owners.setdefault(place, n) == n for n, place in enumerate(places))
        if not apart or not owned or self.strides.setdefault(places[0], stride) != stride:
            raise PartsDiffer

    def check_inputs(self) -> None:
        """Checks that nodes shared by all parts read no input of a single part."""
        nodes = Program((), tuple(self._shared)).nodes()
        if any(node.op == "input" and node.attributes[0] in self._owners for node in nodes):
            raise PartsDiffer

    def dependences(self, program: Program) -> dict[Node, int]:
        """Returns the parts that each node depends on, as bit masks."""
        depends: dict[Node, int] = {}
        for node in program.nodes():
            owner = self._owners.get(node.attributes[0]) if node.op == "input" else None
            depends[node] = 0 if owner is None else 1 << owner
            for operand in node.operands:
                depends[node] |= depends[operand]
        return depends

    def first_of_tile(self, tile: Tile, depends: Mapping[Node, int]) -> Tile:
        """Returns a tile with the terms of the first part."""
        if len(tile.terms) > 1:
            return Tile(tile.terms[:1], tile.parts)
        (left, right), *_ = tile.terms
        if left != (None,) or right[0] is None:
            raise PartsDiffer
        terms = self.first_of_sum([Term(1.0, right[0])], depends)
        if any(term.factor != 1 for term in terms):
            raise PartsDiffer
        return Tile([TileTerm((None,), (term.node,)) for term in terms], tile.parts)

    def first_of_sum(self, terms: Sequence[Term], depends: Mapping[Node, int]) -> list[Term]:
        """Returns terms of the first part, with the sum of these terms as their sum over all parts."""
        of_parts: list[list[Term]] = [[] for _ in range(self.count)]
        shared: list[Term] = []
        for addend in (addend for term in terms for addend in _addends(term, depends)):
            bits = depends[addend.node]
            if bits & (bits - 1):
                raise PartsDiffer
            (of_parts[bits.bit_length() - 1] if bits else shared).append(addend)
        if len({len(own) for own in of_parts}) > 1:
            raise PartsDiffer
        for alike in zip(*of_parts, strict=True):
            if len({term.factor for term in alike}) > 1:
                raise PartsDiffer
            self.match(term.node for term in alike)
        self._shared.update(term.node for term in shared)
        # A scalar of the whole sample is added in every iteration, so each iteration adds only its share.
        return [*of_parts[0], *(Term(term.factor / self.count, term.node) for term in shared)]


def _addends(term: Term, depends: Mapping[Node, int]) -> Iterator[Term]:
    """Splits a sum into terms that each depend on only one part."""
    factor, node = term
    terms: tuple[Term, ...] = ()
    if depends[node] & (depends[node] - 1):
        match node.op, node.operands:
            case ("add", (one, other)):
                terms = Term(factor, one), Term(factor, other)
            case ("sub", (one, other)):
                terms = Term(factor, one), Term(-factor, other)
            case ("neg", (one,)):
                terms = (Term(-factor, one),)
            case ("mul", (one, other)) if "constant" in (one.op, other.op):
                one, other = (one, other) if one.op == "constant" else (other, one)
                terms = (Term(factor * one.value, other),)
            case _:
                pass
    if not terms:
        yield term
    for each in terms:
        yield from _addends(each, depends)


def _are_alike(one: Node, other: Node) -> bool:
    """Returns whether two nodes are the same operation, whatever their operands are."""
    return (
        one.op == other.op
        and one.attributes == other.attributes
        and one.dtype == other.dtype
        and one.width == other.width
        and len(one.operands) == len(other.operands)
    )
