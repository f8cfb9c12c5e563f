"""Metrics of an iteration beside its losses: the learning rate, and how much of the returns critics explain."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.dataflow import Metrics

MOMENTS = "values/"
"""Begins the names of metrics that only `explained_variance` reads."""


RESOLUTION = 1e-6
"""The smallest variance that float32 sums resolve, as a part of the mean square."""


def value_moments(
    value: Float[Array, "..."], target: Float[Array, "..."], weight: Float[Array, "..."] | None = None
) -> Metrics:
    """First and second moments of targets and of critics' errors.

    Like all metrics they are means over samples, so that the mean over equal parts is that of the whole.

    Args:
        value: what a critic predicted.
        target: the returns that it is trained on.
        weight: 0 for samples that do not count, 1 for others; all count if left out.
    """
    weight = jnp.ones_like(target) if weight is None else weight
    moments = {f"{MOMENTS}share": jnp.mean(weight)}
    for name, x in {"target": target, "error": target - value}.items():
        moments[f"{MOMENTS}{name}"] = jnp.mean(weight * x)
        moments[f"{MOMENTS}{name}_square"] = jnp.mean(weight * jnp.square(x))
    return moments


def explained_variance(row: Mapping[str, Any]) -> float | None:
    """`1 - Var[target - value] / Var[target]`: 1 for a perfect critic, 0 for one that knows only the mean.

    Args:
        row: metrics of an iteration, with the means of `value_moments`; each a scalar, or `[seed]`.

    Returns:
        The mean over seeds; None where there are no moments, or all targets are nearly alike.
    """
    if f"{MOMENTS}share" not in row:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        explained = 1 - np.maximum(_variance(row, "error"), 0) / _variance(row, "target")
    known = explained[np.isfinite(explained)]
    return float(known.mean()) if known.size else None


def _variance(row: Mapping[str, Any], name: str) -> np.ndarray:
    """The variance of targets or errors by their moments; NaN where it may be nothing but rounding."""
    share, mean, square = (
        np.atleast_1d(np.asarray(row[f"{MOMENTS}{moment}"], np.float64))
        for moment in ("share", name, f"{name}_square")
    )
    variance = square / share - np.square(mean / share)
    known = (variance > RESOLUTION * square / share) | (name == "error")
    return np.where(known, variance, np.nan)
