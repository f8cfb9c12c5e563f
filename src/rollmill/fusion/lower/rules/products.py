"""Lowers matrix products: of an environment's vectors with shared matrices, and of small matrices of its own.

Shape letters: `b` batch, `f` and `g` free axes of the two operands, `c` contracted axes, `n` matrix columns.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rollmill.fusion.ir import Node, is_float
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.movement import gather_static, permute_axes, reshape_value
from rollmill.fusion.lower.prologue import PrologueBuilder
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules import elementwise
from rollmill.fusion.lower.rules.elementwise import convert_dtype, one_of
from rollmill.fusion.lower.rules.reductions import row_total
from rollmill.fusion.lower.values import (
    NARROW,
    Concat,
    Const,
    LoweringError,
    NodeArray,
    OuterProducts,
    RowArray,
    ScalarArray,
    Uniform,
    Value,
    VectorPair,
    alone,
    is_shared,
    no_nodes,
    positions,
)

MAX_MULTIPLIED = 4096
"""Maximum number of multiplications of a matrix product that is unrolled into scalars."""

MAX_UNROLLED = 32
"""Maximum length of a vector of scalars whose product with a narrow matrix is unrolled."""


class Sides(NamedTuple):
    """The batch axes, free axes and summed axes of an operand of a matrix product."""

    batch: tuple[int, ...]
    free: tuple[int, ...]
    summed: tuple[int, ...]


def _dot_general(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    (summed, batch) = equation.params["dimension_numbers"]
    sides = [_sides(value, tuple(c), tuple(b)) for value, c, b in zip(values, summed, batch, strict=True)]
    one, other = values
    dtype = equation.dtype
    # A matrix that all environments share is a uniform operand, by which tensor cores multiply a block of rows.
    if is_shared(other):
        return [_with_shared(ctx, one, sides[0], other, sides[1], dtype)]
    # `x^T W = (W^T x)^T`: the shared side becomes the right side, and the free axes are exchanged afterwards.
    if is_shared(one) and not _has_free_rows(other, sides[1]):
        turned = _with_shared(ctx, other, sides[1], one, sides[0], dtype)
        return [_exchange_axes(ctx, turned, *map(len, (sides[0].batch, sides[1].free, sides[0].free)))]
    # For the gradient of a weight matrix, only the sum over samples is needed, which is a product of two tall
    # matrices.
    if all(_are_vectors(value, side) for value, side in zip(values, sides, strict=True)):
        vectors = zip(_vectors_inside(ctx, one, sides[0]), _vectors_inside(ctx, other, sides[1]), strict=True)
        return [OuterProducts(tuple(VectorPair(*pair) for pair in vectors), dtype)]
    return [_of_two(ctx, one, sides[0], other, sides[1], dtype)]


def expand_outer_products(ctx: Lowering, value: Value) -> Value:
    """Expands outer products to elements or rows, and returns other values unchanged."""
    if not isinstance(value, OuterProducts):
        return value
    side = Sides(batch=(), free=(0,), summed=())
    if len(value.pairs) > 1:
        _check_multiplied(len(value.pairs) * int(np.prod(value.shape)))
    products = [_of_two(ctx, left, side, right, side, value.dtype) for left, right in value.pairs]
    if any(isinstance(product, RowArray) for product in products):
        rows = [ctx.rows(product) for product in products]
        return RowArray(_add([row.nodes for row in rows], ctx), rows[0].width, value.dtype)
    return ScalarArray(_add([ctx.scalars(product).nodes for product in products], ctx), value.dtype)


def _add(arrays: Sequence[NodeArray], ctx: Lowering) -> NodeArray:
    return reduce(np.frompyfunc(lambda a, b: _plus(ctx, a, b), 2, 1), arrays)


def _are_vectors(value: Value, sides: Sides) -> bool:
    """Returns whether an operand is vectors, one for each position of the contracted axes."""
    return not sides.batch and sides.free == (len(value.shape) - 1,)


def _vectors_inside(ctx: Lowering, value: Value, sides: Sides) -> list[Value]:
    """Returns the vectors of an operand, one for each position of the contracted axes."""
    if len(value.shape) == 1:
        return [value]
    places = positions(value.shape).transpose((*sides.summed, *sides.free))
    return [gather_static(ctx, value, row) for row in places.reshape(-1, value.shape[-1])]


def _sum(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    """Lowers `add_any`: the gradient of a matrix that is used several times is one sum of all products."""
    if all(isinstance(value, OuterProducts) for value in values):
        pairs = [pair for value in values if isinstance(value, OuterProducts) for pair in value.pairs]
        return [OuterProducts(tuple(pairs), equation.dtype)]
    return elementwise.RULES["add_any"](ctx, equation, [expand_outer_products(ctx, value) for value in values])


def one_of_sums(ctx: Lowering, which: Value, cases: Sequence[Value]) -> OuterProducts | None:
    """Selects one of several cases that are sums of outer products or zero. Returns None for other cases.

    The result has the vector pairs of all cases, with the vectors of unselected cases set to zero.
    """
    sums = [case for case in cases if isinstance(case, OuterProducts)]
    if not sums or not all(isinstance(case, OuterProducts) or _is_zero(case) for case in cases):
        return None

    def only(number: int, side: Value) -> Value:
        zero = Const(np.zeros(side.shape, side.dtype))
        return one_of(ctx, which, [side if n == number else zero for n in range(len(cases))])

    pairs = [
        VectorPair(only(number, left), only(number, right))
        for number, case in enumerate(cases)
        if isinstance(case, OuterProducts)
        for left, right in case.pairs
    ]
    return OuterProducts(tuple(pairs), sums[0].dtype)


def _is_zero(value: Value) -> bool:
    return isinstance(value, Const) and not value.array.any()


def _sides(value: Value, summed: tuple[int, ...], batch: tuple[int, ...]) -> Sides:
    free = tuple(axis for axis in range(len(value.shape)) if axis not in (*summed, *batch))
    return Sides(batch, free, summed)


def _exchange_axes(ctx: Lowering, value: Value, batch: int, first: int, second: int) -> Value:
    """Transposes `[b, f, g]` to `[b, g, f]`."""
    axes = (*range(batch), *range(batch + first, batch + first + second), *range(batch, batch + first))
    return permute_axes(ctx, value, axes)


def _has_free_rows(value: Value, sides: Sides) -> bool:
    """Returns whether a value's rows lie across the contracted axis."""
    return isinstance(value, RowArray) and len(value.shape) - 1 in sides.free[-1:]


