"""Runs one replica of a group, which performs the stages of its role (`dataflow.roles`) in every iteration."""

import contextlib
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from rollmill.core.machine import keep_freed_memory, leave_compilers, return_freed_memory
from rollmill.dataflow import Stage
from rollmill.workers.protocol import IterationMetrics, send
from rollmill.workers.replica.collecting import Collect
from rollmill.workers.replica.context import IterationState, ReplicaContext, StageRun, StartReport
from rollmill.workers.replica.env_server import ClientClosed, EnvServer
from rollmill.workers.replica.exchange import PublishWeights, ReceiveTrajectories, ReceiveWeights, SendTrajectories
from rollmill.workers.replica.kernels import replica_kernels
from rollmill.workers.replica.learner_state import FetchParameters, Learn, LearnerState
from rollmill.workers.replica.mesh import run_on_mesh
from rollmill.workers.replica.parameter_server import run_parameter_server
from rollmill.workers.replica.requests import SnapshotRequests, StopParticipant
from rollmill.workers.replica.snapshots import send_part


def run(context: ReplicaContext) -> None:
    """Runs this replica from its first iteration to the last."""
    if Stage.APPLY in context.role.stages:
        run_parameter_server(context)
    elif Stage.ITERATE in context.role.stages:
        run_on_mesh(context)
    else:
        _Replica(context).run()


def _stages(context: ReplicaContext) -> list[StageRun]:
    """Makes the stages of this replica's role. Opening their channels may wait for other replicas."""
    kernels = replica_kernels(context)
    learner = LearnerState(context, kernels) if context.role.learns else None
    makers: dict[Stage, Callable[[], StageRun]] = {
        Stage.SERVE: partial(EnvServer, context),
        Stage.RECEIVE_WEIGHTS: partial(ReceiveWeights, context),
        Stage.COLLECT: partial(Collect, context, learner, kernels),
        Stage.SEND_TRAJECTORIES: partial(SendTrajectories, context),
        Stage.RECEIVE_TRAJECTORIES: partial(ReceiveTrajectories, context),
    }
    if learner is not None:
        makers |= {
            Stage.FETCH: partial(FetchParameters, learner),
            Stage.LEARN: partial(Learn, context, learner),
            Stage.PUBLISH: partial(PublishWeights, context, learner),
        }
    return [makers[stage]() for stage in context.role.stages if stage in makers]


class _Replica:
    """A replica that goes through iterations."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context, self._requests = context, SnapshotRequests(context.control)
        self._reports = Stage.REPORT in context.role.stages and context.replica == 0
        context.control.start("starting")
        self._stages = _stages(context)
        # Compiling uses more memory than many runs do afterwards, so freed memory is returned until all stages
        # have run.
        self._compiled = False
        return_freed_memory()

    def run(self) -> None:
        """Runs until training ends. A replica that no other replica waits for runs until the coordinator ends
        it.
        """
        context, iteration = self._context, self._first
        stop = StopParticipant(context.control, begun=iteration, planned=context.graph.loops.iterations)
        self._start_report = StartReport(context)
        with contextlib.suppress(ClientClosed):
            while not context.role.in_step or stop.admit(iteration):
                if context.role.in_step and self._requests.wants(iteration):
                    self._send_snapshot(iteration)
                self._iterate(iteration)
                iteration += 1
        self._send_snapshot(iteration)

    @property
    def _first(self) -> int:
        """The first iteration. For a replacement, the first iteration not delivered by the lost replica."""
        resumed = [stage.resumed_at for stage in self._stages if stage.resumed_at is not None]
        return min(resumed) if self._context.begin.attempt and resumed else self._context.begin.first

    def _iterate(self, iteration: int) -> None:
        state = IterationState(iteration)
        for stage in self._stages:
            state = stage.run(state)
            if not self._compiled:
                leave_compilers()
        if not self._compiled and jax.default_backend() == "cpu":
            keep_freed_memory()
        self._compiled = True
        self._start_report.send()  # sent before the first metrics, because it explains their speed
        if self._reports and state.metrics is not None:
            send(self._context.control, IterationMetrics(iteration, [state.metrics]))

    def _send_snapshot(self, iteration: int) -> None:
        # returned first, so that the copies of the snapshot do not add to the memory that programs have freed
        return_freed_memory()
        arrays: dict[str, np.ndarray] = {}
        for stage in self._stages:
            arrays |= stage.part()
        send_part(self._context, iteration, arrays)
        self._requests.answered()
