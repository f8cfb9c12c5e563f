"""Optimisers of all algorithms: gradient clipping, scaling, and a step at an annealed learning rate."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.schedules import parse_schedule
from rollmill.dataflow import Loops

MOST_UPDATES = 2**31 - 1
"""Updates are counted in 32 bits."""


class Annealing(NamedTuple):
    """Number of planned updates made so far: `whole + part`.

    Two numbers, because a single float would lose small shares in long trainings.
    """

    whole: Int[Array, ""]
    """Complete planned updates."""
    part: Float[Array, ""]
    """Fraction of the next planned update, in `[0, 1)` up to rounding."""


def planned_updates(loops: Loops) -> int:
    """Number of updates of a training with one update for each minibatch."""
    return loops.iterations * loops.epochs * loops.num_minibatches


def planned_rate(learning_rate: float | str | optax.Schedule, loops: Loops) -> float | optax.Schedule:
    """A learning rate, where it is a schedule as text as a function of the number of updates.

    Raises:
        UsageError: the text is no schedule, or the training makes more updates than the optimiser counts.
    """
    if not isinstance(learning_rate, str):
        return learning_rate
    schedule, count = parse_schedule("learning_rate", learning_rate), planned_updates(loops)
    _check_count(count)

    def rate(updates: Any) -> Any:
        return schedule.at(updates / count)

    return rate


def clipped_descent(
    scaling: optax.GradientTransformation,
    *,
    learning_rate: float | optax.Schedule,
    max_grad_norm: float,
    anneal_over: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Gradient descent with clipping and scaling, on the gradients as one flat vector.

    Its `update` has the argument `share` of `descend`.

    Args:
        scaling: the optimiser's transformation, such as `optax.scale_by_adam()`.
        learning_rate: initial learning rate, or a schedule by the number of updates.
        max_grad_norm: largest global norm; longer gradients are scaled down to it.
        anneal_over: number of planned updates over which a constant learning rate is annealed linearly to zero.

    Raises:
        UsageError: the learning rate or the norm is negative.
    """
    initial = learning_rate(0) if callable(learning_rate) else learning_rate
    for name, number in {"learning_rate": initial, "max_grad_norm": max_grad_norm}.items():
        if not number >= 0:
            raise UsageError(f"{name}={number} must be at least 0.")
    if anneal_over is None and not callable(learning_rate):
        step = optax.scale(-learning_rate)
    else:
        step = _scheduled(rate_schedule(learning_rate, anneal_over=anneal_over))
    clipping = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm < math.inf else optax.identity()
    return optax.flatten(optax.chain(clipping, scaling, step))


def rate_schedule(learning_rate: float | optax.Schedule, *, anneal_over: int | None = None) -> optax.Schedule:
    """The learning rate as a function of the number of updates; for the arguments, see `clipped_descent`.

    Raises:
        UsageError: it is annealed over more updates than the optimiser counts.
    """
    if callable(learning_rate):
        return learning_rate
    if anneal_over is None:
        return optax.constant_schedule(learning_rate)
    _check_count(anneal_over)
    return optax.linear_schedule(learning_rate, 0.0, anneal_over)


def _check_count(updates: int) -> None:
    if updates > MOST_UPDATES:
        raise UsageError(
            f"total_timesteps makes {updates:,} updates, and the learning rate is annealed over at most "
            f"{MOST_UPDATES:,}; lower it, or turn anneal_lr off."
        )


def rate_now(schedule: optax.Schedule, state: PyTree[Array]) -> Float[Array, ""]:
    """The learning rate of the next update; the mean where optimisers are stacked.

    Args:
        schedule: the optimiser's schedule, from `rate_schedule`.
        state: the optimiser's state.
    """
    is_annealing = lambda node: isinstance(node, Annealing)
    counts = [node for node in jax.tree.leaves(state, is_leaf=is_annealing) if is_annealing(node)]
    updates = counts[0].whole.astype(jnp.float32) + counts[0].part if counts else jnp.float32(0)
    return jnp.mean(jnp.asarray(schedule(updates), jnp.float32))


def descend(
    optimiser: optax.GradientTransformation,
    weights: PyTree[Array],
    state: PyTree[Array],
    gradients: PyTree[Array],
    *,
    share: float = 1.0,
) -> tuple[PyTree[Array], PyTree[Array]]:
    """One step of the optimiser: returns the new weights and optimiser state.

    Args:
        optimiser: from `clipped_descent`.
        weights: weights to update.
        state: the optimiser's state.
        gradients: gradients of a minibatch's mean loss with respect to the weights.
        share: fraction of a minibatch that the gradients come from. If the gradients of K workers are applied
            separately, a training makes K times as many updates as planned, each with a share of 1 / K.
    """
    with jax.numpy_dtype_promotion("standard"):  # Optax counts steps in integers and relies on promotion
        steps, state = optax.with_extra_args_support(optimiser).update(gradients, state, weights, share=share)
    return optax.apply_updates(weights, steps), state


def _scheduled(rate: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Scales updates by minus the learning rate for the number of updates made so far."""

    def init(params: PyTree[Array]) -> Annealing:
        return Annealing(jnp.int32(0), jnp.float32(0))

    def update(updates, state, params=None, *, share: float = 1.0, **_):
        step_size = -jnp.float32(rate(state.whole.astype(jnp.float32) + state.part))
        return jax.tree.map(lambda u: step_size.astype(u.dtype) * u, updates), _advanced(state, share)

    return optax.GradientTransformationExtraArgs(init, update)


def _advanced(state: Annealing, share: float) -> Annealing:
    part = state.part + share
    whole = jnp.floor(part + 1e-4)  # three thirds count as one, though their float sum may be smaller
    return Annealing(state.whole + whole.astype(jnp.int32), part - whole)
