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
    """A request to stop the process, which the training loop checks after each iteration."""

    signal_number: int | None = None
    received_at: float = 0.0
    """`time.monotonic()` at which the signal arrived."""

    @property
    def seconds(self) -> float:
        """Seconds since the signal arrived; 0 without one."""
        return time.monotonic() - self.received_at if self.requested else 0.0

    @property
    def requested(self) -> bool:
        """True if a signal has arrived."""
        return self.signal_number is not None

    @property
    def signal_name(self) -> str | None:
        """`SIGINT`, `SIGTERM` or `SIGHUP`; None without a signal."""
        return None if self.signal_number is None else signal.Signals(self.signal_number).name

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP, 0 without a signal."""
        return 0 if self.signal_number is None else 128 + self.signal_number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a `StopRequest` while the context is active.

    A later SIGINT raises KeyboardInterrupt at once, any other later signal is ignored. SIGHUP, which a closing
    terminal sends, stays ignored where it was, as under `nohup`. Previous handlers are restored at the end.
    Outside of the main thread, where Python cannot set handlers, nothing is caught.
    """
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not request.requested:
            request.signal_number, request.received_at = int(number), time.monotonic()

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    caught = [n for n in CAUGHT if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in caught}
    startup_handler = previous[signal.SIGINT]
    if isinstance(startup_handler, Interruption) and startup_handler.asked:
        request.signal_number, request.received_at = int(signal.SIGINT), time.monotonic()
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
