"""What passes along each edge of a graph, derived from the fragments by `jax.eval_shape`."""

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from rollmill.dataflow.graph import Graph
from rollmill.dataflow.loops import collect, identity, learn_minibatch, start
from rollmill.dataflow.minibatches import taker


class Edge(NamedTuple):
    """Data that leaves one fragment for another, at a certain rate."""

    name: str
    source: str
    target: str
    rate: Literal["step", "minibatch", "iteration"]


EDGES = (
    Edge("timestep", "environment", "policy", "step"),
    Edge("action", "policy", "environment", "step"),
    Edge("trajectory", "environment", "gradients", "iteration"),
    Edge("gradients", "gradients", "update", "minibatch"),
    Edge("weights", "update", "policy", "iteration"),
)


class Interface(NamedTuple):
    """Shapes and dtypes of one message on an edge, and how much passes in an iteration."""

    edge: Edge
    shapes: PyTree[jax.ShapeDtypeStruct]
    bytes_per_message: int
    messages_per_iteration: int


def interfaces(graph: Graph) -> dict[str, Interface]:
    """The interface of every edge, over all environments; nothing is computed."""
    shapes = jax.eval_shape(partial(_messages, graph))
    loops = graph.loops
    rates = {"step": loops.num_steps, "minibatch": loops.epochs * loops.num_minibatches, "iteration": 1}
    return {
        edge.name: Interface(edge, shapes[edge.name], _num_bytes(shapes[edge.name]), rates[edge.rate])
        for edge in EDGES
    }


def _messages(graph: Graph) -> dict[str, PyTree]:
    key = jax.random.key(0)
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    state = start(graph, key, index)
    _, trajectory = collect(graph, graph.weights(state.learner), state.collector, key)
    learner, batch = graph.prepare(state.learner, trajectory, reduce=identity, replicas=1)
    rows = graph.loops.num_envs * graph.loops.rows_each
    minibatch = taker(batch, graph.loops)(jnp.arange(rows // graph.loops.num_minibatches, dtype=jnp.uint32))
    gradients, _ = graph.gradients.function(learner, graph.condition(minibatch, identity))
    learn_minibatch(graph, learner, minibatch)  # the update accepts what the gradients give
    first = jax.tree.map(lambda leaf: leaf[0], trajectory.steps)
    timestep = (first.observation, first.action_mask, first.reward, first.terminated, first.truncated)
    return {
        "timestep": timestep,
        "action": first.action,
        "trajectory": trajectory,
        "gradients": gradients,
        "weights": graph.weights(learner),
    }


def _num_bytes(shapes: PyTree[jax.ShapeDtypeStruct]) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
