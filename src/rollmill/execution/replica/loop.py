"""One replica of one group: iteration by iteration its fragments, in the order in which data passes them.

environment alone    serves steps to whoever holds the policy
policy               collects a rollout, with weights of its own or from the learner's group
gradients            learns from its rollout, or from those that come
update alone         applies gradients that come (`updating`)
"""

import contextlib
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from rollmill.channels import Damaged, Gathered, LatestReader, LatestWriter, Receiver
from rollmill.dataflow import (
    Collector,
    Graph,
    Learner,
    Trajectory,
    Weights,
    start_learner,
    with_environment_elsewhere,
)
from rollmill.execution.replica.context import ReplicaContext
from rollmill.execution.replica.env_client import EnvLink, LocalEnvs, RemoteEnvs, start_environments
from rollmill.execution.replica.env_server import EnvServer, Over, host_stepper
from rollmill.execution.replica.lag import metrics_of
from rollmill.execution.replica.layouts import (
    AXES,
    collector_shapes,
    links,
    opening_layout,
    request_layout,
    trajectory_layout,
    turn_layout,
    weights_layout,
)
from rollmill.execution.replica.learner import CompiledLearner, Row, SegmentedLearner
from rollmill.execution.replica.parameter_server import run_update
from rollmill.execution.replica.remote import MeanOverReplicas, ParameterClient
from rollmill.execution.replica.rollout import CompiledRollout, RemoteEnvsRollout, opened, reopened
from rollmill.execution.replica.snapshot_requests import SnapshotRequests
from rollmill.execution.replica.snapshots import (
    collector_part,
    learner_part,
    restored_collector,
    restored_learner,
)
from rollmill.execution.replica.start_report import StartReport
from rollmill.execution.replica.stop import StopParticipant


def run(context: ReplicaContext) -> None:
    """Does this replica's part of a training, from its first iteration to the last."""
    if context.group.fragments == ("update",):
        run_update(context)
    else:
        _Replica(context).run()


class _Weights(NamedTuple):
    tree: Weights
    version: int


