"""Checks that the functions of a graph take and return what its loops expect.

A user's graph may contain any functions. Before training, their parameters are compared with the calls. Results
are examined only after a trace has failed, so that a correct graph is not traced twice.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from rollmill.core.contracts import Call, check_signature, outline
from rollmill.core.errors import ContractError, RollmillError, UsageError
from rollmill.core.types import Timestep
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.dataflow.collecting import collect
from rollmill.dataflow.fragment_results import algorithm_of, check_action, check_batch, check_metrics
from rollmill.dataflow.gradients import ElementwiseUpdate, MeanGradients, SequenceGradients, UnfusedPolicy
from rollmill.dataflow.graph import Batch, Decision, Graph
from rollmill.dataflow.loops import init_state
from rollmill.dataflow.minibatch_loop import identity
from rollmill.dataflow.minibatches import minibatch_gather

_DECIDE = Call(("weights", "key", "memory", "observation", "action_mask"))
CALLS: Mapping[str, Call] = {
    "environment": Call(("key", "state", "action")),
    "policy": _DECIDE,
    "gradients": Call(("learner", "minibatch")),
    "update": Call(("learner", "gradients"), ("share",)),
    "start_environment": Call(("key", "index")),
    "start_memory": Call(),
    "start_learner": Call(("key",)),
    "action_mask": Call(("state",)),
    "weights": Call(("learner",)),
    "prepare": Call(("learner", "trajectory"), ("reduce", "replicas")),
    "condition": Call(("minibatch", "reduce")),
    "greedy": _DECIDE,
    "gradients.loss": Call(("network", "learner", "sample", "sequence")),
    "gradients.network": Call(("learner",)),
    "gradients.step": Call(("network", "learner", "memory", "sample")),
    "outputs.distribution": Call(("weights", "memory", "observation", "action_mask")),
    "outputs.value": Call(("weights", "memory", "observation")),
    "outputs.q_values": Call(("weights", "observation")),
}
"""Arguments of the functions of a graph, and of those that its fragments consist of."""


def check_parameters(graph: Graph) -> None:
    """Raises a `ContractError` if a graph's function does not accept the arguments that the loops pass."""
    for field, function in _functions(graph).items():
        check_signature(f"{algorithm_of(graph)}: {field}", function, CALLS[field])


def check_loops(graph: Graph) -> None:
    """Raises a `UsageError` if a size of a graph's loops is less than 1, or if sizes do not divide evenly."""
    loops, name = graph.loops, algorithm_of(graph)
    for field, size in loops._asdict().items():
        if field != "minibatch_items" and size < 1:
            raise UsageError(
                f"{name}: {field}={size} in the graph's Loops must be at least 1. hint: raise the hyperparameter "
                f"from which {name} computes it."
            )
    if loops.num_envs % loops.num_shards:
        raise UsageError(
            f"{name}: num_shards={loops.num_shards} in the graph's Loops does not divide "
            f"num_envs={loops.num_envs}. hint: use a num_envs that is a multiple of {loops.num_shards}, or choose "
            "the number of shards by rollmill.dataflow.choose_num_shards."
        )
    rows = loops.num_envs // loops.num_shards * loops.rows_per_env
    if graph.replay is None and rows % loops.num_minibatches:
        raise UsageError(
            f"{name}: a shard has {rows} {loops.minibatch_items}, which cannot be divided into "
            f"num_minibatches={loops.num_minibatches} equal parts. hint: choose the number of shards by "
            "rollmill.dataflow.choose_num_shards, or use another num_envs."
        )


@contextmanager
def attribute_to_functions(graph: Graph) -> Iterator[None]:
    """Turns an exception of a graph's trace into a `ContractError` about the function that returns a wrong value.

    An exception with another cause is raised unchanged.
    """
    try:
        yield
    except (RollmillError, FloatingPointError):
        raise
    except Exception:
        check_results(graph)
        raise


def check_results(graph: Graph) -> None:
    """Raises a `ContractError` for the first function of a graph that raises or returns a wrong value.

    Each function is traced on its own, in the order of an iteration.
    """
    key = jax.eval_shape(jax.random.key, 0)
    one = jax.ShapeDtypeStruct((), jnp.int32)
    started = _trace(graph, "start_environment", key, one)
    state, observation = _pair(graph, "start_environment", started, "the tuple (state, observation)")
    mask, memory = _trace(graph, "action_mask", state), _trace(graph, "start_memory")
    learner = _trace(graph, "start_learner", key)
    weights = _trace(graph, "weights", learner)
    for field in ("policy", "greedy"):
        decision = _trace(graph, field, weights, key, memory, observation, mask)
        check_decision(graph, field, decision)
        _expect_types(graph, f"the memory of {field}", decision.memory, memory, "start_memory")
    action = _trace(graph, "policy", weights, key, memory, observation, mask).action
    timestep = _trace(graph, "environment", key, state, action)
    _expect(graph, "environment", timestep, Timestep)
    _expect_types(graph, "the state of environment", timestep.state, state, "start_environment")
    _check_learning(graph)


