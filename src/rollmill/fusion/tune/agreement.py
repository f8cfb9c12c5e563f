"""Compares kernels that have not been verified on a device with the reference, before they are used.

Shape letters: `T` steps, `E` environments, `M` minibatches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rollmill.dataflow import Graph
from rollmill.fusion.backends.base import AnyLaunch, Backend
from rollmill.fusion.kernels.gradients import GradientStep, run_gradients_reference
from rollmill.fusion.kernels.minibatch_loop import kernel_sums
from rollmill.fusion.kernels.rollout import RolloutStep, run_reference
from rollmill.fusion.lower.prologue import UniformArrays

MIN_EQUAL = 0.95
"""Minimum share of environments in which each value of the first step agrees. Rounding may change some actions."""

MIN_SCALE = 1e-3
"""Scale of the smallest gradients, relative to the largest, below which differences are rounding errors."""


def rollout_agreement(
    backend: Backend, step: RolloutStep, num_steps: int, launch: AnyLaunch
) -> Callable[..., Bool[Array, ""]] | None:
    """Returns a function that compares the first step of a rollout with the reference, or None if the launch needs
    no comparison.
    """
    kind = backend.rollouts
    if not kind.is_unverified(launch):
        return None

    def agrees(uniforms: UniformArrays, carried: list[Array], keys: Array) -> Bool[Array, ""]:
        _, mine = kind.run(launch)(step, uniforms, carried, keys, num_steps)
        _, right = run_reference(step, uniforms, carried, keys, 1)
        pairs = zip([leaf[0] for leaf in mine], [leaf[0] for leaf in right], strict=True)
        shares = [jnp.mean(_near(*pair, backend.tolerance).astype(jnp.float32)) for pair in pairs]
        return jnp.all(jnp.stack(shares) >= MIN_EQUAL)

    return agrees


def _near(mine: Array, right: Array, tolerance: float) -> Bool[Array, "..."]:
    if not jnp.issubdtype(mine.dtype, jnp.floating):
        return mine == right
    scale = jnp.maximum(jnp.abs(right), 1)
    return (jnp.abs(mine - right) <= tolerance * scale) | (mine == right) | (jnp.isnan(mine) & jnp.isnan(right))


def gradient_agreement(
    backend: Backend, graph: Graph, step: GradientStep, launch: AnyLaunch
) -> Callable[..., Bool[Array, ""]] | None:
    """Returns a function that compares the gradients of a minibatch with the reference, or None if the launch
    needs no comparison.
    """
    kind = backend.gradients
    if not kind.is_unverified(launch):
        return None
    only: Int[np.ndarray, " M"] = np.zeros(1, np.int32)

    def agrees(*inputs: Any) -> Bool[Array, ""]:
        compute = lambda run: kernel_sums(graph, step, run, only, *inputs)
        mine, right = compute(kind.run(launch)), compute(run_gradients_reference)
        return _are_near(_arrays(step, mine), _arrays(step, right), backend.tolerance)

    return agrees


def _arrays(step: GradientStep, means: Float[Array, " size"]) -> list[Array]:
    """Returns the gradients of matrices and vectors, without scalars such as metrics."""
    sizes = [each.size for each in step.sums if each.is_computed]
    parts = jnp.split(means, np.cumsum(sizes)[:-1])
    return [part for part in parts if part.size > 1]


def _are_near(mine: Sequence[Array], right: Sequence[Array], tolerance: float) -> Bool[Array, ""]:
    greatest = jnp.stack([jnp.max(jnp.abs(array)) for array in right])
    errors = jnp.stack([jnp.max(jnp.abs(one - other)) for one, other in zip(mine, right, strict=True)])
    return jnp.all(errors <= tolerance * jnp.maximum(greatest, MIN_SCALE * jnp.max(greatest)))
