"""Epochs of which each minibatch is one kernel and one step of the optimiser.

Where the optimiser treats all numbers alike, the network is carried as one vector from the first minibatch to
the last: the kernel reads its weights there, and the optimiser takes one step, not one for each leaf.

Shape letters: `M` minibatches of an epoch, `N` rows of each.
"""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, UInt32

from rollmill.core.operations import traced
from rollmill.dataflow import (
    Batch,
    ElementwiseUpdate,
    Graph,
    Learner,
    Metrics,
    MinibatchLoop,
    Reduce,
    gradient_metrics,
    identity,
    plain_minibatch_loop,
)
from rollmill.fusion.kernels.gradients import (
    BatchSamples,
    GradientStep,
    Minibatch,
    Run,
    Shuffled,
    fused_gradients,
    gradient_step,
    mean_gradients,
    results_of,
)
from rollmill.fusion.kernels.vector import as_vector, can_be_vector, cut

UNROLLED = 4
"""Minibatches that are compiled as one turn of the loop: a turn costs about as much as a launch."""


def fused_minibatch_loop(
    graph: Graph, batch: Batch, reduce: Reduce, *, run: Run, step: GradientStep | None = None
) -> MinibatchLoop:
    """The loop over minibatches whose gradients are computed by `run`.

    The program of a sample is `step`, the graph's, which is lowered here where it is left out.
    """
    samples, learner = BatchSamples(graph, batch, reduce), jax.eval_shape(graph.start_learner, jax.random.key(0))
    step = step or gradient_step(graph, learner, samples.shapes)
    network = jax.eval_shape(mean_gradients(graph).network, learner)
    if isinstance(graph.update, ElementwiseUpdate) and can_be_vector(network):
        whole = _OneVector(graph, samples, network, reduce, run, step)
        return MinibatchLoop(whole.begin, whole.samples.shuffled, whole.epoch, whole.end)
    return plain_minibatch_loop(graph, batch, reduce, gradients=partial(fused_gradients, run=run, step=step))


def example_minibatch(
    graph: Graph, step: GradientStep, learner: Learner, batch: Batch, rows: UInt32[Array, "M N"]
) -> Minibatch:
    """The first minibatch of an epoch, as the loop hands it to a kernel."""
    samples, network = BatchSamples(graph, batch, identity), mean_gradients(graph).network(learner)
    vector = None
    if isinstance(graph.update, ElementwiseUpdate) and can_be_vector(network):
        network, vector = cut(as_vector(network), jax.eval_shape(lambda: network))
        learner = eqx.tree_at(mean_gradients(graph).network, learner, network)
    shuffled = jax.tree.map(lambda leaf: leaf[0], samples.shuffled(rows[None]))
    minibatch = samples.minibatch(shuffled, jnp.int32(0), step.prologue(learner))
    return minibatch._replace(vector=vector)


class _OneVector:
    """A learner whose network is one vector."""

    def __init__(
        self,
        graph: Graph,
        samples: BatchSamples,
        like: PyTree[jax.ShapeDtypeStruct],
        reduce: Reduce,
        run: Run,
        step: GradientStep,
    ) -> None:
        self.samples = samples
        self._graph, self._like, self._reduce = graph, like, reduce
        self._run, self._step = run, step
        self._network = mean_gradients(graph).network

    def begin(self, learner: Learner) -> Learner:
        return self._with_network(learner, as_vector(self._network(learner)))

    def end(self, flat: Learner) -> Learner:
        return self._with_network(flat, cut(self._network(flat), self._like)[0])

    def epoch(self, flat: Learner, shuffled: Shuffled) -> tuple[Learner, Metrics]:
        names: list[str] = []

        def minibatch_step(flat: Learner, number: Int[Array, ""]) -> tuple[Learner, Float[Array, " metrics"]]:
            # Slices of the vector: the kernel recognises them, and reads its weights from the vector itself.
            network, vector = cut(self._network(flat), self._like)
            learner = self._with_network(flat, network)
            with traced("gradients"):
                uniforms = self._step.prologue(learner)
                minibatch = self.samples.minibatch(shuffled, number, uniforms)._replace(vector=vector)
                means = self._reduce(self._run(self._step, minibatch))
                tree, metrics = results_of(self._step, uniforms, means)
                gradients = as_vector(tree)
            with traced("update"):
                advanced = self._graph.update(flat, gradients)
            metrics = {**metrics, **gradient_metrics(gradients, metrics)}
            # Set while the body is traced; a scan can only hand out arrays.
            names[:] = metrics
            return advanced, jnp.stack(list(metrics.values()))

        numbers = jnp.arange(len(shuffled.rows), dtype=jnp.int32)
        flat, metrics = jax.lax.scan(minibatch_step, flat, numbers, unroll=min(UNROLLED, len(shuffled.rows)))
        return flat, {name: metrics[:, n] for n, name in enumerate(names)}

    def _with_network(self, learner: Learner, network: Any) -> Learner:
        return eqx.tree_at(self._network, learner, network)