def check_outputs(graph: Graph) -> None:
    """Raises a `ContractError` if a function of `Graph.outputs` fails with the arguments that it is called with.

    Training does not call these functions, so that a mistake would appear only after it.
    """
    functions = {field: function for field, function in graph.outputs._asdict().items() if callable(function)}
    if not functions:
        return
    key = jax.eval_shape(jax.random.key, 0)
    state, observation = jax.eval_shape(graph.start_environment, key, jax.ShapeDtypeStruct((), jnp.int32))
    arguments = {
        "weights": jax.eval_shape(lambda key: graph.weights(graph.start_learner(key)), key),
        "memory": jax.eval_shape(graph.start_memory),
        "observation": observation,
        "action_mask": jax.eval_shape(graph.action_mask, state),
    }
    for field, function in functions.items():
        what, call = f"{algorithm_of(graph)}: outputs.{field}", CALLS[f"outputs.{field}"]
        check_signature(what, function, call)
        try:
            with attribute_to_user_code(what):
                jax.eval_shape(function, *(arguments[name] for name in call.positional))
        except ContractError as error:
            raise ContractError(f"{error}\n  hint: outputs.{field} is called as {call}.") from error


def check_decision(graph: Graph, field: str, decision: Any) -> None:
    """Raises a `ContractError` unless a policy returned a `Decision` with an action of the graph's space."""
    _expect(graph, field, decision, Decision)
    check_action(decision.action, graph.action_space, f"{algorithm_of(graph)}: {field}")


def _check_learning(graph: Graph) -> None:
    """Checks the functions of the learning half of an iteration, with all environments."""
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    begin = jax.eval_shape(lambda: init_state(graph, jax.random.key(0), index))
    collected = lambda state: collect(graph, graph.weights(state.learner), state.collector, state.key)[1]
    trajectory = jax.eval_shape(collected, begin)
    prepare = partial(graph.prepare, reduce=identity, replicas=1)
    returned = _trace(graph, "prepare", begin.learner, trajectory, function=prepare)
    learner, batch = _pair(graph, "prepare", returned, "the tuple (learner, Batch)")
    _expect(graph, "prepare", batch, Batch)
    _expect_types(graph, "the learner of prepare", learner, begin.learner, "start_learner")
    if graph.replay is None:
        check_batch(graph, batch, trajectory)
        rows = jnp.zeros(
            graph.loops.num_envs * graph.loops.rows_per_env // graph.loops.num_minibatches, jnp.uint32
        )
        minibatch = jax.eval_shape(lambda batch: minibatch_gather(batch, graph.loops)(rows), batch)
    else:
        sample = partial(graph.replay.sample, graph)
        minibatch = jax.eval_shape(sample, begin.rings, begin.learner, begin.key, index).minibatch
    condition = lambda minibatch: graph.condition(minibatch, identity)
    conditioned = _trace(graph, "condition", minibatch, function=condition)
    _expect(graph, "condition", conditioned, Batch)
    found = _trace(graph, "gradients", begin.learner, conditioned)
    gradients, metrics = _pair(graph, "gradients", found, "the tuple (gradients, metrics)")
    check_metrics(metrics)
    updated = _trace(graph, "update", begin.learner, gradients)
    _expect_types(graph, "the learner of update", updated, begin.learner, "start_learner")


def _functions(graph: Graph) -> dict[str, Any]:
    """Returns the functions of a graph by the names of `CALLS`."""
    fragments = {field: getattr(graph, field) for field in CALLS if "." not in field}
    parts = {field: part.function for field, part in fragments.items() if isinstance(part, _WRAPPED)}
    gradients = graph.gradients
    if isinstance(gradients, MeanGradients):
        parts |= {"gradients.loss": gradients.loss, "gradients.network": gradients.network}
    if isinstance(gradients, SequenceGradients):
        parts |= {"gradients.step": gradients.step, "gradients.network": gradients.network}
    return fragments | parts


_WRAPPED = (ElementwiseUpdate, UnfusedPolicy)


def _trace(graph: Graph, field: str, *args: Any, function: Callable[..., Any] | None = None) -> Any:
    """Returns the types of the result of one function, which is the field of the graph by default."""
    with attribute_to_user_code(f"{algorithm_of(graph)}: {field}"):
        return jax.eval_shape(getattr(graph, field) if function is None else function, *args)


def _pair(graph: Graph, field: str, returned: Any, expected: str) -> Any:
    if type(returned) is not tuple or len(returned) != 2:
        raise ContractError(f"{algorithm_of(graph)}: {field} returned {outline(returned)}, expected {expected}.")
    return returned


def _expect(graph: Graph, field: str, returned: Any, kind: type) -> None:
    if not isinstance(returned, kind):
        fields = ", ".join(kind._fields)  # pyright: ignore[reportAttributeAccessIssue]
        raise ContractError(
            f"{algorithm_of(graph)}: {field} returned {outline(returned)}, expected a {kind.__name__}({fields})."
        )


def _expect_types(graph: Graph, what: str, actual: PyTree, expected: PyTree, origin: str) -> None:
    """Checks that two trees have one structure and the same types."""
    if jax.tree.structure(actual) != jax.tree.structure(expected) or _types(actual) != _types(expected):
        raise ContractError(
            f"{algorithm_of(graph)}: {what} is {outline(actual)}, expected {outline(expected)}, as {origin} "
            "returned it. hint: keep the structure, shapes and dtypes."
        )


def _types(tree: PyTree) -> list[tuple[Any, Any]]:
    return [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)]
