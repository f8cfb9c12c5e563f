"""Optimisers of all algorithms, with gradient clipping, scaling and annealed learning rates."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from rollmill.algorithms.hyperparameters import Number
from rollmill.core.errors import UsageError
from rollmill.core.schedules import NumberSchedule
from rollmill.dataflow import Hyperparameters, Loops
from rollmill.lowerings.flat_descent import descend_flat

MAX_UPDATES = 2**31 - 1
"""Maximum number of updates of a run, which are counted in 32 bits."""


class Annealing(NamedTuple):
    """Number of planned updates made so far: `whole + part`.

    The count is split in two, because a single float would lose small fractions in long runs.
    """

    whole: Int[Array, ""]
    """Number of planned updates that are complete."""
    part: Float[Array, ""]
    """Fraction of the next planned update, in `[0, 1)` up to rounding."""

    @property
    def updates(self) -> Float[Array, ""]:
        """Number of planned updates made so far, as one number."""
        return self.whole.astype(jnp.float32) + self.part


def no_updates() -> Annealing:
    """Returns the count of updates before the first update."""
    return Annealing(jnp.int32(0), jnp.float32(0))


def count_planned_update(count: Annealing, share: float) -> Annealing:
    """Returns the count of planned updates after one more.

    `share` is the fraction of a minibatch that the update covers.
    """
    part = count.part + share
    # three shares of 1/3 count as one update, although their sum in float32 may be smaller
    whole = jnp.floor(part + 1e-4)
    return Annealing(count.whole + whole.astype(jnp.int32), part - whole)


def planned_updates(loops: Loops) -> int:
    """Returns the number of updates of a run with one update per minibatch.

    Updates that an iteration skips count as made (`at_iteration_end`).
    """
    return loops.iterations * loops.epochs * loops.num_minibatches


def planned_rate(schedule: NumberSchedule, loops: Loops, planned: Number) -> optax.Schedule:
    """Converts a learning rate: a schedule in string form becomes a function of the number of updates.

    `planned` is the number of updates of the whole run, and may be traced. By default, it follows from the loops.
    Raises a `UsageError` if the schedule is invalid, or if the run makes more updates than the optimiser can
    count.
    """
    check_count(planned_updates(loops))

    def rate(updates: Any) -> Any:
        return schedule.at(updates / planned)

    return rate


def clipped_descent(
    scaling: optax.GradientTransformation,
    *,
    learning_rate: Number | optax.Schedule,
    max_grad_norm: Number,
    anneal_over: Number | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns gradient descent with clipping and scaling, on the gradients as one flat vector.

    Its `update` takes the argument `share` of `descend`. The learning rate is a number, or a function of the
    number of updates. Gradients with a larger global norm than `max_grad_norm` are scaled down to it. A constant
    learning rate is annealed linearly to zero over `anneal_over` planned updates. Raises a `UsageError` if rate or
    norm is negative, unless it is traced.
    """
    initial = learning_rate(0) if callable(learning_rate) else learning_rate
    for name, number in {"learning_rate": initial, "max_grad_norm": max_grad_norm}.items():
        if isinstance(number, float | int) and not number >= 0:
            raise UsageError(f"{name}={number} must be at least 0.")
    if anneal_over is None and not callable(learning_rate):
        step = optax.stateless(
            lambda updates, _: jax.tree.map(lambda u: -jnp.asarray(learning_rate, u.dtype) * u, updates)
        )
    else:
        step = _scale_by_schedule(rate_schedule(learning_rate, anneal_over=anneal_over))
    is_bounded = not isinstance(max_grad_norm, float | int) or max_grad_norm < math.inf
    clipping = optax.clip_by_global_norm(max_grad_norm) if is_bounded else optax.identity()
    inner = optax.with_extra_args_support(optax.chain(clipping, scaling, step))
    flat = optax.flatten(inner)
    return optax.GradientTransformationExtraArgs(flat.init, _FlatUpdate(inner, flat))


