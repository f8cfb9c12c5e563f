"""Lowers reductions along axes, such as sums and maxima, and cumulative reductions."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np

from rollmill.fusion.ir import Node, is_float
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.large_loops import first_best_element, reduced_elements
from rollmill.fusion.lower.movement import concatenate_last_axis
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.elementwise import apply_operation, convert_dtype
from rollmill.fusion.lower.values import (
    Concat,
    LoweringError,
    NodeArray,
    RowArray,
    ScalarArray,
    Value,
    alone,
    is_large,
    no_nodes,
)

Combine = Callable[[Node, Node], Node]

REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}
"""Operations between two elements that the reduction primitives apply, by primitive."""

LANE_COLLECTIVES = {"psum": "add", "pmax": "max", "pmin": "min"}
"""Collectives that reduce over the lanes of a `vmap`, by primitive."""

RUNNING = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}

OVER_COLUMNS = {"add": "row_sum", "max": "row_max", "min": "row_min", "or": "row_max", "and": "row_min"}
"""Operations that reduce the columns of a row. The last two reduce booleans as integers."""


# --- along axes -----------------------------------------------------------------------------------------


def _by_op(op: str) -> Rule:
    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        return [reduce_axes(ctx, op, values[0], equation.params["axes"])]

    return rule


def _of_lanes(op: str) -> Rule:
    """Returns the rule of a collective over lanes of `vmap`, whose axes are integers in its jaxpr."""

    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        axes = equation.params["axes"]
        names = [axis for axis in axes if not isinstance(axis, int)]
        if names or equation.params["axis_index_groups"] is not None:
            raise LoweringError(
                f"a collective over {names or 'groups of lanes'} is not supported, only over whole axes of `vmap`"
            )
        return [reduce_axes(ctx, op, values[0], axes)]

    return rule


def reduce_axes(ctx: Lowering, op: str, value: Value, axes: Sequence[int]) -> Value:
    """Reduces an array along some axes with the operation `op`, element by element."""
    if is_large(value):
        return reduced_elements(ctx, op, value, axes, identity_element(op, value.dtype))
    last = len(value.shape) - 1
    leading = tuple(axis for axis in axes if axis != last)
    if isinstance(value, Concat):
        # Each part is reduced separately, because rows and scalars cannot be combined at once.
        parts = [reduce_axes(ctx, op, part, axes) for part in value.parts]
        return (
            reduce(lambda a, b: apply_operation(ctx, op, a, b), parts)
            if last in axes
            else concatenate_last_axis(ctx, parts)
        )
    combine = lambda a, b: ctx.apply(op, a, b)
    if isinstance(value, RowArray):
        rows = RowArray(_along(combine, value.nodes, leading), value.width, value.dtype)
        if last not in axes:
            return rows
        # Bitwise and, or of integers is not an extreme, and columns cannot be reduced by it.
        if op in OVER_COLUMNS and (op not in ("and", "or") or value.dtype == np.bool_):
            return _over_columns(ctx, op, rows)
        value, axes = ctx.scalars(rows), (len(rows.shape) - 1,)
    nodes = ctx.scalars(value).nodes
    if 0 in nodes.shape:
        shape = tuple(size for axis, size in enumerate(nodes.shape) if axis not in axes)
        return ScalarArray(
            np.full(shape, ctx.constant(identity_element(op, value.dtype), value.dtype), object), value.dtype
        )
    return ScalarArray(_along(combine, nodes, axes), value.dtype)


def _along(combine: Combine, nodes: NodeArray, axes: Sequence[int]) -> NodeArray:
    """Nodes without some axes."""
    if not axes:
        return nodes
    remaining = [axis for axis in range(nodes.ndim) if axis not in axes]
    moved = nodes.transpose([*remaining, *axes])
    flat = moved.reshape(*moved.shape[: len(remaining)], -1)
    results = no_nodes(flat.shape[:-1])
    for at in np.ndindex(*results.shape):
        results[at] = reduce(combine, flat[at])
    return results


def _over_columns(ctx: Lowering, op: str, rows: RowArray) -> ScalarArray:
    totals = no_nodes(rows.nodes.shape)
    for at in np.ndindex(*totals.shape):
        totals[at] = row_total(ctx, op, rows.nodes[at])
    return ScalarArray(totals, rows.dtype)


def row_total(ctx: Lowering, op: str, row: Node) -> Node:
    """Returns the reduction of a row's columns to one scalar."""
    numbers = convert_dtype(ctx, row, np.int32) if row.dtype == np.bool_ else row
    total = ctx.region.emit(OVER_COLUMNS[op], numbers, dtype=numbers.dtype)
    return convert_dtype(ctx, total, row.dtype)


def identity_element(op: str, dtype: Any) -> Any:
    """Returns the result of a reduction over no elements, such as 0 for a sum."""
    limits = jnp.finfo(dtype) if is_float(dtype) else None if dtype == np.bool_ else np.iinfo(dtype)
    match op:
        case "max":
            return False if limits is None else -np.inf if is_float(dtype) else limits.min
        case "min":
            return True if limits is None else np.inf if is_float(dtype) else limits.max
        case "and":
            return -1
    return 1 if op == "mul" else 0


