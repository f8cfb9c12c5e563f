"""Lowers convolutions to products of image patches with the kernel's weights.

Letters: `n` images, `p` positions of the kernel (outputs along the spatial axes), `k` taps of the kernel, `i` and
`o` input and output channels of one group.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from rollmill.fusion.ir import is_float
from rollmill.fusion.lower.context import Lowering
from rollmill.fusion.lower.movement import gather_static, permute_axes
from rollmill.fusion.lower.rule import Equation, Rule
from rollmill.fusion.lower.rules.products import (
    MAX_UNROLLED,
    MatrixOperand,
    combine_vectors,
    sum_of_products,
    vector_matrix,
)
from rollmill.fusion.lower.rules.shapes import concatenate_values
from rollmill.fusion.lower.rules.windows import spread, windows
from rollmill.fusion.lower.values import (
    NARROW,
    Const,
    LoweringError,
    ScalarArray,
    Uniform,
    Value,
    is_shared,
    no_nodes,
    positions,
)

MAX_MULTIPLIED = 8192
"""Maximum number of multiplications of a convolution that is unrolled into scalars."""

MAX_PRODUCTS = 128
"""Maximum number of positions of a kernel with many channels. Each position becomes a matrix product."""


class _Taps(NamedTuple):
    """Pairs of image elements and weights to multiply."""

    image: np.ndarray
    """Indices in the image of one group, `[n, p..., k, i]`, or -1 for padding."""
    weights: np.ndarray
    """`[k, i, o]`: places in the weights."""


def _convolve(ctx: Lowering, equation: Equation, values: Sequence[Value]) -> list[Value]:
    image, weights = values
    params = equation.params
    if params["batch_group_count"] != 1:
        raise LoweringError("kernels do not support batch groups of a convolution")
    groups = [_taps(params, image.shape, weights.shape, n) for n in range(params["feature_group_count"])]
    _check_size(image, weights, groups, equation.dtype)
    by_group = _with_shared if is_shared(weights) else _write_sums
    convolved = [by_group(ctx, image, weights, taps, equation.dtype) for taps in groups]
    whole = concatenate_values(ctx, convolved, len(image.shape) - 1)
    _, _, out = params["dimension_numbers"]
    return [permute_axes(ctx, whole, _axes_of(out))]


def _axes_of(spec: Sequence[int]) -> tuple[int, ...]:
    """Transposes `[n, p..., channels]` to a layout, given the positions of its axes."""
    batch, channels, *spatial = spec
    order = {batch: 0, channels: len(spec) - 1} | {axis: n + 1 for n, axis in enumerate(spatial)}
    return tuple(order[axis] for axis in range(len(spec)))


def _taps(params: dict[str, Any], image: tuple[int, ...], weights: tuple[int, ...], group: int) -> _Taps:
    """Returns the taps of one group of channels."""
    (batch, channels, *spatial), (out, into, *kernel), _ = params["dimension_numbers"]
    pixels = positions(image).transpose((batch, channels, *spatial))
    filters = positions(weights).transpose((*kernel, into, out))
    count, (ins, outs) = params["feature_group_count"], filters.shape[-2:]
    pixels = pixels[:, group * ins : (group + 1) * ins]
    filters = filters[..., group * (outs // count) : (group + 1) * (outs // count)]
    pixels = spread(pixels, ((0, 0), (0, 0), *params["padding"]), (1, 1, *params["lhs_dilation"]))
    sizes, rank = filters.shape[:-2], len(spatial)
    under = windows(pixels, (1, 1, *sizes), (1, 1, *params["window_strides"]), (1, 1, *params["rhs_dilation"]))
    under = under.reshape(*under.shape[: rank + 2], prod(sizes))  # [n, i, p..., k]
    return _Taps(np.moveaxis(under, 1, -1), filters.reshape(prod(sizes), ins, -1))


def _check_size(image: Value, weights: Value, groups: Sequence[_Taps], dtype: Any) -> None:
    places, taps = (int(prod(shape)) for shape in (groups[0].image.shape[:-2], groups[0].image.shape[-2:]))
    outs = groups[0].weights.shape[-1]
    written_out = not is_shared(weights) or not is_float(dtype) or (outs <= NARROW and taps <= MAX_UNROLLED)
    count = places * len(groups) * (taps * outs if written_out else 1)
    if count > (MAX_MULTIPLIED if written_out else MAX_PRODUCTS):
        what = "multiplications" if written_out else "matrix products, one for each place of the kernel,"
        most = MAX_MULTIPLIED if written_out else MAX_PRODUCTS
        raise LoweringError(
            f"a convolution of an array of shape {image.shape} with a kernel of shape {weights.shape} takes "
            f"{count:,} {what} in each environment, more than the limit of {most:,}"
        )


# --- with weights that all environments share -----------------------------------------------------------------


def _with_shared(ctx: Lowering, image: Value, weights: Value, taps: _Taps, dtype: Any) -> Value:
    """Returns `[n, p..., o]`: at each position, the image patch times the matrix of kernel weights `[k i, o]`.

    Padding is left out, together with the matching rows of the matrix.
    """
    lead, outs = taps.image.shape[:-2], taps.weights.shape[-1]
    rows = taps.weights.reshape(-1, outs)
    under = taps.image.reshape(*lead, len(rows))
    array = _pick_weights(ctx, weights, rows)
    whole = MatrixOperand(array, False, len(rows), outs)
    outputs = []
    for at in np.ndindex(*lead):
        # Padding is zero, so its products are left out, together with the matching rows of the weights.
        inside = np.flatnonzero(under[at] >= 0)
        vector = gather_static(ctx, image, under[at][inside])
        matrix = whole if len(inside) == len(rows) else whole.chosen(ctx.prologue, inside)
        outputs.append(vector_matrix(ctx, vector, matrix, dtype) if len(inside) else Const(np.zeros(outs, dtype)))
    return combine_vectors(ctx, outputs, lead, outs)


def _pick_weights(ctx: Lowering, weights: Value, places: np.ndarray) -> Any:
    """Weights in the order of a matrix."""
    match weights:
        case Const(array):
            return array.reshape(-1)[places]
        case Uniform(array, before):
            own = places if before is None else before.reshape(-1)[places]
            return ctx.prologue.picked(Uniform(array, own))
    raise TypeError(f"expected a value that all environments share, got {type(weights).__name__}")


# --- with weights of each environment ---------------------------------------------------------------------------


def _write_sums(ctx: Lowering, image: Value, weights: Value, taps: _Taps, dtype: Any) -> Value:
    """Returns `[n, p..., o]`, with each element computed as a separate sum."""
    pixels, filters = (ctx.scalars(value).nodes.reshape(-1) for value in (image, weights))
    lead, outs = taps.image.shape[:-2], taps.weights.shape[-1]
    rows = taps.weights.reshape(-1, outs)
    under = taps.image.reshape(*lead, len(rows))
    outputs = no_nodes((*lead, outs))
    for at in np.ndindex(*lead):
        inside = np.flatnonzero(under[at] >= 0)
        own = pixels[under[at][inside]]
        for out in range(outs):
            outputs[(*at, out)] = sum_of_products(ctx, own, filters[rows[inside, out]], dtype)
    return ScalarArray(outputs, np.dtype(dtype))


RULES: dict[str, Rule] = {"conv_general_dilated": _convolve}