def rate_schedule(learning_rate: Number | optax.Schedule, *, anneal_over: Number | None = None) -> optax.Schedule:
    """Returns the learning rate as a function of the number of updates. See `clipped_descent` for the arguments.

    Raises:
        UsageError: the rate is annealed over more updates than the optimiser can count.
    """
    if callable(learning_rate):
        return learning_rate
    if anneal_over is None:
        return optax.constant_schedule(learning_rate)
    if isinstance(anneal_over, int):
        check_count(anneal_over)
    return partial(_anneal, learning_rate, anneal_over)


def _anneal(first: Number, over: Number, updates: Any) -> Float[Array, ""]:
    """Returns a rate that falls linearly from `first` to zero over a number of updates."""
    left = 1 - jnp.clip(updates, 0, over) / over
    return jnp.float32(first * left)


def check_schedule(schedule: optax.Schedule, updates: int) -> None:
    """Checks a learning rate given as a function of the number of updates.

    Raises a `UsageError` if the rate is negative or not finite, or if the run makes more updates than the
    optimiser can count. It also raises one if the rate grows until the end, because the function was then probably
    written for the remaining progress, as in Stable-Baselines3.
    """
    check_count(updates)
    rates = {n: _rate_at(schedule, n) for n in sorted({0, 1, *(updates * part // 10 for part in range(11))})}
    for n, rate in rates.items():
        if not (math.isfinite(rate) and rate >= 0):
            raise UsageError(
                f"the function learning_rate returns {rate} after {n} of {updates} updates, expected a "
                "nonnegative number."
            )
    first, last, before = rates[0], rates[updates], rates[updates * 9 // 10]
    grows = last > before and last > first
    if grows and (first == 0 or last > 1 or last > 10 * rates[min(1, updates)]):
        raise UsageError(
            "learning_rate is called with the number of updates, as Optax schedules are, and grows from "
            f"{first:g} to {last:g} over all {updates} updates. Functions of the remaining progress, as in "
            "Stable-Baselines3, are not supported. hint: use learning_rate='linear:3e-4:0', or "
            "optax.linear_schedule(3e-4, 0, updates). If the learning rate should really grow, use "
            "'linear:0:3e-4'."
        )


def _rate_at(schedule: optax.Schedule, updates: int) -> float:
    try:
        return float(jnp.asarray(schedule(jnp.float32(updates))).item())
    except Exception as error:  # the user's function may raise anything
        raise UsageError(
            f"the function learning_rate does not return a number for {updates} updates "
            f"({type(error).__name__}: {error}). hint: use a number, or an Optax schedule such as "
            "optax.linear_schedule."
        ) from error


def check_count(updates: int) -> None:
    """Raises a `UsageError` if a run makes more updates than schedules can count."""
    if updates > MAX_UPDATES:
        raise UsageError(
            f"total_timesteps gives {updates:,} updates, but the learning rate can be annealed over at most "
            f"{MAX_UPDATES:,}. hint: lower total_timesteps, or turn anneal_lr off."
        )


def rate_now(schedule: optax.Schedule, state: PyTree[Array]) -> Float[Array, ""]:
    """Returns the learning rate of the next update. If optimisers are stacked, it is their mean."""
    is_annealing = lambda node: isinstance(node, Annealing)
    counts = [node for node in jax.tree.leaves(state, is_leaf=is_annealing) if is_annealing(node)]
    updates = counts[0].updates if counts else jnp.float32(0)
    return jnp.mean(jnp.asarray(schedule(updates), jnp.float32))


@dataclass(frozen=True)
class Optimiser:
    """An optimiser that reads its hyperparameters from the learner, or otherwise from the configuration."""

    build: Callable[[Hyperparameters], optax.GradientTransformation]
    """Returns the optimiser for the hyperparameters that a learner holds."""

    def init(self, weights: PyTree[Array]) -> PyTree[Array]:
        """Returns the optimiser state before the first step, which does not depend on hyperparameters."""
        return self.build({}).init(weights)


def descend(
    optimiser: optax.GradientTransformation | Optimiser,
    weights: PyTree[Array],
    state: PyTree[Array],
    gradients: PyTree[Array],
    hyperparameters: Hyperparameters | None = None,
    *,
    share: float = 1.0,
) -> tuple[PyTree[Array], PyTree[Array]]:
    """Makes one optimiser step, and returns the new weights and the new optimiser state.

    The gradients are for a minibatch's mean loss with respect to the weights. `hyperparameters` are the learner's
    hyperparameters, for an optimiser that reads them. `share` is the fraction of a minibatch that the gradients
    come from. If the gradients of K workers are applied separately, a run makes K times the planned updates, each
    with a share of 1 / K.
    """
    make = optimiser.build if isinstance(optimiser, Optimiser) else lambda hyperparameters: optimiser
    hyperparameters = {} if hyperparameters is None else hyperparameters
    with jax.numpy_dtype_promotion("standard"):  # Optax counts steps in integers and relies on type promotion
        now = make(hyperparameters)
        if isinstance(now.update, _FlatUpdate) and not now.update.reads_weights:
            # Hyperparameters are inputs next to the state, so that the operation does not close over traced
            # values.
            of_vector = partial(_vector_step, make, share)
            weights, (state, _) = descend_flat(of_vector, weights, (state, hyperparameters), gradients)
            return weights, state
        steps, state = optax.with_extra_args_support(now).update(gradients, state, weights, share=share)
    return optax.apply_updates(weights, steps), state


def _vector_step(
    make: Callable[[Hyperparameters], Any], share: float, gradients: Float[Array, " numbers"], given: Any
) -> Any:
    """Returns the flat step, and the next state with the hyperparameters, as `descend_flat` takes them."""
    state, hyperparameters = given
    step, state = make(hyperparameters).update.of_vector(gradients, state, share=share)  # type: ignore[attr-defined]
    return step, (state, hyperparameters)


@dataclass(frozen=True)
class _FlatUpdate:
    """The update of an optimiser that sees all gradients as one flat vector."""

    inner: optax.GradientTransformationExtraArgs
    flat: optax.GradientTransformationExtraArgs
    """`inner`, applied to all leaves of a tree as one flat vector."""

    @cached_property
    def reads_weights(self) -> bool:
        """Whether an update depends on the weights, as weight decay does. Traces an update."""
        one = jax.ShapeDtypeStruct((1,), jnp.float32)
        try:
            with jax.numpy_dtype_promotion("standard"):
                jax.eval_shape(lambda one: self.inner.update(one, self.inner.init(one), None, share=1.0), one)
        except ValueError:  # Optax raises this error if the weights are needed
            return True
        return False

    def __call__(self, updates: Any, state: Any, params: Any = None, **others: Any) -> Any:
        """Returns the updates and the next state, as in Optax."""
        return self.flat.update(updates, state, params, **others)

    def of_vector(self, gradients: Float[Array, " numbers"], state: PyTree[Array], *, share: float) -> Any:
        """Returns the flat step and the next state, given gradients that are already flat."""
        return self.inner.update(gradients, state, None, share=share)


def at_iteration_end(state: PyTree[Array], updates: int) -> PyTree[Array]:
    """Advances the counts of planned updates in an optimiser state by an iteration of `updates` updates.

    Updates that the iteration skipped then count as made. The state may be any tree that contains optimiser
    states.
    """

    def moved(node: Any) -> Any:
        if not isinstance(node, Annealing):
            return node
        return Annealing(-(-node.whole // updates) * updates, node.part)

    return jax.tree.map(moved, state, is_leaf=lambda node: isinstance(node, Annealing))


def _scale_by_schedule(rate: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Scales updates by minus the learning rate for the number of updates made so far."""

    def init(params: PyTree[Array]) -> Annealing:
        return no_updates()

    def update(updates, state, params=None, *, share: float = 1.0, **_):
        step_size = -jnp.float32(rate(state.updates))
        return jax.tree.map(lambda u: step_size.astype(u.dtype) * u, updates), count_planned_update(state, share)

    return optax.GradientTransformationExtraArgs(init, update)
