"""Handles the coordinator's requests to a replica: to send its part of a snapshot, and to end.

A replica cannot be told to end after a certain iteration, because it may have passed this iteration when the
request arrives. It is therefore held first: it answers at once with the number of iterations that it has begun,
and begins no more until it receives the last iteration, which no replica has passed.
"""

import threading

from rollmill.processes.control import Control
from rollmill.processes.messages import WorkerMessage
from rollmill.workers.protocol import End, Hold, MessageLine, MissedSnapshot, SnapshotRequest, latest, send, wait


class SnapshotRequests:
    """Tracks the coordinator's newest request for a snapshot."""

    def __init__(self, control: MessageLine) -> None:
        self._control = control
        self._snapshot: int | None = None
        self._final = False

    def wants(self, iteration: int) -> bool:
        """Returns whether a snapshot before this iteration is requested. A request for an earlier iteration is
        reported as missed.
        """
        self._read()
        if self._snapshot is not None and iteration > self._snapshot:
            send(self._control, MissedSnapshot(self._snapshot))
            self._snapshot = None
        return self._snapshot == iteration

    def pending(self) -> int | None:
        """Returns the iteration of the request that has not been answered yet, or None."""
        self._read()
        return self._snapshot

    def wait(self) -> None:
        """Waits until a snapshot is requested."""
        self._take(wait(self._control, SnapshotRequest))

    @property
    def final(self) -> bool:
        """True if the requested snapshot is the last snapshot of the run."""
        return self._final

    def answered(self) -> None:
        """Records that the requested part of the snapshot has been sent."""
        self._snapshot = None

    def _read(self) -> None:
        if (request := latest(self._control, SnapshotRequest)) is not None:
            self._take(request)

    def _take(self, request: SnapshotRequest) -> None:
        self._snapshot, self._final = request.iteration, request.final


class StopParticipant:
    """Decides how many iterations a replica still performs: as many as planned, or fewer if the coordinator ends
    the run.
    """

    def __init__(self, control: Control, *, begun: int, planned: int) -> None:
        """`begun` is the number of iterations before, by any worker. Training ends after `planned` iterations."""
        self._control = control
        self._begun, self._last = begun, planned
        self._held = False
        self._changing = threading.Lock()
        control.answer(Hold.__name__, self._hold)

    def admit(self, first: int, count: int = 1) -> int:
        """Returns how many further iterations, up to `count`, may begin after the first `first` iterations.

        Returns 0 at the end of training, and waits while this replica is held. Raises `Abandoned` if the
        coordinator stops the replica.
        """
        if (end := latest(self._control, End)) is not None:
            self._release(end)
        while (admitted := self._begin(first, count)) is None:
            self._release(wait(self._control, End))
        return admitted

    def _begin(self, first: int, count: int) -> int | None:
        """Records the iterations that begin. Returns None if the replica is held."""
        with self._changing:
            if self._held:
                return None
            admitted = max(0, min(count, self._last - first))
            self._begun = max(self._begun, first + admitted)
            return admitted

    def _hold(self, _: WorkerMessage) -> dict[str, int]:
        """Answers from another thread than the one that begins iterations."""
        with self._changing:
            self._held = True
            return Hold(self._begun)._asdict()

    def _release(self, end: End) -> None:
        with self._changing:
            self._held, self._last = False, end.iteration
