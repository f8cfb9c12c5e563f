"""The parameter server: a replica that holds only the update, receives gradients, and publishes parameters.

Synchronous groups send the mean of their gradients once. Gradients of asynchronous groups are applied one by one
as they arrive, each weighted by its share of the batch (Mnih et al., "Asynchronous Methods for Deep Reinforcement
Learning", ICML 2016). The policy lag is the number of updates since the weights of the gradients were published.
"""

import contextlib
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np

from rollmill.channels.errors import ChannelClosed, TimedOut
from rollmill.channels.shm.queue import QueueReceiver
from rollmill.channels.shm.ring_reader import RingMessage
from rollmill.channels.transfers import to_device, to_host
from rollmill.dataflow import Learner, end_iteration, evaluate_schedules, restore_schedules
from rollmill.programs.states import begin_learner
from rollmill.workers.protocol import IterationMetrics, send
from rollmill.workers.replica.context import Lag, ReplicaContext, StartReport
from rollmill.workers.replica.layouts import gradients_layout, parameters_layout
from rollmill.workers.replica.remote import LAST, NO_UPDATE
from rollmill.workers.replica.requests import SnapshotRequests, StopParticipant
from rollmill.workers.replica.snapshots import learner_part, restored_learner, send_part

POLL_SECONDS = 0.2
"""Seconds to wait for gradients between two checks for snapshot requests."""


class Ended(Exception):
    """Signals inside the parameter server that the run is over."""


def run_parameter_server(context: ReplicaContext) -> None:
    """Runs the parameter server: applies gradients and publishes parameters until training ends."""
    senders = context.role.partner("gradients")
    sources = range(senders.replicas)
    gradients = context.wire.receiver(
        "gradients", sources=sources, target=0, layout=gradients_layout(context.flow)
    )
    parameters = context.wire.latest_writer(
        "parameters", layout=parameters_layout(context.flow), readers=senders.replicas
    )
    learner = restored_learner(context)
    server = _Server(context, learner)
    report = StartReport(context)
    parameters.publish(server.parameters, version=0)
    with contextlib.suppress(Ended):
        while True:
            context.control.at("waiting for gradients")
            with _next(gradients, server) as message:
                server.apply(message)
            report.send()
            parameters.publish(server.parameters, version=server.version)


def _next(gradients: QueueReceiver, server: "_Server") -> RingMessage:
    while True:
        try:
            return gradients.receive(timeout=POLL_SECONDS)
        except TimedOut:
            server.look_around()
        except ChannelClosed:  # between hosts, workers that have ended close the channels of their gradients
            server.await_end()


class _Server:
    """The learner, and what has happened to it."""

    def __init__(self, context: ReplicaContext, learner: Learner | None) -> None:
        graph, senders = context.graph, context.role.partner("gradients")
        self._context, self._requests = context, SnapshotRequests(context.control)
        self._ending = StopParticipant(context.control, begun=context.begin.first, planned=graph.loops.iterations)
        self._learner = begin_learner(graph, context.key) if learner is None else learner
        self._asynchronous = not senders.synchronous
        self._share = 1.0 / senders.replicas if self._asynchronous else 1.0
        self._rows_each = senders.replicas if self._asynchronous else 1
        self._update = jax.jit(partial(graph.update, share=self._share))
        merge_metrics = graph.merge_metrics
        self._merge_metrics = None if merge_metrics is None else jax.jit(partial(merge_metrics, share=self._share))
        self._end_iteration = jax.jit(partial(end_iteration, graph))
        self._evaluate_schedules = jax.jit(partial(evaluate_schedules, graph))
        self._before: Learner | None = None  # learner before the current iteration, while schedules are evaluated
        self._rows: list[np.ndarray] = []
        self._lag = Lag()
        self._iteration = context.begin.first  # the iteration that the learner is in, or that comes next
        self._whole = True  # whether the iteration has not begun
        self.version = 0
        """Updates that the parameters have seen since the last common start."""

    @property
    def parameters(self) -> list[Any]:
        return to_host(self._context.flow.select_parameters(self._learner))

    def apply(self, message: RingMessage) -> None:
        """Makes one update. Raises `Ended` if the run is over, and its last state was sent."""
        header = message.header
        if not self._asynchronous and header.iteration > self._iteration:
            self._iteration, self._whole = header.iteration, True
            self._learner = self._end_iteration(self._with_schedules())  # the previous iteration ended early
        if self._whole and not self._ending.admit(self._iteration):
            # requests are served here, because workers keep sending gradients until they are ended
            self.look_around()
            return
        self._context.control.work("updating")
        if self._whole and self._requests.wants(self._iteration):
            self._send_snapshot()
        if self._whole and not self._asynchronous:
            self._before, self._learner = self._learner, self._evaluate_schedules(self._learner)
        slopes, metrics = message.copy()
        if not header.flags & NO_UPDATE:
            self._learner = self._update(self._learner, to_device(slopes))
            self._lag.add(self.version - header.version)
            self.version += 1
        last = bool(header.flags & LAST)
        self._whole = last and not self._asynchronous
        if last and self._asynchronous:
            self._count(metrics)
        elif last:
            self._iteration, self._learner = self._iteration + 1, self._with_schedules()

    def _with_schedules(self) -> Learner:
        """Returns the learner with unevaluated schedules, as it is between iterations."""
        before, self._before = self._before, None
        return self._learner if before is None else restore_schedules(self._context.graph, self._learner, before)

    def _count(self, metrics: np.ndarray) -> None:
        """Collects the metrics of one worker. Reports their mean once all workers have sent those of an
        iteration.
        """
        if self._merge_metrics is not None:
            row = dict(zip(self._context.flow.metric_names, metrics, strict=True))
            self._learner = self._merge_metrics(self._learner, row)
        self._rows.append(metrics)
        if len(self._rows) < self._rows_each:
            return
        row = dict(zip(self._context.flow.metric_names, np.mean(self._rows, axis=0).tolist(), strict=True))
        send(self._context.control, IterationMetrics(self._iteration, [{**row, **self._lag.take()}]))
        self._rows, self._whole = [], True
        self._iteration += 1

    def look_around(self) -> None:
        """Serves snapshot requests while no gradients arrive. Raises `Ended` after the last request."""
        self._context.control.at("waiting for gradients")
        if (wanted := self._requests.pending()) is None:
            return
        if self._requests.final or (self._whole and wanted == self._iteration):
            self._send_snapshot()
        if self._requests.final:
            raise Ended

    def await_end(self) -> NoReturn:
        """Serves snapshot requests after the last gradients, until one raises `Ended`."""
        while True:
            self.look_around()
            self._requests.wait()

    def _send_snapshot(self) -> None:
        iteration = self._requests.pending()
        assert iteration is not None
        if not self._asynchronous:
            self._learner = self._end_iteration(self._with_schedules())
        send_part(self._context, iteration, learner_part(self._context, self._learner))
        self._requests.answered()
