"""Events of workers, as the supervisor reports them to the coordinator."""

from typing import NamedTuple, TypeAlias

from rollmill.core.errors import DeviceMemoryError, EnvironmentFailed, NonFiniteError, RollmillError, UnfitHost
from rollmill.processes.jobs import Job
from rollmill.processes.messages import WorkerMessage

FINAL = (EnvironmentFailed, NonFiniteError, DeviceMemoryError, UnfitHost)
"""Errors that end a training: another attempt would meet them again."""


class Started(NamedTuple):
    """The job's function is being called."""

    job: Job
    seconds: float
    """Since its worker was asked for."""


class Received(NamedTuple):
    """The worker sent a message."""

    job: Job
    message: WorkerMessage


class Finished(NamedTuple):
    """The job's function returned, and its worker is gone."""

    job: Job


class Lost(NamedTuple):
    """The worker and everything it had started ended before its function returned."""

    job: Job
    reason: str
    """One line: the error and its line, the signal, or the exit code."""
    exit_status: int | None
    """The exit status of the process. A signal's number is negative. None where it never was or is unknown."""
    raised: bool
    """Whether the function raised an error, so that it may well raise it again."""
    details: str
    """The traceback where it raised, and the last lines that it wrote."""
    final: RollmillError | None = None
    """The error that the worker raised, if no further attempt could succeed."""


class Hung(NamedTuple):
    """The worker is there, but made no progress or gave no sign of life. Told once, until it moves again."""

    job: Job
    seconds: float
    """Since its last progress, or its last sign of life."""
    where: str
    """Its last note, and the source line at which its main thread waits."""


class Silent(NamedTuple):
    """The worker's host acknowledges nothing: the link is down, or the host is. Told once, until it does again."""

    job: Job
    seconds: float
    """Since its last acknowledgement."""
    host: str


class Audible(NamedTuple):
    """The host of a silent worker acknowledges again."""

    job: Job
    seconds: float
    """For which it was silent."""
    host: str


class Leaving(NamedTuple):
    """The worker's host is about to go. Told once."""

    job: Job
    reason: str


Event: TypeAlias = Started | Received | Finished | Lost | Hung | Silent | Audible | Leaving
