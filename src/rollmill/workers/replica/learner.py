"""The learning half of an iteration, in a replica that holds the gradients.

If a single replica also holds the update, learning is one compiled program. Otherwise, means over several replicas
and updates in another group need data from other processes. The program is then cut where data leaves it, and the
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

from rollmill.channels.transfers import to_host
from rollmill.core.machine import leave_compilers
from rollmill.core.operations import operation_scope
from rollmill.core.types import Key
from rollmill.dataflow import (
    FILL,
    LEARN,
    REDUCE,
    UPDATE,
    Batch,
    Flow,
    Graph,
    Learner,
    MakeMinibatchLoop,
    Metrics,
    MinibatchLoop,
    Reduce,
    Sample,
    Trajectory,
    collection_metrics,
    divide_at_crossings,
    end_iteration,
    epoch_rows,
    evaluate_schedules,
    identity,
    iteration_key,
    learn_from_trajectory,
    mean_over_epochs,
    metrics_without_updates,
    pack_metrics,
    prepare,
    remote_reduce,
    report,
    restore_schedules,
    with_remote_update,
)
from rollmill.programs.compiler_options import program_options
from rollmill.workers.replica.pieces import CompiledPieces
from rollmill.workers.reports import Row

Exchange = Callable[[PyTree[Any]], PyTree[Any]]
"""Function from the operands of a crossing to its answer."""


class CompiledLearner:
    """Learner that computes gradients and updates in one compiled program."""

    def __init__(self, graph: Graph, key: Key, index: np.ndarray, make_minibatch_loop: MakeMinibatchLoop) -> None:
        # The replay memory is updated in place, because copying it would take longer than learning.
        learn = partial(_learn, graph, key, index, make_minibatch_loop)
        self._program = jax.jit(learn, donate_argnums=0, compiler_options=program_options())
        self._learn: Callable[..., Any] | None = None

    def __call__(
        self, learner: Learner, rings: PyTree[Any], trajectory: Trajectory, iteration: int
    ) -> tuple[Learner, PyTree[Any], Row]:
        """Learns from a trajectory. Returns the learner, the replay memory and metrics. The given `rings` become
        invalid.
        """
        arguments = rings, learner, trajectory, np.int32(iteration)
        self._learn = self._learn or self._compile(*arguments)
        learner, rings, metrics = self._learn(*arguments)
        return learner, rings, metrics.row()

    def _compile(self, *arguments: PyTree[Any]) -> Callable[..., Any]:
        """Compiles the program. On a CPU returns the compiler's memory before it runs."""
        if jax.default_backend() != "cpu":
            return self._program
        compiled = self._program.lower(*arguments).compile()
        leave_compilers()
        return compiled


def _learn(
    graph: Graph,
    key: Key,
    index: np.ndarray,
    make_minibatch_loop: MakeMinibatchLoop,
    rings: PyTree[Any],
    learner: Learner,
    trajectory: Trajectory,
    iteration: Any,
):
    learn_key = iteration_key(key, iteration, LEARN)
    with operation_scope("learn"):
        learner, rings, metrics = learn_from_trajectory(
            graph,
            learner,
            rings,
            trajectory,
            learn_key,
            jnp.asarray(index),
            make_minibatch_loop=make_minibatch_loop,
        )
        return learner, rings, pack_metrics(metrics)


