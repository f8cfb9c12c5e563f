"""Matrix products: of an environment's vectors with matrices that all share, and small ones of its own.

Letters: `b` batch, `f` and `g` free axes of the two sides, `c` what is summed over, `n` columns of a matrix.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rollmill.fusion.equation import Equation, Rule
from rollmill.fusion.folding import is_float
from rollmill.fusion.ir import Node
from rollmill.fusion.making import Making, Uniforms
from rollmill.fusion.rearranging import rearranged, reshaped, transposed
from rollmill.fusion.refusals import NotLowered
from rollmill.fusion.rules.elementwise import converted
from rollmill.fusion.rules.reductions import row_total
from rollmill.fusion.values import (
    NARROW,
    Joined,
    Known,
    NodeArray,
    Outer,
    Rows,
    Scalars,
    Uniform,
    Value,
    alone,
    is_shared,
    no_nodes,
    positions,
)

MOST_MULTIPLIED = 4096
"""Multiplications of one product that is written out number by number."""

MOST_UNROLLED = 32
"""Elements of a vector of scalars whose product with few columns is written out."""


class Sides(NamedTuple):
    """The axes of an operand, by their part in the product."""

    batch: tuple[int, ...]
    free: tuple[int, ...]
    summed: tuple[int, ...]


def _dot_general(making: Making, equation: Equation, values: Sequence[Value]) -> list[Value]:
    (summed, batch) = equation.params["dimension_numbers"]
    sides = [_sides(value, tuple(c), tuple(b)) for value, c, b in zip(values, summed, batch, strict=True)]
    one, other = values
    dtype = equation.dtype
    if is_shared(other):
        return [_with_shared(making, one, sides[0], other, sides[1], dtype)]
    if is_shared(one) and not _has_free_rows(other, sides[1]):
        turned = _with_shared(making, other, sides[1], one, sides[0], dtype)
        return [_exchanged(making, turned, *map(len, (sides[0].batch, sides[1].free, sides[0].free)))]
    if all(len(value.shape) == 1 and side.free for value, side in zip(values, sides, strict=True)):
        return [Outer(one, other, dtype)]
    return [_of_two(making, one, sides[0], other, sides[1], dtype)]


def written_out(making: Making, product: Outer) -> Value:
    """The numbers, or rows, of a product of vectors."""
    side = Sides(batch=(), free=(0,), summed=())
    return _of_two(making, product.left, side, product.right, side, product.dtype)


def _sides(value: Value, summed: tuple[int, ...], batch: tuple[int, ...]) -> Sides:
    free = tuple(axis for axis in range(len(value.shape)) if axis not in (*summed, *batch))
    return Sides(batch, free, summed)


def _exchanged(making: Making, value: Value, batch: int, first: int, second: int) -> Value:
    """From `[b, f, g]` to `[b, g, f]`."""
    axes = (*range(batch), *range(batch + first, batch + first + second), *range(batch, batch + first))
    return transposed(making, value, axes)


def _has_free_rows(value: Value, sides: Sides) -> bool:
    """Whether a value has rows that are no vectors to multiply, but lie across."""
    return isinstance(value, Rows) and len(value.shape) - 1 in sides.free[-1:]


# --- with a matrix that all environments share --------------------------------------------------------------


class Matrix(NamedTuple):
    """A shared matrix `[c, n]`, and how it lies in memory."""

    array: Any
    """`[c, n]`, or `[n, c]`."""
    transposed: bool
    summed: int
    columns: int

    def rows(self, first: int, count: int) -> "Matrix":
        """Some of what is summed over."""
        if count == self.summed:
            return self
        own = slice(first, first + count)
        return self._replace(array=self.array[:, own] if self.transposed else self.array[own], summed=count)

    def chosen(self, uniforms: Uniforms, chosen: np.ndarray) -> "Matrix":
        """Those of what is summed over, the same array each time."""
        places = positions(self.array.shape)[:, chosen] if self.transposed else positions(self.array.shape)[chosen]
        is_known = isinstance(self.array, np.ndarray)
        array = self.array.reshape(-1)[places] if is_known else uniforms.picked(Uniform(self.array, places))
        return self._replace(array=array, summed=len(chosen))


def _with_shared(making: Making, value: Value, sides: Sides, shared: Value, theirs: Sides, dtype: Any) -> Value:
    """`[b, f, g]`, where `g` are the free axes of the shared array."""
    lead = tuple(value.shape[axis] for axis in (*sides.batch, *sides.free))
    places = positions(value.shape).transpose((*sides.batch, *sides.free, *sides.summed))
    vectors = rearranged(making, value, places.reshape(*lead, -1))
    batch, columns = lead[: len(sides.batch)], tuple(shared.shape[axis] for axis in theirs.free)
    found = []
    for at in np.ndindex(*lead):
        matrix = _matrix(making, shared, theirs, at[: len(batch)])
        vector = rearranged(making, vectors, positions(vectors.shape)[(*at, ...)])
        found.append(vector_matrix(making, vector, matrix, dtype))
    if not found:
        raise NotLowered("a product without any vectors")
    whole = gathered(making, found, lead, found[0].shape[-1])
    return reshaped(making, whole, (*lead, *columns)) if len(columns) != 1 else whole


def gathered(making: Making, found: Sequence[Value], lead: tuple[int, ...], width: int) -> Value:
    """Vectors of one width as an array `[*lead, width]`."""
    if any(isinstance(value, Rows | Joined) for value in found):
        nodes = no_nodes(len(found))
        nodes[:] = [making.rows(value).nodes[()] for value in found]
        return Rows(nodes.reshape(lead), width, found[0].dtype)
    nodes = np.stack([making.scalars(value).nodes for value in found])
    return Scalars(nodes.reshape(*lead, width), found[0].dtype)


def _matrix(making: Making, shared: Value, sides: Sides, at: tuple[int, ...]) -> Matrix:
    """The matrix of one batch; transposed where it lies in memory so that it need not be moved."""
    array = making.array(shared)
    summed = int(np.prod([array.shape[axis] for axis in sides.summed], initial=1))
    columns = int(np.prod([array.shape[axis] for axis in sides.free], initial=1))
    as_it_is = (*sides.batch, *sides.summed, *sides.free), (*sides.batch, *sides.free, *sides.summed)
    own = tuple(range(array.ndim))
    turned = own == as_it_is[1] and own != as_it_is[0]
    if own not in as_it_is:
        array = jnp.transpose(array, as_it_is[0])
    if at:
        array = array.reshape(-1, *array.shape[len(sides.batch) :])[_row_of(at, array.shape)]
    return Matrix(array.reshape((columns, summed) if turned else (summed, columns)), turned, summed, columns)


def _row_of(at: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return int(np.ravel_multi_index(at, shape[: len(at)]))


def vector_matrix(making: Making, vector: Value, matrix: Matrix, dtype: Any) -> Value:
    """A vector `[c]` times a shared matrix `[c, n]`."""
    if isinstance(vector, Joined):
        return _of_parts(making, vector, matrix, dtype)
    few = isinstance(vector, Scalars) and matrix.summed <= MOST_UNROLLED
    if not is_float(dtype) or (few and matrix.columns <= NARROW):
        return _written_out(making, vector, matrix, dtype)
    if matrix.columns <= NARROW:
        return _column_by_column(making, vector, matrix, dtype)
    if isinstance(vector, Scalars) and any(node.op == "constant" for node in vector.nodes):
        return _with_known(making, vector, matrix, dtype)
    if matrix.summed == 1:
        return _multiple(making, making.scalar(vector), matrix, dtype)
    row = making.rows(vector).nodes[()]
    slot = making.uniforms.slot(matrix.array)
    attributes = (slot, matrix.summed, matrix.columns, 0, matrix.transposed)
    row = making.region.emit("dot", row, dtype=dtype, width=matrix.columns, attributes=attributes)
    return Rows(alone(row), matrix.columns, dtype)


def _with_known(making: Making, vector: Scalars, matrix: Matrix, dtype: Any) -> Rows:
    """A vector of which some numbers are known: what they add to the product is the same for all environments.

    Agents with the same weights that see the same, but for who they are, have the rest of it in common. Zeros are
    left out, also where a weight is not finite.
    """
    is_known = np.array([node.op == "constant" for node in vector.nodes])
    numbers = np.array([node.value if known else 0 for node, known in zip(vector.nodes, is_known, strict=True)])
    rows = matrix.chosen(making.uniforms, np.flatnonzero(numbers))
    turned = making.uniforms.turned(rows.array) if rows.transposed else rows.array
    known = making.uniforms.combined(turned, numbers[numbers != 0].astype(np.float32), np.dtype(dtype))
    if is_known.all():
        return Rows(alone(making.uniform_row(known)), matrix.columns, dtype)
    own = matrix.chosen(making.uniforms, np.flatnonzero(~is_known))
    found = making.rows(vector_matrix(making, Scalars(vector.nodes[~is_known], vector.dtype), own, dtype))
    if not rows.summed:
        return found
    return Rows(alone(making.apply("add", found.nodes[()], making.uniform_row(known))), matrix.columns, dtype)


def _of_parts(making: Making, vector: Joined, matrix: Matrix, dtype: Any) -> Value:
    """Vectors side by side: the sum of their products with parts of the matrix."""
    first, found = 0, []
    for part in vector.parts:
        size = part.shape[-1]
        own = part if not is_shared(part) else making.scalars(part)
        found.append(vector_matrix(making, own, matrix.rows(first, size), dtype))
        first += size
    if any(isinstance(value, Rows) for value in found):
        total = reduce(lambda a, b: making.apply("add", a, b), [making.rows(value).nodes[()] for value in found])
        return Rows(alone(total), matrix.columns, dtype)
    add = np.frompyfunc(lambda a, b: making.apply("add", a, b), 2, 1)
    return Scalars(reduce(add, [making.scalars(value).nodes for value in found]), dtype)


def _written_out(making: Making, vector: Value, matrix: Matrix, dtype: Any) -> Scalars:
    """Number by number."""
    _check_multiplied(matrix.summed * matrix.columns)
    weights = making.scalars(_as_value(matrix.array)).nodes
    weights = weights.T if matrix.transposed else weights
    numbers = making.scalars(vector).nodes
    sums = [sum_of_products(making, numbers, weights[:, n], dtype) for n in range(matrix.columns)]
    return Scalars(np.array(sums, object), dtype)


def _as_value(array: Array | np.ndarray) -> Known | Uniform:
    return Known(array) if isinstance(array, np.ndarray) else Uniform(array)


def _column_by_column(making: Making, vector: Value, matrix: Matrix, dtype: Any) -> Scalars:
    """Few columns: the sum over each one's products, for a kernel's matrix products are wide."""
    row = making.rows(vector).nodes[()]
    turned = matrix.array if matrix.transposed else making.uniforms.turned(matrix.array)
    columns = making.row_operands(_as_value(turned), (matrix.columns, matrix.summed))
    return Scalars(np.array([_sum_over_columns(making, row, column, dtype) for column in columns], object), dtype)


def _multiple(making: Making, number: Node, matrix: Matrix, dtype: Any) -> Rows:
    """The only row of a matrix, times a number."""
    whole = making.uniforms.turned(matrix.array) if matrix.transposed else matrix.array
    (row,) = making.row_operands(_as_value(whole), (1, matrix.columns))
    return making.rows_of(alone(_product(making, number, row, dtype)), matrix.columns, dtype)


# --- of two that differ from environment to environment ---------------------------------------------------------


def _of_two(making: Making, one: Value, own: Sides, other: Value, theirs: Sides, dtype: Any) -> Value:
    """`[b, f, g]`, written out; along rows where what is summed over, or what lies across, is a row."""
    if _has_free_rows(other, theirs):
        return _across(making, one, own, other, theirs, dtype)
    left, right = _vectors(making, one, own), _vectors(making, other, theirs)
    batch = left.shape[: len(own.batch)]
    free = left.shape[len(own.batch) : -1], right.shape[len(theirs.batch) : -1]
    if isinstance(left, Rows) or isinstance(right, Rows):
        left, right, of_pair = making.rows(left), making.rows(right), _sum_over_columns
    else:
        left, right, of_pair = making.scalars(left), making.scalars(right), sum_of_products
        _check_multiplied(int(np.prod([*batch, *free[0], *free[1], left.shape[-1]])))
    found = no_nodes((*batch, *free[0], *free[1]))
    for b in np.ndindex(*batch):
        for f in np.ndindex(*free[0]):
            for g in np.ndindex(*free[1]):
                found[(*b, *f, *g)] = of_pair(making, left.nodes[(*b, *f)], right.nodes[(*b, *g)], dtype)
    return Scalars(found, dtype)


def _vectors(making: Making, value: Value, sides: Sides) -> Value:
    """`[b, free, c]`."""
    moved = positions(value.shape).transpose((*sides.batch, *sides.free, *sides.summed))
    lead = moved.shape[: len(sides.batch) + len(sides.free)]
    return rearranged(making, value, moved.reshape(*lead, -1))


def _across(making: Making, one: Value, own: Sides, other: Value, theirs: Sides, dtype: Any) -> Value:
    """Sums of rows, each times a number."""
    assert isinstance(other, Rows)
    weights = making.scalars(_vectors(making, one, own)).nodes
    leading = (*theirs.batch, *theirs.free[:-1], *theirs.summed)
    rows = other.nodes.transpose(leading)
    kept = len(theirs.batch) + len(theirs.free) - 1
    rows = rows.reshape(*rows.shape[:kept], -1)
    batch, free = weights.shape[: len(own.batch)], weights.shape[len(own.batch) : -1]
    across = rows.shape[len(theirs.batch) : kept]
    _check_multiplied(int(np.prod([*batch, *free, *across, rows.shape[-1]])))
    found = no_nodes((*batch, *free, *across))
    for b in np.ndindex(*batch):
        for f in np.ndindex(*free):
            for g in np.ndindex(*across):
                found[(*b, *f, *g)] = sum_of_products(making, weights[(*b, *f)], rows[(*b, *g)], dtype)
    return Rows(found, other.width, dtype)


def sum_of_products(making: Making, one: NodeArray, other: NodeArray, dtype: Any) -> Node:
    """The product of two vectors of nodes, added up one after the other."""
    products = [_product(making, a, b, dtype) for a, b in zip(one, other, strict=True)]
    if not products:
        return making.constant(0, dtype)
    return converted(making, reduce(lambda a, b: making.apply("add", a, b), products), dtype)


def _sum_over_columns(making: Making, one: Node, other: Node, dtype: Any) -> Node:
    return converted(making, row_total(making, "add", _product(making, one, other, dtype)), dtype)


def _product(making: Making, one: Node, other: Node, dtype: Any) -> Node:
    """A product as it is summed: of short floats in long ones, as matrix products do."""
    wide = np.float32 if is_float(np.dtype(dtype)) else dtype
    return making.apply("mul", converted(making, one, wide), converted(making, other, wide))


def _check_multiplied(count: int) -> None:
    if count > MOST_MULTIPLIED:
        raise NotLowered(
            f"a matrix product of {count} multiplications in each environment; at most {MOST_MULTIPLIED} are "
            "written out. Products with matrices that all environments share are not limited"
        )


RULES: dict[str, Rule] = {"dot_general": _dot_general}
