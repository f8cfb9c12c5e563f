"""Traces a graph once for everything that needs the trace: its fingerprint and its programs."""

from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp

from rollmill.core.trace_cache import ReplayedTrace
from rollmill.core.types import Key
from rollmill.dataflow.graph import Graph, Hyperparameters, State
from rollmill.dataflow.graph_checks import attribute_to_functions
from rollmill.dataflow.loops import init_state, iterate
from rollmill.dataflow.program_digests import Digests


@dataclass(frozen=True)
class TracedDigests:
    """Digests of what a graph computes. They are stored, so that later processes need not trace the whole graph.

    `start` and `iteration` are None if no digest can cover the computation, such as one with host callbacks.
    """

    fingerprint: str
    start: str | None
    iteration: str | None
    metrics: tuple[str, ...]
    """Names of the metrics of an iteration."""


class GraphTraces:
    """Traces of a graph: of its first state and of one iteration, with all environments and one replica."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.digests = Digests()
        self.expected: TracedDigests | None = None
        """Expected digests, if they are known without tracing."""

    @cached_property
    def start(self) -> ReplayedTrace:
        """Traced function `(root key, hyperparameters) -> State`: the state before the first iteration."""
        number = jax.ShapeDtypeStruct((), jnp.float32)
        numbers = dict.fromkeys(self.graph.inputs, number)
        with attribute_to_functions(self.graph):
            return ReplayedTrace(partial(_start, self.graph), jax.eval_shape(jax.random.key, 0), numbers)

    @cached_property
    def iterate(self) -> ReplayedTrace:
        """Trace of `dataflow.iterate`, which runs one iteration: `(State) -> (State, Metrics)`."""
        begin = self.start.result
        with attribute_to_functions(self.graph):
            return ReplayedTrace(partial(iterate, self.graph), begin)


_newest: GraphTraces | None = None


def get_traces(graph: Graph) -> GraphTraces:
    """Returns the traces of a graph.

    Only the traces of the last requested graph are kept, because a run requests the traces of the same graph
    repeatedly.
    """
    global _newest
    traces = _newest
    if traces is None or traces.graph is not graph:
        traces = _newest = GraphTraces(graph)
    return traces


def _start(graph: Graph, key: Key, hyperparameters: Hyperparameters) -> State:
    return init_state(graph, key, jnp.arange(graph.loops.num_envs, dtype=jnp.int32), hyperparameters)
