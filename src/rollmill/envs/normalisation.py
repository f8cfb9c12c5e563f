"""Running statistics of observations and rewards, as plain data in the training state.

A batch's mean and variance are merged into the running ones by the parallel algorithm of Chan, Golub
and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979), with
the weight `w = n / (count + n)` of the batch's `n` values:

    mean'     = mean + w (mean_b - mean)
    variance' = (1 - w) variance + w variance_b + w (1 - w) (mean_b - mean)^2

Floating-point leaves have statistics, and so do `Box`es of integers such as counts, which become float32 when they
are normalised. Categories (`Discrete`, `MultiDiscrete`, `MultiBinary`) and bytes (uint8 images and planes) have
None instead of statistics, and pass through unchanged.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.spaces import map_space, struct

VARIANCE_FLOOR = 1e-8
"""Added to a variance before its square root is used as a divisor, in the value's unit squared."""


class RunningStatistics(eqx.Module):
    """Running mean and variance of observations or rewards, and the number of values that they summarise."""

    mean: PyTree[Float[Array, "..."]]
    variance: PyTree[Float[Array, "..."]]
    count: Float[Array, ""]


def identity(means: PyTree) -> PyTree:
    """Returns its argument: the reduction over a single replica."""
    return means


def initial_statistics(struct: PyTree, *, count: float = 1e-4) -> RunningStatistics:
    """Returns running statistics with mean 0 and variance 1, which have almost no weight.

    Args:
        struct: one value, or its `jax.ShapeDtypeStruct`s (`core.spaces.struct` of a space).
        count: weight of the initial mean and variance, as a number of values.
    """
    mean = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32) if _is_float(s) else None, struct)
    return RunningStatistics(
        mean=mean, variance=jax.tree.map(jnp.ones_like, mean), count=jnp.asarray(count, jnp.float32)
    )


