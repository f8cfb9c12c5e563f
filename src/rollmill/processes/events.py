"""Events in the life of a worker, which the supervisor reports to the coordinator."""

from typing import NamedTuple, TypeAlias

from rollmill.core.errors import DeviceMemoryError, EnvironmentFailed, NonFiniteError, RollmillError, UnfitHost
from rollmill.processes.jobs import Job
from rollmill.processes.messages import WorkerMessage

FINAL = (EnvironmentFailed, NonFiniteError, DeviceMemoryError, UnfitHost)
"""Errors after which a job is not tried again, because another attempt would raise them again."""


class Started(NamedTuple):
    """Event: a worker calls the function of its job."""

    job: Job
    seconds: float
    """Seconds since the worker was requested."""


class Received(NamedTuple):
    """Event: a worker has sent a message."""

    job: Job
    message: WorkerMessage


class Finished(NamedTuple):
    """Event: the function of a job has returned, and its worker has ended."""

    job: Job


class Lost(NamedTuple):
    """Event: a worker and all processes that it started have ended before its function returned."""

    job: Job
    reason: str
    """The reason in one line: the error and its source line, the signal, or the exit code."""
    exit_status: int | None
    """Exit status of the process, or the negative number of a signal. None if it is unknown."""
    raised: bool
    """True if the function raised an error, which is likely to be raised again."""
    details: str
    """The traceback of the error, if there was one, and the last lines that the worker wrote."""
    final: RollmillError | None = None
    """The error that the worker raised, if no further attempt could succeed, otherwise None."""


class Hung(NamedTuple):
    """Event: a worker is alive, but has stopped making progress or sending heartbeats.

    It is reported once, until the worker makes progress again.
    """

    job: Job
    seconds: float
    """Seconds since the worker's last progress, or since its last heartbeat."""
    where: str
    """The worker's last reported activity, and the source line at which its main thread waits."""


class Silent(NamedTuple):
    """Event: a worker's host acknowledges nothing, because the host or the link to it is down.

    It is reported once, until the host acknowledges something again.
    """

    job: Job
    seconds: float
    """Seconds since the host last acknowledged anything."""
    host: str


class Audible(NamedTuple):
    """Event: the host of a silent worker acknowledges data again."""

    job: Job
    seconds: float
    """Seconds for which the host was silent."""
    host: str


class Leaving(NamedTuple):
    """Event: a worker's host is about to be removed. It is reported once."""

    job: Job
    reason: str


Event: TypeAlias = Started | Received | Finished | Lost | Hung | Silent | Audible | Leaving
