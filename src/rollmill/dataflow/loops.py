"""One iteration of training: collecting, then learning.

The functions are pure, and work on the environments of one replica. `reduce` computes the mean over all replicas.
By default, it is the identity.

Shape letters: `E` environments of this replica, `S` seeds.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rollmill.core.operations import operation_scope
from rollmill.core.types import Key
from rollmill.dataflow.collecting import COLLECT, LEARN, START, collect, iteration_key, start_collector
from rollmill.dataflow.experience import empty_experience
from rollmill.dataflow.graph import (
    ENVIRONMENT_PREFIX,
    Collector,
    Graph,
    Hyperparameters,
    Learner,
    Metrics,
    Reduce,
    State,
    Trajectory,
)
from rollmill.dataflow.learning import learn_from_trajectory
from rollmill.dataflow.minibatch_loop import MakeMinibatchLoop, identity


def init_state(
    graph: Graph, key: Key, index: Int[Array, " E"], hyperparameters: Hyperparameters | None = None
) -> State:
    """Returns the training state before the first iteration, for the environments with the given global indices.

    `hyperparameters` replaces values of the graph, by the names of `Graph.inputs`.
    """
    parameters: Hyperparameters = {
        name.removeprefix(ENVIRONMENT_PREFIX): jnp.asarray(value, jnp.float32)
        for name, value in (graph.inputs if hyperparameters is None else hyperparameters).items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    collector = start_collector(graph, key, index, parameters)
    learner = start_learner(graph, key, hyperparameters)
    return State(collector, learner, key, jnp.int32(0), empty_experience(graph, index))


def start_learner(graph: Graph, key: Key, hyperparameters: Hyperparameters | None = None) -> Learner:
    """Returns the learner before the first iteration.

    Args:
        graph: graph to train.
        key: root key.
        hyperparameters: values that the learner holds, as inputs of a compiled program. Default: the graph's
            values.
    """
    learner_key, _ = jax.random.split(jax.random.fold_in(key, START))
    learner = graph.start_learner(learner_key)
    return learner if hyperparameters is None else with_hyperparameters(learner, hyperparameters)


def with_hyperparameters(learner: Learner, hyperparameters: Hyperparameters) -> Learner:
    """Returns the learner with values of its field `hyperparameters` replaced, if it has this field."""
    held = {name: value for name, value in hyperparameters.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    return eqx.tree_at(lambda learner: learner.hyperparameters, learner, held) if held else learner


def iterate(
    graph: Graph,
    state: State,
    *,
    reduce: Reduce = identity,
    collect_with: Callable[..., tuple[Collector, Trajectory]] | None = None,
    make_minibatch_loop: MakeMinibatchLoop | None = None,
) -> tuple[State, Metrics]:
    """Performs one iteration of training: collects, then learns.

    Args:
        graph: graph to train.
        state: state before the iteration.
        reduce: mean over replicas.
        collect_with: `collect` or an equivalent function.
        make_minibatch_loop: `plain_minibatch_loop` or an equivalent function.

    Returns:
        The next state, and metrics already reduced over replicas.
    """
    collect_key = iteration_key(state.key, state.iteration, COLLECT)
    learn_key = iteration_key(state.key, state.iteration, LEARN)
    weights = graph.weights(state.learner)
    with operation_scope("collect"):
        collector, trajectory = (collect_with or collect)(graph, weights, state.collector, collect_key)
    with operation_scope("learn"):
        learner, rings, metrics = learn_from_trajectory(
            graph,
            state.learner,
            state.rings,
            trajectory,
            learn_key,
            collector.index,
            reduce=reduce,
            make_minibatch_loop=make_minibatch_loop,
        )
    return State(collector, learner, state.key, state.iteration + 1, rings), metrics


class PackedMetrics(eqx.Module):
    """The metrics of an iteration in one vector, because each transfer from a GPU has a fixed cost.

    Their names are known once the iteration has been traced.
    """

    values: Float[Array | np.ndarray, "*S metric"]
    names: tuple[str, ...] = eqx.field(static=True)

    def row(self) -> dict[str, float]:
        """Returns the metrics of a single seed as floats on the host."""
        return dict(zip(self.names, np.asarray(self.values).tolist(), strict=True))


def pack_metrics(metrics: Metrics) -> PackedMetrics:
    """Packs metrics into one vector, in alphabetical order of their names."""
    names = tuple(sorted(metrics))
    return PackedMetrics(jnp.stack([metrics[name] for name in names]), names)
