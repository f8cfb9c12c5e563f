"""Expressions of drawn programs as JSON."""

from typing import Any

from drawn_programs import Expr
from drawn_types import Type


def to_json(expr: Expr) -> list[Any]:
    """An expression as lists, numbers and strings."""
    params = [repr(x) if isinstance(x, float) else x for x in expr.params]
    return [expr.op, [expr.type.dtype, list(expr.type.shape)], params, list(map(to_json, expr.parts)), expr.binds]


def from_json(data: Any) -> Expr:
    """The expression of `to_json`."""
    op, (dtype, shape), params, parts, binds = data
    return Expr(
        op,
        Type(dtype, tuple(shape)),
        tuple(map(_parameter, params)),
        tuple(map(from_json, parts)),
        tuple(map(tuple, binds)),
    )


def _parameter(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(map(_parameter, x))
    try:
        return float(x) if isinstance(x, str) else x
    except ValueError:
        return x
