"""Operations on each element: of scalars, of rows, and of mixtures."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rollmill.fusion.equation import Equation, Rule
from rollmill.fusion.folding import is_float
from rollmill.fusion.ir import Node
from rollmill.fusion.making import Making
from rollmill.fusion.operations import OPERATIONS
from rollmill.fusion.rearranging import index_columns, joined
from rollmill.fusion.refusals import NotLowered
from rollmill.fusion.values import (
    Joined,
    KeyPair,
    NodeArray,
    Rows,
    Scalars,
    Value,
    check_size,
    is_key,
    no_nodes,
)

Combine = Callable[..., Node]
"""Nodes of one element, or of one row, to the node of the result."""


def mapped(making: Making, combine: Combine, values: Sequence[Value], dtype: Any) -> Value:
    """`combine` of each element, or of each row where a value has rows; axes of length 1 are repeated."""
    shape = np.broadcast_shapes(*(value.shape for value in values))
    if any(isinstance(value, Joined) for value in values):
        return _by_parts(making, combine, values, dtype, shape)
    if any(isinstance(value, Rows) for value in values):
        operands = [making.row_operands(value, shape) for value in values]
        return making.rows_of(_each(combine, operands, shape[:-1]), shape[-1], dtype)
    check_size(shape)
    return Scalars(_each(combine, [making.scalars(value).nodes for value in values], shape), dtype)


def _each(combine: Combine, operands: Sequence[NodeArray], shape: tuple[int, ...]) -> NodeArray:
    flat = [np.broadcast_to(nodes, shape).reshape(-1) for nodes in operands]
    found = no_nodes(int(np.prod(shape)))
    for place, nodes in enumerate(zip(*flat, strict=True)):
        found[place] = combine(*nodes)
    return found.reshape(shape)


def _by_parts(
    making: Making, combine: Combine, values: Sequence[Value], dtype: Any, shape: tuple[int, ...]
) -> Value:
    """Arrays side by side are worked on side by side."""
    ends = [np.cumsum([part.shape[-1] for part in value.parts]) for value in values if isinstance(value, Joined)]
    cuts = [0, *sorted({int(end) for own in ends for end in own})]
    found = []
    for first, end in zip(cuts, cuts[1:], strict=False):
        part = lambda value, a=first, b=end: (
            index_columns(making, value, a, b - a) if value.shape and value.shape[-1] == shape[-1] else value
        )
        found.append(mapped(making, combine, [part(value) for value in values], dtype))
    return joined(making, found)


def applied(making: Making, op: str, *values: Value, dtype: Any = None) -> Value:
    """An operation of `operations.OPERATIONS` on each element."""
    own = values[op == "select"].dtype if dtype is None else dtype
    return mapped(making, lambda *nodes: making.apply(op, *nodes, dtype=own), values, own)


def chosen(making: Making, condition: Value, one: Value, other: Value) -> Value:
    """`one` where the condition holds; of random keys as well."""
    if not is_key(one.dtype):
        return applied(making, "select", condition, one, other)

    def choose(asked: Node, first: KeyPair, second: KeyPair) -> KeyPair:
        select = lambda a, b: making.apply("select", asked, a, b)
        return KeyPair(select(first.first, second.first), select(first.second, second.second))

    return mapped(making, choose, [condition, one, other], one.dtype)  # pyright: ignore[reportArgumentType]


# --- rules ----------------------------------------------------------------------------------------------


def _by_name(op: str) -> Rule:
    def rule(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
        return [applied(making, op, *values, dtype=equation.dtype)]

    return rule


def _by_nodes(combine: Callable[..., Node]) -> Rule:
    """From `combine(making, equation, *nodes)`."""

    def rule(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
        own = lambda *nodes: combine(making, equation, *nodes)
        return [mapped(making, own, values, equation.dtype)]

    return rule


def identity(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """What changes no number."""
    return list(values)


def converted(making: Making, node: Node, dtype: Any) -> Node:
    """A number in another type: of floats the integer towards zero, of all but zero True."""
    if node.dtype == np.dtype(dtype):
        return node
    if dtype == np.bool_:
        return making.apply("ne", node, making.constant(0, node.dtype))
    return making.apply("convert", node, dtype=dtype)


def _convert(making: Making, equation: Equation, x: Node) -> Node:
    return converted(making, x, equation.params["new_dtype"])


def _bitcast(making: Making, equation: Equation, x: Node) -> Node:
    new = np.dtype(equation.params["new_dtype"])
    if new.itemsize != x.dtype.itemsize or np.bool_ in (new, x.dtype):
        raise NotLowered(f"the bits of {x.dtype} cannot be read as {new}: sizes must be equal")
    return making.apply("bitcast", x, dtype=new)


def _reduce_precision(making: Making, equation: Equation, x: Node) -> Node:
    """Rounds to a float with fewer bits, in the bits of a float32: overflow is infinite, denormals are zero."""
    exponent_bits, mantissa_bits = equation.params["exponent_bits"], equation.params["mantissa_bits"]
    if mantissa_bits >= 23 and exponent_bits >= 8:
        return x
    if x.dtype != np.float32:
        wide = _reduce_precision(making, equation, converted(making, x, np.float32))
        return converted(making, wide, x.dtype)
    word = lambda number: making.constant(number, np.uint32)
    both = lambda op, a, b: making.apply(op, a, b)
    bits = making.apply("bitcast", x, dtype=np.uint32)
    sign = both("and", bits, word(0x8000_0000))
    if mantissa_bits < 23:  # to nearest, ties to even: half a unit, less one where the last bit that stays is even
        dropped = 23 - mantissa_bits
        last = both("and", both("shift_right_logical", bits, word(dropped)), word(1))
        rounding = both("add", last, word((1 << (dropped - 1)) - 1))
        bits = both("and", both("add", bits, rounding), word(0xFFFF_FFFF ^ ((1 << dropped) - 1)))
    if exponent_bits < 8:
        # biased exponents of the least and the greatest normal number, at the place of a float32's exponent
        bias = (1 << (exponent_bits - 1)) - 1
        exponent = both("and", bits, word(0x7F80_0000))
        too_large = both("gt", exponent, word((127 + bias) << 23))
        too_small = both("le", exponent, word((127 - bias) << 23))
        bits = making.apply("select", too_large, both("or", sign, word(0x7F80_0000)), bits)
        bits = making.apply("select", too_small, sign, bits)
    rounded = making.apply("bitcast", bits, dtype=np.float32)
    return making.apply("select", making.apply("ne", x, x), x, rounded)


def _nextafter(making: Making, equation: Equation, x: Node, y: Node) -> Node:
    """The neighbour of `x` towards `y`: one more or one less in the bits of its magnitude."""
    kind = np.dtype(f"int{x.dtype.itemsize * 8}")
    limits = np.iinfo(kind)
    number = lambda n: making.constant(n, kind)
    both = lambda op, a, b: making.apply(op, a, b)
    bits, goal = (making.apply("bitcast", node, dtype=kind) for node in (x, y))
    size, goal_size = (both("and", node, number(limits.max)) for node in (bits, goal))
    goal_sign = both("and", goal, number(limits.min))
    same_sign = both("ge", both("xor", bits, goal), number(0))
    grows = both("and", same_sign, both("lt", size, goal_size))
    neighbour = both("add", bits, making.apply("select", grows, number(1), number(-1)))
    is_zero, goal_is_zero = (both("eq", node, number(0)) for node in (size, goal_size))
    neighbour = making.apply("select", is_zero, both("or", goal_sign, number(1)), neighbour)
    is_there = both("or", both("eq", bits, goal), both("and", is_zero, goal_is_zero))
    found = making.apply("bitcast", making.apply("select", is_there, goal, neighbour), dtype=x.dtype)
    is_nan = both("or", both("ne", x, x), both("ne", y, y))
    return making.apply("select", is_nan, making.constant(math.nan, x.dtype), found)


def _square(making: Making, equation: Equation, x: Node) -> Node:
    return making.apply("mul", x, x)


def _one_minus_square(making: Making, equation: Equation, x: Node) -> Node:
    one = making.constant(1, x.dtype)
    return making.apply("mul", making.apply("add", one, x), making.apply("sub", one, x))


def _log2(making: Making, equation: Equation, x: Node) -> Node:
    return making.apply("mul", making.apply("log", x), making.constant(math.log2(math.e), x.dtype))


def _exp2(making: Making, equation: Equation, x: Node) -> Node:
    """`2^x`; for floats of 16 bits `exp(x log 2)`, as JAX lowers it: the rounded product shows in the result."""
    if x.dtype == np.float32:
        return making.apply("exp2", x)
    return making.apply("exp", making.apply("mul", x, making.constant(math.log(2), x.dtype)))


def _polynomial(making: Making, equation: Equation, x: Node, *coefficients: Node) -> Node:
    """By Horner's rule; the constant comes first."""
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = making.apply("add", making.apply("mul", total, x), coefficient)
    return total


