"""Runs workers as threads of one process, with the same functions and events as worker processes."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rollmill.channels.errors import Abandoned
from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.user_frame import user_frame
from rollmill.gpus.device_errors import known_device_error
from rollmill.processes.clocks import Clock
from rollmill.processes.events import FINAL, Event, Finished, Hung, Received, Started
from rollmill.processes.heartbeat import Progress
from rollmill.processes.jobs import Job, function_of
from rollmill.processes.mailbox import Mailbox, MailboxControl
from rollmill.processes.messages import NOTHING, Seconds, WorkerMessage, outgoing, size_of, snapshot
from rollmill.processes.supervision import ALL, MAX_UNREAD, addressed_jobs, by_name, job_name

POLL_SECONDS = 0.5


class WorkerFailed(RollmillError):
    """Error: the function of a worker raised an error, which is the `__cause__` of this one."""

    exit_code = 1


class _Failed(NamedTuple):
    job: Job
    error: BaseException


class LocalControl(MailboxControl):
    """`Control` of a worker that runs as a thread."""

    def __init__(self, worker: "_Worker", supervisor: "ThreadSupervisor") -> None:
        super().__init__(worker.mailbox, worker.pulse)
        self._worker = worker
        self._supervisor = supervisor

    def send(
        self, kind: str, fields: Mapping[str, Any] = NOTHING, arrays: Mapping[str, np.ndarray] = NOTHING
    ) -> None:
        """Sends a message to the coordinator, after all messages that this worker has sent before."""
        self._supervisor.take(self._worker, snapshot(outgoing(kind, fields, arrays)))
        self._pulse.touch()

    def answer(self, kind: str, reply: Callable[[WorkerMessage], Mapping[str, Any]]) -> None:
        """Answers each message of a kind immediately from now on, even while the worker's main thread computes."""
        post = self._supervisor.post
        self._mailbox.answer(kind, lambda message: post(self._worker, outgoing(kind, reply(message), NOTHING)))


