"""A program as data: fragments, edges, the graph they form, and the loops that drive it."""

from rollmill.dataflow.graph import (
    Batch,
    Collector,
    Decision,
    Fragment,
    Graph,
    Learner,
    Loops,
    Metrics,
    Reduce,
    State,
    Step,
    Trajectory,
    Weights,
)
from rollmill.dataflow.interfaces import EDGES, Edge, Interface, interfaces
from rollmill.dataflow.loops import (
    COLLECT,
    LEARN,
    collect,
    identity,
    iterate,
    iteration_key,
    learn,
    learn_minibatch,
    start,
)
from rollmill.dataflow.minibatches import choose_num_shards, shuffled_rows, taker
from rollmill.dataflow.shuffle import permutation

__all__ = [
    "COLLECT",
    "EDGES",
    "LEARN",
    "Batch",
    "Collector",
    "Decision",
    "Edge",
    "Fragment",
    "Graph",
    "Interface",
    "Learner",
    "Loops",
    "Metrics",
    "Reduce",
    "State",
    "Step",
    "Trajectory",
    "Weights",
    "choose_num_shards",
    "collect",
    "identity",
    "interfaces",
    "iterate",
    "iteration_key",
    "learn",
    "learn_minibatch",
    "permutation",
    "shuffled_rows",
    "start",
    "taker",
]
