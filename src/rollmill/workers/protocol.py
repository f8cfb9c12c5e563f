"""Messages between a coordinator and its replicas.

A message is sent under the name of its class. Its optional field `arrays` is sent as arrays, and all other fields
as JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from rollmill.planning.plan import AllReduce
from rollmill.processes.jobs import Job
from rollmill.processes.messages import NOTHING, WorkerMessage
from rollmill.processes.supervision import Supervision
from rollmill.programs.compile_clock import CompileTimes

MessageType = TypeVar("MessageType")

ARRAYS = "arrays"

STRIDE = 8
"""Snapshots of a mesh are taken after multiples of this many iterations, because a mesh dispatches iterations
ahead of the host.
"""

# --- from the coordinator ------------------------------------------------------------------------------


class Begin(NamedTuple):
    """Message to a replica: begin iterating."""

    first: int
    """Number of iterations that have already been done."""
    restart: int
    """Number of times that this coordinator has restarted all replicas. It is part of the names of channels."""
    attempt: int
    """Number of times that this replica has been replaced since the last common start of all replicas."""
    generation: int
    """Number of common starts of all replicas before this one: 0 in a new run, 1 in a resumed run, and one more
    after each restart."""
    resets_environments: bool
    """True if environments are reset at the common start, because no checkpoint restores them. The environment
    server then sends their first observations.
    """
    rendezvous_address: str = ""
    """Address at which the processes of a mesh connect to each other."""
    launches: Mapping[str, Any] | None = None
    """Kernel launches of the replica's group, or None if none have been chosen yet."""
    reduction: AllReduce | None = None
    """Name of the all-reduce of the mesh, or None if it has not been chosen yet."""
    arrays: Mapping[str, np.ndarray] = NOTHING
    """The replica's share of the restored state. Empty for a new run."""


class SnapshotRequest(NamedTuple):
    """Message to a replica: send the part of the training state that the replica owns."""

    iteration: int
    """Number of iterations that come before the requested state."""
    final: bool = False
    """True if the replica ends after sending this state."""


class Hold(NamedTuple):
    """Message to a replica: begin no further iteration, and answer with the number of iterations begun."""

    begun: int = 0
    """Number of iterations begun. Only the answer contains it."""


class End(NamedTuple):
    """Message to a replica: end after this number of iterations."""

    iteration: int


class StartRecording(NamedTuple):
    """Message to a replica: record the events of its process for the profiler from now on."""


class AbandonRecording(NamedTuple):
    """Message to a replica: stop recording, discard the events, and confirm."""

    number: int
    """Number of this request, which the answer repeats."""


class StopRecording(NamedTuple):
    """Message to a replica: stop recording, and send the sums of a window."""

    number: int
    """Number of this request, which the answer repeats."""
    begin: int
    """First nanosecond of the window, on the monotonic clock of the replica's own host."""
    end: int
    """End of the window, in nanoseconds on the same clock. It is not part of the window."""


# --- from a replica --------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """Message from a replica: the code that it has loaded, which the coordinator compares with its own code."""

    host: str
    """Name of the replica's host."""
    pid: int
    platform: str
    """JAX platform on which the replica computes. Empty if `fingerprint` is None."""
    code: Mapping[str, Any]
    """JSON form of `core.code_identity.CodeIdentity`."""
    modules: Mapping[str, str]
    """Digests of the source of each module that the replica has imported for the user, by name."""
    fingerprint: str | None
    """Fingerprint of the replica's graph, or None for a process on the coordinator's host."""


class Process(NamedTuple):
    """Message from a replica: its worker has called the function of its job."""

    pid: int
    rendezvous_address: str = ""
    """Address at which the processes of a mesh connect to each other. Only the first process sends it."""


class KernelsChosen(NamedTuple):
    """Message from the first replica of a group: the kernels that it has chosen. The coordinator forwards them to
    the others.
    """

    launches: Mapping[str, Any] | None
    """Launches of the chosen kernels, or None if no kernels were sought and XLA computes everything."""
    notes: Sequence[str] = ()
    """Notes for the user. A mesh sends its notes after it has compiled."""


