"""Sets up the searches for the fastest launches of a run's two kernels, rollout and gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from rollmill.core.types import Key
from rollmill.dataflow import (
    Batch,
    Collector,
    Graph,
    Learner,
    MakeMinibatchLoop,
    Metrics,
    State,
    Trajectory,
    Weights,
    collect,
    evaluate_schedules,
    identity,
    plain_minibatch_loop,
    without_addresses,
)
from rollmill.fusion.backends.base import AnyLaunch, Backend
from rollmill.fusion.kernels.gradients import GradientStep, Minibatch
from rollmill.fusion.kernels.leaves import to_raw
from rollmill.fusion.kernels.minibatch_loop import (
    epoch_inputs,
    example_minibatch,
    fused_minibatch_loop,
    kernel_sums,
)
from rollmill.fusion.kernels.rollout import RolloutStep, fused_collect, rollout_inputs
from rollmill.fusion.tune.agreement import gradient_agreement, rollout_agreement
from rollmill.fusion.tune.timing import LaunchSearch, file_of

T = TypeVar("T")


def trace_abstractly(make: Callable[..., T], *arguments: Any) -> T:
    """Returns the result of `make` for arrays or shapes, traced without computing anything."""
    made: list[T] = []

    def trace(*arguments: Any) -> tuple[()]:
        made.append(make(*arguments))
        return ()

    jax.eval_shape(trace, *arguments)
    return made[0]


def structure_text(tree: PyTree[Any]) -> str:
    """Returns a pytree's structure as a string, which is equal in every process."""
    return without_addresses(str(jax.tree.structure(tree)))


def rollout_search(
    graph: Graph,
    state: State,
    backend: Backend,
    launches: Sequence[AnyLaunch],
    device: Any,
    *,
    unroll: int,
    step: RolloutStep,
) -> LaunchSearch:
    """Returns the search for a graph's fastest rollout launch on a device.

    `state` has the shapes of the environments on one device. `unroll` steps of the unfused loop are compiled into
    one iteration.
    """
    kind, collector = backend.rollouts, state.collector
    # Shapes are enough to generate and compile kernels. Only timing needs arrays.
    keys = jax.ShapeDtypeStruct((*collector.index.shape, 2), jnp.uint32)
    task = step, step.prologue.shapes, to_raw(collector), keys, graph.loops.num_steps
    several = lambda collect: partial(consecutive_rollouts, backend.timed_repeats, collect)
    what = [
        kind.text(launches[0], *task),
        backend.device_name(device),
        f"{backend.timed_repeats} times alone, unroll {unroll}",
    ]

    def alone(launch: AnyLaunch) -> Callable[..., list[Array]]:
        again = lambda uniforms, keys, now, _: (kind.run(launch)(step, uniforms, now, keys, task[-1])[0], None)
        several = lambda uniforms, raw, keys: jax.lax.scan(
            partial(again, uniforms, keys), raw, length=backend.timed_repeats
        )
        return lambda *inputs: several(*inputs)[0]

    return LaunchSearch(
        file_of(what, launches, backend.package),
        launches,
        lambda launch: several(partial(fused_collect, graph, run=kind.run(launch), step=step)),
        several(partial(collect, graph, unroll=unroll)),
        (jax.eval_shape(graph.weights, state.learner), collector, state.key),
        partial(kind.compile_ahead, launches, *task),
        alone,
        partial(rollout_inputs, step),
        len(what[0]),
        partial(rollout_agreement, backend, step, graph.loops.num_steps),
    )


def consecutive_rollouts(
    count: int,
    collect: Callable[[Weights, Collector, Key], tuple[Collector, Trajectory]],
    weights: Weights,
    collector: Collector,
    key: Key,
) -> tuple[Collector, Trajectory]:
    """Runs `count` consecutive rollouts, and returns the results of the last rollout."""
    shape = jax.eval_shape(collect, weights, collector, key)[1]
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    again = lambda now, key: (collect(weights, now[0], key), None)
    return jax.lax.scan(again, (collector, empty), jax.random.split(key, count))[0]


def num_kernel_rows(
    graph: Graph, step: GradientStep, learner: PyTree[Any], batch: Batch, rows: jax.ShapeDtypeStruct
) -> int:
    """Returns how many rows a gradient kernel sees: samples, or sequences of a recurrent policy."""
    return trace_abstractly(partial(example_minibatch, graph, step), learner, batch, rows).num_rows


def minibatch_loop_search(
    graph: Graph,
    shapes: tuple[PyTree[jax.ShapeDtypeStruct], Batch, jax.ShapeDtypeStruct],
    backend: Backend,
    launches: Sequence[AnyLaunch],
    device: Any,
    *,
    step: GradientStep,
) -> LaunchSearch:
    """Returns the search for a graph's fastest gradient launch on a device.

    `shapes` are the shapes of a learner, its batch, and the rows `[M, N]` of an epoch, on one device.
    """
    kind, (learner, _, rows) = backend.gradients, shapes

    def with_minibatch(use: Callable[[GradientStep, Minibatch], T]) -> T:
        make = lambda *arguments: use(step, example_minibatch(graph, step, *arguments))
        return trace_abstractly(make, *shapes)

    def epochs(learner: Learner, batch: Batch, rows: Array, *, make: MakeMinibatchLoop) -> tuple[Learner, Metrics]:
        loop = make(graph, identity)
        samples = loop.prepare_samples(batch)
        # Several consecutive epochs, so that the device never waits for the host.
        shuffled = loop.shuffle(samples, jnp.broadcast_to(rows, (backend.timed_repeats, *rows.shape)))
        epoch = lambda carried, shuffled: loop.run_epoch(carried, samples, shuffled)
        after, metrics = jax.lax.scan(epoch, loop.begin(evaluate_schedules(graph, learner)), shuffled)
        return loop.end(after), metrics

    what = [
        with_minibatch(partial(kind.text, launches[0])),
        backend.device_name(device),
        f"{backend.timed_repeats} times alone {rows.shape}",
        structure_text(learner),
    ]
    numbers = np.tile(np.arange(rows.shape[0], dtype=np.int32), backend.timed_repeats)
    return LaunchSearch(
        file_of(what, launches, backend.package),
        launches,
        lambda launch: partial(epochs, make=partial(fused_minibatch_loop, run=kind.run(launch), step=step)),
        partial(epochs, make=plain_minibatch_loop),
        shapes,
        lambda: with_minibatch(partial(kind.compile_ahead, launches)),
        lambda launch: partial(kernel_sums, graph, step, kind.run(launch), numbers),
        partial(epoch_inputs, graph),
        len(what[0]),
        partial(gradient_agreement, backend, graph, step),
    )
