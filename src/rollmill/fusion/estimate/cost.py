"""Operations of a program for one environment, counted by the unit of a GPU that executes them."""

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
"""Operations of a function on the special-function units, and on the ordinary ones around them, about."""

OTHER_FUNCTION = (2, 24)
FUNCTIONS = ("tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "cbrt", "rem")
DIVISION = (1, 7)

FREE = ("input", "constant", "uniform", "item", "splat", "stack", "column", "bitcast")
"""Nothing is computed for these, or no more than is hidden in what reads them."""


class Cost(NamedTuple):
    """Operations of one environment."""

    floats: int = 0
    """On the ordinary units, comparisons and choices among them."""
    integers: int = 0
    special: int = 0
    """On the special-function units."""
    tensor: int = 0
    """Multiplications and additions of matrix products."""

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> "Cost":
        """Returns a multiple of this cost."""
        return Cost(*(x * count for x in self))

    @property
    def instructions(self) -> int:
        """Number of instructions of one lane, excluding matrix products."""
        return self.floats + self.integers + self.special


class Costs(NamedTuple):
    """Operations of a step."""

    always: Cost
    sometimes: Cost
    """Behind branches that a block takes where one of its environments needs it, as at an episode's end."""


def costs_of(program: Program) -> Costs:
    """Estimates the cost of a program. Loops of unknown length count once."""
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
        return Cost(tensor=2 * node.attributes[1] * (node.width or 1))
    if node.op in ("row_sum", "row_max", "row_min"):
        return Cost(floats=node.operands[0].width or 1)
    return _arithmetic(node).times(node.width or 1)


def _arithmetic(node: Node) -> Cost:
    """Returns the cost of one number."""
    # By the operands' type: comparisons of floats give booleans. The last one, for a select's first is a boolean.
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
"""Weights that one instruction of a tensor core multiplies 16 vectors with, in tf32."""


def instructions_of(node: Node, lanes: int) -> int:
    """Returns the instructions per thread of a node other than a loop, with `lanes` lanes per row."""
    if node.op == "dot":
        return -(-node.attributes[1] * (node.width or 1) // MMA)
    cost = _cost(node).instructions
    is_row = node.width is not None or any(operand.width is not None for operand in node.operands)
    return -(-cost // lanes) if is_row else cost


def _loop_cost(loop: Loop) -> Cost:
    body = _total(loop.body.nodes())
    asked = _total(loop.condition.nodes()) if loop.condition is not None else Cost()
    return (body + asked).times(loop.turns or 1)


def bytes_of(shapes: Sequence[tuple[tuple[int, ...], np.dtype]]) -> int:
    """Returns the bytes of one environment's arrays."""
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes)
