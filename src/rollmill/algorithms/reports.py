"""Metrics of an iteration beside its losses: the learning rate, and how much of the returns critics explain."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.dataflow import Metrics

MOMENTS = "values/"
"""Begins the names of metrics that only `explained_variance` reads."""


def value_moments(
    value: Float[Array, "..."], target: Float[Array, "..."], weight: Float[Array, "..."] | None = None
) -> Metrics:
    """Moments of targets and of critics' errors, from which the mean over equal parts makes those of the whole.

    As in Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979: the
    variance of the whole is the mean of the parts' variances and the variance of their means.

    Args:
        value: a critic's.
        target: what it should have been.
        weight: 0 for samples that do not count, 1 for others; all count if left out.
    """
    weight = jnp.ones_like(target) if weight is None else weight
    share = jnp.maximum(jnp.mean(weight), 1e-9)
    moments: dict[str, Float[Array, ""]] = {f"{MOMENTS}share": share}
    for name, x in {"target": target, "error": target - value}.items():
        mean = jnp.mean(weight * x) / share
        moments[f"{MOMENTS}{name}"] = share * mean
        moments[f"{MOMENTS}{name}_mean_square"] = share * jnp.square(mean)
        moments[f"{MOMENTS}{name}_variance"] = jnp.mean(weight * jnp.square(x - mean))
    return moments


def explained_variance(row: Mapping[str, np.ndarray | float]) -> float | None:
    """`1 - Var[target - value] / Var[target]`: 1 for a perfect critic, 0 for one that knows only the mean.

    Args:
        row: metrics of an iteration, with the means of `value_moments`; each a scalar, or `[seed]`.

    Returns:
        The mean over seeds; None where there are no moments, or all targets are alike.
    """
    if f"{MOMENTS}share" not in row:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        explained = 1 - _variance(row, "error") / _variance(row, "target")
    known = explained[np.isfinite(explained)]
    return float(known.mean()) if known.size else None


def _variance(row: Mapping[str, np.ndarray | float], name: str) -> np.ndarray:
    share, mean, square, variance = (
        np.atleast_1d(np.asarray(row[f"{MOMENTS}{moment}"], np.float64))
        for moment in ("share", name, f"{name}_mean_square", f"{name}_variance")
    )
    return variance / share + np.maximum(square / share - np.square(mean / share), 0)
