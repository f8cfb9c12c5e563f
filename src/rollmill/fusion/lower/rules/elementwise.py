"""Lowers element-wise operations on scalars, rows, and mixtures of both."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rollmill.core.types import is_key
from rollmill.fusion.ir import OPERATIONS, Node, is_float
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.large_arrays import chosen_whole, everywhere, is_too_large, mapped_elements
from rollmill.fusion.lower.movement import concatenate_last_axis, index_columns
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.values import (
    Concat,
    KeyPair,
    LoweringError,
    NodeArray,
    RowArray,
    ScalarArray,
    Value,
    is_large,
    no_nodes,
)

Combine = Callable[..., Node]
"""Function that returns the node for one element or row of the result, given the operands' nodes."""


def map_elements(ctx: Lowering, combine: Combine, values: Sequence[Value], dtype: Any) -> Value:
    """Applies `combine` to each element, or to each row if a value has rows. Axes of length 1 are broadcast."""
    shape = np.broadcast_shapes(*(value.shape for value in values))
    if any(isinstance(value, Concat) for value in values) and not any(map(is_large, values)):
        return _by_parts(ctx, combine, values, dtype, shape)
    if any(map(is_large, values)):
        return mapped_elements(ctx, combine, values, dtype, shape)
    if any(isinstance(value, RowArray) for value in values):
        operands = [ctx.row_operands(value, shape) for value in values]
        return ctx.rows_of(_each(combine, operands, shape[:-1]), shape[-1], dtype)
    if is_too_large(shape):
        return mapped_elements(ctx, combine, values, dtype, shape)
    return ScalarArray(_each(combine, [ctx.scalars(value).nodes for value in values], shape), dtype)


def _each(combine: Combine, operands: Sequence[NodeArray], shape: tuple[int, ...]) -> NodeArray:
    flat = [np.broadcast_to(nodes, shape).reshape(-1) for nodes in operands]
    found = no_nodes(int(np.prod(shape)))
    for place, nodes in enumerate(zip(*flat, strict=True)):
        found[place] = combine(*nodes)
    return found.reshape(shape)


def _by_parts(
    ctx: Lowering, combine: Combine, values: Sequence[Value], dtype: Any, shape: tuple[int, ...]
) -> Value:
    """Arrays side by side are worked on side by side."""
    ends = [np.cumsum([part.shape[-1] for part in value.parts]) for value in values if isinstance(value, Concat)]
    cuts = [0, *sorted({int(end) for own in ends for end in own})]
    found = []
    for first, end in zip(cuts, cuts[1:], strict=False):
        part = lambda value, a=first, b=end: (
            index_columns(ctx, value, a, b - a) if value.shape and value.shape[-1] == shape[-1] else value
        )
        found.append(map_elements(ctx, combine, [part(value) for value in values], dtype))
    return concatenate_last_axis(ctx, found)


def apply_operation(ctx: Lowering, op: str, *values: Value, dtype: Any = None) -> Value:
    """Lowers an element-wise operation, using the entry `op` of `operations.OPERATIONS`."""
    own = values[op == "select"].dtype if dtype is None else dtype
    return map_elements(ctx, lambda *nodes: ctx.apply(op, *nodes, dtype=own), values, own)


def select_elements(ctx: Lowering, condition: Value, one: Value, other: Value) -> Value:
    """Returns `one` where the condition is true, and `other` elsewhere. Supports random keys."""
    if is_large(one) or is_large(other):
        asked = everywhere(ctx, condition)
        whole = None if asked is None else chosen_whole(ctx, asked, one, other)
        if whole is not None:
            return whole
    if not is_key(one.dtype):
        return apply_operation(ctx, "select", condition, one, other)

    def choose(asked: Node, first: KeyPair, second: KeyPair) -> KeyPair:
        select = lambda a, b: ctx.apply("select", asked, a, b)
        return KeyPair(select(first.first, second.first), select(first.second, second.second))

    return map_elements(ctx, choose, [condition, one, other], one.dtype)  # pyright: ignore[reportArgumentType]


# --- rules ----------------------------------------------------------------------------------------------


def _by_name(op: str) -> Rule:
    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        return [apply_operation(ctx, op, *values, dtype=equation.dtype)]

    return rule


def _by_nodes(combine: Callable[..., Node]) -> Rule:
    """Returns the rule of an element-wise primitive, given `combine(ctx, equation, *nodes)`."""

    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        own = lambda *nodes: combine(ctx, equation, *nodes)
        return [map_elements(ctx, own, values, equation.dtype)]

    return rule


