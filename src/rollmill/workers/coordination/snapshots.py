"""Requests snapshots from all replicas, and assembles the training state once all parts have arrived."""

import math
import time
from collections.abc import Set

from rollmill.dataflow import State
from rollmill.processes.supervision import ALL, Supervision
from rollmill.workers.protocol import STRIDE, SnapshotRequest, send_to
from rollmill.workers.replica.snapshots import StatePart, assemble
from rollmill.workers.reports import Saved

MARGIN_SECONDS = 0.5
"""Seconds by which a snapshot is announced in advance, so that probably no replica has passed its iteration."""


PACE_SECONDS = 5.0
"""Seconds over which the speed of training is averaged. Reports may arrive in bursts, because workers send several
at once, or because the coordinator was busy."""


class Pace:
    """Measures the progress of training and its speed in iterations."""

    def __init__(self, first: int) -> None:
        self.first = self.iteration = self.furthest = first
        self._rows, self._seconds = 1.0, 0.1
        self._row_at: float | None = None

    def advance(self, iteration: int, rows: int) -> bool:
        """Records `rows` rows of metrics up to `iteration`. Returns whether training has progressed further than
        ever.
        """
        now = time.monotonic()
        if self._row_at is not None:  # the first report waits for all workers to start
            seconds = now - self._row_at
            kept = math.exp(-seconds / PACE_SECONDS)
            self._rows, self._seconds = kept * self._rows + rows, kept * self._seconds + seconds
        self._row_at, self.iteration = now, iteration
        is_new = iteration > self.furthest
        self.furthest = max(self.furthest, iteration)
        return is_new

    def begin_again(self, iteration: int) -> None:
        """Goes back to an iteration. The time until the next report does not count, since all workers restart."""
        self.iteration, self._row_at = iteration, None

    def ahead(self, *, mesh: bool) -> int:
        """Returns an iteration that probably no replica has reached yet. If a replica has, it answers with
        `MissedSnapshot`.
        """
        ahead = self.iteration + 2 + int(MARGIN_SECONDS / max(self._seconds / self._rows, 1e-4))
        return -(-ahead // STRIDE) * STRIDE + STRIDE if mesh else ahead


class SnapshotCollector:
    """Collects the parts of a requested snapshot from all replicas."""

    def __init__(self, workers: Supervision, initial: State) -> None:
        self._workers, self._initial = workers, initial
        self._wanted: int | None = None
        self._parts: dict[int, dict[str, StatePart]] = {}

    def request(self, pace: Pace, last: int, *, mesh: bool) -> None:
        """Requests a snapshot after one of the next iterations, unless a request is already pending."""
        passed = self._wanted is not None and pace.iteration > self._wanted + 1
        if (self._wanted is None or passed) and pace.iteration < last:
            self._wanted = min(pace.ahead(mesh=mesh), last)
            self._parts = {n: parts for n, parts in self._parts.items() if n > pace.iteration}
            self.repeat(ALL)

    def repeat(self, to: str) -> None:
        """Sends the pending request, if any, to the replicas that `to` addresses (see `Supervision.send`)."""
        if self._wanted is not None:
            send_to(self._workers, to, SnapshotRequest(self._wanted))

    def add(self, iteration: int, part: StatePart) -> None:
        """Adds the part of the snapshot that a replica has sent."""
        self._parts.setdefault(iteration, {})[part.replica] = part

    def missed(self, iteration: int) -> None:
        """Drops the request for a snapshot whose iteration a replica had already passed."""
        if iteration == self._wanted:
            self._wanted = None

    def clear(self) -> None:
        """Drops the pending request and all parts, because all replicas restart."""
        self._wanted = None
        self._parts.clear()

    def complete(self, replicas: Set[str]) -> Saved | None:
        """Removes and returns the first state for which all of these replicas have sent their parts, or returns
        None if there is none.

        Raises a `CheckpointError` if a replica did not send a part that it owns.
        """
        for iteration, parts in sorted(self._parts.items()):
            if replicas <= parts.keys():
                del self._parts[iteration]
                state = assemble(self._initial, iteration, list(parts.values()))
                self.missed(iteration)
                return Saved(iteration, state)
        return None
