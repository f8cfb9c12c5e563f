"""Layouts of the messages between groups, and pairs of replicas that share environments."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.layout import Layout
from rollmill.dataflow import (
    Collector,
    Flow,
    Group,
    ResetReply,
    Trajectory,
    add_leading_axis,
    replica_environments,
)

AXES: Any = Trajectory(steps=1, start_memory=0, observation=0, memory=0)  # type: ignore[arg-type]
"""For each leaf of a trajectory, the axis along which its environments lie."""


class EnvPolicyPair(NamedTuple):
    """Environments that one replica of an environment group steps for one replica of the policy's group."""

    environment: int
    policy: int
    index: range


def env_policy_pairs(environments: Group, policies: Group, num_envs: int) -> list[EnvPolicyPair]:
    """Returns all pairs of replicas that share environments, in the order of the environments."""
    count = max(environments.replicas, policies.replicas)
    return [
        EnvPolicyPair(
            n * environments.replicas // count,
            n * policies.replicas // count,
            replica_environments(num_envs, count, n),
        )
        for n in range(count)
    ]


def collector_shapes(flow: Flow, width: int) -> Collector:
    """Returns the shapes of a collector with `width` environments."""
    return _resize(flow.state.collector, 0, width)


def ring_shapes(flow: Flow, width: int) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes of a replay memory for `width` environments."""
    return _resize(flow.state.rings, 0, width)


def trajectory_layout(flow: Flow, width: int) -> Layout:
    """Returns the layout of a message on the edge *trajectory*, for `width` environments."""
    return Layout.of(trajectory_shapes(flow, width))


def trajectory_shapes(flow: Flow, width: int) -> Trajectory:
    """Returns the shapes of a trajectory of `width` environments."""
    return Trajectory(*(_resize(part, axis, width) for axis, part in zip(AXES, flow.trajectory, strict=True)))


def request_layout(flow: Flow, width: int) -> Layout:
    """Returns the layout of a message on the edge *action*, for `width` environments."""
    return Layout.of(add_leading_axis(flow.request, width))


def reply_layout(flow: Flow, width: int) -> Layout:
    """Returns the layout of a message on the edge *timestep*, for `width` environments."""
    return Layout.of(add_leading_axis(flow.reply, width))


def opening_layout(flow: Flow, width: int) -> Layout:
    """Returns the layout of the message with the first observations of `width` environments."""
    return Layout.of(add_leading_axis(ResetReply(flow.reply.observation, flow.reply.action_mask), width))


def gradients_layout(flow: Flow) -> Layout:
    """Returns the layout of a message with gradients. The last message of an iteration also carries
    its metrics.
    """
    metrics = jax.ShapeDtypeStruct((len(flow.metric_names),), np.dtype("float32"))
    return Layout.of((flow.gradients, metrics))


def parameters_layout(flow: Flow) -> Layout:
    """Returns the layout of a message with parameters, the answer of the group with the update."""
    return Layout.of(flow.select_parameters(flow.state.learner))


def weights_layout(flow: Flow) -> Layout:
    """Returns the layout of a message on the edge *weights*."""
    return Layout.of(flow.weights)


def _resize(tree: PyTree, axis: int, width: int) -> PyTree:
    def leaf(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape.shape[:axis], width, *shape.shape[axis + 1 :]), shape.dtype)

    return jax.tree.map(leaf, tree)
