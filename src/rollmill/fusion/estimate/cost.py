"""Counts the operations of a program for one environment, by the GPU unit that executes them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollmill.fusion.ir import Loop, Node, Program
from rollmill.fusion.opt.branches import guarded_regions

SPECIAL = {
    "exp": (1, 2),
    "exp2": (1, 1),
    "log": (1, 2),
    "sqrt": (1, 4),
    "rsqrt": (1, 3),
    "sin": (1, 12),
    "cos": (1, 12),
    "tanh": (1, 4),
    "logistic": (2, 3),
    "expm1": (1, 8),
    "log1p": (1, 8),
    "pow": (2, 12),
    "erf": (1, 12),
    "erfc": (2, 16),
    "erf_inv": (2, 12),
}
"""Approximate operations of a function: on the special-function units, and on the ordinary units around them."""

OTHER_FUNCTION = (2, 24)
FUNCTIONS = ("tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "cbrt", "rem")
DIVISION = (1, 7)

FREE = ("input", "constant", "uniform", "item", "splat", "stack", "column", "bitcast")
"""Operations that compute nothing, or so little that it is hidden in the operations that read them."""


class Cost(NamedTuple):
    """Counts of the operations for one environment, by the GPU unit that executes them."""

    floats: int = 0
    """Operations on the floating-point units, including comparisons and selections of floats."""
    integers: int = 0
    special: int = 0
    """Operations on the special-function units, such as exponentials."""
    tensor: int = 0
    """Multiplications and additions in matrix products."""

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> "Cost":
        """Returns the cost of executing the operations `count` times."""
        return Cost(*(x * count for x in self))

    @property
    def instructions(self) -> int:
        """Number of instructions for one environment, without matrix products."""
        return self.floats + self.integers + self.special


class Costs(NamedTuple):
    """Operation counts of one environment step, separately for operations that always run and operations behind
    branches.
    """

    always: Cost
    sometimes: Cost
    """Operations behind branches. A block takes a branch only if one of its environments needs it, for example
    when an episode ends."""


def costs_of(program: Program) -> Costs:
    """Estimates the cost of a program. The body of a loop of unknown length counts once."""
    nodes = program.nodes()
    guarded = {node for guard in guarded_regions(nodes, program.outputs) for node in guard.nodes}
    return Costs(
        _total([node for node in nodes if node not in guarded]),
        _total([node for node in nodes if node in guarded]),
    )


def _total(nodes: Sequence[Node]) -> Cost:
    return sum(map(_cost, nodes), start=Cost())


def _cost(node: Node) -> Cost:
    if node.op in FREE:
        return Cost()
    if node.op == "loop":
        return _loop_cost(node.attributes[0])
    if node.op == "dot":
        return Cost(tensor=2 * (node.operands[0].width or 1) * (node.width or 1))
    if node.op in ("row_sum", "row_max", "row_min"):
        return Cost(floats=node.operands[0].width or 1)
    return _arithmetic(node).times(node.width or 1)


def _arithmetic(node: Node) -> Cost:
    """Returns the cost of one number."""
    # Uses the type of the last operand, because comparisons of floats give booleans, and the first operand of a
    # select is a boolean.
    kind = (node.operands[-1] if node.operands else node).dtype
    if kind.kind != "f" or node.op == "table":
        return Cost(integers=1)
    if node.op in SPECIAL or node.op in FUNCTIONS:
        special, floats = SPECIAL.get(node.op, OTHER_FUNCTION)
        return Cost(floats=floats, special=special)
    if node.op == "div" and node.operands[1].op != "constant":
        return Cost(floats=DIVISION[1], special=DIVISION[0])
    return Cost(floats=1)


MMA = 8 * 8
"""Matrix elements per tensor-core instruction in tf32, which multiplies them with 16 vectors."""


def instructions_of(node: Node, lanes: int) -> int:
    """Estimates instructions per thread of a node other than a loop, with `lanes` threads per row."""
    if node.op == "dot":
        return -(-(node.operands[0].width or 1) * (node.width or 1) // MMA)
    cost = _cost(node).instructions
    is_row = node.width is not None or any(operand.width is not None for operand in node.operands)
    return -(-cost // lanes) if is_row else cost


def _loop_cost(loop: Loop) -> Cost:
    body = _total(loop.body.nodes())
    asked = _total(loop.condition.nodes()) if loop.condition is not None else Cost()
    return (body + asked).times(loop.trip_count or 1)


def bytes_of(shapes: Sequence[tuple[tuple[int, ...], np.dtype]]) -> int:
    """Returns the total size in bytes of arrays with these shapes and dtypes."""
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes)
