"""A program over the numbers of ONE environment, each of which stands for a block of environments.

A node is a scalar of each environment, in a kernel a vector `[block]`; or a row of numbers, `[block, width]`,
which is what matrix products take and give. Nothing else exists: arrays are gone by the time that nodes are made.
Nodes are made in a `Region`, which returns the same node for the same operation on the same operands, and what
nobody reads is not in the `Program` that comes out of it. What all environments have in common, such as weights,
is *uniform*: computed before the kernel starts, and read from memory.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rollmill.fusion.folding import COMMUTATIVE, folded


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Node:
    """One operation, and its result."""

    op: str
    """A name in `operations.OPERATIONS`, or one of `STRUCTURAL`."""
    operands: tuple["Node", ...]
    attributes: tuple[Any, ...]
    """What else the operation needs; hashable."""
    dtype: np.dtype
    width: int | None = None
    """Numbers of a row; None for a scalar."""
    region: "Region | None" = field(default=None, repr=False)
    """Where it was made; None where it belongs everywhere, as constants do."""

    def __repr__(self) -> str:
        return f"{self.op} {self.dtype.name}{'' if self.width is None else f'[{self.width}]'}"

    @property
    def value(self) -> Any:
        """Of a constant: its number."""
        return self.attributes[0]


STRUCTURAL = {
    "input": "(place)",
    "constant": "(number): a Python bool, int or float",
    "uniform": "(slot, place): a number of a uniform array, by its place in row-major order; or a row, [width]",
    "table": "(slot,) operand: the number of a uniform array at a place of each environment's own",
    "loop": "(Loop) operands: carried numbers before the first turn, what the body reads from outside, what the "
    "condition does",
    "item": "(n): the n-th carried number after a loop",
}
"""Operations that are no arithmetic, and their attributes."""


ANYWHERE = ("input", "constant", "uniform")
"""Operations whose results are there before the first node."""

OF_UNIFORMS = ("uniform", "table", "dot")
"""Operations whose first attribute is a slot."""


class Program(NamedTuple):
    """Nodes in an order in which every operand precedes its user; what no output needs is left out."""

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    def nodes(self) -> list[Node]:
        """Inputs that are read and everything computed from them, operands first."""
        return list(operands_first(self.outputs))

    def slots(self) -> set[int]:
        """Of the uniform arrays that are read, in loops as well."""
        found: set[int] = set()
        for node in self.nodes():
            if node.op in OF_UNIFORMS:
                found.add(node.attributes[0])
            elif node.op == "loop":
                body, condition, _ = node.attributes[0]
                found |= body.slots() | (set() if condition is None else condition.slots())
        return found


class Loop(NamedTuple):
    """The body and the condition of a loop; both take the carried numbers, then what they read from outside."""

    body: Program
    """Gives the carried numbers after one turn."""
    condition: Program | None
    """Gives one boolean: whether another turn follows, each environment for itself; None for a counted loop."""
    turns: int | None
    """Of a counted loop."""


class Region:
    """Where nodes are made; a loop's bodies have regions of their own."""

    def __init__(self, outer: "Region | None" = None) -> None:
        self.outer = outer
        self.inputs: list[Node] = []
        self._made: dict[Any, Node] = {}
        self._captured: dict[Node, Node] = {}

    def input(self, dtype: Any, width: int | None = None) -> Node:
        """A number, or a row, that is handed in."""
        node = Node("input", (), (len(self.inputs),), np.dtype(dtype), width, self)
        self.inputs.append(node)
        return node

    def constant(self, value: bool | int | float, dtype: Any) -> Node:
        """A number that is known; integers wrap around as the dtype does."""
        if self.outer is not None:
            return self.outer.constant(value, dtype)
        dtype = np.dtype(dtype)
        number = np.asarray(value).astype(dtype).item()
        key = ("constant", repr(number), dtype)
        return self._once(key, lambda: Node("constant", (), (number,), dtype))

    def uniform(self, slot: int, place: int, dtype: Any, width: int | None = None) -> Node:
        """A number, or a row, of what all environments have in common."""
        if self.outer is not None:
            return self.outer.uniform(slot, place, dtype, width)
        dtype = np.dtype(dtype)
        key = ("uniform", slot, place, width)
        return self._once(key, lambda: Node("uniform", (), (slot, place), dtype, width))

    def emit(
        self, op: str, *operands: Node, dtype: Any, width: int | None = None, attributes: tuple[Any, ...] = ()
    ) -> Node:
        """The result of an operation; what depends on nothing in a loop is computed outside of it."""
        if self.outer is not None and all(operand.region is not self for operand in operands):
            return self.outer.emit(op, *operands, dtype=dtype, width=width, attributes=attributes)
        dtype = np.dtype(dtype)
        inside = tuple(self.inside(operand) for operand in operands)
        simpler = folded(self, op, inside, attributes, dtype, width)
        if simpler is not None:
            return simpler if simpler.width == width else self.emit("splat", simpler, dtype=dtype, width=width)
        if op in COMMUTATIVE and (found := self._made.get((op, inside[::-1], attributes, dtype, width))):
            return found
        key = (op, inside, attributes, dtype, width)
        return self._once(key, lambda: Node(op, inside, attributes, dtype, width, self))

    def inside(self, node: Node) -> Node:
        """The node as this region may use it."""
        if node.region is None or node.region is self:
            return node
        if node not in self._captured:
            self._captured[node] = self.input(node.dtype, node.width)
        return self._captured[node]

    @property
    def captures(self) -> list[Node]:
        """What was taken from outside, in the order of the inputs that it became."""
        return list(self._captured)

    @property
    def size(self) -> int:
        """Nodes that were made here, whether or not anybody reads them."""
        return len(self._made)

    def is_same(self, one: Node, other: Node) -> bool:
        """Whether two nodes are one, seen from here."""
        return self._captured.get(one, one) is self._captured.get(other, other)

    def program(self, outputs: Sequence[Node]) -> Program:
        """What computes these outputs."""
        inside = tuple(self.inside(node) for node in outputs)  # may take more from outside
        return Program(tuple(self.inputs), inside)

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def operands_first(roots: Sequence[Node], known: Container[Node] = ()) -> Iterator[Node]:
    """These nodes and everything that they are computed from, but for what is known, and what that needed.

    Depth first, without recursion: programs are deeper than Python's stack.
    """
    seen: set[Node] = set()
    pending: list[tuple[Node, bool]] = [(root, False) for root in reversed(roots)]
    while pending:
        node, ready = pending.pop()
        if ready:
            yield node
        elif node not in seen and node not in known:
            seen.add(node)
            pending.append((node, True))
            pending.extend((operand, False) for operand in reversed(node.operands) if operand not in seen)
