"""Lowers factorisations and triangular solves of small matrices, unrolled into scalars.

Letters: `n` rows of a matrix, `m` columns of a right-hand side. Leading axes are batches.
"""

from collections.abc import Sequence
from functools import reduce
from math import prod

import numpy as np

from rollmill.fusion.ir import Node
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.reductions import is_better
from rollmill.fusion.lower.values import LoweringError, NodeArray, ScalarArray, Value, no_nodes

MAX_MULTIPLIED = 4096
"""Approximate maximum number of multiplications of a factorisation or solve: one matrix of 16 x 16, or eight of 8
x 8."""


def check_order(primitive: str, shape: Sequence[int], columns: int) -> None:
    """Raises a `LoweringError` if a factorisation or solve of matrices of this shape is too large to unroll."""
    *batch, rows, _ = shape
    count = prod(batch) * rows * rows * columns
    if count > MAX_MULTIPLIED:
        many = f"{prod(batch)} matrices" if prod(batch) > 1 else "a matrix"
        raise LoweringError(
            f"{primitive} of {many} of {shape[-2]} x {shape[-1]} takes about {count:,} multiplications in each "
            f"environment, more than the limit of {MAX_MULTIPLIED:,}, which is one matrix of 16 x 16"
        )


# --- LU with partial pivoting ---------------------------------------------------------------------------------