class _Replica:
    """A replica that goes through iterations."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context, self._orders = context, SnapshotRequests(context.control)
        group, apart = context.group, context.partition.apart
        context.control.start("starting")
        serves = group.has("environment") and not group.has("policy")
        self._serving = EnvServer(context) if serves else None
        self._collects = _collecting(context) if group.has("policy") else None
        sends = group.has("policy") and not group.has("gradients")
        self._outgoing = _Outgoing(context) if sends else None
        self._learner = _Learner(context) if group.has("gradients") else None
        self._incoming = _Incoming(context) if group.has("gradients") and apart("policy", "gradients") else None

    def run(self) -> None:
        """Until the training ends, or, where nobody is waited for, until it is ended."""
        iteration = self._first
        ending = StopParticipant(
            self._context.control, begun=iteration, planned=self._context.graph.loops.iterations
        )
        self._report = StartReport(self._context)
        with contextlib.suppress(Over):
            while self._context.endless or ending.admit(iteration):
                if not self._context.endless and self._orders.wants(iteration):
                    self._send_snapshot(iteration)
                self._iterate(iteration)
                self._report.send()
                iteration += 1
        self._send_snapshot(iteration)

    @property
    def _first(self) -> int:
        if self._context.attempt and self._outgoing is not None:
            return self._outgoing.begun
        if self._context.attempt and self._serving is not None:
            return self._serving.begun
        return self._context.first

    def _iterate(self, iteration: int) -> None:
        control = self._context.control
        if self._learner is not None:
            self._learner.begin(iteration)
        if self._serving is not None:
            self._serving()
        trajectory: Trajectory | None = None
        lags: list[int] | None = None
        if self._collects is not None:
            weights = self._weights(iteration)
            control.work("collecting")
            trajectory = self._collects(weights.tree, iteration)
            if self._outgoing is not None:
                self._outgoing.send(trajectory, weights.version, iteration)
        if self._learner is not None:
            if self._incoming is not None:
                control.at("waiting for trajectories")
                trajectory, lags = self._incoming.take(iteration)
            control.work("learning")
            assert trajectory is not None
            row = self._learner.learn(trajectory, iteration)
            self._report.send()  # before the first row, whose speed it explains
            self._learner.tell(row, iteration, lags)

    def _weights(self, iteration: int) -> _Weights:
        if self._learner is not None:
            return _Weights(self._learner.weights, iteration)
        assert self._outgoing is not None
        return self._outgoing.weights(iteration)

    # --- checkpoints ---------------------------------------------------------------------------------

    def _send_snapshot(self, iteration: int) -> None:
        arrays: dict[str, np.ndarray] = {}
        if self._serving is not None and self._context.keeps_environments:
            arrays |= self._serving.part()
        if self._collects is not None and self._context.keeps_environments:
            arrays |= collector_part(self._context, self._collects.collector)
        if self._learner is not None:
            arrays |= learner_part(self._context, self._learner.learner)
        fields = {"iteration": iteration, "lowest": int(self._context.index[0])}
        self._context.control.send("snapshot", fields, arrays)
        self._orders.answered()


# --- collecting ---------------------------------------------------------------------------------------


def _collecting(context: ReplicaContext) -> CompiledRollout | RemoteEnvsRollout:
    graph = context.graph
    if context.group.has("environment") and graph.host is None:
        collector = restored_collector(context, collector_shapes(context.flow, len(context.index)))
        if collector is None:
            collector = start_environments(graph, context.start_key, context.index)
        return CompiledRollout(graph, context.key, collector, unroll=context.unroll)
    graph = graph if graph.host is not None else with_environment_elsewhere(graph, context.flow)
    if context.group.has("environment"):
        lane = LocalEnvs(host_stepper(context, context.index.tolist()))
        return RemoteEnvsRollout(graph, context.key, [lane], [opened(graph, context.index, lane.open())])
    return RemoteEnvsRollout(graph, context.key, *_distant_lanes(context, graph))


def _distant_lanes(context: ReplicaContext, graph: Graph) -> tuple[list[EnvLink], list[Collector]]:
    environments = context.partition.holder("environment")
    own = [
        link for link in links(environments, context.group, graph.loops.num_envs) if link.policy == context.replica
    ]
    restored = restored_collector(context, collector_shapes(context.flow, len(context.index)))
    lanes, collectors = [], []
    for link in own:
        width, source, index = len(link.index), link.environment, np.asarray(link.index, np.int32)
        wire, here = context.wire, context.replica
        lane = RemoteEnvs(
            wire.receiver("opening", sources=[source], target=here, layout=opening_layout(context.flow, width)),
            wire.sender(
                "action",
                source=here,
                targets=[source],
                layout=request_layout(context.flow, width),
                checksum=context.checksums,
            ),
            wire.receiver("timestep", sources=[source], target=here, layout=turn_layout(context.flow, width)),
            source,
        )
        lanes.append(lane)
        context.control.start("waiting for the first observations")
        collectors.append(
            opened(graph, index, lane.open()) if restored is None else reopened(restored, index - context.index[0])
        )
    return lanes, collectors


class _Outgoing:
    """Trajectories go to the group with the gradients, weights come from there."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        learners, self._targets = context.peers("gradients")
        width = len(context.index) // len(self._targets)
        self._layout = trajectory_layout(context.flow, width)
        self._sender = context.wire.sender(
            "trajectory",
            source=context.replica,
            targets=list(self._targets),
            layout=self._layout,
            checksum=context.checksums,
        )
        self._weights: LatestReader = context.wire.newest_reader(
            f"weights/{self._targets[0]}",
            layout=weights_layout(context.flow),
            reader=context.replica,
            readers=context.group.replicas,
        )

    @property
    def begun(self) -> int:
        """The first iteration that the replaced worker had not delivered to all of its targets."""
        return self._context.first + min(map(self._delivered, self._targets))

    def _delivered(self, target: int) -> int:
        return self._sender.statistics()[target].messages

    def weights(self, iteration: int) -> _Weights:
        """The weights of this iteration, or the newest there are."""
        at_least = iteration if self._context.group.synchronous else self._context.first
        self._context.control.at("waiting for weights")
        found = self._weights.read(at_least=at_least)
        return _Weights(found.tree, found.version)

    def send(self, trajectory: Trajectory, version: int, iteration: int) -> None:
        """To every replica that learns from some of these environments."""
        parts = [trajectory] if len(self._targets) == 1 else _parts(trajectory, len(self._targets))
        for target, part in zip(self._targets, parts, strict=True):
            if self._context.attempt and self._context.first + self._delivered(target) > iteration:
                continue  # the replaced worker had delivered this one, and no further
            tree = jax.tree.map(np.asarray, part)
            self._context.control.at("waiting for room to send a trajectory")
            self._sender.send(tree, version=version, iteration=iteration, target=target)


