"""The interface through which the coordinator starts, watches and ends workers, whether processes or threads."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollmill.core.errors import UsageError, unknown_name
from rollmill.processes.clocks import Clock
from rollmill.processes.events import Event
from rollmill.processes.jobs import Job
from rollmill.processes.messages import NOTHING, Seconds

ALL = "*"
"""Value of the argument `to` that addresses every worker."""

MAX_UNREAD = 256 * 2**20
"""Maximum bytes of one worker's unread messages before the worker has to wait."""


@runtime_checkable
class Supervision(Protocol):
    """Starts workers, reports their events, and ends them. A `with` block closes it.

    Only one thread may use it, except for `send`, which any thread may call.
    """

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs of all workers, each with its current attempt."""
        ...

    def start(self) -> None:
        """Requests that all workers be started, and returns without waiting."""
        ...

    def events(self, timeout: Seconds | None = None) -> list[Event]:
        """Returns the events of workers since the last call, in order.

        Waits up to `timeout` seconds for at least one event, or without limit if it is None. Returns an empty list
        after the timeout, and returns at once if all workers are gone. All messages of a worker come before its
        `Finished` or `Lost` event.
        """
        ...

    def doing(self) -> dict[str, str]:
        """Returns the last known activity of each remaining worker, by job name."""
        ...

    def measure_clocks(self) -> None:
        """Starts to measure the clocks of workers on other hosts again, without waiting for the answers."""
        ...

    def clock(self, job: Job | str) -> Clock:
        """Returns a worker's clock as last measured, or this host's clock if the worker is gone."""
        ...

    def unreachable_hosts(self) -> dict[str, str]:
        """Returns the hosts of workers that may be unreachable, by job name."""
        ...

    def send(
        self,
        to: Job | str,
        kind: str,
        fields: Mapping[str, Any] = NOTHING,
        arrays: Mapping[str, np.ndarray] = NOTHING,
    ) -> None:
        """Sends a message to workers, in order and without waiting. Workers that are starting get it later.

        Messages to a worker that is gone are lost. A replacement receives only messages sent after `replace`.

        Args:
            to: a job, a job's name, a group's name, or `ALL`.
            kind: any name that the worker waits for. It must not start with a dot.
            fields: values that can be represented in JSON.
            arrays: numeric arrays, which the caller may reuse at once.

        Raises:
            UsageError: no worker has that name, or the message cannot be sent.
        """
        ...

    def replace(self, job: Job | str) -> Job:
        """Starts another worker for a job, and returns the job with its next attempt. A worker that still runs is
        killed at once.

        No event of the earlier worker is reported afterwards.
        """
        ...

    def stop(self, to: Job | str, *, grace_seconds: Seconds = 5.0) -> None:
        """Stops the addressed workers, first by a request and later by force. Returns when they have ended.

        Stopping causes no event.
        """
        ...

    def close(self, *, grace_seconds: Seconds = 5.0) -> None:
        """Stops all workers and releases all resources."""
        ...


def by_name(jobs: Sequence[Job]) -> dict[str, Job]:
    """Returns the jobs by name. Raises a `UsageError` if two jobs have the same name."""
    named = {job.name: job for job in jobs}
    if len(named) != len(jobs):
        raise UsageError(
            f"{len(jobs)} jobs have only {len(named)} different names. hint: give each job a different name."
        )
    return named


def addressed_jobs(jobs: Iterable[Job], to: Job | str) -> list[str]:
    """Returns the names of the jobs that `to` addresses (see `Supervision.send`).

    Raises a `UsageError` if it addresses no job.
    """
    jobs = list(jobs)
    to = to.name if isinstance(to, Job) else to
    names = [job.name for job in jobs if to in (ALL, job.name, job.group)]
    if not names and to != ALL:
        raise unknown_name("worker or group", to, {name for job in jobs for name in (job.name, job.group)})
    return names


def job_name(jobs: Iterable[Job], job: Job | str) -> str:
    """Returns the name of `job`, which must be one of `jobs`. Raises a `UsageError` otherwise."""
    name, names = job.name if isinstance(job, Job) else job, [job.name for job in jobs]
    if name not in names:
        raise unknown_name("worker", name, names)
    return name