class CutLearner:
    """Learner that computes gradients in this replica, while other processes take part in means or compute the
    update.
    """

    def __init__(
        self,
        graph: Graph,
        flow: Flow,
        key: Key,
        index: np.ndarray,
        make_minibatch_loop: MakeMinibatchLoop,
        *,
        reduce: Exchange | None = None,
        update: Callable[[PyTree[Any], bool], PyTree[Any]] | None = None,
        skip: Callable[[], None] | None = None,
    ) -> None:
        """Makes the programs of a replica, which holds the environments with the global indices `index`.

        `make_minibatch_loop` is `plain_minibatch_loop` or an equivalent function. `reduce` averages over replicas.
        `update` takes gradients, and whether the iteration ends, and returns parameters. `skip` reports an
        iteration without updates to whoever makes them.
        """
        self._graph = graph if update is None else with_remote_update(graph, flow)
        self._key, self._index = key, index
        self._reduce, self._mean = reduce, identity if reduce is None else remote_reduce
        self._update, self._skip = update, skip
        self._loop = make_minibatch_loop(self._graph, self._mean)
        self._mean_over_epochs = jax.jit(mean_over_epochs)
        end = partial(end_iteration, graph)
        self._end_iteration = end if graph.keep_learning is None else jax.jit(end)
        if graph.replay is not None:
            self._add = jax.jit(partial(graph.replay.add, graph), donate_argnums=0)
            self._sample = jax.jit(partial(_sample, graph, self._loop, key, index))
            follow = partial(_follow, graph, self._loop)
            self._follow = jax.jit(follow, donate_argnums=0, compiler_options=program_options())
        self._learned_names = flow.learning_metric_names
        self._programs: dict[str, CompiledPieces] = {}

    def __call__(
        self, learner: Learner, rings: PyTree[Any], trajectory: Trajectory, iteration: int
    ) -> tuple[Learner, PyTree[Any], Row]:
        """Learns from a trajectory. Returns the learner, the replay memory and metrics. The given `rings` become
        invalid.
        """
        graph, mean, index = self._graph, self._mean, self._index
        if graph.replay is None:
            ready = partial(_ready, graph, self._loop, mean, self._key, index)
            task, reported = self._run("prepare", ready, learner, trajectory, np.int32(iteration))
            before = learner
            learner, metrics = self._learn(self._loop, *task)
            learner = restore_schedules(graph, learner, before)
        else:
            learner, reported = self._run("prepare", partial(_prepare, graph, mean, index), learner, trajectory)
            learner, rings, metrics = self._learn_from_replay(learner, rings, trajectory, iteration)
        collect = partial(_reduce_metrics, graph, mean, index)
        collected = self._run("collected", collect, trajectory, learner, {**reported, **_fill(self._graph, rings)})
        return learner, rings, {**_row(collected), **metrics}

    def _learn(
        self, loop: MinibatchLoop, carried: PyTree[Any], samples: PyTree[Any], shuffled: PyTree[Any]
    ) -> tuple[Learner, Row]:
        """Runs the epochs of the iteration's batch, minibatch by minibatch."""
        graph, loops = self._graph, self._graph.loops
        leaves, structure = jax.tree.flatten(carried)  # flattened once, instead of at every minibatch
        step = partial(_learn_one, loop, structure)
        metrics, learned, found = [], [], {}
        for epoch in range(loops.epochs):
            for n in range(loops.num_minibatches):
                last = epoch + 1 == loops.epochs and n + 1 == loops.num_minibatches
                place = np.int32(epoch), np.int32(n)
                leaves, found = self._run("minibatch", step, leaves, samples, shuffled, *place, last=last)
                metrics.append(found)
            learned.append(1.0)
            if graph.keep_learning is not None and not graph.keep_learning(jax.tree.map(jnp.asarray, found)):
                break
        summary = self._mean_over_epochs(_stack(metrics, loops.num_minibatches), np.asarray(learned, np.float32))
        learner = self._run("end", loop.end, jax.tree.unflatten(structure, leaves))
        return self._end_iteration(learner), _row(summary)

    def _learn_from_replay(
        self, learner: Learner, rings: PyTree[Any], trajectory: Trajectory, iteration: int
    ) -> tuple[Learner, PyTree[Any], Row]:
        """Learns from samples of the experience store, once enough is stored."""
        graph, loops = self._graph, self._graph.loops
        assert graph.replay is not None
        rings = self._add(rings, trajectory)
        if not graph.replay.is_ready(rings, loops):
            if self._skip is not None:
                self._skip()
            return (
                learner,
                rings,
                _row(metrics_without_updates({name: jnp.float32(0) for name in self._learned_names})),
            )
        leaves, structure = jax.tree.flatten(self._run("begin", partial(_begin, graph, self._loop), learner))
        step, metrics = partial(_learn_sample, self._loop, structure), []
        for n in range(loops.num_minibatches):
            now = jax.tree.unflatten(structure, leaves)
            sample = self._sample(rings, now, np.int32(iteration), np.int32(n))
            last = n + 1 == loops.num_minibatches
            rings = self._follow(rings, now, sample)
            leaves, found = self._run("minibatch", step, leaves, sample.minibatch, last=last)
            metrics.append(found)
        summary = self._mean_over_epochs(_stack(metrics, loops.num_minibatches), np.ones(1, np.float32))
        after = self._run("end", self._loop.end, jax.tree.unflatten(structure, leaves))
        return restore_schedules(graph, after, learner), rings, _row(summary)

    def _run(self, name: str, function: Callable[..., Any], *arguments: PyTree, last: bool = False) -> PyTree:
        if name not in self._programs:
            self._programs[name] = CompiledPieces(divide_at_crossings(function, *arguments))
        handlers: dict[str, Callable[[PyTree], PyTree]] = {}
        if self._reduce is not None:
            handlers[REDUCE] = self._reduce
        if (update := self._update) is not None:
            handlers[UPDATE] = lambda gradients: update(gradients, last)
        return self._programs[name](handlers, *arguments)


