"""Epochs in which each minibatch is one gradient kernel and one optimiser step.

If the optimiser is element-wise, the network is carried through the epoch as one vector. The kernel then reads its
weights from this vector, and the optimiser makes one step instead of one for each leaf.

Shape letters: `M` minibatches of an epoch, `N` rows of a minibatch.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, UInt32

from rollmill.core.operations import operation_scope
from rollmill.dataflow import (
    Batch,
    ElementwiseUpdate,
    Graph,
    Learner,
    Metrics,
    MinibatchLoop,
    Reduce,
    Weights,
    adapt_hyperparameters,
    evaluate_schedules,
    gradient_metrics,
    identity,
)
from rollmill.fusion.kernels.gradients import (
    GradientStep,
    Minibatch,
    PackedBatch,
    Run,
    Shuffled,
    in_one_vector,
    kernel_gradients,
    lower_gradients,
    minibatch_of,
    pack_batch,
    results_of,
    shuffle_samples,
)
from rollmill.fusion.kernels.vector import Vector, as_vector, can_be_vector, split_vector

UNROLLED = 4
"""Number of minibatches compiled into one iteration of the loop. An iteration costs about as much as a kernel
launch."""


def fused_minibatch_loop(
    graph: Graph, reduce: Reduce, *, run: Run, step: GradientStep | None = None, unroll: int = UNROLLED
) -> MinibatchLoop:
    """Returns the loop over minibatches, with gradients computed by a kernel.

    `run` calls the kernel. `step` is the graph's lowered program, lowered here by default. Up to `unroll`
    minibatches are compiled into one iteration of the loop.
    """
    own = _FusedLoop(graph, reduce, run, step or lower_gradients(graph))
    return MinibatchLoop(
        own.begin,
        own.prepare_samples,
        own.shuffle,
        own.run_minibatch,
        own.run_epoch,
        own.run_drawn,
        own.end,
        unroll=unroll,
    )


def example_minibatch(
    graph: Graph, step: GradientStep, learner: Learner, batch: Batch, rows: UInt32[Array, "M N"]
) -> Minibatch:
    """Returns the first minibatch of an epoch, as the loop passes it to a kernel."""
    packed, carried = pack_batch(batch), _carry_of(graph)
    shuffled = jax.tree.map(lambda leaf: leaf[0], shuffle_samples(graph, packed, rows[None], identity))
    learner, vector = carried.learner(carried.begin(learner))
    return minibatch_of(graph, step, learner, packed, shuffled, jnp.int32(0), vector)


def epoch_inputs(
    graph: Graph, learner: Learner, batch: Batch, rows: UInt32[Array, "M N"]
) -> tuple[Learner, PackedBatch, Shuffled]:
    """Computes the inputs of an epoch's gradient kernels: the learner state with its schedules evaluated, the
    packed batch and the shuffled rows.
    """
    packed = pack_batch(batch)
    shuffled = jax.tree.map(lambda leaf: leaf[0], shuffle_samples(graph, packed, rows[None], identity))
    return evaluate_schedules(graph, learner), packed, shuffled


def kernel_sums(
    graph: Graph,
    step: GradientStep,
    run: Run,
    numbers: Int[np.ndarray, " minibatch"],
    learner: Learner,
    packed: PackedBatch,
    shuffled: Shuffled,
) -> Float[Array, " size"]:
    """Runs the gradient kernels of several minibatches with the same weights. Returns their summed results."""
    carried = _carry_of(graph)

    def turn(begun: Any, number: Int[Array, ""]) -> tuple[Any, Float[Array, " size"]]:
        learner, vector = carried.learner(begun)
        return begun, run(step, minibatch_of(graph, step, learner, packed, shuffled, number, vector))

    return jnp.sum(jax.lax.scan(turn, carried.begin(learner), jnp.asarray(numbers))[1], axis=0)


class _Carried(NamedTuple):
    """Functions that carry a learner from minibatch to minibatch unchanged."""

    graph: Graph

    def begin(self, learner: Learner) -> Any:
        """Returns the carry of a learner."""
        return learner

    def learner(self, carried: Any) -> tuple[Learner, Vector | None]:
        """Returns the learner of a carry, and the vector that its network is a part of."""
        return carried, None

    def gradients(self, tree: Weights) -> Any:
        """Returns gradients in the structure of the carried network."""
        return tree


class _OneVector(_Carried):
    """Carries a learner whose network is one vector."""

    def begin(self, learner: Learner) -> Any:
        return self._with_network(learner, as_vector(self._network(learner)))

    def learner(self, carried: Any) -> tuple[Learner, Vector | None]:
        # The kernel recognises the leaves as slices of the vector, and reads its weights from the vector itself.
        network, vector = split_vector(self._network(carried), _network_shapes(self.graph))
        return self._with_network(carried, network), vector

    def gradients(self, tree: Weights) -> Any:
        return as_vector(tree)

    def _network(self, learner: Learner) -> Any:
        return kernel_gradients(self.graph).network(learner)

    def _with_network(self, learner: Learner, network: Any) -> Learner:
        return eqx.tree_at(kernel_gradients(self.graph).network, learner, network)


def _network_shapes(graph: Graph) -> PyTree[jax.ShapeDtypeStruct]:
    learner = jax.eval_shape(graph.start_learner, jax.eval_shape(jax.random.key, 0))
    return jax.eval_shape(kernel_gradients(graph).network, learner)


def _carry_of(graph: Graph) -> _Carried:
    """Returns how the loop carries the learner: as one vector if the optimiser is element-wise."""
    one = isinstance(graph.update, ElementwiseUpdate) and can_be_vector(_network_shapes(graph))
    return _OneVector(graph) if one else _Carried(graph)


class _FusedLoop:
    """The functions of a `MinibatchLoop` by kernels."""

    def __init__(self, graph: Graph, reduce: Reduce, run: Run, step: GradientStep) -> None:
        self._graph, self._reduce, self._run, self._step = graph, reduce, run, step
        self._carried = _carry_of(graph)
        self.begin = self._carried.begin

    def prepare_samples(self, batch: Batch) -> PackedBatch:
        return pack_batch(batch)

    def shuffle(self, packed: PackedBatch, rows: UInt32[Array, "epochs M N"]) -> Shuffled:
        return shuffle_samples(self._graph, packed, rows, self._reduce)

    def run_minibatch(
        self, carried: Any, packed: PackedBatch, shuffled: Shuffled, number: Int[Array, ""]
    ) -> tuple[Any, Metrics]:
        learner, vector = self._carried.learner(carried)
        with operation_scope("gradients"):
            minibatch = minibatch_of(self._graph, self._step, learner, packed, shuffled, number, vector)
            means = self._reduce(self._run(self._step, minibatch))
            tree, metrics = results_of(self._step, minibatch.uniforms, means)
            gradients = self._carried.gradients(tree)
        with operation_scope("update"):
            advanced = self._graph.update(adapt_hyperparameters(self._graph, carried, metrics), gradients)
        # For one vector, these are a few GPU operations. For a tree, they are several operations per leaf.
        return advanced, {**metrics, **gradient_metrics(in_one_vector(self._step, tree, means), metrics)}

    def run_epoch(self, carried: Any, packed: PackedBatch, shuffled: Shuffled) -> tuple[Any, Metrics]:
        names: list[str] = []

        def minibatch_step(carried: Any, number: Int[Array, ""]) -> tuple[Any, Float[Array, " metrics"]]:
            advanced, metrics = self.run_minibatch(carried, packed, shuffled, number)
            # The names are stored while the body is traced, because a scan can only return arrays.
            names[:] = metrics
            # Otherwise, XLA fuses the optimiser steps of successive minibatches, and computes most of them again.
            return jax.lax.optimization_barrier(advanced), jnp.stack(list(metrics.values()))

        numbers = jnp.arange(len(shuffled.rows), dtype=jnp.int32)
        carried, metrics = jax.lax.scan(minibatch_step, carried, numbers, unroll=min(UNROLLED, len(shuffled.rows)))
        return carried, {name: metrics[:, n] for n, name in enumerate(names)}

    def run_drawn(self, carried: Any, minibatch: Batch) -> tuple[Any, Metrics]:
        packed = self.prepare_samples(jax.tree.map(lambda leaf: leaf[None], minibatch))
        rows = jnp.arange(len(packed.packed.table), dtype=jnp.uint32)
        shuffled = jax.tree.map(lambda leaf: leaf[0], self.shuffle(packed, rows[None, None]))
        return self.run_minibatch(carried, packed, shuffled, jnp.int32(0))

    def end(self, carried: Any) -> Learner:
        return self._carried.learner(carried)[0]
