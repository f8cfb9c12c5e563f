"""The fastest launches of the two kernels, for what they are to compute on the device where it lies."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rollmill.core.types import Key
from rollmill.dataflow import (
    Batch,
    Collector,
    Graph,
    Learner,
    MakeMinibatchLoop,
    Metrics,
    Trajectory,
    Weights,
    collect,
    identity,
    plain_minibatch_loop,
)
from rollmill.fusion.backends.base import AnyLaunch, Backend
from rollmill.fusion.kernels.descent import fused_minibatch_loop
from rollmill.fusion.kernels.gradients import BatchSamples
from rollmill.fusion.kernels.leaves import each_struct, to_raw
from rollmill.fusion.kernels.rollout import fused_collect, rollout_step
from rollmill.fusion.kernels.tracing import trace_abstractly
from rollmill.fusion.tune.timing import Tuned, fastest


def tune_rollout(
    graph: Graph,
    weights: Weights,
    collector: Collector,
    key: Key,
    backend: Backend,
    launches: Sequence[AnyLaunch],
    *,
    unroll: int,
) -> Tuned:
    """The fastest of these launches for these environments.

    Raises:
        CannotFuse: if the graph's policy and environment cannot be one kernel, or none that runs on this device.
    """

    def text(weights: Weights, collector: Collector, key: Key) -> str:
        step = rollout_step(graph, weights, each_struct(collector))
        keys = jax.ShapeDtypeStruct((*collector.index.shape, 2), jnp.uint32)
        return backend.rollout_text(launches[0], step, to_raw(collector), keys, graph.loops.num_steps)

    arguments = weights, collector, key
    device = backend.device(_device_of(collector.index))
    several = lambda collect: partial(rollouts_in_a_row, backend.timed_repeats, collect)
    return fastest(
        [trace_abstractly(text, *arguments), device, f"{backend.timed_repeats} times, unroll {unroll}"],
        launches,
        lambda launch: several(partial(fused_collect, graph, run=backend.rollouts(launch))),
        several(partial(collect, graph, unroll=unroll)),
        arguments,
        package=backend.package,
    )


def rollouts_in_a_row(
    count: int,
    collect: Callable[[Weights, Collector, Key], tuple[Collector, Trajectory]],
    weights: Weights,
    collector: Collector,
    key: Key,
) -> tuple[Collector, Trajectory]:
    """The last of several rollouts, of which each goes on where the one before has ended."""
    shape = jax.eval_shape(collect, weights, collector, key)[1]
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    again = lambda now, key: (collect(weights, now[0], key), None)
    return jax.lax.scan(again, (collector, empty), jax.random.split(key, count))[0]


def tune_descent(
    graph: Graph, learner: Learner, batch: Batch, rows: Array, backend: Backend, launches: Sequence[AnyLaunch]
) -> Tuned:
    """The fastest of these launches for an epoch with these rows `[M, N]`.

    Raises:
        CannotFuse: if the graph's gradients cannot be one kernel, or none that runs on this device.
    """
    first = partial(jax.tree.map, lambda leaf: leaf[0])

    def text(learner: Learner, batch: Batch, rows: Array) -> str:
        samples = BatchSamples(graph, batch, identity)
        step, minibatch = samples.task(learner, first(samples.shuffled(rows[None])), jnp.int32(0))
        return backend.gradient_text(launches[0], step, minibatch)

    def epochs(
        learner: Learner, batch: Batch, rows: Array, *, descents: MakeMinibatchLoop
    ) -> tuple[Learner, Metrics]:
        descent = descents(graph, batch, identity)
        shuffled = descent.shuffled(jnp.broadcast_to(rows, (backend.timed_repeats, *rows.shape)))
        after, metrics = jax.lax.scan(descent.epoch, descent.begin(learner), shuffled)
        return descent.end(after), metrics

    arguments = learner, batch, rows
    return fastest(
        [
            trace_abstractly(text, *arguments),
            backend.device(_device_of(rows)),
            f"{backend.timed_repeats} times {rows.shape}",
            str(jax.tree.structure(learner)),
        ],
        launches,
        lambda launch: partial(epochs, descents=partial(fused_minibatch_loop, run=backend.gradients(launch))),
        partial(epochs, descents=plain_minibatch_loop),
        arguments,
        package=backend.package,
    )


def _device_of(array: Array) -> Any:
    return next(iter(array.devices()))
