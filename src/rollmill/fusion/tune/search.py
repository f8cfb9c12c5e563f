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
from rollmill.fusion.kernels.gradients import GradientStep, Minibatch
from rollmill.fusion.kernels.leaves import to_raw
from rollmill.fusion.kernels.minibatch_loop import example_minibatch, fused_minibatch_loop
from rollmill.fusion.kernels.rollout import RolloutStep, fused_collect
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
    step: RolloutStep,
) -> Tuned:
    """The fastest of these launches for these environments; `step` is the graph's.

    Raises:
        CannotFuse: if there is no kernel that runs on this device.
    """
    kind, arguments = backend.rollouts, (weights, collector, key)
    keys = jax.ShapeDtypeStruct((*collector.index.shape, 2), jnp.uint32)
    # Shapes are enough to write and to compile kernels; only their times need arrays.
    task = step, step.prologue.shapes, to_raw(jax.eval_shape(lambda: collector)), keys, graph.loops.num_steps
    several = lambda collect: partial(rollouts_in_a_row, backend.timed_repeats, collect)
    return fastest(
        [
            kind.text(launches[0], *task),
            backend.device(_device_of(collector.index)),
            f"{backend.timed_repeats} times, unroll {unroll}",
        ],
        launches,
        lambda launch: several(partial(fused_collect, graph, run=kind.run(launch), step=step)),
        several(partial(collect, graph, unroll=unroll)),
        arguments,
        package=backend.package,
        compile_ahead=partial(kind.compile_ahead, launches, *task),
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
    graph: Graph,
    learner: Learner,
    batch: Batch,
    rows: Array,
    backend: Backend,
    launches: Sequence[AnyLaunch],
    *,
    step: GradientStep,
) -> Tuned:
    """The fastest of these launches for an epoch with these rows `[M, N]`; `step` is the graph's.

    Raises:
        CannotFuse: if there is no kernel that runs on this device.
    """
    kind, arguments = backend.gradients, (learner, batch, rows)

    def with_minibatch(use: Callable[[GradientStep, Minibatch], T]) -> T:
        make = lambda *arguments: use(step, example_minibatch(graph, step, *arguments))
        return trace_abstractly(make, *arguments)

    def epochs(learner: Learner, batch: Batch, rows: Array, *, make: MakeMinibatchLoop) -> tuple[Learner, Metrics]:
        loop = make(graph, batch, identity)
        shuffled = loop.shuffled(jnp.broadcast_to(rows, (backend.timed_repeats, *rows.shape)))
        after, metrics = jax.lax.scan(loop.epoch, loop.begin(learner), shuffled)
        return loop.end(after), metrics

    return fastest(
        [
            with_minibatch(partial(kind.text, launches[0])),
            backend.device(_device_of(rows)),
            f"{backend.timed_repeats} times {rows.shape}",
            str(jax.tree.structure(learner)),
        ],
        launches,
        lambda launch: partial(epochs, make=partial(fused_minibatch_loop, run=kind.run(launch), step=step)),
        partial(epochs, make=plain_minibatch_loop),
        arguments,
        package=backend.package,
        compile_ahead=lambda: with_minibatch(partial(kind.compile_ahead, launches)),
    )


def _device_of(array: Array) -> Any:
    return next(iter(array.devices()))
