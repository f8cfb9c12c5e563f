"""Reports of a run while it trains, as one program or with a coordinator and workers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from rollmill.core.errors import RollmillError
from rollmill.dataflow import State
from rollmill.planning.plan import AllReduce


class LostWorker(RollmillError):
    """Raised if a worker was lost too many times in a row."""

    exit_code = 1


Row: TypeAlias = Mapping[str, Any]
"""Metrics by name. Each value is a scalar, or `[seed]`."""


class MetricsRows(NamedTuple):
    """Report: metrics of consecutive iterations, after the first `first` iterations."""

    first: int
    rows: Sequence[Row]
    """Metrics of one iteration each, or sums over several consecutive iterations (the minimum of flags)."""
    counts: Sequence[int] | None = None
    """Number of iterations that each row sums, or None if each row is one iteration."""


class Saved(NamedTuple):
    """Report: the training state after some iterations, on the host."""

    iteration: int
    state: State


class RolledBack(NamedTuple):
    """Report: all replicas restart from the state after some iterations."""

    iteration: int


class Notice(NamedTuple):
    """Report: a message for the user, of one line."""

    text: str
    failed: Literal["worker", "environment"] | None = None
    """What has failed, if the line is about a failure that the run survives, otherwise None."""
    wants_checkpoint: bool = False
    """True if the next state should be saved as a checkpoint."""


class Durations(NamedTuple):
    """Durations of a run's start-up, in seconds."""

    compiling: float
    """Seconds in which at least one worker was compiling."""
    total: float
    """Seconds before training began, in which workers were started, built environments, or compiled."""


class StartedUp(NamedTuple):
    """Report: training has started, or another replica has started."""

    so_far: Durations
    """Durations over all replicas that have started so far."""


class LaunchesChosen(NamedTuple):
    """Report: the fastest kernels for workers have been chosen."""

    launches: Mapping[str, Any]
    """Launches of the kernels, which the run records. None for a part that XLA computes."""


class ReductionChosen(NamedTuple):
    """Report: the processes of a mesh have timed all-reduces and chosen one."""

    reduction: AllReduce
    """Name of the fastest all-reduce, which the run records."""


class Recorded(NamedTuple):
    """Report: a worker has ended a recording for the profiler."""

    worker: str
    number: int
    """Number of the request that this report answers."""
    window: Mapping[str, Any] | None
    """Sums of the recorded window, or None if the events were discarded."""


Report: TypeAlias = (
    MetricsRows | Saved | RolledBack | StartedUp | Notice | LaunchesChosen | ReductionChosen | Recorded
)


@runtime_checkable
class Training(Protocol):
    """Interface of a prepared run, which yields reports until it ends."""

    def run(self, stopping: Callable[[], bool]) -> Iterator[Report]:
        """Runs the training and yields reports until it ends. The last report carries the last state.

        `stopping` returns whether to end early. It is called at least about twice a second. Raises
        `NonFiniteError` if a number of an iteration is not finite.
        """
        ...

    def request_snapshot(self) -> None:
        """Requests a report of the training state (`Saved`) after one of the next iterations."""
        ...

    @property
    def unreachable_workers(self) -> str:
        """Names of the workers on unreachable hosts, with these hosts. Empty if all hosts respond."""
        ...

    @property
    def waited_for(self) -> str:
        """Names of the workers that delay the end of the run. Empty if no worker does."""
        ...
