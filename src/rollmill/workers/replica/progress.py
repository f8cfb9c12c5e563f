"""A replica's connection to its coordinator, which distinguishes waiting for others, work and a hang."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rollmill.core.operations import AROUND_SIMULATORS, STEPPING, ThreadActivity, span
from rollmill.processes.control import Control
from rollmill.processes.messages import Seconds, WorkerMessage

MAX_LENGTHENING = 10.0
"""Work may take this many times as long as the longest that was done so far, where that is above the limit."""

OPERATIONS = {
    "collecting": "collect",
    "learning": "learn",
    "updating": "learn/update",
    "stepping environments": STEPPING,
    "making environments": STEPPING,
}
"""The operations that notes belong to, as the profiler names them."""


UNRECORDED = ("compiling", "training")
"""Notes of a mesh, where the dispatch loop records the operations itself."""


class ReplicaControl:
    """Control that suspends hang detection while its worker waits on a channel, since its peer may be stuck.

    It belongs to the thread that makes it. Work that starts up (building, compiling, making environments) may take
    `start_seconds`.
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
        """Records the next act of the main thread, such as `waiting for weights`, as a sign of progress."""
        self._measure()
        self._note, self._expect = note, float(expect)
        if note not in UNRECORDED:
            self._activity.become(*_operation_of(note))
        self._control.at(note, expect=expect)

    def work(self, note: str) -> None:
        """Notes work like `at`, with a limit from earlier repetitions once all programs are compiled."""
        self.at(note, expect=self._start_seconds if self._starting else MAX_LENGTHENING * self._longest)

    def start(self, note: str) -> None:
        """Notes work like `at`, before the first iteration."""
        self.at(note, expect=self._start_seconds)

    @contextmanager
    def stepping(self, note: str, *, starts: bool = False) -> Iterator[None]:
        """Marks the time in which a user's environments run, after which the earlier note holds again.

        Making them (`starts`) may take as long as any other start. Otherwise the limit is the user's, whatever
        else this replica does at the same time.
        """
        before, expect = self._note, self._expect
        self.at(note, expect=self._start_seconds if starts else 0.0)
        self._activity.become(OPERATIONS.get(note, note), AROUND_SIMULATORS, stepping=True)
        yield
        self.at(before, expect=expect)

    def started(self) -> None:
        """Notes that the first iteration, which compiles, is over."""
        self._starting, self._longest, self._noted_at = False, 0.0, time.monotonic()

    def wait(self, kind: str, timeout: Seconds | None = None) -> WorkerMessage:
        """Waits for the oldest pending message of a kind, for at most `timeout` seconds."""
        with span(kind, "waiting"):
            message = self._control.wait(kind, timeout)
        self._noted_at = time.monotonic()
        return message

    def stopping(self) -> bool:
        """Asked by channels while they wait."""
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
    if note.startswith("waiting for room"):
        return note.removeprefix("waiting for "), "channel"
    if note.startswith("waiting"):
        return note, "waiting"
    return OPERATIONS.get(note, note), "python"
