"""The fastest launches of the two kernels, for what they are to compute on the device where it lies."""

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
    ManyDescents,
    Metrics,
    Weights,
    collect,
    identity,
    plain_descent,
)
from rollmill.fusion.descent import fused_descent
from rollmill.fusion.gradients import GradientLaunch, Samples, gradient_kernel, run_gradients_kernel
from rollmill.fusion.kernels import Kernel
from rollmill.fusion.leaves import each_struct, to_raw
from rollmill.fusion.prelude import Numerics
from rollmill.fusion.rollout import Launch, fused_collect, rollout_kernel, rollout_step, run_kernel
from rollmill.fusion.timing import Tuned, fastest
from rollmill.fusion.tracing import traced

ROLLOUTS = (Launch(16, 1), Launch(32, 1), Launch(32, 2), Launch(64, 2), Launch(64, 4), Launch(128, 4))
GRADIENTS = ((1, 128, 8), (2, 64, 4), (4, 64, 4), (4, 32, 2))
"""Programs on each multiprocessor of the chip, samples of a block and its warps, where gradients are summed."""


def tune_rollout(
    graph: Graph, weights: Weights, collector: Collector, key: Key, numerics: Numerics, *, unroll: int
) -> Tuned:
    """The fastest launch for these environments.

    Raises:
        CannotFuse: if the graph's policy and environment cannot be one kernel, or none that runs on this device.
    """

    def kernel(weights: Weights, collector: Collector, key: Key) -> Kernel:
        step = rollout_step(graph, weights, each_struct(collector))
        keys = jax.ShapeDtypeStruct((*collector.index.shape, 2), jnp.uint32)
        steps, launch = graph.loops.num_steps, ROLLOUTS[0]
        return rollout_kernel(step, to_raw(collector), keys, steps, launch=launch, numerics=numerics)[0]

    run = lambda launch: partial(run_kernel, launch=launch, numerics=numerics)
    return fastest(
        traced(kernel, weights, collector, key),
        ROLLOUTS,
        lambda launch: partial(fused_collect, graph, run=run(launch)),
        partial(collect, graph, unroll=unroll),
        (weights, collector, key),
        unroll=unroll,
    )


def tune_descent(graph: Graph, learner: Learner, batch: Batch, rows: Array, numerics: Numerics) -> Tuned:
    """The fastest launch for an epoch with these rows `[M, N]`.

    Raises:
        CannotFuse: if the graph's gradients cannot be one kernel, or none that runs on this device.
    """
    run = lambda launch: partial(run_gradients_kernel, launch=launch, numerics=numerics)
    launches = gradient_launches(next(iter(rows.devices())))
    first = partial(jax.tree.map, lambda leaf: leaf[0])

    def kernel(learner: Learner, batch: Batch, rows: Array) -> Kernel:
        samples = Samples(graph, batch, identity)
        step, minibatch = samples.task(learner, first(samples.shuffled(rows[None])), jnp.int32(0))
        return gradient_kernel(step, minibatch, launch=launches[0], numerics=numerics)[0]

    def epoch(learner: Learner, batch: Batch, rows: Array, *, descents: ManyDescents) -> tuple[Learner, Metrics]:
        descent = descents(graph, batch, identity)
        after, metrics = descent.epoch(descent.begin(learner), first(descent.shuffled(rows[None])))
        return descent.end(after), metrics

    return fastest(
        traced(kernel, learner, batch, rows),
        launches,
        lambda launch: partial(epoch, descents=partial(fused_descent, run=run(launch))),
        partial(epoch, descents=plain_descent),
        (learner, batch, rows),
        unroll=1,
    )


def gradient_launches(device: Any) -> list[GradientLaunch]:
    """What is tried on a device."""
    processors = getattr(device, "core_count", None) or 128
    return [GradientLaunch(processors * n, *block) for n, *block in GRADIENTS]
