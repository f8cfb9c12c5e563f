"""Simplifies operations before their nodes are created, to a constant or to one of the operands.

Only identities that hold for every float are used. For example, `x + 0` is kept, because it turns -0 into 0.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.fusion.ir.node import Node
from rollmill.fusion.ir.operations import OPERATIONS

COMMUTATIVE = {"add", "mul", "and", "or", "xor", "eq", "ne"}

NEUTRAL: dict[str, tuple[Any, bool]] = {
    "add": (0, False),
    "sub": (0, True),
    "mul": (1, True),
    "div": (1, True),
    "and": (-1, False),
    "or": (0, False),
    "xor": (0, False),
    "shift_left": (0, False),
    "shift_right_logical": (0, False),
    "shift_right_arithmetic": (0, False),
}
"""The right operand that leaves the left one unchanged, and whether also for floats. -1 means all bits."""

ABSORBING = {"and": 0, "or": -1, "mul": 0}
"""The operand that determines the result on its own. Not for floats."""

WITH_EQUAL_OPERANDS: dict[str, Any] = {
    "eq": True,
    "ne": False,
    "le": True,
    "ge": True,
    "lt": False,
    "gt": False,
    "xor": 0,
    "sub": 0,
}
"""The result of an operation on two equal operands. Not for floats."""

COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}

EXACT: dict[str, Callable[..., Any]] = {
    **COMPARISONS,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "select": np.where,
}
"""Operations with bitwise equal results in NumPy and JAX. All others are evaluated by JAX, which is slower."""


@runtime_checkable
class Maker(Protocol):
    """Protocol for creating the nodes that replace an operation. `Region` implements it."""

    def constant(self, value: bool | int | float, dtype: Any) -> Node:
        """Returns a program node for a constant of `dtype`."""
        ...

    def uniform(self, slot: int, place: int, dtype: Any, width: int | None = None) -> Node:
        """Returns a node that reads a scalar or a row from a uniform array."""
        ...

    def emit(
        self, op: str, *operands: Node, dtype: Any, width: int | None = None, attributes: tuple[Any, ...] = ()
    ) -> Node:
        """Returns a program node for the result of an operation."""
        ...


def fold_node(
    region: Maker, op: str, operands: tuple[Node, ...], attributes: tuple, dtype: np.dtype, width: int | None
) -> Node | None:
    """Returns a constant or an existing node that equals the result of an operation, or None if there is none.

    If the operation's result is a row, a scalar may be returned, which stands for a row with that value in all
    columns.
    """
    if op in ("convert", "bitcast") and operands[0].dtype == dtype:
        return operands[0]
    if op == "column":
        return _column(region, operands[0], attributes[0])
    if op in OPERATIONS or op in ("convert", "bitcast"):
        if all(operand.op == "constant" for operand in operands):
            return _compute(region, op, operands, dtype)
        return _simplify(region, op, operands, dtype)
    return None


def _simplify(region: Maker, op: str, operands: tuple[Node, ...], dtype: np.dtype) -> Node | None:
    match op, operands:
        case "select", _:
            return _fold_select(*operands)
        case (("not" | "neg"), (inner,)) if inner.op == op:
            return inner.operands[0]
        # A boolean converted through a numeric type: zero and one are exact in every type, so one conversion
        # suffices.
        case "convert", (inner,) if inner.op == "convert" and inner.operands[0].dtype == np.bool_:
            return region.emit("convert", inner.operands[0], dtype=dtype, width=inner.width)
        case _, (left, right):
            return _of_two(region, op, left, right, dtype)
    return None


def _of_two(region: Maker, op: str, left: Node, right: Node, dtype: np.dtype) -> Node | None:
    if left is right and op in ("and", "or", "max", "min"):
        return left
    if left is right and op in WITH_EQUAL_OPERANDS and not is_float(left.dtype):
        return region.constant(WITH_EQUAL_OPERANDS[op], dtype)
    if op in COMPARISONS and left.op == "convert" and right.op == "constant":
        return _fold_comparison(region, op, left, right)
    # A product takes a fraction of a division's time, and is rounded to the same result here.
    if op == "div" and is_float(dtype) and (inverse := _inverse(region, right)) is not None:
        return region.emit("mul", left, inverse, dtype=dtype, width=left.width or right.width)
    if op in ABSORBING and not is_float(dtype):
        for operand in (left, right):
            if operand.op == "constant" and operand.value == _in(ABSORBING[op], dtype):
                return operand
    return _neutral(op, left, right)


def _inverse(region: Maker, divisor: Node) -> Node | None:
    """Returns the inverse of a power of two, or of a selection between two powers of two, or None.

    Multiplying by it gives exactly the quotient. For example, the derivative of a maximum divides by one or two,
    because both operands may be equal.
    """
    if divisor.dtype != np.float32:
        return None
    if divisor.op == "constant" and abs(math.frexp(divisor.value)[0]) == 0.5 and 1e-30 < abs(divisor.value) < 1e30:
        return region.constant(1 / divisor.value, divisor.dtype)
    if divisor.op != "select" or any(choice.op != "constant" for choice in divisor.operands[1:]):
        return None
    condition, *choices = divisor.operands
    inverses = [inverse for choice in choices if (inverse := _inverse(region, choice)) is not None]
    if len(inverses) < 2:
        return None
    return region.emit("select", condition, *inverses, dtype=divisor.dtype, width=divisor.width)


def _fold_select(condition: Node, chosen: Node, other: Node) -> Node | None:
    if chosen is other:
        return chosen
    if condition.op == "constant":
        return chosen if condition.value else other
    # The sides differ, so they are the constants True and False, and the result is the condition or its opposite.
    if chosen.dtype == np.bool_ and chosen.op == other.op == "constant":
        return condition if chosen.value else None
    return None


def _neutral(op: str, left: Node, right: Node) -> Node | None:
    if op in ("max", "min") and is_float(left.dtype):
        number, of_floats = (-np.inf if op == "max" else np.inf), True
    elif op in NEUTRAL:
        number, of_floats = NEUTRAL[op]
    else:
        return None
    if is_float(left.dtype) and not of_floats:
        return None
    # For neutral elements, maximum and minimum count as commutative.
    for changed, by in ((left, right), (right, left)) if op in COMMUTATIVE | {"max", "min"} else ((left, right),):
        # compares by `repr`, because 0 is not -0
        if by.op == "constant" and repr(by.value) == repr(_in(number, by.dtype)):
            return changed
    return None


def _fold_comparison(region: Maker, op: str, left: Node, right: Node) -> Node | None:
    """Simplifies a comparison of a converted boolean with a constant: to the boolean, its negation, or a constant.

    Returns None for any other comparison.
    """
    boolean = left.operands[0]
    if boolean.dtype != np.bool_:
        return None
    if_false, if_true = (bool(COMPARISONS[op](number, right.value)) for number in (0, 1))
    if if_false == if_true:
        return region.constant(if_true, np.bool_)
    return boolean if if_true else region.emit("not", boolean, dtype=np.bool_, width=boolean.width)


def _column(region: Maker, row: Node, place: int) -> Node | None:
    match row.op:
        case "stack":
            return row.operands[place]
        case "splat":
            return row.operands[0]
        case "uniform":
            slot, first = row.attributes
            return region.uniform(slot, first + place, row.dtype)
    return None


def _in(number: int | float, dtype: np.dtype) -> Any:
    return np.asarray(number).astype(dtype).item()


def is_float(dtype: np.dtype) -> bool:
    """Returns whether a dtype is a floating-point type. In contrast to NumPy, this includes bfloat16."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_short_float(dtype: np.dtype) -> bool:
    """Returns whether a dtype is a 16-bit float. Programs compute these in float32 and round each result."""
    return is_float(dtype) and dtype.itemsize == 2


def _compute(region: Maker, op: str, operands: tuple[Node, ...], dtype: np.dtype) -> Node:
    arrays = [np.asarray(operand.value, operand.dtype) for operand in operands]
    if op in EXACT:
        # Overflow and division by zero give the same results as in a kernel.
        with np.errstate(all="ignore"):
            return region.constant(np.asarray(EXACT[op](*arrays)).item(), dtype)
    # The caller may be tracing, and this must not become an equation.
    with jax.ensure_compile_time_eval():
        if op == "convert":
            result = jax.lax.convert_element_type(arrays[0], dtype)
        elif op == "bitcast":
            result = jax.lax.bitcast_convert_type(arrays[0], dtype)
        else:
            result = OPERATIONS[op](*arrays)
    return region.constant(np.asarray(result).item(), dtype)
