"""The stage of a replica that collects rollouts, from environments in the same replica or over channels."""

import numpy as np

from rollmill.dataflow import Collector, Graph, with_remote_environment
from rollmill.programs.kernels import KernelChoice
from rollmill.programs.states import start_environments
from rollmill.workers.replica.context import IterationState, ReplicaContext, StageRun
from rollmill.workers.replica.env_client import EnvLink, LocalEnvs, RemoteEnvs
from rollmill.workers.replica.env_server import host_stepper
from rollmill.workers.replica.layouts import (
    collector_shapes,
    env_policy_pairs,
    opening_layout,
    reply_layout,
    request_layout,
)
from rollmill.workers.replica.learner_state import LearnerState
from rollmill.workers.replica.rollout import (
    CompiledRollout,
    RemoteEnvsRollout,
    collector_from_checkpoint,
    collector_from_reset,
)
from rollmill.workers.replica.snapshots import collector_part, restored_collector


class Collect(StageRun):
    """Stage that collects a rollout, with weights received from a learner or with the replica's own."""

    def __init__(self, context: ReplicaContext, learner: LearnerState | None, kernels: KernelChoice) -> None:
        self._context, self._learner = context, learner
        self._rollout = _rollout(context, kernels)

    def run(self, state: IterationState) -> IterationState:
        """Collects a rollout and returns the state with its trajectory."""
        if state.weights is None:
            assert self._learner is not None
            state = state._replace(weights=self._learner.weights, version=state.iteration)
        self._context.control.work("collecting")
        return state._replace(trajectory=self._rollout(state.weights, state.iteration))

    def part(self) -> dict[str, np.ndarray]:
        """Returns the leaves of the collector that this replica owns, for a snapshot."""
        return collector_part(self._context, self._rollout.collector)


def _rollout(context: ReplicaContext, kernels: KernelChoice) -> CompiledRollout | RemoteEnvsRollout:
    graph, here = context.graph, context.role.steps_environments
    if here and graph.host is None:
        collector = restored_collector(context, collector_shapes(context.flow, len(context.index)))
        if collector is None:
            collector = start_environments(graph, context.start_key, context.index, context.begin.first)
        return CompiledRollout(graph, context.key, collector, kernels.rollouts.function)
    graph = graph if graph.host is not None else with_remote_environment(graph, context.flow)
    if here:
        link = LocalEnvs(host_stepper(context, context.index.tolist()))
        return RemoteEnvsRollout(
            graph, context.key, [link], [collector_from_reset(graph, context.index, link.open())]
        )
    return RemoteEnvsRollout(graph, context.key, *_remote_links(context, graph))


def _remote_links(context: ReplicaContext, graph: Graph) -> tuple[list[EnvLink], list[Collector]]:
    """Opens a link to each replica that steps environments for this one. Also returns their collectors."""
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
                checksum=context.spec.checksums,
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
