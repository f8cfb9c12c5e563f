"""The learning half of an iteration, in the group that holds the gradients.

Alone, and with the update beside it, it is one compiled program. Several replicas reduce over channels, and an
update that lives elsewhere is asked for new parameters: then the program is cut where data leaves it, and the
loops over epochs and minibatches run on the host.

Shape letters: `T` steps, `E` environments of this replica.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.core.types import Key
from rollmill.dataflow import (
    LEARN,
    REDUCE,
    UPDATE,
    Batch,
    Flow,
    Graph,
    Learner,
    Loops,
    Metrics,
    Reduce,
    Trajectory,
    collection_metrics,
    cut,
    identity,
    iteration_key,
    learn_from,
    learn_minibatch,
    minibatch_gather,
    over_epochs,
    prepare,
    remote_reduce,
    report,
    shuffled_rows,
    with_remote_update,
)
from rollmill.execution.replica.pieces import CompiledPieces
from rollmill.execution.reports import Row

Exchange = Callable[[PyTree[Any]], PyTree[Any]]
"""From the operands of a crossing to its answer."""


class CompiledLearner:
    """Gradients and update in one program."""

    def __init__(self, graph: Graph, key: Key, index: np.ndarray) -> None:
        self._learn = jax.jit(partial(_learn, graph, key, index))

    def __call__(self, learner: Learner, trajectory: Trajectory, iteration: int) -> tuple[Learner, Row]:
        """Learns from a trajectory."""
        learner, metrics = self._learn(learner, trajectory, np.int32(iteration))
        return learner, _row(metrics)


def _learn(graph: Graph, key: Key, index: np.ndarray, learner: Learner, trajectory: Trajectory, iteration: Any):
    return learn_from(graph, learner, trajectory, iteration_key(key, iteration, LEARN), jnp.asarray(index))


class CutLearner:
    """Gradients here; means over replicas, the update, or both are elsewhere."""

    def __init__(
        self,
        graph: Graph,
        flow: Flow,
        key: Key,
        index: np.ndarray,
        *,
        reduce: Exchange | None = None,
        update: Callable[[PyTree[Any], bool], PyTree[Any]] | None = None,
    ) -> None:
        """`reduce` is the mean over replicas; `update` takes gradients, and whether the iteration ends."""
        self._graph = graph if update is None else with_remote_update(graph, flow)
        self._index = index
        self._reduce = reduce
        self._update = update
        self._minibatches = jax.jit(partial(_minibatches, graph.loops, key, index))
        self._over_epochs = jax.jit(over_epochs)
        self._programs: dict[str, CompiledPieces] = {}

    def __call__(self, learner: Learner, trajectory: Trajectory, iteration: int) -> tuple[Learner, Row]:
        """Learns from a trajectory."""
        graph, loops = self._graph, self._graph.loops
        mean = identity if self._reduce is None else remote_reduce
        prepared = self._run("prepare", partial(_prepare, graph, mean, self._index), learner, trajectory)
        learner, batch, reported = prepared
        leaves, structure = jax.tree.flatten(learner)  # and not at every minibatch
        step = partial(_learn_one, graph, mean, structure)
        metrics, learned, found = [], [], {}
        for epoch in range(loops.epochs):
            minibatches = self._minibatches(batch, np.int32(iteration), np.int32(epoch))
            for n in range(loops.num_minibatches):
                last = epoch + 1 == loops.epochs and n + 1 == loops.num_minibatches
                leaves, found = self._run("minibatch", step, leaves, minibatches, np.int32(n), last=last)
                metrics.append(jax.tree.map(float, found))
            learned.append(1.0)
            if graph.keep_learning is not None and not graph.keep_learning(jax.tree.map(jnp.asarray, found)):
                break
        learner = jax.tree.unflatten(structure, leaves)
        collect = partial(_collected, graph, mean, self._index)
        collected = self._run("collected", collect, trajectory, learner, reported)
        summary = self._over_epochs(_stacked(metrics, loops.num_minibatches), np.asarray(learned, np.float32))
        return learner, {**_row(collected), **_row(summary)}

    def _run(self, name: str, function: Callable[..., Any], *arguments: PyTree, last: bool = False) -> PyTree:
        if name not in self._programs:
            self._programs[name] = CompiledPieces(cut(function, *arguments))
        handlers: dict[str, Callable[[PyTree], PyTree]] = {}
        if self._reduce is not None:
            handlers[REDUCE] = self._reduce
        if (update := self._update) is not None:
            handlers[UPDATE] = lambda gradients: update(gradients, last)
        return self._programs[name](handlers, *arguments)


def _prepare(graph: Graph, mean: Reduce, index: np.ndarray, learner: Learner, trajectory: Trajectory):
    learner, batch = prepare(graph, learner, trajectory, jnp.asarray(index), reduce=mean)
    return learner, batch, report(graph, learner, batch)


def _minibatches(loops: Loops, key: Key, index: np.ndarray, batch: Batch, iteration: Any, epoch: Any) -> Batch:
    """All minibatches of one epoch, stacked."""
    epoch_key = jax.random.fold_in(iteration_key(key, iteration, LEARN), epoch)
    return jax.lax.map(minibatch_gather(batch, loops), shuffled_rows(epoch_key, jnp.asarray(index), loops))


def _learn_one(graph: Graph, mean: Reduce, structure: Any, leaves: list[Any], minibatches: Batch, n: Any):
    """A minibatch's learning, from leaves of the learner to such leaves."""
    minibatch = jax.tree.map(lambda leaf: leaf[n], minibatches)
    learner, metrics = learn_minibatch(graph, jax.tree.unflatten(structure, leaves), minibatch, reduce=mean)
    return jax.tree.leaves(learner), metrics


def _collected(
    graph: Graph, mean: Reduce, index: np.ndarray, trajectory: Trajectory, learner: Learner, reported: Metrics
):
    """Metrics of an iteration beside those of its minibatches, reduced together."""
    collected = collection_metrics(graph, trajectory, graph.weights(learner), jnp.asarray(index))
    return mean({**collected, **reported})


def _stacked(metrics: list[Mapping[str, float]], num_minibatches: int) -> dict[str, np.ndarray]:
    """Metrics of all minibatches, `[epochs, minibatches]`."""
    return {
        name: np.asarray([step[name] for step in metrics], np.float32).reshape(-1, num_minibatches)
        for name in metrics[0]
    }


def _row(metrics: Mapping[str, Any]) -> Row:
    return {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
