"""Derives the data flow of a graph from its functions, by tracing them.

Tracing gives the shapes on each edge. It also shows which leaves of the learner each function passes on unchanged,
and thus the part of the learner that has to travel between groups. Nothing is computed.

Shape letters: `T` steps, `E` all environments.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.core.types import Action, Key, Observation
from rollmill.dataflow.collecting import collect, collection_metrics
from rollmill.dataflow.experience import FILL
from rollmill.dataflow.graph import ActionMask, Batch, Graph, Learner, State, Trajectory, Weights
from rollmill.dataflow.learning import prepare, report
from rollmill.dataflow.loops import init_state
from rollmill.dataflow.minibatch_loop import identity
from rollmill.dataflow.minibatches import minibatch_gather

LEARNED = ("finite/gradients", "losses/gradient_norm", "epochs")
"""Metrics of learning that no fragment returns: the metrics of `gradient_metrics`, and the number of epochs."""


class StepRequest(NamedTuple):
    """Message from the policy to the environment for one step: the edge *action*."""

    key: Array
    """Data of the environment's random key."""
    action: Action


class StepReply(NamedTuple):
    """Message from the environment to the policy after an action: the edge *timestep*."""

    observation: Observation
    action_mask: ActionMask
    reward: PyTree[Float[Array, "..."]]
    terminated: Bool[Array, "..."]
    truncated: Bool[Array, "..."]
    info: dict[str, PyTree[Array]]
    """Info of the step, which includes `final_observation`."""


class Flow(NamedTuple):
    """Shapes of the data that fragments exchange, as `jax.ShapeDtypeStruct`."""

    state: State
    trajectory: Trajectory
    """Shapes of a trajectory, with leaves `[T, E, ...]`."""
    request: StepRequest
    """Request for ONE environment."""
    reply: StepReply
    """Reply of ONE environment."""
    gradients: Weights
    weights: Weights
    metric_names: tuple[str, ...]
    """Names of all metrics of an iteration."""
    learning_metric_names: tuple[str, ...]
    """Names of the metrics of learning."""
    updated_leaves: frozenset[int]
    """Positions of the learner's leaves written by the update, such as weights and optimiser state."""
    prepared_leaves: frozenset[int]
    """Positions of the learner's leaves written by `prepare`, such as running statistics."""
    merged_leaves: frozenset[int]
    """Positions of the learner's leaves written by `merge_metrics`."""
    parameters: tuple[int, ...]
    """Positions of the learner's leaves that the update writes and other functions read: the edge *parameters*."""

    def with_metrics_only(self) -> "Flow":
        """Returns the flow for a graph in which only gradients and metrics reach the update."""
        return self._replace(
            updated_leaves=self.updated_leaves | self.merged_leaves,
            prepared_leaves=self.prepared_leaves - self.merged_leaves,
            parameters=tuple(sorted({*self.parameters, *self.merged_leaves})),
        )

    def select_parameters(self, learner: PyTree[Any]) -> list[Any]:
        """Returns the leaves of a learner, or of its shapes, that `parameters` selects."""
        leaves = jax.tree.leaves(learner)
        return [leaves[place] for place in self.parameters]

    def replace_parameters(self, learner: PyTree[Any], values: Sequence[Any]) -> PyTree[Any]:
        """Returns the learner with the leaves that `parameters` selects replaced by `values`."""
        leaves, structure = jax.tree.flatten(learner)
        for place, leaf in zip(self.parameters, values, strict=True):
            leaves[place] = leaf
        return jax.tree.unflatten(structure, leaves)


