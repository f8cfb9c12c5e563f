"""Stopping on Ctrl-C, `kill` or a closed terminal without tearing an iteration."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from rollmill.core.interruption import Interruption

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class StopRequest:
    """Whether the process was asked to stop; the training loop looks after each iteration."""

    signal_number: int | None = None
    came_at: float = 0.0

    @property
    def seconds(self) -> float:
        """Since the signal came; 0 before any."""
        return time.monotonic() - self.came_at if self.requested else 0.0

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.signal_number is not None

    @property
    def signal_name(self) -> str | None:
        """`SIGINT`, `SIGTERM` or `SIGHUP`; None before any."""
        return None if self.signal_number is None else signal.Signals(self.signal_number).name

    @property
    def exit_code(self) -> int:
        """The exit code of the process: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP, 0 before any."""
        return 0 if self.signal_number is None else 128 + self.signal_number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a `StopRequest` for as long as the context lasts.

    A SIGINT after that raises KeyboardInterrupt at once, another signal after that changes nothing. SIGHUP, which
    a terminal sends when it is closed, stays ignored where it was, as under `nohup`. The earlier handlers come
    back at the end. Outside of the main thread, where Python cannot set handlers, nothing is caught.
    """
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not request.requested:
            request.signal_number, request.came_at = int(number), time.monotonic()

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    caught = [n for n in CAUGHT if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    earlier = {number: signal.signal(number, handle) for number in caught}
    before = earlier[signal.SIGINT]
    if isinstance(before, Interruption) and before.asked:
        request.signal_number, request.came_at = int(signal.SIGINT), time.monotonic()
    try:
        yield request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
