"""The stage that collects: how policy and environments are joined in one replica, or over channels."""

import numpy as np

from rollmill.dataflow import Collector, Graph, with_remote_environment
from rollmill.workers.replica.context import ReplicaContext
from rollmill.workers.replica.env_client import EnvLink, LocalEnvs, RemoteEnvs, start_environments
from rollmill.workers.replica.env_server import host_stepper
from rollmill.workers.replica.held_learner import HeldLearner
from rollmill.workers.replica.layouts import (
    collector_shapes,
    env_policy_pairs,
    opening_layout,
    reply_layout,
    request_layout,
)
from rollmill.workers.replica.rollout import (
    CompiledRollout,
    RemoteEnvsRollout,
    collector_from_checkpoint,
    collector_from_reset,
)
from rollmill.workers.replica.snapshots import collector_part, restored_collector
from rollmill.workers.replica.work import StageRun, Work


def collect_stage(context: ReplicaContext, learner: HeldLearner | None) -> StageRun:
    """Makes the stage that collects a rollout, with weights that were received or the replica's own."""
    collects = _rollout(context)

    def collect(work: Work) -> Work:
        if work.weights is None:
            assert learner is not None
            work = work._replace(weights=learner.weights, version=work.iteration)
        context.control.work("collecting")
        return work._replace(trajectory=collects(work.weights, work.iteration))

    return StageRun(collect, part=lambda: collector_part(context, collects.collector))


def _rollout(context: ReplicaContext) -> CompiledRollout | RemoteEnvsRollout:
    graph, here = context.graph, context.role.steps_environments
    if here and graph.host is None:
        collector = restored_collector(context, collector_shapes(context.flow, len(context.index)))
        if collector is None:
            collector = start_environments(graph, context.start_key, context.index)
        return CompiledRollout(graph, context.key, collector, unroll=context.unroll)
    graph = graph if graph.host is not None else with_remote_environment(graph, context.flow)
    if here:
        link = LocalEnvs(host_stepper(context, context.index.tolist()))
        return RemoteEnvsRollout(
            graph, context.key, [link], [collector_from_reset(graph, context.index, link.open())]
        )
    return RemoteEnvsRollout(graph, context.key, *_remote_links(context, graph))


def _remote_links(context: ReplicaContext, graph: Graph) -> tuple[list[EnvLink], list[Collector]]:
    """A link to each replica that steps environments for this one, and the policy's part of their state."""
    pairs = env_policy_pairs(context.role.partner("action"), context.group, graph.loops.num_envs)
    restored = restored_collector(context, collector_shapes(context.flow, len(context.index)))
    links: list[EnvLink] = []
    collectors = []
    for pair in pairs:
        if pair.policy != context.replica:
            continue
        width, source, index = len(pair.index), pair.environment, np.asarray(pair.index, np.int32)
        wire, here = context.wire, context.replica
        link = RemoteEnvs(
            wire.receiver("opening", sources=[source], target=here, layout=opening_layout(context.flow, width)),
            wire.sender(
                "action",
                source=here,
                targets=[source],
                layout=request_layout(context.flow, width),
                checksum=context.checksums,
            ),
            wire.receiver("timestep", sources=[source], target=here, layout=reply_layout(context.flow, width)),
            source,
        )
        links.append(link)
        context.control.start("waiting for the first observations")
        collectors.append(
            collector_from_reset(graph, index, link.open())
            if restored is None
            else collector_from_checkpoint(restored, index - context.index[0])
        )
    return links, collectors
