"""Reorders the axes of convolutions on CPUs, so that XLA computes them fast everywhere in a program.

On CPUs, XLA has a fast routine for operands with channels last and kernels with outputs last. XLA brings other
convolutions into this order, except inside loops and branches: there, it computes them element by element.
Gradients of a convolution therefore take eight to eleven times as long inside a `scan` as outside.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxtyping import Array

Convolve: TypeAlias = Callable[[Array, Array], Array]
"""Maps the operands of one convolution, with its parameters, to its result."""

OwnCode: TypeAlias = Callable[[Any, Any, dict[str, Any]], Convolve | None]
"""Maps the operands' shapes and dtypes, and the parameters of a convolution, to a function that computes its
result, or to None to leave the convolution to XLA."""


def by_xla(lhs: Any, rhs: Any, params: dict[str, Any]) -> None:
    """Leaves every convolution to XLA. This is the default `OwnCode`."""


_ordered = core.Primitive("ordered_convolution")
"""Convolves `[batch, *space, inputs]` with `[*space, inputs, outputs]` to `[batch, *space, outputs]`."""


def order_convolutions(compile_code: OwnCode = by_xla) -> None:
    """Makes all programs compiled for CPUs after this call convolve in the fast order of axes.

    `compile_code` computes some convolutions with machine code of this process. Exported programs do not contain
    that code.
    """

    def rule(context: mlir.LoweringRuleContext, lhs: ir.Value, rhs: ir.Value, **params: Any) -> Sequence[ir.Value]:
        is_exported = context.module_context.lowering_parameters.for_export
        image, kernel = context.avals_in
        compute = None if is_exported else compile_code(image, kernel, params)
        function = compute or partial(convolve_in_fast_order, **params)
        return mlir.lower_fun(function, multiple_results=False)(context, lhs, rhs)

    mlir.register_lowering(jax.lax.conv_general_dilated_p, rule, platform="cpu")


def convolve_in_fast_order(lhs: Array, rhs: Array, *, dimension_numbers: Any, **params: Any) -> Array:
    """Computes a convolution in the fast order of axes, by transposing its operands and its result."""
    (batch, inputs, *space), (outputs, kernel_inputs, *kernel_space), out = dimension_numbers
    last, kernel_last = (batch, *space, inputs), (*kernel_space, kernel_inputs, outputs)
    product = _convolve_in_fast_order(jnp.transpose(lhs, last), jnp.transpose(rhs, kernel_last), params)
    return jnp.transpose(product, _positions(out))


def _positions(out: Sequence[int]) -> list[int]:
    """Returns the positions of a result's axes in the fast order."""
    batch, outputs, *space = out
    return [int(axis) for axis in np.argsort((batch, *space, outputs))]


def _convolve_in_fast_order(lhs: Array, rhs: Array, params: dict[str, Any]) -> Array:
    """Convolves operands in the fast order. A complex convolution is computed as four real ones."""
    if not jnp.issubdtype(lhs.dtype, jnp.complexfloating):
        return _ordered.bind(lhs, rhs, **params)
    real = {**params, "preferred_element_type": None}
    product = lambda a, b: _ordered.bind(a, b, **real)
    return jax.lax.complex(
        product(lhs.real, rhs.real) - product(lhs.imag, rhs.imag),
        product(lhs.real, rhs.imag) + product(lhs.imag, rhs.real),
    )


@_ordered.def_abstract_eval
def _shape(lhs: Any, rhs: Any, **params: Any) -> ShapedArray:
    rank = lhs.ndim
    last, kernel_last = (0, rank - 1, *range(1, rank - 1)), (rank - 1, rank - 2, *range(rank - 2))
    numbers = jax.lax.ConvDimensionNumbers(last, kernel_last, last)
    shapes = (jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in (lhs, rhs))
    convolve = lambda *operands: jax.lax.conv_general_dilated_p.bind(
        *operands, dimension_numbers=numbers, **params
    )
    result = jax.eval_shape(convolve, *shapes)
    return ShapedArray(result.shape, result.dtype)


def _lower(
    context: mlir.LoweringRuleContext,
    lhs: ir.Value,
    rhs: ir.Value,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_group_count: int,
    batch_group_count: int,
    precision: Any,
    **_: Any,
) -> list[ir.Value]:
    (result,) = context.avals_out
    space = list(range(1, result.ndim - 1))
    kernel = [axis - 1 for axis in space]
    numbers = stablehlo.ConvDimensionNumbers.get(
        0, result.ndim - 1, space, result.ndim - 2, result.ndim - 1, kernel, 0, result.ndim - 1, space
    )
    convolution = stablehlo.ConvolutionOp(
        _tensor(result),
        lhs,
        rhs,
        dimension_numbers=numbers,
        feature_group_count=mlir.i64_attr(feature_group_count),
        batch_group_count=mlir.i64_attr(batch_group_count),
        window_strides=mlir.dense_int_array(window_strides),
        padding=mlir.dense_int_elements(padding),
        lhs_dilation=mlir.dense_int_array(lhs_dilation),
        rhs_dilation=mlir.dense_int_array(rhs_dilation),
        precision_config=_precision(precision),
    )
    return [convolution.result]


def _tensor(shape: ShapedArray) -> ir.RankedTensorType:
    sizes = [size if isinstance(size, int) else ir.ShapedType.get_dynamic_size() for size in shape.shape]
    return ir.RankedTensorType.get(sizes, mlir.dtype_to_ir_type(shape.dtype))


def _precision(precision: Any) -> ir.ArrayAttr:
    """Converts a JAX precision to the precision attribute of both operands."""
    both = precision if isinstance(precision, tuple) else (precision, precision)
    names = [jax.lax.Precision.DEFAULT.name if each is None else each.name for each in both]
    return ir.ArrayAttr.get([stablehlo.PrecisionAttr.get(name) for name in names])


mlir.register_lowering(_ordered, _lower, platform="cpu")
