"""Wide inputs on NVIDIA GPUs: how a first layer joins and multiplies more numbers than a kernel computes.

All functions compute the same on each platform, except for rounding. The durations are of one minibatch of 65,536
observations of CraftaxClassic-v0 (1,345 numbers) on an H200, in layers of 512 units.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_NARROW = 1024
"""Largest input that is joined and multiplied as usual. It takes little time, and kernels compute it, too."""

ALIGNMENT = 8
"""Wide inputs have a multiple of this number of elements, because tensor cores load rows of 16 bytes.

With 1,352 inputs, of which 7 are zero, an iteration of PPO takes three quarters of the time with 1,345 inputs.
"""

MAX_SUMMED = 8
"""Largest number of parts that are joined as a sum. Each element of the sum looks at all parts."""


def joined(parts: Sequence[Float[Array, " _"]]) -> Float[Array, " I"]:
    """Concatenates vectors. On GPUs, a few parts of a wide vector are padded with zeros, and added.

    XLA then computes each element in its own thread. Its kernel for concatenations takes 350 us, and that for the
    sum 170 us.
    """
    size = sum(part.size for part in parts)
    if size <= MAX_NARROW or not 1 < len(parts) <= MAX_SUMMED:
        return jnp.concatenate([jnp.zeros(0, jnp.float32), *parts])
    return jax.lax.platform_dependent(*parts, cuda=_sum_of_padded, default=lambda *parts: jnp.concatenate(parts))


def product(x: Float[Array, " I"], weight: Float[Array, "I O"]) -> Float[Array, " O"]:
    """Returns `x @ weight`. On GPUs, wide inputs are aligned, and the matrices around the product have columns.

    Tensor cores multiply 32-bit numbers fastest if both operands lie in memory along the axis that is summed over.
    For the gradient with respect to the weight, this axis is the batch. If only the gradient with respect to the
    output lies in this order, the product takes 316 instead of 556 us.
    """
    if x.size <= MAX_NARROW:
        return x @ weight
    return jax.lax.platform_dependent(x, weight, cuda=_product_on_tensor_cores, default=jnp.matmul)


def _sum_of_padded(*parts: Float[Array, " _"]) -> Float[Array, " I"]:
    size, first, total = sum(part.size for part in parts), 0, jnp.zeros((), jnp.float32)
    for part in parts:
        total += jnp.pad(part, (first, size - first - part.size))
        first += part.size
    return total


def _product_on_tensor_cores(x: Float[Array, " I"], weight: Float[Array, "I O"]) -> Float[Array, " O"]:
    from rollmill.lowerings.column_major import column_major  # needed by few networks

    missing = -x.size % ALIGNMENT
    aligned = jnp.pad(weight, ((0, missing), (0, 0)))
    return column_major(jnp.pad(x, (0, missing)) @ column_major(aligned))
