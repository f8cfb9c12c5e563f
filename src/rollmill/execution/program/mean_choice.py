"""The way in which a training on a mesh takes its means: the one that is asked for, or the fastest."""

from typing import NamedTuple

import jax
from jax.sharding import Mesh

from rollmill.core.errors import UsageError
from rollmill.dataflow import Graph, Reduce
from rollmill.execution.program.compiled import state_shapes
from rollmill.execution.program.peer_memory import NoPeerMemory
from rollmill.execution.program.reductions import MeshMean, fastest, mean_over, time_reductions, ways_of
from rollmill.planning import AllReduce, AllReduceOption


class MeanChoice(NamedTuple):
    """How a mesh takes means."""

    mean: MeshMean
    fastest: AllReduce | None = None
    """The way that it is, where ways were timed."""
    note: str = ""
    """Their times, for the user."""


def choose_mean(graph: Graph, mesh: Mesh, wanted: AllReduceOption, host: Reduce | None = None) -> MeanChoice:
    """The mean that is wanted; for `auto` the fastest at the graph's number of parameters.

    Args:
        graph: what is trained.
        mesh: where; all of its processes have to call this.
        wanted: the way.
        host: the mean through the host's memory, where processes share GPUs.

    Raises:
        UsageError: the way that is wanted cannot be had.
    """
    if mesh.size == 1:
        return MeanChoice(mean_over(mesh))
    num_parameters = _num_parameters(graph)
    if wanted != "auto":
        try:
            return MeanChoice(mean_over(mesh, wanted, host, num_parameters=num_parameters))
        except NoPeerMemory as reason:
            raise UsageError(f"reduction={wanted} is not possible: {reason}. hint: reduction=auto.") from reason
    means = _means_that_can_be_had(mesh, host, num_parameters)
    if len(means) == 1:
        return MeanChoice(means["flat"])
    seconds = time_reductions(mesh, num_parameters, means)
    chosen = fastest(seconds)
    times = ", ".join(f"{each} {1e6 * taken:.0f} us" for each, taken in seconds.items())
    note = f"a mean of {num_parameters:,} parameters takes {times}: {chosen}"
    return MeanChoice(means[chosen], chosen, note)


def _means_that_can_be_had(mesh: Mesh, host: Reduce | None, num_parameters: int) -> dict[AllReduce, MeshMean]:
    means: dict[AllReduce, MeshMean] = {}
    for way in ways_of(mesh, num_parameters):
        try:
            means[way] = mean_over(mesh, way, host, num_parameters=num_parameters)
        except NoPeerMemory:  # there are other ways
            continue
    return means


def _num_parameters(graph: Graph) -> int:
    learner = state_shapes(graph).learner
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(graph.weights, learner)))