def flow(graph: Graph) -> Flow:
    """Derives the data flow of a graph. Traces each function once and computes nothing."""
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    state = jax.eval_shape(lambda: init_state(graph, jax.random.key(0), index))
    weights_program, weights = _trace(graph.weights, state.learner)
    whole = trajectory = jax.eval_shape(partial(_trajectory, graph._replace(compact_step=None)), state)
    if graph.compact_step is not None:
        trajectory = jax.eval_shape(partial(_trajectory, graph), state)
    prepare_program, (_, batch) = _trace(partial(prepare, graph), state.learner, trajectory, index)
    drawn = state.learner, state.rings, state.key, batch
    minibatch_program, minibatch = _trace(partial(_minibatch, graph, index), *drawn)
    conditioned = jax.eval_shape(lambda batch: graph.condition(batch, identity), minibatch)
    report_program, reported = _trace(partial(report, graph), state.learner, batch)
    gradients_program, (gradients, learned) = _trace(graph.gradients, state.learner, conditioned)
    update_program, _ = _trace(graph.update, state.learner, gradients)
    collected = jax.eval_shape(partial(collection_metrics, graph), trajectory, weights, index)
    replayed = () if graph.replay is None else (FILL,)
    count = len(jax.tree.leaves(state.learner))
    batch_program = prepare_program.replace(outvars=prepare_program.outvars[count:])
    read = frozenset[int]().union(
        *(
            _read(program, count)
            for program in (batch_program, minibatch_program, gradients_program, weights_program, report_program)
        )
    )
    updated = _find_written(update_program, count)
    names = tuple(sorted({*collected, *reported, *learned, *LEARNED, *replayed}))
    return Flow(
        state=state,
        trajectory=trajectory,
        request=StepRequest(
            jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))), _of_one(trajectory).action
        ),
        reply=_reply(whole),
        gradients=gradients,
        weights=weights,
        metric_names=names,
        learning_metric_names=tuple(sorted({*learned, *LEARNED})),
        updated_leaves=updated,
        prepared_leaves=_find_written(prepare_program, count),
        merged_leaves=_find_merged(graph, state.learner, names),
        parameters=tuple(sorted(updated & read)),
    )


def _find_merged(graph: Graph, learner: PyTree[Any], names: Sequence[str]) -> frozenset[int]:
    if graph.merge_metrics is None:
        return frozenset()
    metrics = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in names}
    program, _ = _trace(graph.merge_metrics, learner, metrics)
    return _find_written(program, len(jax.tree.leaves(learner)))


def _minibatch(
    graph: Graph, index: Array, learner: Learner, rings: PyTree[Array], key: Key, batch: Batch
) -> Batch:
    """Draws a minibatch from the batch or from the experience store."""
    if graph.replay is not None:
        return graph.replay.sample(graph, rings, learner, key, index).minibatch
    loops = graph.loops
    rows = loops.num_envs * loops.rows_per_env // loops.num_minibatches
    return minibatch_gather(batch, loops)(jnp.zeros(rows, jnp.uint32))


def _trace(function: Any, *examples: PyTree) -> tuple[core.Jaxpr, PyTree]:
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    return program.jaxpr, shapes


def _trajectory(graph: Graph, state: State) -> Trajectory:
    return collect(graph, graph.weights(state.learner), state.collector, state.key)[1]


def _of_one(trajectory: Trajectory) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), trajectory.steps)


def _reply(trajectory: Trajectory) -> StepReply:
    step = _of_one(trajectory)
    info = {**step.info, "final_observation": step.final_observation}
    return StepReply(step.observation, step.action_mask, step.reward, step.terminated, step.truncated, info)


def _find_written(program: core.Jaxpr, count: int) -> frozenset[int]:
    """Returns which of the first `count` results differ from the arguments at the same positions."""
    pairs = zip(program.invars[:count], program.outvars[:count], strict=True)
    return frozenset(n for n, (before, after) in enumerate(pairs) if before is not after)


def _read(program: core.Jaxpr, count: int) -> frozenset[int]:
    """Returns which of the first `count` arguments a result may depend on."""
    wanted = {id(atom) for atom in program.outvars}
    for equation in reversed(program.eqns):
        if any(id(var) in wanted for var in equation.outvars):
            wanted.update(id(atom) for atom in equation.invars)
    return frozenset(n for n, var in enumerate(program.invars[:count]) if id(var) in wanted)