def _begin(graph: Graph, loop: MinibatchLoop, learner: Learner) -> Any:
    """Returns the carry of a learner, with its schedules evaluated for the iteration."""
    return loop.begin(evaluate_schedules(graph, learner))


def _prepare(graph: Graph, mean: Reduce, index: np.ndarray, learner: Learner, trajectory: Trajectory):
    """Prepares the learner for samples of the experience store."""
    with operation_scope("learn"), operation_scope("prepare"):
        learner, batch = prepare(graph, learner, trajectory, jnp.asarray(index), reduce=mean)
        return learner, report(graph, learner, batch)


def _ready(
    graph: Graph,
    loop: MinibatchLoop,
    mean: Reduce,
    key: Key,
    index: np.ndarray,
    learner: Learner,
    trajectory: Trajectory,
    iteration: Any,
):
    """Prepares the batch, and shuffles it for all epochs. Returns the arguments of `CutLearner._learn`."""
    with operation_scope("learn"):
        with operation_scope("prepare"):
            learner, batch = prepare(graph, learner, trajectory, jnp.asarray(index), reduce=mean)
            reported, samples = report(graph, learner, batch), loop.prepare_samples(batch)
        with operation_scope("shuffle"):
            rows = epoch_rows(iteration_key(key, iteration, LEARN), jnp.asarray(index), graph.loops)
            shuffled = loop.shuffle(samples, rows)
    return (loop.begin(evaluate_schedules(graph, learner)), samples, shuffled), reported


def _sample(
    graph: Graph,
    loop: MinibatchLoop,
    key: Key,
    index: np.ndarray,
    rings: PyTree[Any],
    carried: Any,
    iteration: Any,
    n: Any,
) -> Sample:
    assert graph.replay is not None
    learner = loop.end(carried)
    with operation_scope("learn"), operation_scope("draw"):
        sample_key = jax.random.fold_in(iteration_key(key, iteration, LEARN), n)
        return graph.replay.sample(graph, rings, learner, sample_key, jnp.asarray(index))


def _follow(graph: Graph, loop: MinibatchLoop, rings: PyTree[Any], carried: Any, sample: Sample) -> PyTree[Any]:
    assert graph.replay is not None
    return graph.replay.update(graph, rings, loop.end(carried), sample)


def _learn_sample(loop: MinibatchLoop, structure: Any, leaves: list[Any], minibatch: Batch):
    """Makes an update with a sample of the experience store, from leaves of the carry to such leaves."""
    with operation_scope("learn"):
        carried, metrics = loop.run_drawn(jax.tree.unflatten(structure, leaves), minibatch)
    return jax.tree.leaves(carried), metrics


def _fill(graph: Graph, rings: PyTree[Any]) -> Metrics:
    return {} if graph.replay is None else {FILL: graph.replay.fill_fraction(rings)}


def _learn_one(
    loop: MinibatchLoop,
    structure: Any,
    leaves: list[Any],
    samples: PyTree[Any],
    shuffled: PyTree[Any],
    epoch: Any,
    number: Any,
):
    """Learns from one minibatch, from leaves of the carry to such leaves."""
    with operation_scope("learn"):
        of_epoch = jax.tree.map(lambda leaf: leaf[epoch], shuffled)
        carried, metrics = loop.run_minibatch(jax.tree.unflatten(structure, leaves), samples, of_epoch, number)
    return jax.tree.leaves(carried), metrics


def _reduce_metrics(
    graph: Graph, mean: Reduce, index: np.ndarray, trajectory: Trajectory, learner: Learner, reported: Metrics
):
    """Reduces the metrics of an iteration that do not belong to a minibatch."""
    with operation_scope("learn"), operation_scope("metrics"):
        collected = collection_metrics(graph, trajectory, graph.weights(learner), jnp.asarray(index))
        return mean({**collected, **reported})


def _stack(metrics: list[Mapping[str, Any]], num_minibatches: int) -> dict[str, np.ndarray]:
    """Copies the metrics of all minibatches to the host, and stacks them, `[epochs, minibatches]`."""
    steps = to_host(metrics)
    return {
        name: np.asarray([step[name] for step in steps], np.float32).reshape(-1, num_minibatches)
        for name in steps[0]
    }


def _row(metrics: Mapping[str, Any]) -> Row:
    return {name: float(value) for name, value in to_host(dict(metrics)).items()}
