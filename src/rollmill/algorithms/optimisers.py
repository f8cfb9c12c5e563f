"""Optimisers that every algorithm builds in the same way: clip, scale, step at an annealed rate."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from rollmill.core.errors import UsageError
from rollmill.dataflow import Loops


class Annealing(NamedTuple):
    """How far a training has come, counted in its planned updates: `whole + part`.

    Two numbers, because a float that counts alone loses the small shares of long trainings.
    """

    whole: Int[Array, ""]
    part: Float[Array, ""]
    """In `[0, 1)`, rounding aside."""


def planned_updates(loops: Loops) -> int:
    """Updates of a training in which every minibatch makes one."""
    return loops.iterations * loops.epochs * loops.num_minibatches


def clipped_descent(
    scaling: optax.GradientTransformation,
    *,
    learning_rate: float | optax.Schedule,
    max_grad_norm: float,
    anneal_over: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Descent along gradients that are clipped and then scaled; their tree is one flat vector to it.

    Its `update` takes `share`, as `descend` does.

    Args:
        scaling: what is special about the optimiser, such as `optax.scale_by_adam()`.
        learning_rate: step size, at the start where it is annealed; or the step size by the number of updates.
        max_grad_norm: gradients are scaled down to this global norm.
        anneal_over: planned updates over which a step size that is a number falls linearly to zero.

    Raises:
        UsageError: for a step size or a norm below zero.
    """
    first = learning_rate(0) if callable(learning_rate) else learning_rate
    for name, number in {"learning_rate": first, "max_grad_norm": max_grad_norm}.items():
        if not number >= 0:
            raise UsageError(f"{name}={number} must be at least 0.")
    if anneal_over is None and not callable(learning_rate):
        step = optax.scale(-learning_rate)
    else:
        step = _scheduled(rate_schedule(learning_rate, anneal_over=anneal_over))
    return optax.flatten(optax.chain(optax.clip_by_global_norm(max_grad_norm), scaling, step))


def rate_schedule(learning_rate: float | optax.Schedule, *, anneal_over: int | None = None) -> optax.Schedule:
    """The step size by the number of updates; arguments are those of `clipped_descent`."""
    if callable(learning_rate):
        return learning_rate
    if anneal_over is None:
        return optax.constant_schedule(learning_rate)
    return optax.linear_schedule(learning_rate, 0.0, anneal_over)


def rate_now(schedule: optax.Schedule, state: PyTree[Array]) -> Float[Array, ""]:
    """The step size of the next update; where optimisers are stacked, the mean of theirs.

    Args:
        schedule: of the optimiser, as `rate_schedule` gives it.
        state: of the optimiser.
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
    """One step of the optimiser: the weights and its state after it.

    Args:
        optimiser: what `clipped_descent` returns.
        weights: what is learned.
        state: of the optimiser.
        gradients: of a mean over a minibatch, with respect to the weights.
        share: the part of a minibatch that the gradients are of. Where each of K workers has its own
            gradients applied, a training makes K times as many updates as planned, of 1 / K each.
    """
    with jax.numpy_dtype_promotion("standard"):  # Optax counts steps in integers and relies on promotion
        steps, state = optax.with_extra_args_support(optimiser).update(gradients, state, weights, share=share)
    return optax.apply_updates(weights, steps), state


def _scheduled(rate: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Steps downhill at a rate that depends on how many updates were made."""

    def init(params: PyTree[Array]) -> Annealing:
        return Annealing(jnp.int32(0), jnp.float32(0))

    def update(updates, state, params=None, *, share: float = 1.0, **_):
        now = -jnp.float32(rate(state.whole.astype(jnp.float32) + state.part))
        return jax.tree.map(lambda u: now.astype(u.dtype) * u, updates), _advanced(state, share)

    return optax.GradientTransformationExtraArgs(init, update)


def _advanced(state: Annealing, share: float) -> Annealing:
    part = state.part + share
    whole = jnp.floor(part + 1e-4)  # three thirds are one, though their sum may fall short of it
    return Annealing(state.whole + whole.astype(jnp.int32), part - whole)