def _parts(trajectory: Trajectory, count: int) -> list[Trajectory]:
    split = lambda axis: lambda leaf: np.split(np.asarray(leaf), count, axis=axis)
    fields = [jax.tree.map(split(axis), field) for axis, field in zip(AXES, trajectory, strict=True)]
    is_list = lambda node: isinstance(node, list)
    return [
        Trajectory(*(jax.tree.map(lambda leaves, n=n: leaves[n], field, is_leaf=is_list) for field in fields))
        for n in range(count)
    ]


# --- learning -----------------------------------------------------------------------------------------


class _Incoming:
    """Trajectories of the replicas that collect for this one."""

    def __init__(self, context: ReplicaContext) -> None:
        policies, sources = context.peers("policy")
        self._sources = list(sources)
        self._synchronous = policies.synchronous
        width = len(context.index) // len(self._sources)
        layout = trajectory_layout(context.flow, width)
        self._receiver: Receiver = context.wire.receiver(
            "trajectory", sources=self._sources, target=context.replica, layout=layout
        )

    def take(self, iteration: int) -> tuple[Trajectory, list[int]]:
        """One rollout of each, or as many of any as make a batch; and how many iterations old the weights were."""
        found: Gathered
        if self._synchronous:
            found = self._receiver.gather(axis=AXES, sources=self._sources)
            self._check(found, iteration)
        else:
            found = self._receiver.gather(axis=AXES, count=len(self._sources))
        return found.tree, [iteration - header.version for header in found.headers]

    def _check(self, found: Gathered, iteration: int) -> None:
        for header in found.headers:
            if header.iteration != iteration:
                raise Damaged(
                    f"the trajectory of replica {header.source} is of iteration {header.iteration}; "
                    f"iteration {iteration} was expected."
                )


class _Learner:
    """The learner of a replica that holds the gradients."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context, graph = context, context.graph
        restored = restored_learner(context, context.flow.state.learner)
        self.learner: Learner = (
            jax.jit(partial(start_learner, graph))(context.key) if restored is None else restored
        )
        self._parameters = None if context.group.has("update") else ParameterClient(context)
        self._learns = self._learning()
        self._publishes = _publishing(context)
        self._publish(context.first)

    @property
    def weights(self) -> Weights:
        """What the policy needs."""
        return self._context.graph.weights(self.learner)

    def begin(self, iteration: int) -> None:
        """Takes the parameters that an iteration begins with, where they are made elsewhere."""
        if self._parameters is not None:
            self.learner = self._parameters.begin(self.learner, iteration)

    def learn(self, trajectory: Trajectory, iteration: int) -> Row:
        """One iteration's learning; its metrics."""
        self.learner, row = self._learns(self.learner, trajectory, iteration)
        self._publish(iteration + 1)
        return row

    def tell(self, row: Row, iteration: int, lags: list[int] | None) -> None:
        """Sends an iteration's metrics to where they are put together."""
        if self._parameters is not None and not self._context.group.synchronous:
            self._parameters.end(row)  # the update's group tells
            return
        if self._context.replica:
            return
        loops = self._context.graph.loops
        updates = loops.epochs * loops.num_minibatches
        row = row if lags is None else {**row, **metrics_of([lag * updates for lag in lags])}
        self._context.control.send("row", {"iteration": iteration, "metrics": row})

    def _publish(self, version: int) -> None:
        if self._publishes is not None:
            weights = jax.device_get(self._context.graph.weights(self.learner))
            self._publishes.publish(weights, version=version)

    def _learning(self) -> CompiledLearner | SegmentedLearner:
        context, graph = self._context, self._context.graph
        several = context.group.replicas > 1 and context.group.synchronous
        if self._parameters is None and not several:
            return CompiledLearner(graph, context.key, context.index)
        return SegmentedLearner(
            graph,
            context.flow,
            context.key,
            context.index,
            reduce=MeanOverReplicas(context) if several else None,
            update=self._parameters,
        )


def _publishing(context: ReplicaContext) -> LatestWriter | None:
    policies = context.partition.holder("policy")
    if policies.name == context.group.name:
        return None
    return context.wire.newest_writer(
        f"weights/{context.replica}", layout=weights_layout(context.flow), readers=policies.replicas
    )