def _integer_pow(making: Making, equation: Equation, x: Node) -> Node:
    """By repeated squaring, in the order in which JAX multiplies."""
    exponent = equation.params["y"]
    if exponent == 0:
        return making.constant(1, x.dtype)
    result, square, rest = None, x, abs(exponent)
    while rest:
        if rest & 1:
            result = square if result is None else making.apply("mul", result, square)
        rest >>= 1
        square = making.apply("mul", square, square) if rest else square
    assert result is not None
    return making.apply("div", making.constant(1, x.dtype), result) if exponent < 0 else result


def _pow(making: Making, equation: Equation, x: Node, y: Node) -> Node:
    return making.apply("pow", x, converted(making, y, x.dtype))


def _clamp(making: Making, equation: Equation, low: Node, x: Node, high: Node) -> Node:
    return making.apply("min", making.apply("max", x, low), high)


def _round(making: Making, equation: Equation, x: Node) -> Node:
    even = equation.params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return making.apply("round_even" if even else "round_away", x)


def _in_order(op: str) -> Callable[..., Node]:
    """Comparisons in which -0 comes before 0, and NaN after all, or before where its sign is negative."""

    def rule(making: Making, equation: Equation, x: Node, y: Node) -> Node:
        return making.apply(op, ordered_bits(making, x), ordered_bits(making, y))

    return rule


def ordered_bits(making: Making, x: Node) -> Node:
    """An integer by which floats are in total order; integers are what they are."""
    if not is_float(x.dtype):
        return x
    kind = np.dtype(f"int{x.dtype.itemsize * 8}")
    bits = making.apply("bitcast", x, dtype=kind)
    sign = making.apply("shift_right_arithmetic", bits, making.constant(kind.itemsize * 8 - 1, kind))
    magnitude = making.apply("and", sign, making.constant(np.iinfo(kind).max, kind))
    return making.apply("xor", bits, magnitude)


def _select_n(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    which, *cases = values
    return [one_of(making, which, cases)]


def one_of(making: Making, which: Value, cases: Sequence[Value]) -> Value:
    """The case of a number, or the second where a boolean is True."""
    result = cases[0]
    for number, case in enumerate(cases[1:], start=1):
        is_case = lambda node, n=number: making.apply("eq", node, making.constant(n, node.dtype))
        condition = which if which.dtype == np.bool_ else mapped(making, is_case, [which], np.dtype(bool))
        result = chosen(making, condition, case, result)
    return result


UNCHANGED = (
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