def normalised_struct(space: spaces.Space) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes of one observation for `initial_statistics`. Normalised leaves are floating-point."""
    return map_space(_normalised_leaf, space)


def _normalised_leaf(space: spaces.Space) -> jax.ShapeDtypeStruct:
    leaf = struct(space)
    counts = isinstance(space, spaces.Box) and leaf.dtype != np.uint8 and jnp.issubdtype(leaf.dtype, jnp.integer)
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32) if counts else leaf


def update_statistics(
    statistics: RunningStatistics,
    batch: PyTree[Array],
    *,
    where: Bool[Array, "..."] | None = None,
    reduce: Callable[[PyTree], PyTree] = identity,
    replicas: int = 1,
) -> RunningStatistics:
    """Merges a batch into the running statistics (Chan et al. 1979).

    The result does not depend on how a batch is divided among replicas, because squared deviations refer to the
    mean over all replicas.

    Args:
        statistics: the running statistics, the same on every replica.
        batch: leaves `[..., *value]`. All leading axes, which every leaf shares, are reduced.
        where: mask of the values that count, in the shape of the leading axes. Default: all.
        reduce: maps a pytree of this replica's means to their mean over all replicas, each of which
            holds equally many values. The default is for one replica.
        replicas: number of replicas that `reduce` averages over.

    Raises:
        UsageError: the leaves of `batch` have different leading axes.
    """
    leading = _leading_shape(statistics, batch)
    if leading is None:
        return statistics
    average = partial(_average, where, len(leading))
    values = _over_floats(lambda x, _: _float32(x), batch, statistics.mean)
    mean, share = (reduce(average(values)), 1) if where is None else reduce((average(values), _share(where)))
    mean = jax.tree.map(lambda m: m / share, mean)
    variance = reduce(average(_over_floats(lambda x, m: jnp.square(x - _spread(m, x)), values, mean)))
    variance = jax.tree.map(lambda v: v / share, variance)
    return merge_moments(statistics, mean, variance, share * (math.prod(leading) * replicas))


def normalise(statistics: RunningStatistics, value: PyTree[Array], *, clip: float = 10.0) -> PyTree[Array]:
    """Returns `(value - mean) / standard deviation`, clipped to `[-clip, clip]`.

    Args:
        statistics: running statistics of one value's structure.
        value: leaves `[..., *value]`, any leading axes. Floating-point dtypes are kept, and integers become
            float32.
        clip: bound on the result, in standard deviations.
    """

    def centred(x: Array, mean: Array, variance: Array) -> Array:
        deviation = (_float32(x) - _spread(mean, x)) * jax.lax.rsqrt(_spread(variance, x) + VARIANCE_FLOOR)
        return jnp.clip(deviation, -clip, clip).astype(x.dtype if _is_float(x) else jnp.float32)

    return _over_floats(centred, value, statistics.mean, statistics.variance, other=lambda x: x)


def denormalise(statistics: RunningStatistics, value: PyTree[Array]) -> PyTree[Array]:
    """Returns `value * standard deviation + mean`, the inverse of `normalise` except for clipping.

    Args:
        statistics: running statistics of one value's structure.
        value: leaves `[..., *value]`, any leading axes. Their dtypes are kept.
    """

    def restored(x: Array, mean: Array, variance: Array) -> Array:
        deviation = jnp.sqrt(_spread(variance, x) + VARIANCE_FLOOR)
        return (_float32(x) * deviation + _spread(mean, x)).astype(x.dtype)

    return _over_floats(restored, value, statistics.mean, statistics.variance, other=lambda x: x)


def scale(statistics: RunningStatistics, value: PyTree[Array]) -> PyTree[Array]:
    """Returns `value / standard deviation`, for rewards, whose sign and zero must not change.

    Args:
        statistics: running statistics of one value's structure.
        value: leaves `[..., *value]`, any leading axes. Their dtypes are kept.
    """

    def scaled(x: Array, variance: Array) -> Array:
        return (_float32(x) * jax.lax.rsqrt(_spread(variance, x) + VARIANCE_FLOOR)).astype(x.dtype)

    return _over_floats(scaled, value, statistics.variance, other=lambda x: x)


def _average(where: Bool[Array, "..."] | None, num_axes: int, values: PyTree) -> PyTree:
    """Returns the mean over leading axes, with values that do not count as zeros."""
    axes = tuple(range(num_axes))

    def one(x: Array) -> Array:
        if where is None:
            return jnp.mean(x, axes)
        return jnp.mean(jnp.where(where.reshape(*where.shape, *(1,) * (x.ndim - num_axes)), x, 0), axes)

    return jax.tree.map(one, values)


def _share(where: Bool[Array, "..."]) -> Float[Array, ""]:
    """Returns the fraction of values that count, or a tiny number instead of zero."""
    return jnp.maximum(jnp.mean(where.astype(jnp.float32)), 1e-12)


def merge_moments(
    statistics: RunningStatistics, mean: PyTree, variance: PyTree, batch_count: Float[Array, ""] | int | float
) -> RunningStatistics:
    """Merges a batch's mean and variance into running statistics, weighted by the batch's number of values."""
    count = statistics.count + batch_count
    w = batch_count / count

    def merged_variance(v: Array, v_b: Array, m: Array, m_b: Array) -> Array:
        return (1 - w) * v + w * v_b + w * (1 - w) * jnp.square(m_b - m)

    return dataclasses.replace(
        statistics,
        mean=jax.tree.map(lambda m, m_b: m + w * (m_b - m), statistics.mean, mean),
        variance=jax.tree.map(merged_variance, statistics.variance, variance, statistics.mean, mean),
        count=count,
    )


def _leading_shape(statistics: RunningStatistics, batch: PyTree) -> tuple[int, ...] | None:
    """Returns the leading axes that all leaves share, or None if no leaf has statistics."""
    leaves, structure = jax.tree.flatten(batch)
    means = structure.flatten_up_to(statistics.mean)
    shapes = {x.shape[: x.ndim - m.ndim] for x, m in zip(leaves, means, strict=True) if m is not None}
    if len(shapes) > 1:
        raise UsageError(f"the leaves of the batch must have the same leading axes, got {sorted(shapes)}.")
    return shapes.pop() if shapes else None


def _over_floats(
    function: Callable[..., Any], value: PyTree, *statistics: PyTree, other: Callable[[Any], Any] = lambda x: None
) -> PyTree:
    """Maps `function(leaf, *statistics)` over leaves with statistics, and `other(leaf)` over the rest."""
    return jax.tree.map(lambda x, *s: other(x) if s[0] is None else function(x, *s), value, *statistics)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _float32(x: Array) -> Array:
    return x.astype(jnp.float32)


def _spread(statistic: Array, like: Array) -> Array:
    return jnp.broadcast_to(statistic, like.shape)
