"""Builds graphs with remote fragments: a crossing replaces a fragment that another group holds."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Int, PyTree

from rollmill.core.types import Action, Key, Observation, Timestep
from rollmill.dataflow.crossing import cross
from rollmill.dataflow.flow import Flow, StepReply, StepRequest
from rollmill.dataflow.graph import ActionMask, Graph, Learner, Weights
from rollmill.dataflow.minibatch_loop import identity

REDUCE, START, ENVIRONMENT, UPDATE = "reduce", "start", "environment", "update"
"""Names of the crossings, at which a program sends data to a fragment of another group and gets its answer."""


class ResetReply(NamedTuple):
    """Message from the environment group to the policy group before the first step."""

    observation: Observation
    action_mask: ActionMask


class RemoteEnvironment(NamedTuple):
    """Functions of an environment that another group steps.

    The program keeps only the action mask of the environment's state.
    """

    start: Callable[[Key, Int[Array, ""]], tuple[PyTree[Array], Observation]]
    step: Callable[[Key, PyTree[Array], Action], Timestep]
    action_mask: Callable[[PyTree[Array]], ActionMask]


def remote_environment(reply: StepReply) -> RemoteEnvironment:
    """Returns the functions of ONE environment that another group steps. Answers have the shapes of `reply`."""

    def start(key, index):
        opening = cross(START, index, ResetReply(reply.observation, reply.action_mask))
        return opening.action_mask, opening.observation

    def step(key, state, action):
        answer = cross(ENVIRONMENT, StepRequest(jax.random.key_data(key), action), reply)
        return Timestep(
            answer.observation,
            answer.action_mask,
            answer.reward,
            answer.terminated,
            answer.truncated,
            answer.info,
        )

    return RemoteEnvironment(start, step, identity)


def with_remote_environment(graph: Graph, flow: Flow) -> Graph:
    """Returns a graph for a group that holds the policy but not the environment."""
    remote = remote_environment(flow.reply)
    return graph._replace(
        environment=remote.step,
        start_environment=remote.start,
        action_mask=remote.action_mask,
        parameters={},
    )


def with_remote_update(graph: Graph, flow: Flow) -> Graph:
    """Returns a graph for a group that holds the gradients but not the update."""
    parameters = flow.select_parameters(flow.state.learner)

    def update(learner: Learner, gradients: Weights, *, share: float = 1.0) -> Learner:
        return flow.replace_parameters(learner, cross(UPDATE, gradients, parameters))

    return graph._replace(update=update)


def remote_reduce(tree: PyTree[Array]) -> PyTree[Array]:
    """Computes the mean over replicas that do not share a program. Leaves are sent as a list."""
    leaves, structure = jax.tree.flatten(tree)
    return (
        jax.tree.unflatten(structure, cross(REDUCE, leaves, jax.eval_shape(identity, leaves))) if leaves else tree
    )


def answer_request(graph: Graph, state: PyTree[Array], request: StepRequest) -> tuple[PyTree[Array], StepReply]:
    """Steps ONE environment to answer a request of a policy in another group."""
    timestep = graph.environment(jax.random.wrap_key_data(request.key), state, request.action)
    reply = StepReply(
        timestep.observation,
        graph.action_mask(timestep.state),
        timestep.reward,
        timestep.terminated,
        timestep.truncated,
        dict(timestep.info),
    )
    return timestep.state, reply
