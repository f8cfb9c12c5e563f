"""Describes the messages on each edge of a graph: shapes, sizes in bytes, and rates."""

import math
from typing import Literal, NamedTuple

import jax
from jaxtyping import PyTree

from rollmill.dataflow.flow import flow
from rollmill.dataflow.graph import Graph


class Edge(NamedTuple):
    """Data that one fragment sends to another, with the number of messages in an iteration."""

    name: str
    source: str
    target: str
    rate: Literal["step", "minibatch", "iteration"]


EDGES = (
    Edge("timestep", "environment", "policy", "step"),
    Edge("action", "policy", "environment", "step"),
    Edge("trajectory", "policy", "gradients", "iteration"),
    Edge("gradients", "gradients", "update", "minibatch"),
    Edge("parameters", "update", "gradients", "minibatch"),
    Edge("weights", "gradients", "policy", "iteration"),
)


class Interface(NamedTuple):
    """Shapes of one message on an edge of a graph, and the amount of data sent in an iteration."""

    edge: Edge
    shapes: PyTree[jax.ShapeDtypeStruct]
    bytes_per_message: int
    messages_per_iteration: int

    @property
    def bytes_per_iteration(self) -> int:
        """Number of bytes that an iteration sends over the edge, for all environments."""
        return self.bytes_per_message * self.messages_per_iteration


def interfaces(graph: Graph) -> dict[str, Interface]:
    """Returns the interface of every edge of a graph, for all environments. Nothing is computed."""
    flows, loops = flow(graph), graph.loops
    shapes = {
        "timestep": add_leading_axis(flows.reply, loops.num_envs),
        "action": add_leading_axis(flows.request, loops.num_envs),
        "trajectory": flows.trajectory,
        "gradients": flows.gradients,
        "parameters": flows.select_parameters(flows.state.learner),
        "weights": flows.weights,
    }
    rates = {"step": loops.num_steps, "minibatch": loops.epochs * loops.num_minibatches, "iteration": 1}
    return {
        edge.name: Interface(edge, shapes[edge.name], tree_bytes(shapes[edge.name]), rates[edge.rate])
        for edge in EDGES
    }


def add_leading_axis(tree: PyTree[jax.ShapeDtypeStruct], width: int) -> PyTree[jax.ShapeDtypeStruct]:
    """Adds a leading axis of size `width` to the shapes of one environment."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((width, *leaf.shape), leaf.dtype), tree)


def tree_bytes(tree: PyTree[jax.ShapeDtypeStruct]) -> int:
    """Returns the size in bytes of all arrays in a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