def identity(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Lowers primitives that do not change any value, by returning their operands."""
    return list(values)


def convert_dtype(ctx: Lowering, node: Node, dtype: Any) -> Node:
    """Converts a node to another dtype. Floats are truncated to integers, and any value but zero becomes True."""
    if node.dtype == np.dtype(dtype):
        return node
    if dtype == np.bool_:
        return ctx.apply("ne", node, ctx.constant(0, node.dtype))
    return ctx.apply("convert", node, dtype=dtype)


def _convert(ctx: Lowering, equation: Equation, x: Node) -> Node:
    return convert_dtype(ctx, x, equation.params["new_dtype"])


def _bitcast(ctx: Lowering, equation: Equation, x: Node) -> Node:
    new = np.dtype(equation.params["new_dtype"])
    if new.itemsize != x.dtype.itemsize or np.bool_ in (new, x.dtype):
        raise LoweringError(f"{x.dtype} cannot be reinterpreted as {new}, because their sizes differ")
    return ctx.apply("bitcast", x, dtype=new)


def _reduce_precision(ctx: Lowering, equation: Equation, x: Node) -> Node:
    """Rounds to a float with fewer bits, in the bits of a float32: overflow is infinite, denormals are zero."""
    exponent_bits, mantissa_bits = equation.params["exponent_bits"], equation.params["mantissa_bits"]
    if mantissa_bits >= 23 and exponent_bits >= 8:
        return x
    if x.dtype != np.float32:
        wide = _reduce_precision(ctx, equation, convert_dtype(ctx, x, np.float32))
        return convert_dtype(ctx, wide, x.dtype)
    word = lambda number: ctx.constant(number, np.uint32)
    both = lambda op, a, b: ctx.apply(op, a, b)
    bits = ctx.apply("bitcast", x, dtype=np.uint32)
    sign = both("and", bits, word(0x8000_0000))
    # Rounds to nearest, ties to even: adds half a unit, minus one if the last remaining bit is even.
    if mantissa_bits < 23:
        dropped = 23 - mantissa_bits
        last = both("and", both("shift_right_logical", bits, word(dropped)), word(1))
        rounding = both("add", last, word((1 << (dropped - 1)) - 1))
        bits = both("and", both("add", bits, rounding), word(0xFFFF_FFFF ^ ((1 << dropped) - 1)))
    if exponent_bits < 8:
        # biased exponents of the smallest and largest normal float, shifted to the exponent bits of a float32
        bias = (1 << (exponent_bits - 1)) - 1
        exponent = both("and", bits, word(0x7F80_0000))
        too_large = both("gt", exponent, word((127 + bias) << 23))
        too_small = both("le", exponent, word((127 - bias) << 23))
        bits = ctx.apply("select", too_large, both("or", sign, word(0x7F80_0000)), bits)
        bits = ctx.apply("select", too_small, sign, bits)
    rounded = ctx.apply("bitcast", bits, dtype=np.float32)
    return ctx.apply("select", ctx.apply("ne", x, x), x, rounded)


def _nextafter(ctx: Lowering, equation: Equation, x: Node, y: Node) -> Node:
    """Returns the neighbour of `x` towards `y`: one more or one less in the bits of its magnitude."""
    kind = np.dtype(f"int{x.dtype.itemsize * 8}")
    limits = np.iinfo(kind)
    number = lambda n: ctx.constant(n, kind)
    both = lambda op, a, b: ctx.apply(op, a, b)
    bits, goal = (ctx.apply("bitcast", node, dtype=kind) for node in (x, y))
    size, goal_size = (both("and", node, number(limits.max)) for node in (bits, goal))
    goal_sign = both("and", goal, number(limits.min))
    same_sign = both("ge", both("xor", bits, goal), number(0))
    grows = both("and", same_sign, both("lt", size, goal_size))
    neighbour = both("add", bits, ctx.apply("select", grows, number(1), number(-1)))
    is_zero, goal_is_zero = (both("eq", node, number(0)) for node in (size, goal_size))
    neighbour = ctx.apply("select", is_zero, both("or", goal_sign, number(1)), neighbour)
    is_there = both("or", both("eq", bits, goal), both("and", is_zero, goal_is_zero))
    found = ctx.apply("bitcast", ctx.apply("select", is_there, goal, neighbour), dtype=x.dtype)
    is_nan = both("or", both("ne", x, x), both("ne", y, y))
    return ctx.apply("select", is_nan, ctx.constant(math.nan, x.dtype), found)


def _square(ctx: Lowering, equation: Equation, x: Node) -> Node:
    return ctx.apply("mul", x, x)


def _one_minus_square(ctx: Lowering, equation: Equation, x: Node) -> Node:
    one = ctx.constant(1, x.dtype)
    return ctx.apply("mul", ctx.apply("add", one, x), ctx.apply("sub", one, x))


def _log2(ctx: Lowering, equation: Equation, x: Node) -> Node:
    return ctx.apply("mul", ctx.apply("log", x), ctx.constant(math.log2(math.e), x.dtype))


def _exp2(ctx: Lowering, equation: Equation, x: Node) -> Node:
    """Returns `2^x`. Floats of 16 bits use `exp(x log 2)` as JAX does, since its rounding shows in the result."""
    if x.dtype == np.float32:
        return ctx.apply("exp2", x)
    return ctx.apply("exp", ctx.apply("mul", x, ctx.constant(math.log(2), x.dtype)))


def _logistic(ctx: Lowering, equation: Equation, x: Node) -> Node:
    """Returns `1 / (1 + e^-x)`. For floats of 16 bits each step is rounded, as by XLA."""
    if x.dtype == np.float32:
        return ctx.apply("logistic", x)
    one = ctx.constant(1, x.dtype)
    return ctx.apply("div", one, ctx.apply("add", one, ctx.apply("exp", ctx.apply("neg", x))))


def _polynomial(ctx: Lowering, equation: Equation, x: Node, *coefficients: Node) -> Node:
    """Evaluates a polynomial by Horner's rule, from coefficients with the constant first."""
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = ctx.apply("add", ctx.apply("mul", total, x), coefficient)
    return total


def _integer_pow(ctx: Lowering, equation: Equation, x: Node) -> Node:
    """Returns an integer power by repeated squaring, in the order in which JAX multiplies."""
    exponent = equation.params["y"]
    if exponent == 0:
        return ctx.constant(1, x.dtype)
    result, square, rest = None, x, abs(exponent)
    while rest:
        if rest & 1:
            result = square if result is None else ctx.apply("mul", result, square)
        rest >>= 1
        square = ctx.apply("mul", square, square) if rest else square
    assert result is not None
    return ctx.apply("div", ctx.constant(1, x.dtype), result) if exponent < 0 else result


def _pow(ctx: Lowering, equation: Equation, x: Node, y: Node) -> Node:
    return ctx.apply("pow", x, convert_dtype(ctx, y, x.dtype))


def _clamp(ctx: Lowering, equation: Equation, low: Node, x: Node, high: Node) -> Node:
    return ctx.apply("min", ctx.apply("max", x, low), high)


def _round(ctx: Lowering, equation: Equation, x: Node) -> Node:
    even = equation.params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return ctx.apply("round_even" if even else "round_away", x)


def _in_order(op: str) -> Callable[..., Node]:
    """Comparisons in a total order: -0 before 0, NaN last, and negative NaN first."""

    def rule(ctx: Lowering, equation: Equation, x: Node, y: Node) -> Node:
        return ctx.apply(op, ordered_bits(ctx, x), ordered_bits(ctx, y))

    return rule


def ordered_bits(ctx: Lowering, x: Node) -> Node:
    """Maps floats to integers with the same total order. Integers are returned unchanged."""
    if not is_float(x.dtype):
        return x
    kind = np.dtype(f"int{x.dtype.itemsize * 8}")
    bits = ctx.apply("bitcast", x, dtype=kind)
    sign = ctx.apply("shift_right_arithmetic", bits, ctx.constant(kind.itemsize * 8 - 1, kind))
    magnitude = ctx.apply("and", sign, ctx.constant(np.iinfo(kind).max, kind))
    return ctx.apply("xor", bits, magnitude)


def _select_n(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    which, *cases = values
    return [one_of(ctx, which, cases)]


def one_of(ctx: Lowering, which: Value, cases: Sequence[Value]) -> Value:
    """Selects one of several cases by an integer or a boolean, where True selects the second case."""
    result = cases[0]
    for number, case in enumerate(cases[1:], start=1):
        is_case = lambda node, n=number: ctx.apply("eq", node, ctx.constant(n, node.dtype))
        condition = which if which.dtype == np.bool_ else map_elements(ctx, is_case, [which], np.dtype(bool))
        result = select_elements(ctx, condition, case, result)
    return result


UNCHANGED = (
    "column_major",
    "copy",
    "copy_p",
    "optimization_barrier",
    "stop_gradient",
    "name",
    "pvary",
    "pcast",
    "mesh_cast",
    "reshard",
    "sharding_constraint",
    "layout_constraint",
    "device_put",
    "random_clone",
)

RULES: dict[str, Rule] = {
    **{name: _by_name(name) for name in OPERATIONS},
    **{name: identity for name in UNCHANGED},
    "add_any": _by_name("add"),
    "convert_element_type": _by_nodes(_convert),
    "bitcast_convert_type": _by_nodes(_bitcast),
    "reduce_precision": _by_nodes(_reduce_precision),
    "nextafter": _by_nodes(_nextafter),
    "square": _by_nodes(_square),
    "one_minus_square": _by_nodes(_one_minus_square),
    "exp2": _by_nodes(_exp2),
    "log2": _by_nodes(_log2),
    "logistic": _by_nodes(_logistic),
    "polynomial": _by_nodes(_polynomial),
    "integer_pow": _by_nodes(_integer_pow),
    "pow": _by_nodes(_pow),
    "clamp": _by_nodes(_clamp),
    "round": _by_nodes(_round),
    "lt_to": _by_nodes(_in_order("lt")),
    "le_to": _by_nodes(_in_order("le")),
    "eq_to": _by_nodes(_in_order("eq")),
    "select_n": _select_n,
}