# --- with a matrix that all environments share --------------------------------------------------------------


class MatrixOperand(NamedTuple):
    """A matrix `[c, n]` that all environments share, and its layout in memory."""

    array: Any
    """The matrix as stored: `[c, n]`, or `[n, c]` if transposed."""
    transposed: bool
    summed: int
    columns: int

    def rows(self, first: int, count: int) -> "MatrixOperand":
        """Returns `count` rows of the matrix, beginning at row `first`."""
        if count == self.summed:
            return self
        # The part stays transposed like the whole, so that no copy is made.
        own = slice(first, first + count)
        return self._replace(array=self.array[:, own] if self.transposed else self.array[own], summed=count)

    def chosen(self, prologue: PrologueBuilder, chosen: np.ndarray) -> "MatrixOperand":
        """Returns a matrix that consists of the rows `chosen`. Equal selections use the same uniform array."""
        places = positions(self.array.shape)[:, chosen] if self.transposed else positions(self.array.shape)[chosen]
        is_known = isinstance(self.array, np.ndarray)
        array = self.array.reshape(-1)[places] if is_known else prologue.picked(Uniform(self.array, places))
        return self._replace(array=array, summed=len(chosen))


def _with_shared(ctx: Lowering, value: Value, sides: Sides, shared: Value, theirs: Sides, dtype: Any) -> Value:
    """Returns the product `[b, f, g]`, where `g` are the free axes of the shared array."""
    lead = tuple(value.shape[axis] for axis in (*sides.batch, *sides.free))
    # `[b, f, c]`, with all summed axes as one. From here on, there is one vector for each index of `lead`.
    places = positions(value.shape).transpose((*sides.batch, *sides.free, *sides.summed))
    vectors = gather_static(ctx, value, places.reshape(*lead, -1))
    batch, columns = lead[: len(sides.batch)], tuple(shared.shape[axis] for axis in theirs.free)
    products = []
    for at in np.ndindex(*lead):
        matrix = _matrix(ctx, shared, theirs, at[: len(batch)])
        vector = gather_static(ctx, vectors, positions(vectors.shape)[(*at, ...)])
        products.append(vector_matrix(ctx, vector, matrix, dtype))
    if not products:
        raise LoweringError("kernels do not support a product without vectors")
    whole = combine_vectors(ctx, products, lead, products[0].shape[-1])
    return reshape_value(ctx, whole, (*lead, *columns)) if len(columns) != 1 else whole


