"""Several iterations in one call of a program.

On a GPU, the host takes about a millisecond to start a program, whatever the program computes. Programs with short
iterations therefore compute several of them per call.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rollmill.dataflow import Graph, PackedMetrics, State, is_flag
from rollmill.programs.kernels import KernelChoice

MAX_PER_CALL = 16
"""Maximum number of iterations per call."""

SAMPLES_PER_CALL = 2**24
"""Approximate maximum number of samples that are learned from per call, where samples count once in each epoch.

PPO on CartPole-v1 learns from this many in 9 to 12 ms on an H200 (`benchmarks/fusion_training.py`), about ten
times as long as the host takes to start a program. A window of iterations that ends early wastes less than that.
"""

Iterate: TypeAlias = Callable[[State], tuple[State, PackedMetrics]]
"""Function that computes one iteration."""


def iterations_per_call(graph: Graph, num_seeds: int, devices: Sequence[Any], kernels: KernelChoice) -> int:
    """Returns the maximum number of iterations per call of a program with these kernels, by `iterate_up_to`.

    It is more than one on a single GPU if rollouts and gradients are kernels. Other iterations take so long that
    the start of the program does not count.
    """
    on_one_gpu = [device.platform for device in devices] == ["gpu"]
    if not (on_one_gpu and kernels.rollouts.fused and kernels.gradients.fused and graph.replay is None):
        return 1
    samples = num_seeds * graph.loops.batch_size * graph.loops.epochs
    return min(max(SAMPLES_PER_CALL // samples, 1), MAX_PER_CALL)


def iterate_up_to(most: int, step: Iterate, state: State, count: Int[Array, ""]) -> tuple[State, PackedMetrics]:
    """Runs `count` of at most `most` iterations, and returns the metrics of each, with an additional first axis.

    The device computes `most` iterations, because with a number that it does not know in advance, the host would
    have to wait for it in each of them. What the others compute is dropped: rows of metrics from `count` on are
    meaningless.
    """

    def iterate(state: State, number: Int[Array, ""]) -> tuple[State, PackedMetrics]:
        after, metrics = step(state)
        keep = lambda new, old: jnp.where(number < count, new, old)
        return jax.tree.map(keep, after, state), metrics

    return jax.lax.scan(iterate, state, jnp.arange(most))


def sum_iterations(step: Iterate, state: State, count: Int[Array, ""]) -> tuple[State, PackedMetrics]:
    """Runs several iterations, and sums their metrics. Of flags, it returns the minimum."""
    shape = jax.eval_shape(step, state)[1]
    flags = np.asarray([is_flag(name) for name in shape.names])

    def again(_: Any, carry: tuple[State, PackedMetrics]) -> tuple[State, PackedMetrics]:
        state, sums = carry
        state, metrics = step(state)
        both = jnp.where(flags, jnp.minimum(sums.values, metrics.values), sums.values + metrics.values)
        return state, PackedMetrics(both, shape.names)

    none = PackedMetrics(jnp.broadcast_to(jnp.float32(flags), shape.values.shape), shape.names)
    return jax.lax.fori_loop(0, count, again, (state, none))
