"""Weights as a latest value: published where they are learned, received where they are acted with."""

import jax

from rollmill.workers.replica.context import ReplicaContext
from rollmill.workers.replica.held_learner import HeldLearner
from rollmill.workers.replica.layouts import weights_layout
from rollmill.workers.replica.work import StageRun, Work


def receive_weights_stage(context: ReplicaContext) -> StageRun:
    """Makes the stage that waits for the weights of an iteration, or takes the newest where nobody waits."""
    reader = context.wire.latest_reader(
        f"weights/{context.peers('weights')[0]}",
        layout=weights_layout(context.flow),
        reader=context.replica,
        readers=context.group.replicas,
    )

    def receive(work: Work) -> Work:
        at_least = work.iteration if context.group.synchronous else context.first
        context.control.at("waiting for weights")
        latest = reader.read(at_least=at_least)
        return work._replace(weights=latest.tree, version=latest.version)

    return StageRun(receive)


def publish_stage(context: ReplicaContext, learner: HeldLearner) -> StageRun:
    """Makes the stage that publishes the weights after each iteration; those to begin with are published here."""
    writer = context.wire.latest_writer(
        f"weights/{context.replica}",
        layout=weights_layout(context.flow),
        readers=context.role.partner("weights").replicas,
    )

    def publish(version: int) -> None:
        writer.publish(jax.device_get(learner.weights), version=version)

    def publish_next(work: Work) -> Work:
        publish(work.iteration + 1)
        return work

    publish(context.first)
    return StageRun(publish_next)
