"""Replaces JAX convolutions on CPUs with machine code.

It supports float32 convolutions of two-dimensional images whose number of outputs is a multiple of the vector
width, and their gradients in the form that JAX emits.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.fusion.backends.cpu.convolution_code import kernel_gradient_code, result_code, sum_code
from rollmill.fusion.backends.cpu.convolution_plan import (
    KernelGradientPlan,
    ResultPlan,
    kernel_gradient_plan,
    result_plan,
)
from rollmill.fusion.backends.cpu.ffi import call
from rollmill.fusion.backends.cpu.target import processor
from rollmill.lowerings.convolutions import Convolve

MAX_AWAITED_CORES = 8
"""Maximum number of cores to keep busy with whole images. With fewer images than cores, XLA divides images."""


def compile_convolution(lhs: Any, rhs: Any, params: dict[str, Any]) -> Convolve | None:
    """Returns machine code for a convolution, or None if it is not supported or XLA is as fast.

    The operands may be shapes with dtypes. `params` are the parameters of `jax.lax.conv_general_dilated_p`.
    """
    if not _is_plain(lhs, rhs, params):
        return None
    operands = (jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (lhs, rhs))
    out = jax.eval_shape(lambda *both: jax.lax.conv_general_dilated_p.bind(*both, **params), *operands).shape
    if 0 in (*lhs.shape, *rhs.shape, *out):
        return None
    # JAX expresses the gradient of a kernel as a convolution that sums over the batch of the images.
    is_gradient = params["dimension_numbers"][0][1] == 0
    return (_kernel_gradient if is_gradient else _result)(lhs, rhs, out, params)


def _is_plain(lhs: Any, rhs: Any, params: dict[str, Any]) -> bool:
    types = {lhs.dtype, rhs.dtype, np.dtype(params["preferred_element_type"] or lhs.dtype)}
    groups = params["feature_group_count"], params["batch_group_count"]
    return len(lhs.shape) == 4 and types == {np.dtype(np.float32)} and groups == (1, 1)


def _result(lhs: Any, rhs: Any, out: Sequence[int], params: dict[str, Any]) -> Convolve | None:
    """Returns code for images in the left operand and kernels in the right one."""
    lhs_axes, rhs_axes, out_axes = params["dimension_numbers"]
    image_axes, kernel_axes = (lhs_axes[0], *lhs_axes[2:], lhs_axes[1]), (*rhs_axes[2:], rhs_axes[1], rhs_axes[0])
    strides, dilation = params["window_strides"], params["lhs_dilation"]
    is_mixed = any(stride > 1 and spread > 1 for stride, spread in zip(strides, dilation, strict=True))
    pays = rhs.shape[rhs_axes[0]] % processor().lanes == 0 and _occupies_cores(lhs.shape[lhs_axes[0]])
    if is_mixed or not pays or max(params["rhs_dilation"]) > 1:
        return None
    plan = result_plan(
        [lhs.shape[axis] for axis in image_axes],
        [rhs.shape[axis] for axis in kernel_axes],
        strides=strides,
        padding=params["padding"],
        dilation=dilation,
    )
    place = _positions((out_axes[0], *out_axes[2:], out_axes[1]))
    return lambda lhs, rhs: jnp.transpose(
        _convolve(plan, jnp.transpose(lhs, image_axes), jnp.transpose(rhs, kernel_axes)), place
    )


def _convolve(plan: ResultPlan, image: Float[Array, "B H W I"], kernel: Float[Array, "R C I O"]) -> Array:
    cut = lambda taps: slice(taps.start, taps.stop, taps.step)
    parts = [kernel[cut(phase.taps[0]), cut(phase.taps[1])].reshape(-1) for phase in plan.phases]
    return call(result_code(plan), [image, jnp.concatenate(parts)])[0]


def _kernel_gradient(lhs: Any, rhs: Any, out: Sequence[int], params: dict[str, Any]) -> Convolve | None:
    """Returns code for a kernel's gradient. JAX writes it with the images' channels as the batch axis."""
    lhs_axes, rhs_axes, out_axes = params["dimension_numbers"]
    image_axes, gradient_axes = (
        (lhs_axes[1], *lhs_axes[2:], lhs_axes[0]),
        (rhs_axes[1], *rhs_axes[2:], rhs_axes[0]),
    )
    rows, columns = (out[axis] for axis in out_axes[2:])
    before = tuple(low for low, _ in params["padding"])
    is_written = min(before) >= 0 and {*params["window_strides"], *params["lhs_dilation"]} == {1}
    pays = rhs.shape[rhs_axes[0]] % processor().lanes == 0 and _occupies_cores(lhs.shape[lhs_axes[1]])
    if not is_written or not pays:
        return None
    plan = kernel_gradient_plan(
        [lhs.shape[axis] for axis in image_axes],
        [rhs.shape[axis] for axis in gradient_axes],
        strides=params["rhs_dilation"],
        before=(before[0], before[1]),
        kernel=(rows, columns),
    )
    place = _positions((*out_axes[2:], out_axes[0], out_axes[1]))
    return lambda lhs, rhs: jnp.transpose(
        _sum_gradients(plan, jnp.transpose(lhs, image_axes), jnp.transpose(rhs, gradient_axes)), place
    )


def _sum_gradients(
    plan: KernelGradientPlan, image: Float[Array, "B H W I"], gradient: Float[Array, "B R C O"]
) -> Array:
    (parts,) = call(kernel_gradient_code(plan), [image, gradient])
    (total,) = call(sum_code(*parts.shape), [parts])
    return total.reshape(*plan.kernel, plan.image[2], plan.gradient[2])


def _positions(axes: Sequence[int]) -> list[int]:
    """Returns the transposition that undoes `axes`."""
    return [int(axis) for axis in np.argsort(axes)]


def _occupies_cores(images: int) -> bool:
    return images >= min(processor().cores, MAX_AWAITED_CORES)
