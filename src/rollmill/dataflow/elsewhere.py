"""Graphs in which a fragment is placed elsewhere: a crossing stands in its place."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Int, PyTree

from rollmill.core.types import Action, Key, Observation, Timestep
from rollmill.dataflow.crossing import cross
from rollmill.dataflow.flow import Flow, StepReply, StepRequest
from rollmill.dataflow.graph import Graph, Learner, Weights
from rollmill.dataflow.loops import identity

REDUCE, START, ENVIRONMENT, UPDATE = "reduce", "start", "environment", "update"
"""Names of the crossings."""


class ResetReply(NamedTuple):
    """What the environment's group says before the first step of a training."""

    observation: Observation
    action_mask: PyTree[Bool[Array, "..."]]


class EnvironmentElsewhere(NamedTuple):
    """What a graph needs of an environment that is not part of the program; its state is the action mask."""

    start: Callable[[Key, Int[Array, ""]], tuple[PyTree[Array], Observation]]
    step: Callable[[Key, PyTree[Array], Action], Timestep]
    action_mask: Callable[[PyTree[Array]], PyTree[Bool[Array, "..."]]]


def environment_elsewhere(turn: StepReply) -> EnvironmentElsewhere:
    """Functions of ONE environment that is stepped elsewhere and answers in the shapes of `turn`."""

    def start(key, index):
        opening = cross(START, index, ResetReply(turn.observation, turn.action_mask))
        return opening.action_mask, opening.observation

    def step(key, state, action):
        answer = cross(ENVIRONMENT, StepRequest(jax.random.key_data(key), action), turn)
        return Timestep(
            answer.observation,
            answer.action_mask,
            answer.reward,
            answer.terminated,
            answer.truncated,
            answer.info,
        )

    return EnvironmentElsewhere(start, step, identity)


def with_environment_elsewhere(graph: Graph, flow: Flow) -> Graph:
    """The graph as the group sees it that holds the policy, but not the environment."""
    elsewhere = environment_elsewhere(flow.turn)
    return graph._replace(
        environment=graph.environment._replace(function=elsewhere.step),
        start_environment=elsewhere.start,
        action_mask=elsewhere.action_mask,
    )


def with_remote_update(graph: Graph, flow: Flow) -> Graph:
    """The graph as the group sees it that holds the gradients, but not the update."""
    parameters = flow.pick_parameters(flow.state.learner)

    def update(learner: Learner, gradients: Weights, *, share: float = 1.0) -> Learner:
        return flow.put_parameters(learner, cross(UPDATE, gradients, parameters))

    return graph._replace(update=graph.update._replace(function=update))


def remote_reduce(tree: PyTree[Array]) -> PyTree[Array]:
    """The mean over replicas that share no program; its leaves leave as a list."""
    leaves, structure = jax.tree.flatten(tree)
    return (
        jax.tree.unflatten(structure, cross(REDUCE, leaves, jax.eval_shape(identity, leaves))) if leaves else tree
    )


def turn_one(graph: Graph, state: PyTree[Array], request: StepRequest) -> tuple[PyTree[Array], StepReply]:
    """The environment fragment of ONE environment, as it answers a request."""
    timestep = graph.environment.function(jax.random.wrap_key_data(request.key), state, request.action)
    turn = StepReply(
        timestep.observation,
        graph.action_mask(timestep.state),
        timestep.reward,
        timestep.terminated,
        timestep.truncated,
        dict(timestep.info),
    )
    return timestep.state, turn