class _Worker:
    """One attempt at a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.mailbox = Mailbox()
        self.pulse = Progress(0)
        self.thread: threading.Thread | None = None
        self.dismissed = False
        self.unread_bytes = 0
        self.hung_at = -1


class ThreadSupervisor:
    """`Supervision` of workers that run as threads. If one worker is lost, all others end as well.

    If the function of a job raises an error, all other threads are stopped, and `events` raises it. A thread
    cannot be killed. If it never checks whether to stop, it stays as a daemon thread until the process ends.
    Raises a `UsageError` if two jobs have the same name, or if a job sets environment variables, which all threads
    share.
    """

    def __init__(self, jobs: Sequence[Job], *, hang_seconds: float = 120.0) -> None:
        self._jobs = by_name(jobs)
        for job in jobs:
            if job.environment:
                raise UsageError(
                    f"job {job.name!r} sets {', '.join(job.environment)}, but threads share one environment. "
                    "hint: set these variables for the whole process, or run the workers as processes."
                )
        self._hang_seconds = hang_seconds
        self._workers: dict[str, _Worker] = {}
        self._inbox: deque[tuple[_Worker, Event | _Failed]] = deque()
        self._changed = threading.Condition()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs of all workers, each with its current attempt."""
        return tuple(self._jobs.values())

    def start(self) -> None:
        """Starts the threads of all workers."""
        for job in self.jobs:
            self._begin(job)

    def events(self, timeout: Seconds | None = None) -> list[Event]:
        """Returns the events of workers since the last call, in order. See `Supervision.events`.

        If the function of a job raised an error, all workers have been stopped, and `WorkerFailed` is raised. An
        `EnvironmentFailed` or a `NonFiniteError` is raised unchanged.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._look()
            while not self._inbox and self._workers and (now := time.monotonic()) < deadline:
                self._changed.wait(min(POLL_SECONDS, deadline - now))
                self._look()
            events, failed = self._drain()
        if failed is not None and not events:
            self._fail(failed)
        return events

    def measure_clocks(self) -> None:
        """Does nothing, because threads share the coordinator's clock."""

    def clock(self, job: Job | str) -> Clock:
        """Returns the coordinator's own clock, which all threads share."""
        return Clock()

    def unreachable_hosts(self) -> dict[str, str]:
        """Returns an empty mapping, because threads are on the coordinator's own host."""
        return {}

    def doing(self) -> dict[str, str]:
        """Returns the last known activity of each remaining worker, by job name."""
        with self._changed:
            return {name: str(worker.pulse.look()) for name, worker in self._workers.items()}

    def send(
        self,
        to: Job | str,
        kind: str,
        fields: Mapping[str, Any] = NOTHING,
        arrays: Mapping[str, np.ndarray] = NOTHING,
    ) -> None:
        """Sends a message to workers, in order and without waiting. Workers that are starting get it later."""
        message = outgoing(kind, fields, arrays)
        with self._changed:
            workers = [self._workers[name] for name in addressed_jobs(self.jobs, to) if name in self._workers]
        for worker in workers:
            worker.mailbox.put(snapshot(message))

    def replace(self, job: Job | str) -> Job:
        """Starts another thread for a job, and returns the job with its next attempt. Raises a `UsageError` if the
        thread still runs.
        """
        name = job_name(self.jobs, job)
        if name in self._workers:
            raise UsageError(f"worker {name!r} is a thread, which cannot be killed. hint: use place=processes.")
        self._jobs[name] = replace(self._jobs[name], attempt=self._jobs[name].attempt + 1)
        self._begin(self._jobs[name])
        return self._jobs[name]

    def stop(self, to: Job | str, *, grace_seconds: Seconds = 5.0) -> None:
        """Asks the addressed workers to stop, and returns when they have ended. Threads that take longer than
        `grace_seconds` are left behind.
        """
        with self._changed:
            names = addressed_jobs(self.jobs, to)
            workers = [self._workers.pop(name) for name in names if name in self._workers]
            for worker in workers:
                worker.dismissed = True
                worker.mailbox.stop()
            self._inbox = deque(entry for entry in self._inbox if not entry[0].dismissed)
            self._changed.notify_all()
        deadline = time.monotonic() + grace_seconds
        for worker in workers:
            if worker.thread is not None:
                worker.thread.join(max(0.0, deadline - time.monotonic()))

    def close(self, *, grace_seconds: Seconds = 5.0) -> None:
        """Stops all workers and releases all resources."""
        self.stop(ALL, grace_seconds=grace_seconds)

    def __enter__(self) -> "ThreadSupervisor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, worker: _Worker, message: WorkerMessage) -> None:
        """Queues a worker's message, in the worker's own thread. Waits while too many of its messages
        are unread.
        """
        with self._changed:
            while worker.unread_bytes > MAX_UNREAD and not worker.dismissed:
                self._changed.wait()
        self.post(worker, message)

    def post(self, worker: _Worker, message: WorkerMessage) -> None:
        """Queues a worker's message from any thread, without a limit on unread messages."""
        with self._changed:
            worker.unread_bytes += size_of(message)
        self._note(worker, Received(worker.job, message))

    def _begin(self, job: Job) -> None:
        worker = self._workers[job.name] = _Worker(job)
        worker.thread = threading.Thread(
            target=self._run, args=(worker, time.monotonic()), name=job.name, daemon=True
        )
        worker.thread.start()

    def _run(self, worker: _Worker, asked_at: float) -> None:
        """Calls the worker's function in its thread, with a copy of the job."""
        worker.pulse = Progress(threading.get_ident())
        job = Job.from_json(worker.job.to_json())
        try:
            function = function_of(job)
            self._note(worker, Started(worker.job, time.monotonic() - asked_at))
            function(job, LocalControl(worker, self))
            self._note(worker, Finished(worker.job))
        except BaseException as error:
            stopped = worker.mailbox.stopping and isinstance(error, Abandoned)
            failed = _Failed(worker.job, known_device_error(error) or error)
            self._note(worker, Finished(worker.job) if stopped else failed)

    def _note(self, worker: _Worker, what: Event | _Failed) -> None:
        with self._changed:
            if worker.dismissed:
                return
            self._inbox.append((worker, what))
            self._changed.notify_all()
            if isinstance(what, Finished | _Failed):
                del self._workers[worker.job.name]
            if isinstance(what, _Failed):
                for other in self._workers.values():
                    other.mailbox.stop()

    def _look(self) -> None:
        for worker in self._workers.values():
            beat = worker.pulse.look()
            seconds = beat.hung_seconds(self._hang_seconds)
            if seconds is not None and worker.hung_at != beat.progress:
                worker.hung_at = beat.progress
                self._inbox.append((worker, Hung(worker.job, seconds, str(beat))))

    def _drain(self) -> tuple[list[Event], _Failed | None]:
        """Returns the events up to the first failure, and the failure, which stays in the queue."""
        events: list[Event] = []
        while self._inbox:
            worker, what = self._inbox[0]
            if isinstance(what, _Failed):
                return events, what
            if isinstance(what, Received):
                worker.unread_bytes -= size_of(what.message)
            events.append(what)
            self._inbox.popleft()
        self._changed.notify_all()
        return events, None

    def _fail(self, failed: _Failed) -> None:
        self.close()
        job, error = failed
        if isinstance(error, FINAL):
            raise type(error)(f"{job.name}: {error}") from error
        first_line = str(error).strip().partition("\n")[0]
        text = f"{job.name} (group {job.group}, replica {job.replica}) raised {type(error).__name__}: {first_line}"
        raise WorkerFailed(f"{text}\n  at {user_frame(error)}") from error
