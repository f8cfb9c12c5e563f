"""Messages between a coordinator and its replicas.

A message is sent under the name of its class. An optional field `arrays` is sent as arrays, all other fields as
JSON.
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
"""Snapshots of a mesh are taken after multiples of it, because it dispatches iterations ahead of the host."""

# --- from the coordinator ------------------------------------------------------------------------------


class Begin(NamedTuple):
    """Start iterating."""

    first: int
    """Iterations that came before."""
    restart: int
    """How many times this coordinator has restarted all replicas; it scopes channel names."""
    attempt: int
    """How many times this replica was replaced since the last common start of all replicas."""
    generation: int
    """Common starts of all replicas before this one: 0 for a new run, 1 for a resumed one, and one more for each
    restart of all replicas since."""
    resets_environments: bool
    """Whether environments are reset at the common start, because no checkpoint restores them. The server of
    environments then sends their first observations."""
    rendezvous_address: str = ""
    """Where the processes of a mesh find each other."""
    launches: Mapping[str, Any] | None = None
    """Launches of the kernels of the replica's group, where they have been chosen."""
    reduction: AllReduce | None = None
    """How the mesh takes means, where it has been chosen."""
    arrays: Mapping[str, np.ndarray] = NOTHING
    """The replica's share of the restored state; empty at the beginning."""


class SnapshotRequest(NamedTuple):
    """Send the part of the state that this replica owns."""

    iteration: int
    """Iterations that come before that state."""
    final: bool = False
    """Whether the replica ends with it."""


class Hold(NamedTuple):
    """Requests to begin no further iteration, and to answer with the number of iterations begun."""

    begun: int = 0
    """Iterations begun; only the answer gives it."""


class End(NamedTuple):
    """End after this many iterations."""

    iteration: int


class StartRecording(NamedTuple):
    """Record this process's events from now on, for the profiler."""


class AbandonRecording(NamedTuple):
    """Requests to stop recording, discard the events, and confirm."""

    number: int
    """Number of this request, which the answer repeats."""


class StopRecording(NamedTuple):
    """Stop recording, and send the sums of a window."""

    number: int
    """Number of this request, which the answer repeats."""
    begin: int
    """The window's first nanosecond on the monotonic clock of the replica's own host."""
    end: int
    """The nanosecond after its last."""


# --- from a replica --------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """The code that the replica has loaded, to be compared with the coordinator's before it counts."""

    host: str
    """Name of its host."""
    pid: int
    platform: str
    """JAX's name of the platform that it computes on; empty where no fingerprint is told."""
    code: Mapping[str, Any]
    """JSON form of `core.code_identity.CodeIdentity`."""
    modules: Mapping[str, str]
    """Digest of the source of each module that it imported for the user."""
    fingerprint: str | None
    """That of its graph; None where it is a process of the coordinator's host."""


class Process(NamedTuple):
    """The replica's function was called."""

    pid: int
    rendezvous_address: str = ""
    """Where the processes of a mesh find each other, told by the first of them."""


class KernelsChosen(NamedTuple):
    """Reports the kernels chosen by the first replica of a group. The coordinator forwards it to the others."""

    launches: Mapping[str, Any] | None
    """None: no kernels were sought, and XLA computes all."""
    notes: Sequence[str] = ()
    """Notes for the user; a mesh sends its notes once it has compiled."""


class MeshCompiled(NamedTuple):
    """The first process of a mesh has compiled the program."""

    launches: Mapping[str, Any] | None
    """Launches of its kernels; None: no kernels were sought, or none could be compiled."""
    reduction: AllReduce | None = None
    """How it takes means, where there was a choice."""
    notes: Sequence[str] = ()
    """Notes for the user."""


class IterationMetrics(NamedTuple):
    """Metrics of consecutive iterations, after the first `first` iterations."""

    first: int
    rows: Sequence[Mapping[str, Any]]


class SnapshotPart(NamedTuple):
    """A replica's part of the state."""

    iteration: int
    lowest: int
    """The first of its environments."""
    arrays: Mapping[str, np.ndarray]


class MissedSnapshot(NamedTuple):
    """The replica was past that iteration when the request came."""

    iteration: int


class EnvFailures(NamedTuple):
    """Failures of environments that are Python objects."""

    failures: Sequence[Mapping[str, Any]]
    """Fields of `HostFailure`."""


class EnvGrowth(NamedTuple):
    """The memory of this process grows from step to step of its environments."""

    bytes_per_step: float
    """Bytes for each step of one environment."""
    resident: int
    """Bytes that the process holds."""
    first: int
    """The first of its environments."""
    last: int
    """The last of its environments."""


class WindowRecorded(NamedTuple):
    """The end of a recording, and the sums of its window."""

    number: int
    """Number of the request that it answers, so that a late answer is not taken for that of a later window."""
    window: Mapping[str, Any] | None
    """From `rollmill.profiling.recording.RecordedWindow.to_json`; None if the events were forgotten."""


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
    """The part of `Control` that `send`, `latest` and `wait` use."""

    @property
    def send(self) -> Callable[..., None]:
        """Sends a message, after all that this worker sent before."""
        ...

    @property
    def latest(self) -> Callable[[str], WorkerMessage | None]:
        """Takes the newest message of a kind without waiting, and drops older messages."""
        ...

    def wait(self, kind: str, timeout: float | None = None) -> WorkerMessage:
        """Waits for the oldest pending message of a kind, for at most `timeout` seconds."""
        ...


def parse(message: WorkerMessage) -> Any:
    """Returns the typed form of a message."""
    kind = MESSAGES[message.kind]
    return kind(**message.fields, **({ARRAYS: message.arrays} if ARRAYS in kind._fields else {}))


def send(line: MessageLine, message: Any) -> None:
    """Sends a message from a replica to its coordinator."""
    line.send(*_parts(message))


def send_to(workers: Supervision, to: Job | str, message: Any) -> None:
    """Sends a message from the coordinator to one replica, a group, or all."""
    workers.send(to, *_parts(message))


def latest(line: MessageLine, kind: type[MessageType]) -> MessageType | None:
    """Takes the newest message of a type without waiting, and drops older ones."""
    message = line.latest(kind.__name__)
    return None if message is None else parse(message)


def wait(line: MessageLine, kind: type[MessageType]) -> MessageType:
    """Waits for the oldest message of a type that was not taken yet.

    Raises `Abandoned` if this replica must stop.
    """
    return parse(line.wait(kind.__name__))


def _parts(message: Any) -> tuple[str, dict[str, Any], Mapping[str, np.ndarray]]:
    fields = message._asdict()
    arrays = fields.pop(ARRAYS, NOTHING)
    return type(message).__name__, fields, arrays
