"""The fastest launches of the two kernels, for what they are to compute on the device where it lies."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

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
from rollmill.fusion.kernels.gradients import BatchSamples
from rollmill.fusion.kernels.leaves import each_struct, to_raw
from rollmill.fusion.kernels.minibatch_loop import fused_minibatch_loop
from rollmill.fusion.kernels.rollout import fused_collect, rollout_step
from rollmill.fusion.kernels.tracing import trace_abstractly
from rollmill.fusion.tune.timing import Tuned, fastest

T = TypeVar("T")


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

    def with_task(use: Callable[..., T], weights: Weights, collector: Collector, key: Key) -> T:
        step = rollout_step(graph, weights, each_struct(collector))
        keys = jax.ShapeDtypeStruct((*collector.index.shape, 2), jnp.uint32)
        return use(step, to_raw(collector), keys, graph.loops.num_steps)

    arguments, kind = (weights, collector, key), backend.rollouts
    traced = lambda use: trace_abstractly(partial(with_task, use), *arguments)
    device = backend.device(_device_of(collector.index))
    several = lambda collect: partial(rollouts_in_a_row, backend.timed_repeats, collect)
    return fastest(
        [traced(partial(kind.text, launches[0])), device, f"{backend.timed_repeats} times, unroll {unroll}"],
        launches,
        lambda launch: several(partial(fused_collect, graph, run=kind.run(launch))),
        several(partial(collect, graph, unroll=unroll)),
        arguments,
        package=backend.package,
        compile_ahead=lambda: traced(partial(kind.compile_ahead, launches)),
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


def tune_minibatch_loop(
    graph: Graph, learner: Learner, batch: Batch, rows: Array, backend: Backend, launches: Sequence[AnyLaunch]
) -> Tuned:
    """The fastest of these launches for an epoch with these rows `[M, N]`.

    Raises:
        CannotFuse: if the graph's gradients cannot be one kernel, or none that runs on this device.
    """
    first = partial(jax.tree.map, lambda leaf: leaf[0])

    def with_task(use: Callable[..., T], learner: Learner, batch: Batch, rows: Array) -> T:
        samples = BatchSamples(graph, batch, identity)
        return use(*samples.task(learner, first(samples.shuffled(rows[None])), jnp.int32(0)))

    def epochs(learner: Learner, batch: Batch, rows: Array, *, make: MakeMinibatchLoop) -> tuple[Learner, Metrics]:
        loop = make(graph, batch, identity)
        shuffled = loop.shuffled(jnp.broadcast_to(rows, (backend.timed_repeats, *rows.shape)))
        after, metrics = jax.lax.scan(loop.epoch, loop.begin(learner), shuffled)
        return loop.end(after), metrics

    arguments, kind = (learner, batch, rows), backend.gradients
    traced = lambda use: trace_abstractly(partial(with_task, use), *arguments)
    return fastest(
        [
            traced(partial(kind.text, launches[0])),
            backend.device(_device_of(rows)),
            f"{backend.timed_repeats} times {rows.shape}",
            str(jax.tree.structure(learner)),
        ],
        launches,
        lambda launch: partial(epochs, make=partial(fused_minibatch_loop, run=kind.run(launch))),
        partial(epochs, make=plain_minibatch_loop),
        arguments,
        package=backend.package,
        compile_ahead=lambda: traced(partial(kind.compile_ahead, launches)),
    )


def _device_of(array: Array) -> Any:
    return next(iter(array.devices()))
