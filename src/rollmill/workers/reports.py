"""Reports of a running training, whatever runs it: one program, or a coordinator with workers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from rollmill.core.errors import RollmillError
from rollmill.dataflow import State
from rollmill.planning.plan import AllReduce


class LostWorker(RollmillError):
    """A worker was lost too many times in a row."""

    exit_code = 1


Row: TypeAlias = Mapping[str, Any]
"""Metrics by name; each a scalar, or `[seed]`."""


class MetricsRows(NamedTuple):
    """Metrics of consecutive iterations, after the first `first` iterations."""

    first: int
    rows: Sequence[Row]
    """Sums of metrics over one iteration, or over several in a row; of flags, the lowest."""
    counts: Sequence[int] | None = None
    """Number of iterations of each row; None: one each."""


class Saved(NamedTuple):
    """The state after some iterations, on the host."""

    iteration: int
    state: State


class RolledBack(NamedTuple):
    """All replicas restart from the state after some iterations."""

    iteration: int


class Notice(NamedTuple):
    """A line for the user."""

    text: str
    failed: Literal["worker", "environment"] | None = None
    """The part that failed, if the line is about a failure that the training survives."""
    wants_checkpoint: bool = False
    """Whether the next state is to be saved as a checkpoint."""


class Durations(NamedTuple):
    """Durations of start-up, in seconds."""

    compiling: float
    """While at least one worker compiled."""
    total: float
    """While the training had not begun: workers were started, built environments, or compiled."""


class StartedUp(NamedTuple):
    """Reports that training, or another replica, has started."""

    so_far: Durations
    """Durations over all replicas that have started."""


class LaunchesChosen(NamedTuple):
    """Kernels for workers have been sought, and the fastest chosen."""

    launches: Mapping[str, Any]
    """Their launches, for the run to keep; None for a part that XLA computes."""


class ReductionChosen(NamedTuple):
    """Reports that the processes of a mesh have timed all-reduces."""

    reduction: AllReduce
    """The fastest way, for the run to keep."""


class Recorded(NamedTuple):
    """A worker has ended a recording for the profiler."""

    worker: str
    number: int
    """Number of the request that it answers."""
    window: Mapping[str, Any] | None
    """The sums of its window; None if its events were forgotten."""


Report: TypeAlias = (
    MetricsRows | Saved | RolledBack | StartedUp | Notice | LaunchesChosen | ReductionChosen | Recorded
)


@runtime_checkable
class Training(Protocol):
    """A prepared run, which yields reports until it ends."""

    def run(self, stopping: Callable[[], bool]) -> Iterator[Report]:
        """Yields reports until the training ends, the last of them with its last state.

        `stopping` returns whether to end early; it is called about twice a second or more often. Raises
        `NonFiniteError` if a number of an iteration is not finite.
        """
        ...

    def request_snapshot(self) -> None:
        """Requests a `Saved` after one of the next iterations."""
        ...

    @property
    def out_of_reach(self) -> str:
        """The workers on unreachable hosts, with their hosts. Empty if all hosts respond."""
        ...

    @property
    def waited_for(self) -> str:
        """The workers that delay the end of the run. Empty if it needs none."""
        ...