# --- running ----------------------------------------------------------------------------------------------


def _running(combine_of: Callable[[Lowering], Combine]) -> Rule:
    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        axis, reverse = equation.params["axis"], equation.params["reverse"]
        nodes = np.moveaxis(ctx.scalars(values[0]).nodes, axis, -1)
        results = _accumulate(combine_of(ctx), nodes[..., ::-1] if reverse else nodes)
        return [ScalarArray(np.moveaxis(results[..., ::-1] if reverse else results, -1, axis), equation.dtype)]

    return rule


def _accumulate(combine: Combine, nodes: NodeArray) -> NodeArray:
    totals = nodes.copy()
    for place in range(1, nodes.shape[-1]):
        for at in np.ndindex(*nodes.shape[:-1]):
            totals[(*at, place)] = combine(totals[(*at, place - 1)], nodes[(*at, place)])
    return totals


def _log_add_exp(ctx: Lowering) -> Combine:
    """Returns `log(exp(a) + exp(b))`. Infinities of one sign are kept."""

    def combine(a: Node, b: Node) -> Node:
        # `exp` of the negative distance is at most one, so it cannot overflow.
        greatest, gap = ctx.apply("max", a, b), ctx.apply("sub", a, b)
        rest = ctx.apply("log1p", ctx.apply("exp", ctx.apply("neg", ctx.apply("abs", gap))))
        is_nan = ctx.apply("ne", gap, gap)
        return ctx.apply("select", is_nan, ctx.apply("add", a, b), ctx.apply("add", greatest, rest))

    return combine


# --- the place of an extreme ----------------------------------------------------------------------------------


def _argument_of(op: str) -> Rule:
    """Returns the first maximum or minimum. NaN precedes all."""

    def rule(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
        (axis,) = equation.params["axes"]
        if is_large(values[0]):
            return [
                first_best_element(
                    ctx, lambda at, node, best: is_better(at, op, node, best), values[0], axis, equation.dtype
                )
            ]
        nodes = np.moveaxis(ctx.scalars(values[0]).nodes, axis, -1)
        results = no_nodes(nodes.shape[:-1])
        for at in np.ndindex(*results.shape):
            results[at] = _first_best(ctx, op, list(nodes[at]), equation.dtype)
        return [ScalarArray(results, equation.dtype)]

    return rule


def _first_best(ctx: Lowering, op: str, nodes: Sequence[Node], dtype: Any) -> Node:
    best, place = nodes[0], ctx.constant(0, dtype)
    for number, node in enumerate(nodes[1:], start=1):
        better = is_better(ctx, op, node, best)
        best = ctx.apply("select", better, node, best)
        place = ctx.apply("select", better, ctx.constant(number, dtype), place)
    return place


def is_better(ctx: Lowering, op: str, node: Node, best: Node) -> Node:
    """Returns whether a later element replaces the best so far. `op` is "gt" or "lt". The first NaN wins."""
    if not is_float(node.dtype):
        return ctx.apply(op, node, best)
    not_worse = ctx.apply("not", ctx.apply({"gt": "le", "lt": "ge"}[op], node, best))  # or one of the two is NaN
    return ctx.apply("and", not_worse, ctx.apply("eq", best, best))


# --- by a function of the caller's ------------------------------------------------------------------------------


def _reduce(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Lowers `jax.lax.reduce` with any function, also of several arrays together."""
    count, axes = len(values) // 2, equation.params["dimensions"]
    arrays, starts = [ctx.scalars(value) for value in values[:count]], list(values[count:])
    shape = arrays[0].shape
    remaining = [axis for axis in range(len(shape)) if axis not in axes]
    flat = [
        array.nodes.transpose([*remaining, *axes]).reshape(*(shape[axis] for axis in remaining), -1)
        for array in arrays
    ]
    results = [no_nodes(equation.shape) for _ in arrays]
    for at in np.ndindex(*equation.shape):
        totals = starts
        for place in range(flat[0].shape[-1]):
            own = [
                ScalarArray(alone(nodes[(*at, place)]), array.dtype)
                for nodes, array in zip(flat, arrays, strict=True)
            ]
            totals = ctx.read(equation.params["jaxpr"], [*totals, *own], ctx)
        for nodes, total in zip(results, totals, strict=True):
            nodes[at] = ctx.scalar(total)
    return [ScalarArray(nodes, array.dtype) for nodes, array in zip(results, arrays, strict=True)]


RULES: dict[str, Rule] = {
    **{name: _by_op(op) for name, op in REDUCTIONS.items()},
    **{name: _of_lanes(op) for name, op in LANE_COLLECTIVES.items()},
    **{name: _running(lambda ctx, own=op: lambda a, b: ctx.apply(own, a, b)) for name, op in RUNNING.items()},
    "cumlogsumexp": _running(_log_add_exp),
    "argmax": _argument_of("gt"),
    "argmin": _argument_of("lt"),
    "reduce": _reduce,
}
