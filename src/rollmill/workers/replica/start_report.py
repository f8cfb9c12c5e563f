"""Reports to the coordinator, once, how long a replica took to build and compile."""

import time

from rollmill.workers.protocol import send
from rollmill.workers.replica.context import ReplicaContext


class StartReport:
    """Made when the replica is built and its first iteration begins."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context, self._began = context, time.monotonic()
        self._sent = False

    def send(self) -> None:
        """After the first iteration; later calls change nothing."""
        if self._sent:
            return
        self._sent = True
        self._context.control.started()
        if self._context.compile_clock is not None:
            send(self._context.control, self._context.compile_clock.report(self._began))
