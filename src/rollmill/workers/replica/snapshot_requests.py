"""The coordinator's requests for a replica's part of a snapshot."""

from rollmill.workers.protocol import MessageLine, MissedSnapshot, SnapshotRequest, latest, send, wait


class SnapshotRequests:
    """The newest request."""

    def __init__(self, control: MessageLine) -> None:
        self._control = control
        self._snapshot: int | None = None
        self._final = False

    def wants(self, iteration: int) -> bool:
        """Whether a snapshot before this iteration is requested; reports it as missed where it is too late."""
        self._read()
        if self._snapshot is not None and iteration > self._snapshot:
            send(self._control, MissedSnapshot(self._snapshot))
            self._snapshot = None
        return self._snapshot == iteration

    def pending(self) -> int | None:
        """The iteration of the request that was not answered yet."""
        self._read()
        return self._snapshot

    def wait(self) -> None:
        """Waits until a snapshot is requested."""
        self._take(wait(self._control, SnapshotRequest))

    @property
    def final(self) -> bool:
        """Whether the requested snapshot is the last one, after which nothing comes."""
        return self._final

    def answered(self) -> None:
        """Notes that the requested part was sent."""
        self._snapshot = None

    def _read(self) -> None:
        if (wanted := latest(self._control, SnapshotRequest)) is not None:
            self._take(wanted)

    def _take(self, wanted: SnapshotRequest) -> None:
        self._snapshot, self._final = wanted.iteration, wanted.final
