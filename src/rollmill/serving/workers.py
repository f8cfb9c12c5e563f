"""Runs several workers of one server: processes that share its listening socket, each with its own copy of the
policy.
"""

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollmill.core.child_processes import start_python
from rollmill.core.errors import RollmillError
from rollmill.gpus.machine_parts import MachinePart
from rollmill.processes.restarts import LossCounter, end_all, ending
from rollmill.record.signals import StopRequest

READY = b"."
"""Message that a worker sends through its pipe once it serves."""

LOOK_SECONDS = 0.1
MAX_LOSSES = 3
"""Number of consecutive losses of workers that the server survives. The count restarts after a worker has served
for a minute."""

SETTLED_SECONDS = 60.0


class WorkersLost(RollmillError):
    """Raised if the workers of a server keep ending."""

    exit_code = 1


@dataclass
class _ServingWorker:
    """A process and the pipe through which it says that it serves."""

    index: int
    process: subprocess.Popen
    pipe: int
    ready_at: float | None = None


@dataclass
class _Workers:
    launch: Callable[[int, int], subprocess.Popen]
    count: int
    stop: StopRequest
    workers: list[_ServingWorker] = field(default_factory=list)
    losses: LossCounter = field(default_factory=lambda: LossCounter(SETTLED_SECONDS))

    def start(self, index: int) -> _ServingWorker:
        read, write = os.pipe()
        try:
            worker = _ServingWorker(index, self.launch(index, write), read)
        finally:
            os.close(write)
        self.workers.append(worker)
        return worker

    def wait_until_ready(self) -> int | None:
        """Waits for all workers, and returns the exit code of one that ended instead, or None.

        Raises `WorkersLost` if a signal ended it, which gives no reason.
        """
        while not all(worker.ready_at is not None for worker in self.workers):
            self._read_pipes()
            for worker in self.workers:
                if (code := worker.process.poll()) is not None:
                    if code < 0 and not self.stop.requested:
                        raise WorkersLost(f"worker {worker.index} {ending(code)} before it was ready.")
                    return code
            if self.stop.requested:
                return 0
        return None

    def look(self) -> None:
        """Replaces workers that have ended. Raises `WorkersLost` after too many losses in close succession."""
        self._read_pipes()
        for worker in [worker for worker in self.workers if worker.process.poll() is not None]:
            served = time.monotonic() - worker.ready_at if worker.ready_at is not None else 0.0
            how = ending(worker.process.returncode)
            if self.losses.add("", worked_seconds=served) > MAX_LOSSES:
                raise WorkersLost(
                    f"worker {worker.index} {how}. The server stops, because {MAX_LOSSES + 1} workers were lost "
                    "in close succession."
                )
            print(f"rollmill: worker {worker.index} {how} and is being replaced", file=sys.stderr)
            self._forget(worker)
            self.start(worker.index)

    def end(self, *, patience: float) -> None:
        """Asks all workers to answer requests in flight, and waits until they have ended."""
        end_all([worker.process for worker in self.workers], patience=patience)
        for worker in list(self.workers):
            self._forget(worker)

    def _read_pipes(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                if worker.ready_at is None:
                    selector.register(worker.pipe, selectors.EVENT_READ, worker)
            if not selector.get_map():
                time.sleep(LOOK_SECONDS)
                return
            found = selector.select(LOOK_SECONDS)
        for key, _ in found:
            if os.read(key.data.pipe, 1) == READY:
                key.data.ready_at = time.monotonic()
            else:  # it is about to end
                time.sleep(LOOK_SECONDS)

    def _forget(self, worker: _ServingWorker) -> None:
        os.close(worker.pipe)
        self.workers.remove(worker)


def run_workers(
    command: Sequence[str],
    parts: Sequence[MachinePart],
    *,
    descriptors: Sequence[int],
    stop: StopRequest,
    ready: Callable[[], None],
    patience: float,
) -> int:
    """Starts the workers of a server, replaces lost workers, and stops all workers on request.

    The first worker starts before the others, so that errors of the run are reported only once and the compilation
    cache is filled. Each worker runs Python with the arguments of `command`, its index, its cores and the
    descriptor of its pipe, and inherits `descriptors`. `stop` is called ten times a second, and `ready` once all
    workers serve. When the server stops, workers have `patience` seconds to answer the requests in flight.

    Returns 0, or the exit code of a worker that could not start. Raises `WorkersLost` if workers end again and
    again, or if a worker ends before it has served.
    """

    def launch(index: int, pipe: int) -> subprocess.Popen:
        part = parts[index]
        words = [*command, str(index), ",".join(map(str, part.cores)), str(pipe)]
        return start_python(
            *words,
            variables=os.environ | part.environment,
            pass_fds=(*descriptors, *part.descriptors, pipe),
            start_new_session=True,
        )

    workers = _Workers(launch, len(parts), stop)
    try:
        workers.start(0)
        code = workers.wait_until_ready()
        if code is None:
            for index in range(1, len(parts)):
                workers.start(index)
            code = workers.wait_until_ready()
        if code is not None:
            return code if code >= 0 else 1
        ready()
        while not stop.requested:
            workers.look()
        return 0
    finally:
        workers.end(patience=patience)