def combine_vectors(ctx: Lowering, vectors: Sequence[Value], lead: tuple[int, ...], width: int) -> Value:
    """Combines vectors of equal width into an array `[*lead, width]`."""
    # All vectors become rows, or all become scalars, because an array never contains both.
    if any(isinstance(value, RowArray | Concat) for value in vectors):
        nodes = no_nodes(len(vectors))
        nodes[:] = [ctx.rows(value).nodes[()] for value in vectors]
        return RowArray(nodes.reshape(lead), width, vectors[0].dtype)
    nodes = np.stack([ctx.scalars(value).nodes for value in vectors])
    return ScalarArray(nodes.reshape(*lead, width), vectors[0].dtype)


def _matrix(ctx: Lowering, shared: Value, sides: Sides, at: tuple[int, ...]) -> MatrixOperand:
    """Returns the matrix of one batch, transposed if its memory layout avoids a copy so."""
    array = ctx.array(shared)
    summed = int(np.prod([array.shape[axis] for axis in sides.summed], initial=1))
    columns = int(np.prod([array.shape[axis] for axis in sides.free], initial=1))
    # Two orders of axes need no copy: `[b, c, n]`, and `[b, n, c]`, which kernels read with exchanged strides.
    # Without summed or free axes, both orders are equal, and count as not transposed.
    as_it_is = (*sides.batch, *sides.summed, *sides.free), (*sides.batch, *sides.free, *sides.summed)
    own = tuple(range(array.ndim))
    turned = own == as_it_is[1] and own != as_it_is[0]
    if own not in as_it_is:
        array = jnp.transpose(array, as_it_is[0])
    if at:
        array = array.reshape(-1, *array.shape[len(sides.batch) :])[_row_of(at, array.shape)]
    return MatrixOperand(
        array.reshape((columns, summed) if turned else (summed, columns)), turned, summed, columns
    )