class MeshCompiled(NamedTuple):
    """Message from the first process of a mesh: it has compiled the program."""

    launches: Mapping[str, Any] | None
    """Launches of the program's kernels, or None if no kernels were sought or none could be compiled."""
    reduction: AllReduce | None = None
    """Name of the all-reduce that was chosen by timing, or None if there was no choice."""
    notes: Sequence[str] = ()
    """Notes for the user."""


class IterationMetrics(NamedTuple):
    """Message from a replica: metrics of consecutive iterations after the first `first` ones."""

    first: int
    rows: Sequence[Mapping[str, Any]]


class SnapshotPart(NamedTuple):
    """Message from a replica: its part of a requested snapshot."""

    iteration: int
    lowest: int
    """Global index of the replica's first environment."""
    arrays: Mapping[str, np.ndarray]


class MissedSnapshot(NamedTuple):
    """Message from a replica: it had already passed the iteration of a requested snapshot."""

    iteration: int


class EnvFailures(NamedTuple):
    """Message from a replica: failures of its host environments."""

    failures: Sequence[Mapping[str, Any]]
    """Fields of a `HostFailure` for each failure."""


class EnvGrowth(NamedTuple):
    """Message from a replica: the memory of its process grows steadily while it steps environments."""

    bytes_per_step: float
    """Bytes of growth per step of one environment."""
    resident: int
    """Bytes that the process holds."""
    first: int
    """Global index of the replica's first environment."""
    last: int
    """Global index of the replica's last environment."""


class WindowRecorded(NamedTuple):
    """Message from a replica: it has stopped recording, with the sums of the recorded window."""

    number: int
    """Number of the request that this message answers, so that a late answer matches no later window."""
    window: Mapping[str, Any] | None
    """Result of `rollmill.profiling.recording.RecordedWindow.to_json`, or None if the events were discarded."""


MESSAGES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Begin, SnapshotRequest, Hold, End, StartRecording, AbandonRecording, StopRecording),
        *(
            Loaded,
            Process,
            KernelsChosen,
            MeshCompiled,
            CompileTimes,
            IterationMetrics,
            SnapshotPart,
            MissedSnapshot,
        ),
        *(EnvFailures, EnvGrowth, WindowRecorded),
    )
}


@runtime_checkable
class MessageLine(Protocol):
    """The part of `Control` that the functions `send`, `latest` and `wait` of this module use."""

    @property
    def send(self) -> Callable[..., None]:
        """Function that sends a message to the coordinator, after all earlier messages of this worker."""
        ...

    @property
    def latest(self) -> Callable[[str], WorkerMessage | None]:
        """Function that takes the name of a message class and returns its newest message, or None.

        It drops older messages of the class, and does not wait.
        """
        ...

    def wait(self, kind: str, timeout: float | None = None) -> WorkerMessage:
        """Waits for the oldest pending message of a kind, and returns it.

        Raises `TimedOut` after `timeout` seconds, and `Abandoned` if the worker should stop.
        """
        ...


def parse(message: WorkerMessage) -> Any:
    """Converts a received `WorkerMessage` to the class of this module that has its name."""
    kind = MESSAGES[message.kind]
    return kind(**message.fields, **({ARRAYS: message.arrays} if ARRAYS in kind._fields else {}))


def send(line: MessageLine, message: Any) -> None:
    """Sends a message of this module from a replica to its coordinator."""
    line.send(*_parts(message))


def send_to(workers: Supervision, to: Job | str, message: Any) -> None:
    """Sends a message of this module from the coordinator to one replica, a group, or all replicas."""
    workers.send(to, *_parts(message))


def latest(line: MessageLine, kind: type[MessageType]) -> MessageType | None:
    """Returns a replica's newest message of type `kind` and drops older ones, without waiting. Returns None if
    there is none.
    """
    message = line.latest(kind.__name__)
    return None if message is None else parse(message)


def wait(line: MessageLine, kind: type[MessageType]) -> MessageType:
    """Waits for a replica's oldest pending message of type `kind`, and returns it.

    Raises `Abandoned` if this replica must stop.
    """
    return parse(line.wait(kind.__name__))


def _parts(message: Any) -> tuple[str, dict[str, Any], Mapping[str, np.ndarray]]:
    fields = message._asdict()
    arrays = fields.pop(ARRAYS, NOTHING)
    return type(message).__name__, fields, arrays
