"""A hint that the elements of a matrix lie in memory column by column."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir
from jaxtyping import Array

_column_major = core.Primitive("column_major")
_column_major.def_impl(lambda array: array)
_column_major.def_abstract_eval(lambda array: array)
ad.deflinear2(_column_major, lambda cotangent, _: (_column_major.bind(cotangent),))


def column_major(array: Array) -> Array:
    """Returns its argument. In programs for NVIDIA GPUs, a matrix and its gradient are laid out column by column.

    A vector becomes a matrix under `jax.vmap`, with a row for each sample. Arrays with other numbers of axes are
    laid out as usual, and so are all arrays on other platforms and in exported programs.
    """
    return _column_major.bind(array)


def _batched(arrays: tuple[Array], axes: tuple[int]) -> tuple[Array, int]:
    return _column_major.bind(jnp.moveaxis(arrays[0], axes[0], 0)), 0


def _lower_for_cuda(context: mlir.LoweringRuleContext, array: ir.Value) -> Any:
    is_exported = context.module_context.lowering_parameters.for_export
    if is_exported or ir.RankedTensorType(array.type).rank != 2:
        return [array]
    columns = lambda matrix: with_layout_constraint(matrix, Layout((1, 0)))
    return mlir.lower_fun(columns, multiple_results=False)(context, array)


batching.primitive_batchers[_column_major] = _batched
mlir.register_lowering(_column_major, lambda context, array: [array])
mlir.register_lowering(_column_major, _lower_for_cuda, platform="cuda")
