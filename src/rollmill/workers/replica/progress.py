"""A replica's connection to its coordinator, which distinguishes work, waiting for other replicas, and hangs."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rollmill.core.operations import AROUND_SIMULATORS, STEPPING, ThreadActivity, span
from rollmill.processes.control import Control
from rollmill.processes.messages import Seconds, WorkerMessage

MAX_LENGTHENING = 10.0
"""Factor by which work may exceed the longest work so far, if this is more than the limit for hangs."""

OPERATIONS = {
    "collecting": "collect",
    "learning": "learn",
    "updating": "learn/update",
    "stepping environments": STEPPING,
    "making environments": STEPPING,
}
"""Operations of the profiler to which reported activities belong."""


UNRECORDED = ("compiling", "training")
"""Activities of a mesh for which the dispatch loop itself records operations."""


class ReplicaControl:
    """`Control` of a replica, which suspends hang detection while the replica waits on a channel.

    While it waits, its peer is the process that may be stuck. The object belongs to the thread that creates it.
    Starting (building, compiling, creating environments) may take `start_seconds`.
    """

    def __init__(self, control: Control, *, start_seconds: Seconds) -> None:
        self._control = control
        self._thread = threading.get_ident()
        self._note, self._expect = "working", 0.0
        self._activity = ThreadActivity()
        self._start_seconds = float(start_seconds)
        self._starting = True
        self._longest, self._noted_at = 0.0, time.monotonic()
        self.send, self.latest = control.send, control.latest
        self.check, self.answer = control.check, control.answer

    def at(self, note: str, *, expect: Seconds = 0.0) -> None:
        """Reports the next activity of the main thread, such as `waiting for weights`, as a sign of progress."""
        self._measure()
        self._note, self._expect = note, float(expect)
        if note not in UNRECORDED:
            self._activity.become(*_operation_of(note))
        self._control.at(note, expect=expect)

    def work(self, note: str) -> None:
        """Reports an activity like `at`. Once all programs are compiled, earlier repetitions determine its time
        limit.
        """
        self.at(note, expect=self._start_seconds if self._starting else MAX_LENGTHENING * self._longest)

    def start(self, note: str) -> None:
        """Reports an activity before the first iteration, which may take `start_seconds`."""
        self.at(note, expect=self._start_seconds)

    @contextmanager
    def stepping(self, note: str, *, starts: bool = False) -> Iterator[None]:
        """Context manager that reports that environments are being stepped, and then the previous activity again.

        Creating environments (`starts`) may take as long as any other start. Otherwise, the user's limit
        applies, even if this replica also does other work.
        """
        before, expect = self._note, self._expect
        self.at(note, expect=self._start_seconds if starts else 0.0)
        self._activity.become(OPERATIONS.get(note, note), AROUND_SIMULATORS, stepping=True)
        yield
        self.at(before, expect=expect)

    def started(self) -> None:
        """Records that the first iteration, which compiles the programs, is done."""
        self._starting, self._longest, self._noted_at = False, 0.0, time.monotonic()

    def wait(self, kind: str, timeout: Seconds | None = None) -> WorkerMessage:
        """Waits for the oldest pending message of a kind, and returns it.

        Raises `TimedOut` after `timeout` seconds, and `Abandoned` if the worker should stop.
        """
        with span(kind, "waiting"):
            message = self._control.wait(kind, timeout)
        self._noted_at = time.monotonic()
        return message

    def stopping(self) -> bool:
        """Returns whether the coordinator wants this replica to stop. Channels call it while they wait."""
        if threading.get_ident() == self._thread:
            self.at(self._note, expect=self._expect)
        return self._control.stopping()

    def _measure(self) -> None:
        """Notes how long the work lasted that ends here. Waiting is made of short pieces, and counts as little."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._noted_at)
        self._noted_at = now


def _operation_of(note: str) -> tuple[str, str]:
    """Returns the operation and the category of time that a note stands for."""
    if note.startswith("waiting for space"):
        return note.removeprefix("waiting for "), "channel"
    if note.startswith("waiting"):
        return note, "waiting"
    return OPERATIONS.get(note, note), "python"
