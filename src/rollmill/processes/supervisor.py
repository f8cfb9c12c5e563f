"""Supervises workers that run as processes."""

import contextlib
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.core.code_identity import own_code
from rollmill.core.folder import Folder
from rollmill.processes.clocks import Clock
from rollmill.processes.connection import Acceptor, WorkerConnection
from rollmill.processes.events import Event, Received
from rollmill.processes.framing import encode
from rollmill.processes.handshake import Identity, other_code
from rollmill.processes.health import Timeouts, WorkerHealth
from rollmill.processes.jobs import Job
from rollmill.processes.launchers import Launcher
from rollmill.processes.local_launcher import LocalLauncher
from rollmill.processes.logs import LogReader, WorkerLog
from rollmill.processes.messages import NOTHING, Seconds, WorkerMessage, outgoing, size_of, snapshot
from rollmill.processes.supervision import ALL, MAX_UNREAD, addressed_jobs, by_name, job_name

POLL_SECONDS = 0.05
KILL_SECONDS = 5.0
TERMINATE_SECONDS = 2.0


class Supervisor:
    """`Supervision` of worker processes, one per job.

    By default, workers are started by a `LocalLauncher` that is closed with this object. A launcher passed by the
    caller can serve several supervisors, and the caller closes it. Workers send a heartbeat every
    `heartbeat_seconds`, may go without progress for `hang_seconds`, and may take `start_seconds` until their
    function is called. `display` receives each line that workers write, from another thread, and the log folder
    receives one file of lines per job. Workers connect to the coordinator at `address`, which is `unix:`, or
    `tcp:host:0` for workers on other hosts.

    Raises a `UsageError` if two jobs have the same name, or if the coordinator cannot listen on the address.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        launcher: Launcher | None = None,
        heartbeat_seconds: float = 1.0,
        hang_seconds: float = 120.0,
        start_seconds: float = 120.0,
        display: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        log_folder: Path | Folder | None = None,
        address: str = "unix:",
    ) -> None:
        self._jobs = by_name(jobs)
        own_code()  # digests the sources before anything changes the files
        self._timeouts = Timeouts(heartbeat_seconds, hang_seconds, start_seconds)
        self._launcher = LocalLauncher() if launcher is None else launcher
        self._owns_launcher = launcher is None
        self._display = display
        self._log_folder = log_folder
        self._workers: dict[str, WorkerHealth] = {}
        self._inbox: deque[tuple[WorkerHealth, Event]] = deque()
        self._changed = threading.Condition()
        self._token = secrets.token_bytes(32)
        limits = {"heartbeat_seconds": heartbeat_seconds, "hang_seconds": hang_seconds}
        self._acceptor = Acceptor(address, self._token, self._admit, display, **limits)
        self._logs = LogReader()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs of all workers, each with its current attempt."""
        return tuple(self._jobs.values())

    @property
    def address(self) -> str:
        """Address at which workers connect to the coordinator."""
        return self._acceptor.address

    def start(self) -> None:
        """Requests that all workers be started, and returns without waiting."""
        for job in self.jobs:
            self._begin(job)

    def events(self, timeout: Seconds | None = None) -> list[Event]:
        """Returns the events of workers since the last call, in order. See `Supervision.events`."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._look()
            while not self._inbox and self._workers and (now := time.monotonic()) < deadline:
                self._changed.wait(min(POLL_SECONDS, deadline - now))
                self._look()
            return self._drain()

    def doing(self) -> dict[str, str]:
        """Returns the last known activity of each remaining worker, by job name."""
        with self._changed:
            return {name: worker.doing for name, worker in self._workers.items()}

    def measure_clocks(self) -> None:
        """Starts to measure the clocks of workers on other hosts again, without waiting for the answers."""
        with self._changed:
            workers = list(self._workers.values())
        for worker in workers:
            worker.connection.measure_clock()

    def clock(self, job: Job | str) -> Clock:
        """Returns a worker's clock as last measured, or this host's clock if the worker is gone."""
        with self._changed:
            worker = self._workers.get(job_name(self.jobs, job))
            return Clock() if worker is None else worker.connection.watch.clock

    def unreachable_hosts(self) -> dict[str, str]:
        """Returns the hosts of workers that may be unreachable, by job name."""
        with self._changed:
            return {name: each.link.host for name, each in self._workers.items() if each.link.is_doubtful}

    def send(
        self,
        to: Job | str,
        kind: str,
        fields: Mapping[str, Any] = NOTHING,
        arrays: Mapping[str, np.ndarray] = NOTHING,
    ) -> None:
        """Sends a message to workers, in order and without waiting. Workers that are starting get it later.

        Raises `TimedOut` if one of the workers has left gigabytes of messages unread.
        """
        self._send_to(addressed_jobs(self.jobs, to), snapshot(outgoing(kind, fields, arrays)))

    def replace(self, job: Job | str) -> Job:
        """Starts another worker process for a job, and returns the job with its next attempt."""
        name = job_name(self.jobs, job)
        old = self._dismiss([name])
        self._kill(old)
        self._forget(old)
        self._jobs[name] = replace(self._jobs[name], attempt=self._jobs[name].attempt + 1)
        self._begin(self._jobs[name])
        return self._jobs[name]

    def stop(self, to: Job | str, *, grace_seconds: Seconds = 5.0) -> None:
        """Stops the addressed workers, and returns when they have ended.

        Workers are first asked to stop. After `grace_seconds`, they receive SIGTERM, and two seconds later
        SIGKILL.
        """
        names = addressed_jobs(self.jobs, to)
        self._send_to(names, WorkerMessage(".stop", {}, {}))
        workers = self._dismiss(names)
        for worker in workers:
            # the worker has nothing to clean up, or may be unreachable
            if worker.link.is_doubtful or not worker.connection.taken:
                self._end(worker)
        left = self._wait(workers, grace_seconds)
        for worker in left:
            self._launcher.kill(worker.handle, at_once=False)
        self._kill(self._wait(left, TERMINATE_SECONDS))
        self._forget(workers)

    def close(self, *, grace_seconds: Seconds = 5.0) -> None:
        """Stops all workers and releases all resources."""
        with contextlib.ExitStack() as last:
            last.callback(self._logs.close)
            last.callback(self._acceptor.close)
            if self._owns_launcher:
                last.callback(self._launcher.close)
            self.stop(ALL, grace_seconds=grace_seconds)

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, job: Job) -> None:
        log = WorkerLog(job, self._display, self._log_folder)
        with self._changed:
            worker = WorkerHealth(job, self._launcher.start(job, self._acceptor.address, self._token), log)
            worker.connection = WorkerConnection(lambda message: self._take(worker, message))
            self._workers[job.name] = worker
        output = self._launcher.output(worker.handle)
        if output is None:
            log.end()
        else:
            self._logs.add(output, log)

    def _admit(self, claim: Identity) -> WorkerConnection | str:
        with self._changed:
            worker = self._workers.get(claim.name)
            if worker is None or worker.job.attempt != claim.attempt:
                return "no worker with this name and attempt is expected"
            if worker.connection.taken:
                return "it is already connected"
            if problem := other_code(claim.code, claim.host):
                worker.refuse(problem)
                return problem
            worker.connection.host = claim.host
            worker.connection.taken = True
            return worker.connection

    def _take(self, worker: WorkerHealth, message: WorkerMessage) -> None:
        """Queues a message in the connection's thread. Waits while too many are unread."""
        with self._changed:
            while worker.unread_bytes > MAX_UNREAD and not worker.dismissed:
                worker.blocked = True
                self._changed.wait()
            worker.blocked = False
            event = worker.take(message)
            if event is not None and not worker.dismissed:
                worker.unread_bytes += size_of(message)
                self._inbox.append((worker, event))
                self._changed.notify_all()

    def _look(self) -> None:
        """Notes what happened to workers without their saying so."""
        now = time.monotonic()
        for name, worker in list(self._workers.items()):
            worker.exit = worker.exit or self._launcher.exit(worker.handle)
            if (event := worker.look_at_link()) is not None:
                self._inbox.append((worker, event))
            if worker.exit is None and worker.link.is_lost:
                worker.leave_behind()
                self._end(worker)
            if worker.has_ended(now):
                self._inbox.append((worker, worker.outcome()))
                self._forget([self._workers.pop(name)])
            elif worker.overdue(now, self._timeouts):
                self._launcher.kill(worker.handle)
            elif worker.exit is None:
                if (leaving := worker.leaving(partial(self._launcher.leaving, worker.handle))) is not None:
                    self._inbox.append((worker, leaving))
                hung = worker.hung(now, self._timeouts, partial(self._launcher.condition, worker.handle))
                self._inbox.extend([] if hung is None else [(worker, hung)])

    def _drain(self) -> list[Event]:
        events = [event for _, event in self._inbox]
        for worker, event in self._inbox:
            if isinstance(event, Received):
                worker.unread_bytes -= size_of(event.message)
        self._inbox.clear()
        self._changed.notify_all()
        return events

    def _send_to(self, names: Iterable[str], message: WorkerMessage) -> None:
        frame = encode(message)
        with self._changed:
            workers = [self._workers[name] for name in names if name in self._workers]
        for worker in workers:
            worker.connection.send(frame)

    def _dismiss(self, names: Iterable[str]) -> list[WorkerHealth]:
        """Leaves these workers out of later reports, and returns those that were still there."""
        with self._changed:
            workers = [self._workers.pop(name) for name in names if name in self._workers]
            for worker in workers:
                worker.dismissed = True
            self._inbox = deque(entry for entry in self._inbox if not entry[0].dismissed)
            self._changed.notify_all()
        return workers

    def _kill(self, workers: Sequence[WorkerHealth]) -> None:
        for worker in workers:
            self._end(worker)
        for worker in self._wait(workers, KILL_SECONDS):
            self._display(f"[{worker.job.name}] its process could not be killed and was left behind")

    def _end(self, worker: WorkerHealth) -> None:
        if worker.link.is_doubtful:
            self._launcher.abandon(worker.handle)
        else:
            self._launcher.kill(worker.handle)

    def _wait(self, workers: Iterable[WorkerHealth], seconds: float) -> list[WorkerHealth]:
        """Waits until these processes are gone, and returns those that are not in time."""
        deadline = time.monotonic() + seconds
        left = list(workers)
        while left := [worker for worker in left if self._launcher.exit(worker.handle) is None]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        return left

    def _forget(self, workers: Iterable[WorkerHealth]) -> None:
        for worker in workers:
            worker.connection.hang_up()
            self._logs.drop(worker.log)
