"""Tells the coordinator, once, how long a replica took to build and compile."""

import time

from rollmill.execution.replica.context import ReplicaContext


class StartReport:
    """Made when the replica is built and its first iteration begins."""

    def __init__(self, seat: ReplicaContext) -> None:
        self._seat, self._began = seat, time.monotonic()
        self._sent = False

    def send(self) -> None:
        """After the first iteration; later calls change nothing."""
        if self._sent:
            return
        self._sent = True
        self._seat.control.started()
        if self._seat.compiling is not None:
            self._seat.control.send("started", self._seat.compiling.report(self._began))
