"""Computes metrics of an iteration besides its losses: the learning rate, and the critic's explained variance."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.algorithms.hyperparameters import follows_schedules, schedule_metrics
from rollmill.dataflow import Batch, Learner, Metrics

MOMENTS = "values/"
"""Prefix of the metrics that serve `explained_variance` only."""


GAMES = "games/"
"""Prefix of metrics that count games. The log contains their shares of all games that ended."""

RESOLUTION = 1e-6
"""Smallest variance that float32 sums resolve, relative to the mean square."""


def with_schedules(
    report: Callable[[Learner, Batch], Metrics], numbers: Mapping[str, float]
) -> Callable[[Learner, Batch], Metrics]:
    """Returns a `Graph.report` that adds the current values of scheduled hyperparameters."""
    if not follows_schedules(numbers):
        return report
    return lambda learner, batch: {**report(learner, batch), **schedule_metrics(learner)}


def value_moments(
    value: Float[Array, "..."], target: Float[Array, "..."], weight: Float[Array, "..."] | None = None
) -> Metrics:
    """Computes weighted sums over samples from which the explained variance of the critic is derived.

    Returns the weighted means of targets, errors and their squares, and the mean weight (`share`), each divided by
    the number of all samples. The mean over equal parts of a batch therefore equals the result for the batch, and
    dividing by `share` gives moments over the samples with a weight.
    """
    weight = jnp.ones_like(target) if weight is None else weight
    moments = {f"{MOMENTS}share": jnp.mean(weight)}
    for name, x in {"target": target, "error": target - value}.items():
        moments[f"{MOMENTS}{name}"] = jnp.mean(weight * x)
        moments[f"{MOMENTS}{name}_square"] = jnp.mean(weight * jnp.square(x))
    return moments


def explained_variance(row: Mapping[str, Any]) -> float | None:
    """Computes the explained variance of the critic, `1 - Var[target - value] / Var[target]`.

    It is 1 for a perfect critic, and 0 for a critic that predicts the mean.

    Args:
        row: metrics of an iteration, with the means of `value_moments`, each a scalar or `[seed]`.

    Returns:
        The mean over seeds, or None if there are no moments or all targets are nearly equal.
    """
    if f"{MOMENTS}share" not in row:
        return None
    moments = [row[MOMENTS + name] for name in ("share", "target", "target_square", "error", "error_square")]
    share, target, target_square, error, error_square = np.asarray(moments, np.float64).reshape(5, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        square = target_square / share
        variance = square - np.square(target / share)
        unexplained = np.maximum(error_square / share - np.square(error / share), 0)
        explained = 1 - unexplained / variance
        is_resolved = variance > RESOLUTION * square  # otherwise the variance may be a rounding error
    explained = explained[is_resolved & np.isfinite(explained)]
    return float(explained.mean()) if explained.size else None
