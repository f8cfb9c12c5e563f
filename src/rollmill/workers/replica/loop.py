"""One replica of one group: iteration by iteration the stages of its role (`dataflow.roles`)."""

import contextlib
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from rollmill.core.machine import keep_freed_memory, return_freed_memory
from rollmill.dataflow import Stage
from rollmill.workers.protocol import IterationMetrics, SnapshotPart, send
from rollmill.workers.replica.collecting import collect_stage
from rollmill.workers.replica.context import ReplicaContext
from rollmill.workers.replica.env_server import PolicyEnded, serve_stage
from rollmill.workers.replica.held_learner import HeldLearner, fetch_stage, learn_stage
from rollmill.workers.replica.parameter_server import run_parameter_server
from rollmill.workers.replica.snapshot_requests import SnapshotRequests
from rollmill.workers.replica.start_report import StartReport
from rollmill.workers.replica.stop import StopParticipant
from rollmill.workers.replica.trajectories import receive_stage, send_stage
from rollmill.workers.replica.weights import publish_stage, receive_weights_stage
from rollmill.workers.replica.work import StageRun, Work


def run(context: ReplicaContext) -> None:
    """Does this replica's part of a training, from its first iteration to the last."""
    if Stage.APPLY in context.role.stages:
        run_parameter_server(context)
    else:
        _Replica(context).run()


def _stages(context: ReplicaContext) -> list[StageRun]:
    """The stages of this replica's role, ready to run; opening their channels may wait for other replicas."""
    learner = HeldLearner(context) if context.role.learns else None

    makers: dict[Stage, Callable[[], StageRun]] = {
        Stage.SERVE: partial(serve_stage, context),
        Stage.RECEIVE_WEIGHTS: partial(receive_weights_stage, context),
        Stage.COLLECT: partial(collect_stage, context, learner),
        Stage.SEND_TRAJECTORIES: partial(send_stage, context),
        Stage.RECEIVE_TRAJECTORIES: partial(receive_stage, context),
    }
    if learner is not None:
        makers |= {
            Stage.FETCH: partial(fetch_stage, learner),
            Stage.LEARN: partial(learn_stage, context, learner),
            Stage.PUBLISH: partial(publish_stage, context, learner),
        }
    return [makers[stage]() for stage in context.role.stages if stage in makers]


class _Replica:
    """A replica that goes through iterations."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context, self._requests = context, SnapshotRequests(context.control)
        self._reports = Stage.REPORT in context.role.stages and context.replica == 0
        context.control.start("starting")
        self._stages = _stages(context)
        self._compiled = False
        """Whether all stages have run once, and so nothing more is compiled: a compiler frees as much
        memory as many a training needs."""
        return_freed_memory()

    def run(self) -> None:
        """Runs until the training ends; replicas that nobody waits for run until they are ended."""
        context, iteration = self._context, self._first
        stop = StopParticipant(context.control, begun=iteration, planned=context.graph.loops.iterations)
        self._start_report = StartReport(context)
        with contextlib.suppress(PolicyEnded):
            while not context.role.in_step or stop.admit(iteration):
                if context.role.in_step and self._requests.wants(iteration):
                    self._send_snapshot(iteration)
                self._iterate(iteration)
                iteration += 1
        self._send_snapshot(iteration)

    @property
    def _first(self) -> int:
        """The first iteration, or in a lost replica's place the first that it had not delivered."""
        resumed = [stage.resumed_at() for stage in self._stages if stage.resumed_at is not None]
        return min(resumed) if self._context.attempt and resumed else self._context.first

    def _iterate(self, iteration: int) -> None:
        work = Work(iteration)
        for stage in self._stages:
            work = stage.run(work)
            if not self._compiled:
                return_freed_memory()
        if not self._compiled and jax.default_backend() == "cpu":
            keep_freed_memory()
        self._compiled = True
        self._start_report.send()  # before the first metrics, whose speed it explains
        if self._reports and work.metrics is not None:
            send(self._context.control, IterationMetrics(iteration, [work.metrics]))

    def _send_snapshot(self, iteration: int) -> None:
        arrays: dict[str, np.ndarray] = {}
        for stage in self._stages:
            arrays |= stage.part()
        send(self._context.control, SnapshotPart(iteration, int(self._context.index[0]), arrays))
        self._requests.answered()
