"""Computes a digest of what a graph computes. Equal code gives equal digests in every process.

The graph is traced but not compiled. The digest covers the first state, one whole iteration (environment, policy,
prepare, condition, gradients, update and the end of learning) and the greedy policy. Hyperparameters that are
inputs of the program are left out. With the same inputs, two graphs with equal fingerprints train the same
weights, so a graph that was rebuilt from names is the intended one if its fingerprint agrees.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend import core

from rollmill.dataflow.collecting import step_one
from rollmill.dataflow.graph import Graph, State
from rollmill.dataflow.graph_checks import attribute_to_functions, check_decision
from rollmill.dataflow.graph_traces import TracedDigests, get_traces
from rollmill.dataflow.program_digests import Digests, sha256, without_addresses


def fingerprint(graph: Graph) -> str:
    """Returns the digest of a graph: its traced program, sizes, spaces, and how it starts host environments.

    Hyperparameters that are inputs of the program are not part of the digest.
    """
    traces = get_traces(graph)
    if traces.expected is not None:
        return traces.expected.fingerprint
    programs = (traces.start.program, traces.iterate.program, *_decisions(graph, traces.start.result))
    digests = traces.digests
    host = None if graph.host is None else without_addresses(repr(graph.host))
    around = (tuple(graph.loops), repr(graph.observation_space), repr(graph.action_space), host)
    return sha256(f"{[digests.of_closed(program) for program in programs]}{around}")


def start_digest(graph: Graph) -> str | None:
    """Returns the digest of the program that starts a run.

    The result is None if the program contains computation that no digest can cover, such as a host callback.
    """
    traces = get_traces(graph)
    return traces.expected.start if traces.expected else traces.digests.whole(traces.start.program)


def iteration_digest(graph: Graph) -> str | None:
    """Returns the digest of an iteration's program and metric names.

    Programs with equal digests compute the same results. The result is None if the program contains
    computation that no digest can cover, such as a host callback.
    """
    traces = get_traces(graph)
    if traces.expected is not None:
        return traces.expected.iteration
    digest = traces.digests.whole(traces.iterate.program)
    return digest and sha256(f"{digest}{metric_names(graph)}")


def metric_names(graph: Graph) -> tuple[str, ...]:
    """Returns the names of an iteration's metrics, sorted."""
    traces = get_traces(graph)
    return traces.expected.metrics if traces.expected else tuple(sorted(traces.iterate.result[1]))


def trace_digests(graph: Graph) -> TracedDigests:
    """Returns the digests of a graph's start, its iteration and its parts."""
    return TracedDigests(fingerprint(graph), start_digest(graph), iteration_digest(graph), metric_names(graph))


def expect_digests(graph: Graph, digests: TracedDigests) -> None:
    """Stores known digests of a graph, so that the graph need not be traced."""
    get_traces(graph).expected = digests


def fragment_fingerprints(graph: Graph) -> dict[str, str]:
    """Returns separate digests of a graph's environment, its policy, and the rest of the algorithm.

    These are the parts that a user may have replaced.
    """
    index, key = jnp.zeros((), jnp.int32), jax.random.key(0)
    state, observation = jax.eval_shape(graph.start_environment, key, index)
    mask = jax.eval_shape(graph.action_mask, state)
    weights, memory = jax.eval_shape(lambda k: graph.weights(graph.start_learner(k)), key), graph.start_memory()
    decision = jax.eval_shape(graph.policy, weights, key, memory, observation, mask)
    host = None if graph.host is None else without_addresses(repr(graph.host))
    environment = (
        jax.make_jaxpr(graph.start_environment)(key, index),
        jax.make_jaxpr(graph.environment)(key, state, decision.action),
        jax.make_jaxpr(graph.action_mask)(state),
    )
    policy = tuple(
        jax.make_jaxpr(function)(weights, key, memory, observation, mask)
        for function in (graph.policy, graph.greedy)
    )
    digest = lambda programs: sha256("".join(map(Digests().of_closed, programs)))
    return {"environment": sha256(f"{digest(environment)}{host}"), "policy": digest(policy)}


def _decisions(graph: Graph, begin: State) -> list[core.ClosedJaxpr]:
    """Returns the programs of a greedy decision in ONE environment and, if there are any, of its values."""
    key = begin.key
    weights = jax.eval_shape(graph.weights, begin.learner)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), begin.collector)
    observed = weights, key, one.memory, one.observation, one.action_mask
    with attribute_to_functions(graph):
        program, decision = jax.make_jaxpr(graph.greedy, return_shape=True)(*observed)
    check_decision(graph, "greedy", decision)
    programs = [program]
    if graph.compute_values is not None:
        _, step = jax.eval_shape(functools.partial(step_one, graph), weights, one, key, 0)
        programs.append(jax.make_jaxpr(graph.compute_values)(weights, step))
    return programs
