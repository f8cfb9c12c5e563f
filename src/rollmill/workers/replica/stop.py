"""Where a replica ends: after the iterations that are planned, or earlier, where the coordinator has all end.

Being told to end after some iteration would not do: by the time that a replica hears of it, it may be past it. So
a replica is held first. It answers how many iterations it has begun, at once and whatever it is doing, and begins
no other until it is told where the end is, which is behind all that anybody has begun.
"""

import threading

from rollmill.processes.control import Control
from rollmill.processes.messages import WorkerMessage
from rollmill.workers.protocol import End, Hold, latest, wait


class StopParticipant:
    """Says which iterations a replica still does."""

    def __init__(self, control: Control, *, begun: int, planned: int) -> None:
        """`begun` iterations came before, by any worker; the training ends after the `planned` ones."""
        self._control = control
        self._begun, self._last = begun, planned
        self._held = False
        self._changing = threading.Lock()
        control.answer(Hold.__name__, self._hold)

    def admit(self, first: int, count: int = 1) -> int:
        """How many of `count` iterations may be begun now, after the `first` ones; none where the training ends.

        Waits while this replica is held.

        Raises:
            Abandoned: the coordinator wants this worker to stop.
        """
        if (end := latest(self._control, End)) is not None:
            self._release(end)
        while (admitted := self._begin(first, count)) is None:
            self._release(wait(self._control, End))
        return admitted

    def _begin(self, first: int, count: int) -> int | None:
        """Notes what is begun; None where the coordinator was told that nothing is."""
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