def _row_of(at: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return int(np.ravel_multi_index(at, shape[: len(at)]))


def vector_matrix(ctx: Lowering, vector: Value, matrix: MatrixOperand, dtype: Any) -> Value:
    """Returns the product of a vector `[c]` and a shared matrix `[c, n]`."""
    if isinstance(vector, Concat):
        return _of_parts(ctx, vector, matrix, dtype)
    # In this order: products that tensor cores do not support (integers, few elements), products that are too
    # narrow for them, products with constant elements, outer products, and all others.
    few = isinstance(vector, ScalarArray) and matrix.summed <= MAX_UNROLLED
    if not is_float(dtype) or (few and matrix.columns <= NARROW):
        return _write_sums(ctx, vector, matrix, dtype)
    if matrix.columns <= NARROW:
        return _column_by_column(ctx, vector, matrix, dtype)
    if isinstance(vector, ScalarArray) and any(node.op == "constant" for node in vector.nodes):
        return _with_known(ctx, vector, matrix, dtype)
    if matrix.summed == 1:
        return _multiple(ctx, ctx.scalar(vector), matrix, dtype)
    # Only this case becomes a matrix product of the kernel. The cases above are cheaper as ordinary arithmetic.
    row = ctx.rows(vector).nodes[()]
    slot = ctx.prologue.slot(matrix.array)
    attributes = (slot, 0, 0, matrix.summed if matrix.transposed else matrix.columns, matrix.transposed)
    row = ctx.region.emit("dot", row, dtype=dtype, width=matrix.columns, attributes=attributes)
    return RowArray(alone(row), matrix.columns, dtype)


def _with_known(ctx: Lowering, vector: ScalarArray, matrix: MatrixOperand, dtype: Any) -> RowArray:
    """Multiplies a vector with some constant elements, which contribute a uniform part to the product.

    Agents with the same weights that see the same, but for who they are, have the rest of it in common. Zeros are
    left out, also where a weight is not finite.
    """
    is_known = np.array([node.op == "constant" for node in vector.nodes])
    numbers = np.array([node.value if known else 0 for node, known in zip(vector.nodes, is_known, strict=True)])
    rows = matrix.chosen(ctx.prologue, np.flatnonzero(numbers))
    turned = ctx.prologue.turned(rows.array) if rows.transposed else rows.array
    known = ctx.prologue.combined(turned, numbers[numbers != 0].astype(np.float32), np.dtype(dtype))
    if is_known.all():
        return RowArray(alone(ctx.uniform_row(known)), matrix.columns, dtype)
    # Only unknown elements are multiplied in the kernel, by their rows of the matrix.
    own = matrix.chosen(ctx.prologue, np.flatnonzero(~is_known))
    unknown = ctx.rows(vector_matrix(ctx, ScalarArray(vector.nodes[~is_known], vector.dtype), own, dtype))
    if not rows.summed:
        return unknown
    return RowArray(alone(ctx.apply("add", unknown.nodes[()], ctx.uniform_row(known))), matrix.columns, dtype)


def _of_parts(ctx: Lowering, vector: Concat, matrix: MatrixOperand, dtype: Any) -> Value:
    """Multiplies concatenated vectors, as the sum of their products with parts of the matrix."""
    first, products = 0, []
    for part in vector.parts:
        size = part.shape[-1]
        # Shared parts become scalars. Constant scalars are multiplied outside of the kernel.
        own = part if not is_shared(part) else ctx.scalars(part)
        products.append(vector_matrix(ctx, own, matrix.rows(first, size), dtype))
        first += size
    if any(isinstance(value, RowArray) for value in products):
        total = reduce(lambda a, b: ctx.apply("add", a, b), [ctx.rows(value).nodes[()] for value in products])
        return RowArray(alone(total), matrix.columns, dtype)
    return ScalarArray(_add([ctx.scalars(value).nodes for value in products], ctx), dtype)


def _write_sums(ctx: Lowering, vector: Value, matrix: MatrixOperand, dtype: Any) -> ScalarArray:
    """Returns the product with each element computed as a separate sum."""
    _check_multiplied(matrix.summed * matrix.columns)
    weights = ctx.scalars(_as_value(matrix.array)).nodes
    weights = weights.T if matrix.transposed else weights
    numbers = ctx.scalars(vector).nodes
    sums = [sum_of_products(ctx, numbers, weights[:, n], dtype) for n in range(matrix.columns)]
    return ScalarArray(np.array(sums, object), dtype)


def _as_value(array: Array | np.ndarray) -> Const | Uniform:
    return Const(array) if isinstance(array, np.ndarray) else Uniform(array)


def _column_by_column(ctx: Lowering, vector: Value, matrix: MatrixOperand, dtype: Any) -> ScalarArray:
    """Computes a product with few columns as one sum per column, because matrix products in kernels are wide."""
    row = ctx.rows(vector).nodes[()]
    # Each column is read as a row, so its elements must be adjacent in memory.
    turned = matrix.array if matrix.transposed else ctx.prologue.turned(matrix.array)
    columns = ctx.row_operands(_as_value(turned), (matrix.columns, matrix.summed))
    return ScalarArray(np.array([_sum_over_columns(ctx, row, column, dtype) for column in columns], object), dtype)


def _multiple(ctx: Lowering, number: Node, matrix: MatrixOperand, dtype: Any) -> RowArray:
    """Returns the only row of a matrix, times a number."""
    whole = ctx.prologue.turned(matrix.array) if matrix.transposed else matrix.array
    (row,) = ctx.row_operands(_as_value(whole), (1, matrix.columns))
    return ctx.rows_of(alone(_product(ctx, number, row, dtype)), matrix.columns, dtype)


# --- of two that differ from environment to environment ---------------------------------------------------------


def _of_two(ctx: Lowering, one: Value, own: Sides, other: Value, theirs: Sides, dtype: Any) -> Value:
    """Returns a product `[b, f, g]`, computed by ordinary arithmetic.

    It is computed with rows if the summed axis, or the last free axis, lies along rows.
    """
    if _has_free_rows(other, theirs):
        return _across(ctx, one, own, other, theirs, dtype)
    left, right = _vectors(ctx, one, own), _vectors(ctx, other, theirs)
    batch = left.shape[: len(own.batch)]
    free = left.shape[len(own.batch) : -1], right.shape[len(theirs.batch) : -1]
    if isinstance(left, RowArray) or isinstance(right, RowArray):
        left, right, of_pair = ctx.rows(left), ctx.rows(right), _sum_over_columns
    else:
        left, right, of_pair = ctx.scalars(left), ctx.scalars(right), sum_of_products
        _check_multiplied(int(np.prod([*batch, *free[0], *free[1], left.shape[-1]])))
    products = no_nodes((*batch, *free[0], *free[1]))
    for b in np.ndindex(*batch):
        for f in np.ndindex(*free[0]):
            for g in np.ndindex(*free[1]):
                products[(*b, *f, *g)] = of_pair(ctx, left.nodes[(*b, *f)], right.nodes[(*b, *g)], dtype)
    return ScalarArray(products, dtype)


def _vectors(ctx: Lowering, value: Value, sides: Sides) -> Value:
    """Arranges an operand as vectors, `[b, free, c]`."""
    moved = positions(value.shape).transpose((*sides.batch, *sides.free, *sides.summed))
    lead = moved.shape[: len(sides.batch) + len(sides.free)]
    return gather_static(ctx, value, moved.reshape(*lead, -1))


def _across(ctx: Lowering, one: Value, own: Sides, other: Value, theirs: Sides, dtype: Any) -> Value:
    """Sums of rows, each times a number."""
    assert isinstance(other, RowArray)
    weights = ctx.scalars(_vectors(ctx, one, own)).nodes
    # The last free axis is the row itself. Nodes have the other axes, `[b, g, c]`, and each node is a row.
    leading = (*theirs.batch, *theirs.free[:-1], *theirs.summed)
    rows = other.nodes.transpose(leading)
    num_across = len(theirs.batch) + len(theirs.free) - 1
    rows = rows.reshape(*rows.shape[:num_across], -1)
    batch, free = weights.shape[: len(own.batch)], weights.shape[len(own.batch) : -1]
    across = rows.shape[len(theirs.batch) : num_across]
    _check_multiplied(int(np.prod([*batch, *free, *across, rows.shape[-1]])))
    sums = no_nodes((*batch, *free, *across))
    for b in np.ndindex(*batch):
        for f in np.ndindex(*free):
            for g in np.ndindex(*across):
                sums[(*b, *f, *g)] = sum_of_products(ctx, weights[(*b, *f)], rows[(*b, *g)], dtype)
    return RowArray(sums, other.width, dtype)


def sum_of_products(ctx: Lowering, one: NodeArray, other: NodeArray, dtype: Any) -> Node:
    """Returns the dot product of two vectors of nodes, summed in order."""
    products = [_product(ctx, a, b, dtype) for a, b in zip(one, other, strict=True)]
    # A sum without terms, as for an empty vector, is zero.
    if not products:
        return ctx.constant(0, dtype)
    return convert_dtype(ctx, reduce(lambda a, b: _plus(ctx, a, b), products), dtype)


def _sum_over_columns(ctx: Lowering, one: Node, other: Node, dtype: Any) -> Node:
    return convert_dtype(ctx, row_total(ctx, "add", _product(ctx, one, other, dtype)), dtype)


def _product(ctx: Lowering, one: Node, other: Node, dtype: Any) -> Node:
    """Returns the product of two elements in the dtype of their sum, which is float32 for floats.

    The product of two booleans is their conjunction, and a sum of booleans is their disjunction.
    """
    if dtype == np.bool_:
        return ctx.apply("and", one, other)
    wide = np.float32 if is_float(np.dtype(dtype)) else dtype
    return ctx.apply("mul", convert_dtype(ctx, one, wide), convert_dtype(ctx, other, wide))


def _plus(ctx: Lowering, one: Node, other: Node) -> Node:
    return ctx.apply("or" if one.dtype == np.bool_ else "add", one, other)


def _check_multiplied(count: int) -> None:
    if count > MAX_MULTIPLIED:
        raise LoweringError(
            f"a matrix product takes {count} multiplications in each environment, more than the limit of "
            f"{MAX_MULTIPLIED}. Products with matrices that all environments share have no limit"
        )


RULES: dict[str, Rule] = {"dot_general": _dot_general, "add_any": _sum}
