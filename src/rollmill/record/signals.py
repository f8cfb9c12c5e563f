"""Handles signals that stop a run or request a checkpoint, between two iterations.

Ctrl-C, `kill`, a closed terminal, and SIGUSR2, the notice of a batch system, stop training. SIGUSR1 requests a
checkpoint.
"""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

from rollmill.core.interruption import (
    CHECKPOINT_REQUEST,
    NOTICES,
    STOP_NOTICE,
    EarlyStop,
    Interruption,
    leaving_notices_to_training,
    nothing_to_save,
)

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES)


@dataclass
class StopRequest:
    """A request to stop, which the training loop checks after each iteration."""

    signal_number: int | None = None
    received_at: float = 0.0
    """Time of `time.monotonic()` at which the signal arrived."""
    wants_checkpoint: bool = False
    """True after SIGUSR1 has arrived, until `take_checkpoint_request` is called."""

    def take_checkpoint_request(self) -> bool:
        """Returns whether SIGUSR1 has arrived since the last call."""
        wanted, self.wants_checkpoint = self.wants_checkpoint, False
        return wanted

    @property
    def seconds(self) -> float:
        """Seconds since the signal arrived, or 0 without a signal."""
        return time.monotonic() - self.received_at if self.requested else 0.0

    @property
    def requested(self) -> bool:
        """True if a signal to stop has arrived."""
        return self.signal_number is not None

    @property
    def signal_name(self) -> str | None:
        """Name of the signal, such as `SIGTERM`, or None without a signal."""
        return None if self.signal_number is None else signal.Signals(self.signal_number).name

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 128 plus the number of the signal, such as 143 after SIGTERM, or 0 without a
        signal.
        """
        return 0 if self.signal_number is None else 128 + self.signal_number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Context manager that turns the first of the signals `CAUGHT` into a `StopRequest`.

    SIGUSR1 only requests a checkpoint. A second SIGINT raises KeyboardInterrupt at once. SIGTERM or SIGHUP after
    SIGUSR2 replaces it, because its deadline counts. All other later signals are ignored. SIGHUP, which a closing
    terminal sends, stays ignored under `nohup`. If the program has its own handlers for SIGUSR1 and SIGUSR2, as
    under submitit, these stay in place. The previous handlers are restored at the end. Outside the main thread,
    Python cannot set handlers, so no signal is caught.
    """
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == CHECKPOINT_REQUEST:
            request.wants_checkpoint = True
            return
        if request.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not request.requested or (request.signal_number == STOP_NOTICE and number != STOP_NOTICE):
            request.signal_number, request.received_at = int(number), time.monotonic()

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    caught = [number for number in CAUGHT if _is_ours(number, signal.getsignal(number))]
    previous = {number: signal.signal(number, handle) for number in caught}
    _take_early(request, previous)
    is_watched = isinstance(previous.get(STOP_NOTICE), EarlyStop)
    try:
        with leaving_notices_to_training() if is_watched else nullcontext():
            yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _take_early(request: StopRequest, handlers: Mapping[Any, Any]) -> None:
    """Turns a signal that came just before the training loop into a request."""
    for number, handler in handlers.items():
        if isinstance(handler, Interruption | EarlyStop) and handler.asked:
            request.signal_number, request.received_at = int(number), time.monotonic()


def _is_ours(number: int, handler: Any) -> bool:
    """Returns whether a training loop handles a signal now."""
    if number in NOTICES:
        return handler in (signal.SIG_DFL, nothing_to_save) or isinstance(handler, EarlyStop)
    return number != signal.SIGHUP or handler != signal.SIG_IGN
