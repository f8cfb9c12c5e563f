"""What the coordinator asked a replica for: its part of a checkpoint."""

from rollmill.execution.processes import Control, WorkerMessage


class SnapshotRequests:
    """The newest order."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._snapshot: int | None = None
        self._final = False

    def wants(self, iteration: int) -> bool:
        """Whether the state before this iteration is wanted for a checkpoint; it may have been missed."""
        self._read()
        if self._snapshot is not None and iteration > self._snapshot:
            self._control.send("missed", {"iteration": self._snapshot})
            self._snapshot = None
        return self._snapshot == iteration

    def pending(self) -> int | None:
        """The checkpoint that is wanted, and not yet answered."""
        self._read()
        return self._snapshot

    def wait(self) -> None:
        """Until a checkpoint is wanted."""
        self._take(self._control.wait("snapshot"))

    @property
    def final(self) -> bool:
        """Whether the one that is wanted is the last one, after which nothing comes."""
        return self._final

    def answered(self) -> None:
        """The state was sent."""
        self._snapshot = None

    def _read(self) -> None:
        if wanted := self._control.latest("snapshot"):
            self._take(wanted)

    def _take(self, wanted: WorkerMessage) -> None:
        self._snapshot, self._final = int(wanted.fields["iteration"]), bool(wanted.fields.get("final"))
