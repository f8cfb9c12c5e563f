"""The interface through which the coordinator starts, watches and ends workers, be they processes or threads."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollmill.core.errors import UsageError, unknown_name
from rollmill.processes.clocks import Clock
from rollmill.processes.events import Event
from rollmill.processes.jobs import Job
from rollmill.processes.messages import NOTHING, Seconds

ALL = "*"
"""As the argument `to`: every worker."""

MAX_UNREAD = 256 * 2**20
"""Bytes of one worker's messages that lie unread before it has to wait."""


@runtime_checkable
class Supervision(Protocol):
    """Starts workers, reports their events, and ends them. Belongs to one thread, except for `send`.

    As a context manager it closes itself.
    """

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs, each with its current attempt."""
        ...

    def start(self) -> None:
        """Requests all workers, without waiting."""
        ...

    def events(self, timeout: Seconds | None = None) -> list[Event]:
        """Returns the events since the last call, in order. Waits up to `timeout` seconds for at least one, or
        without limit if it is None.

        Returns at once if all workers are gone. All messages of a worker come before its `Finished` or `Lost`
        event.
        """
        ...

    def doing(self) -> dict[str, str]:
        """Returns the last known activity of each remaining worker, by job name."""
        ...

    def measure_clocks(self) -> None:
        """Asks workers of other hosts for their clocks again, without waiting for the answers."""
        ...

    def clock(self, job: Job | str) -> Clock:
        """Returns a worker's clock as last measured, or this host's if the worker is gone."""
        ...

    def out_of_reach(self) -> dict[str, str]:
        """Returns the hosts that may be out of reach, by job name."""
        ...

    def send(
        self,
        to: Job | str,
        kind: str,
        fields: Mapping[str, Any] = NOTHING,
        arrays: Mapping[str, np.ndarray] = NOTHING,
    ) -> None:
        """Sends a message in order, without waiting. Requested workers receive it once they have started.

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
        """Starts the job anew in another worker. One that still runs is killed at once. Its attempt is one more.

        No event of the earlier worker comes after this.
        """
        ...

    def stop(self, to: Job | str, *, grace_seconds: Seconds = 5.0) -> None:
        """Asks these workers to stop, makes them, and returns when they are gone. It causes no event."""
        ...

    def close(self, *, grace_seconds: Seconds = 5.0) -> None:
        """Stops all workers and lets go of everything."""
        ...


def by_name(jobs: Sequence[Job]) -> dict[str, Job]:
    """Returns the jobs by their names. Raises a `UsageError` if two share one."""
    named = {job.name: job for job in jobs}
    if len(named) != len(jobs):
        raise UsageError(
            f"{len(jobs)} jobs have only {len(named)} different names. hint: give each a name of its own."
        )
    return named


def addressed(jobs: Iterable[Job], to: Job | str) -> list[str]:
    """Returns the names of the addressed jobs (see `Supervision.send`). Raises a `UsageError` without any."""
    jobs = list(jobs)
    to = to.name if isinstance(to, Job) else to
    names = [job.name for job in jobs if to in (ALL, job.name, job.group)]
    if not names and to != ALL:
        raise unknown_name("worker or group", to, {name for job in jobs for name in (job.name, job.group)})
    return names


def named(jobs: Iterable[Job], job: Job | str) -> str:
    """Returns the name of one job. Raises a `UsageError` if there is no such job."""
    name, names = job.name if isinstance(job, Job) else job, [job.name for job in jobs]
    if name not in names:
        raise unknown_name("worker", name, names)
    return name
