"""Programs over the scalars of ONE environment, which kernels run for a block of environments.

A node is a scalar of each environment, in a kernel a vector `[block]`, or it is a *row*, `[block, width]`, for
matrix products. No other values exist: all arrays have been taken apart when nodes are made. Values that are equal
for all environments, such as weights, are *uniform*. They are computed before the kernel starts and read from
memory.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Node:
    """A node of a program: one operation, and its result."""

    op: str
    """Name of the operation, a key of `operations.OPERATIONS`, `TYPED`, `ROWS` or `STRUCTURAL`."""
    operands: tuple["Node", ...]
    attributes: tuple[Any, ...]
    """Hashable parameters of the operation other than its operands."""
    dtype: np.dtype
    width: int | None = None
    """Number of columns of a row, or None for a scalar."""
    region: Any = None
    """The `Region` in which the node was made, or None for nodes that are valid everywhere, such as constants."""

    def __repr__(self) -> str:
        return f"{self.op} {self.dtype.name}{'' if self.width is None else f'[{self.width}]'}"

    @property
    def value(self) -> Any:
        """Value of a constant node."""
        return self.attributes[0]


STRUCTURAL = {
    "input": "(place)",
    "constant": "(number): a Python bool, int or float",
    "uniform": "(slot, place): a number of a uniform array, by its place in row-major order; or a row, [width]",
    "table": "(slot,) operand: the number of a uniform array at a place of each environment's own",
    "cell": "(memory) operand: the number of a large array of the state, at a place in bounds, before the step",
    "loop": "(Loop) operands: carried numbers before the first turn, what the body reads from outside, what the "
    "condition does",
    "item": "(n): the n-th carried number after a loop",
}
"""Operations other than arithmetic, with their attributes."""


ANYWHERE = ("input", "constant", "uniform")
"""Operations whose results are available before the first node is computed."""

UNIFORM_OPERATIONS = ("uniform", "table", "dot")
"""Operations whose first attribute is the slot of a uniform array."""


class Program(NamedTuple):
    """A program: its inputs and its outputs. The outputs refer to all nodes in between."""

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    def nodes(self) -> list[Node]:
        """Returns the inputs in use and all nodes that the outputs depend on, operands before their users."""
        return list(toposort(self.outputs))

    def slots(self) -> set[int]:
        """Returns the slots of all uniform arrays that the program reads, including in loops."""
        slots: set[int] = set()
        for node in self.nodes():
            if node.op in UNIFORM_OPERATIONS:
                slots.add(node.attributes[0])
            elif node.op == "loop":
                body, condition, _ = node.attributes[0]
                slots |= body.slots() | (set() if condition is None else condition.slots())
        return slots


class Loop(NamedTuple):
    """A loop: its body as a program, and either a condition, evaluated for each environment, or a fixed count.

    Body and condition take the values carried from one iteration to the next, followed by values from outside the
    loop.
    """

    body: Program
    """Computes the carried values after one iteration."""
    condition: Program | None
    """Computes a boolean for each environment, whether it needs another iteration. None for a counted loop."""
    trip_count: int | None
    """Number of iterations of a counted loop, or None for a loop with a condition."""


def count_nodes(nodes: Sequence[Node]) -> int:
    """Returns the number of nodes, counting those in bodies and conditions of loops once."""
    loops = [node.attributes[0] for node in nodes if node.op == "loop"]
    inside = [part for loop in loops for part in (loop.body, loop.condition) if part is not None]
    return len(nodes) + sum(count_nodes(part.nodes()) for part in inside)


def toposort(roots: Sequence[Node], known: Container[Node] = ()) -> Iterator[Node]:
    """Yields `roots` and all nodes that they depend on, operands first. Skips `known` nodes and their operands.

    The order is depth-first. There is no recursion, because programs are deeper than the Python stack.
    """
    seen: set[Node] = set()
    pending: list[tuple[Node, bool]] = [(root, False) for root in reversed(roots)]
    while pending:
        node, ready = pending.pop()
        if ready:
            yield node
        elif node not in seen and node not in known:
            seen.add(node)
            # Pushed again behind its operands, so that all operands are yielded first.
            pending.append((node, True))
            pending.extend((operand, False) for operand in reversed(node.operands) if operand not in seen)
