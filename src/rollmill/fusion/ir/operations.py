"""Defines the meaning of every operation of programs, as JAX functions.

Operands are `[block]`, or `[block, width]` if the result is a row. Scalars are broadcast to all columns. Each
backend generates its own code for these operations.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

lax = jax.lax

OPERATIONS: dict[str, Callable[..., Any]] = {
    # arithmetic, in which integers wrap around and divide towards zero
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "neg": lax.neg,
    "abs": lax.abs,
    "sign": lax.sign,
    "max": lax.max,
    "min": lax.min,
    "pow": lax.pow,
    # rounding
    "floor": lax.floor,
    "ceil": lax.ceil,
    "round_away": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    # functions
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "log": lax.log,
    "log1p": lax.log1p,
    "sqrt": lax.sqrt,
    "rsqrt": lax.rsqrt,
    "cbrt": lax.cbrt,
    "sin": lax.sin,
    "cos": lax.cos,
    "tan": lax.tan,
    "asin": lax.asin,
    "acos": lax.acos,
    "atan": lax.atan,
    "atan2": lax.atan2,
    "sinh": lax.sinh,
    "cosh": lax.cosh,
    "asinh": lax.asinh,
    "acosh": lax.acosh,
    "atanh": lax.atanh,
    "tanh": lax.tanh,
    "logistic": lax.logistic,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erf_inv": lax.erf_inv,
    # comparisons, and bitwise operations on integers and booleans
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
    "is_finite": lax.is_finite,
    # bits
    "shift_left": lax.shift_left,
    "shift_right_logical": lax.shift_right_logical,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "population_count": lax.population_count,
    "clz": lax.clz,
    # selection: `select(condition, where True, where False)`
    "select": lambda condition, chosen, other: jnp.where(condition, chosen, other),
}
"""JAX functions of operations whose operands have one type. The result has the dtype of the node."""

TYPED = {
    "convert": "the operand in the node's dtype",
    "bitcast": "the bits of the operand, read as the node's dtype",
}
"""Operations that convert their operand to the dtype of the node."""

ROWS = {
    "splat": "() scalar: the same number in all columns",
    "stack": "() scalars: one in each column",
    "column": "(n) row: the scalar in the n-th column",
    "row_sum": "() row: the sum over its columns",
    "row_max": "() row: the greatest of its columns",
    "row_min": "() row: the least of its columns",
    "dot": "(slot, first row, first column, size, transposed) row: its product with part of a uniform matrix, "
    "which has as many rows as the row has columns, and as many columns as the node. The array is made of rows of "
    "`size` numbers, which are the columns of the matrix if it is transposed",
}
"""Operations between scalars and rows, with their attributes and operands."""