def _lu(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Returns both factors in one matrix, the pivots, and the order of the rows in the product of the factors."""
    check_order("lu", values[0].shape, min(values[0].shape[-2:]))
    matrices = ctx.scalars(values[0]).nodes
    factors, pivots, orders = (no_nodes(output.shape) for output in equation.outputs)
    for at in np.ndindex(*matrices.shape[:-2]):
        factors[at], pivots[at], orders[at] = _factorise(ctx, matrices[at])
    found = zip((factors, pivots, orders), equation.outputs, strict=True)
    return [ScalarArray(nodes, np.dtype(output.dtype)) for nodes, output in found]


def _factorise(ctx: Lowering, matrix: NodeArray) -> tuple[NodeArray, list[Node], list[Node]]:
    """Computes Gaussian elimination. Each row carries its number along."""
    count, columns = matrix.shape
    rows = [[*matrix[n], ctx.constant(n, np.int32)] for n in range(count)]
    pivots = []
    for step in range(min(count, columns)):
        pivots.append(_row_of_greatest(ctx, [row[step] for row in rows], step))
        _exchange(ctx, rows, step, pivots[-1])
        for n in range(step + 1, count):
            _eliminate(ctx, rows[step], rows[n], step, columns)
    factors = no_nodes(matrix.shape)
    for n, row in enumerate(rows):
        factors[n] = row[:columns]
    return factors, pivots, [row[-1] for row in rows]


def _row_of_greatest(ctx: Lowering, column: Sequence[Node], first: int) -> Node:
    """Returns the first row with the greatest magnitude, from row `first` on."""
    best, place = ctx.apply("abs", column[first]), ctx.constant(first, np.int32)
    for n in range(first + 1, len(column)):
        magnitude = ctx.apply("abs", column[n])
        better = is_better(ctx, "gt", magnitude, best)
        best = ctx.apply("select", better, magnitude, best)
        place = ctx.apply("select", better, ctx.constant(n, np.int32), place)
    return place


def _exchange(ctx: Lowering, rows: list[list[Node]], first: int, place: Node) -> None:
    """Swaps a row with the row at `place`, which is not earlier."""
    here, there = rows[first], rows[first]
    for n in range(first + 1, len(rows)):
        is_it = ctx.apply("eq", place, ctx.constant(n, np.int32))
        there = [ctx.apply("select", is_it, a, b) for a, b in zip(rows[n], there, strict=True)]
        rows[n] = [ctx.apply("select", is_it, a, b) for a, b in zip(here, rows[n], strict=True)]
    rows[first] = there


def _eliminate(ctx: Lowering, pivot: Sequence[Node], row: list[Node], step: int, columns: int) -> None:
    """Subtracts the multiple of the pivot's row that cancels an element of a row, and stores the factor there.

    If the pivot is zero, all elements below it are zero, too, and the factor is zero, as in LAPACK.
    """
    zero = ctx.constant(0, row[step].dtype)
    factor = ctx.apply("div", row[step], pivot[step])
    row[step] = ctx.apply("select", ctx.apply("eq", pivot[step], zero), row[step], factor)
    for k in range(step + 1, columns):
        row[k] = ctx.apply("sub", row[k], ctx.apply("mul", row[step], pivot[k]))


def _pivots_to_permutation(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Returns the order of the rows after one exchange after the other."""
    pivots, size = ctx.scalars(values[0]).nodes, equation.params["permutation_size"]
    found = no_nodes(equation.shape)
    for at in np.ndindex(*pivots.shape[:-1]):
        rows = [[ctx.constant(n, np.int32)] for n in range(size)]
        for step, place in enumerate(pivots[at]):
            _exchange(ctx, rows, step, place)
        found[at] = [row[0] for row in rows]
    return [ScalarArray(found, np.dtype(equation.dtype))]


# --- Cholesky -------------------------------------------------------------------------------------------------


def _cholesky(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Returns the lower factor, or NaN throughout if the matrix is not positive definite."""
    check_order("cholesky", values[0].shape, values[0].shape[-1])
    matrices = ctx.scalars(values[0]).nodes
    found = no_nodes(matrices.shape)
    for at in np.ndindex(*matrices.shape[:-2]):
        found[at] = _root(ctx, matrices[at])
    return [ScalarArray(found, np.dtype(equation.dtype))]


def _root(ctx: Lowering, matrix: NodeArray) -> NodeArray:
    """Returns the lower Cholesky factor of a matrix, or NaN throughout if it is not positive definite."""
    size, dtype = len(matrix), matrix[0, 0].dtype
    zero, nan = ctx.constant(0, dtype), ctx.constant(np.nan, dtype)
    root = no_nodes(matrix.shape)
    root[:] = zero
    positive = []
    for k in range(size):
        square = _less_products(ctx, matrix[k, k], root[k, :k], root[k, :k])
        positive.append(ctx.apply("gt", square, zero))
        root[k, k] = ctx.apply("sqrt", square)
        for n in range(k + 1, size):
            rest = _less_products(ctx, matrix[n, k], root[n, :k], root[k, :k])
            root[n, k] = ctx.apply("div", rest, root[k, k])
    definite = reduce(lambda a, b: ctx.apply("and", a, b), positive, ctx.constant(True, np.bool_))
    for at in np.ndindex(*root.shape):
        root[at] = ctx.apply("select", definite, root[at], nan)
    return root


def _less_products(ctx: Lowering, number: Node, one: NodeArray, other: NodeArray) -> Node:
    """Subtracts the products of two vectors from a number, one after the other."""
    for a, b in zip(one, other, strict=True):
        number = ctx.apply("sub", number, ctx.apply("mul", a, b))
    return number


# --- triangular systems -----------------------------------------------------------------------------------------


def _triangular_solve(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Returns `x` for `a x = b`, or for `x a = b`, which is transposed to the first form."""
    params, on_left = equation.params, equation.params["left_side"]
    columns = values[1].shape[-1 if on_left else -2]
    check_order("triangular_solve", values[0].shape, columns)
    matrices, sides = (ctx.scalars(value).nodes for value in values)
    turned = params["transpose_a"] == on_left
    lower = params["lower"] != turned
    found = no_nodes(sides.shape)
    for at in np.ndindex(*matrices.shape[:-2]):
        matrix = matrices[at].T if turned else matrices[at]
        side = sides[at] if on_left else sides[at].T
        solved = _substitute(ctx, matrix, side, lower=lower, unit=params["unit_diagonal"])
        found[at] = solved if on_left else solved.T
    return [ScalarArray(found, np.dtype(equation.dtype))]


def _substitute(ctx: Lowering, matrix: NodeArray, side: NodeArray, *, lower: bool, unit: bool) -> NodeArray:
    """Solves a triangular system by forward or backward substitution, with results `[n, m]`."""
    size, found = len(matrix), no_nodes(side.shape)
    for n in range(size) if lower else reversed(range(size)):
        before = slice(0, n) if lower else slice(n + 1, size)
        for m in range(side.shape[1]):
            rest = _less_products(ctx, side[n, m], matrix[n, before], found[before, m])
            found[n, m] = rest if unit else ctx.apply("div", rest, matrix[n, n])
    return found


RULES: dict[str, Rule] = {
    "lu": _lu,
    "lu_pivots_to_permutation": _pivots_to_permutation,
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
}
