"""Programs over the scalars of ONE environment, each standing for a block of environments.

A node is a scalar of each environment, in a kernel a vector `[block]`; or a row, `[block, width]`, as read and
written by matrix products. Nothing else exists: arrays are gone by the time that nodes are made. Values that all
environments have in common, such as weights, are *uniform*: computed before the kernel starts, and read from
memory.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Node:
    """One operation, and its result."""

    op: str
    """A name in `operations.OPERATIONS`, or one of `STRUCTURAL`."""
    operands: tuple["Node", ...]
    attributes: tuple[Any, ...]
    """Hashable parameters of the operation other than nodes."""
    dtype: np.dtype
    width: int | None = None
    """Numbers of a row. None for a scalar."""
    region: Any = None
    """The `Region` that it was made in; None where it belongs everywhere, as constants do."""

    def __repr__(self) -> str:
        return f"{self.op} {self.dtype.name}{'' if self.width is None else f'[{self.width}]'}"

    @property
    def value(self) -> Any:
        """The number that a constant is."""
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
"""Operations that are no arithmetic, and their attributes."""


ANYWHERE = ("input", "constant", "uniform")
"""Operations whose results are there before the first node."""

OF_UNIFORMS = ("uniform", "table", "dot")
"""Operations whose first attribute is a slot."""


class Program(NamedTuple):
    """Returns the nodes that outputs need, operands before their users."""

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    def nodes(self) -> list[Node]:
        """The used inputs and all nodes computed from them, operands first."""
        return list(toposort(self.outputs))

    def slots(self) -> set[int]:
        """Slots of the uniform arrays read, including in loops."""
        slots: set[int] = set()
        for node in self.nodes():
            if node.op in OF_UNIFORMS:
                slots.add(node.attributes[0])
            elif node.op == "loop":
                body, condition, _ = node.attributes[0]
                slots |= body.slots() | (set() if condition is None else condition.slots())
        return slots


class Loop(NamedTuple):
    """The body and the condition of a loop. Both take the carried values, then the values read from outside."""

    body: Program
    """Gives the carried numbers after one turn."""
    condition: Program | None
    """Gives one boolean: whether another turn follows, each environment for itself; None for a counted loop."""
    turns: int | None
    """Iterations of a counted loop. None if the condition decides."""


def total_of(nodes: Sequence[Node]) -> int:
    """Returns the number of nodes, those in the bodies and conditions of loops among them, once."""
    loops = [node.attributes[0] for node in nodes if node.op == "loop"]
    inside = [part for loop in loops for part in (loop.body, loop.condition) if part is not None]
    return len(nodes) + sum(total_of(part.nodes()) for part in inside)


def toposort(roots: Sequence[Node], known: Container[Node] = ()) -> Iterator[Node]:
    """Returns these nodes and everything that they are computed from, except known nodes and their inputs.

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
            # Once more behind its operands: when it is met again, all of them have been handed out.
            pending.append((node, True))
            pending.extend((operand, False) for operand in reversed(node.operands) if operand not in seen)
