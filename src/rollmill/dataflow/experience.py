"""Functions that work with every experience store."""

from jaxtyping import Array, Int, PyTree

from rollmill.dataflow.graph import ExperienceStore, Graph, Loops

FILL = "replay/fill"
"""Metric: mean fraction of a store's capacity in use."""


def empty_experience(graph: Graph, index: Int[Array, " E"]) -> PyTree[Array]:
    """Returns the contents of a graph's store before the first step, or `()` without a store."""
    return () if graph.replay is None else graph.replay.empty(graph, index)


def first_learning_iteration(graph: Graph) -> int:
    """Returns the number of iterations before the first that learns, which is 0 without a store."""
    return 0 if graph.replay is None else waiting_iterations(graph.replay, graph.loops)


def waiting_iterations(store: ExperienceStore, loops: Loops) -> int:
    """Returns the number of iterations that only fill the store, before the first that learns."""
    return -(-store.first_learning(loops) // loops.batch_size) - 1
