"""Handles Ctrl-C before training starts, and ends calls from Python after it.

The module imports nothing slow, because the command line imports it first.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar, runtime_checkable

from rollmill.core.early_interruption import end_at_once

CHECKPOINT_REQUEST = signal.SIGUSR1
"""Signal that asks a run to save a checkpoint and continue."""
STOP_NOTICE = signal.SIGUSR2
"""Signal with which a batch system announces that a job's time is almost over. SIGTERM and SIGKILL follow."""
NOTICES = (CHECKPOINT_REQUEST, STOP_NOTICE)


def leave_signals_to_coordinator() -> None:
    """Ignores stop signals in a worker, because batch systems send them to all processes of a job."""
    for number in (signal.SIGINT, *NOTICES):
        signal.signal(number, signal.SIG_IGN)


def nothing_to_save(number: int, frame: FrameType | None) -> None:
    """Ignores SIGUSR1 before training begins, because the first checkpoint follows anyway."""


@contextmanager
def holding_checkpoint_requests() -> Iterator[None]:
    """Context manager in which started processes block SIGUSR1, until they call `take_held_requests`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {CHECKPOINT_REQUEST})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_held_requests() -> None:
    """Makes SIGUSR1 harmless for this process, and then unblocks it."""
    signal.signal(CHECKPOINT_REQUEST, nothing_to_save)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {CHECKPOINT_REQUEST})


@contextmanager
def handling_early_notices() -> Iterator[None]:
    """Handles SIGUSR1 and SIGUSR2 until the training loop does, unless the program has its own handlers.

    SIGUSR1 is ignored. SIGUSR2 ends the process with a message and exit code 140, even while it compiles.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    ours = [number for number in NOTICES if in_main_thread and signal.getsignal(number) == signal.SIG_DFL]
    handlers = {CHECKPOINT_REQUEST: nothing_to_save, STOP_NOTICE: EarlyStop()}
    for number in ours:
        signal.signal(number, handlers[number])
    try:
        with _ending_at_notice() if STOP_NOTICE in ours else contextlib.nullcontext():
            yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@dataclass
class EarlyStop:
    """Handler of SIGUSR2 until the training loop installs its own. If training begins afterwards, it stops."""

    asked: bool = False
    """Whether the signal has arrived."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Records the signal. A separate thread then ends the process."""
        self.asked = True


@contextmanager
def _ending_at_notice() -> Iterator[None]:
    """Ends the process at SIGUSR2 while `EarlyStop` is its handler.

    Python runs handlers in the main thread, which can be busy compiling for minutes. Another thread therefore
    waits for the bytes that Python's C handler writes for each signal.
    """
    watched, written = socket.socketpair()
    written.setblocking(False)
    before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    if before != -1:  # an event loop has set this descriptor, and handles signals in time
        signal.set_wakeup_fd(before)
    thread = threading.Thread(target=_end_at_notice, args=(watched,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        if before == -1:
            signal.set_wakeup_fd(-1)
        # `close` would not wake the reader, because forked processes may hold the socket open
        written.shutdown(socket.SHUT_RDWR)
        written.close()
        thread.join()
        watched.close()


@contextmanager
def leaving_notices_to_training() -> Iterator[None]:
    """Context manager in which the training loop handles SIGUSR2.

    Outside of the context, a thread ends the process at this signal.
    """
    before = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def _end_at_notice(watched: socket.socket) -> None:
    while number := watched.recv(1):
        if number[0] == STOP_NOTICE and isinstance(signal.getsignal(STOP_NOTICE), EarlyStop):
            text = "rollmill: stopped by SIGUSR2 outside of training, so there is nothing new to save"
            with contextlib.suppress(OSError, ValueError):
                print(text, file=sys.stderr, flush=True)
            os._exit(128 + STOP_NOTICE)


@dataclass
class Interruption:
    """Handler of SIGINT until the training loop installs its own: `Interruption().install()`.

    The handler raises KeyboardInterrupt. In a finaliser or a callback, Python continues after this exception. If
    training begins afterwards, it stops at the first opportunity.
    """

    asked: bool = False
    """Whether the signal has arrived."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Records the signal and raises KeyboardInterrupt."""
        self.asked = True
        raise KeyboardInterrupt

    def install(self) -> None:
        """Installs this object as the handler of SIGINT, unless SIGINT is ignored (as in background jobs) or
        already has another handler.

        Also stops Python from printing a KeyboardInterrupt that is raised where it cannot propagate, such as in a
        finaliser.
        """
        if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, end_at_once):
            return
        signal.signal(signal.SIGINT, self)
        usual = sys.unraisablehook
        sys.unraisablehook = lambda raised: None if raised.exc_type is KeyboardInterrupt else usual(raised)


@runtime_checkable
class _HasExitCode(Protocol):
    @property
    def exit_code(self) -> int:
        """Exit code of the command: 128 plus the number of the signal that stopped it."""
        ...


Result = TypeVar("Result", bound=_HasExitCode)


class Interrupted(KeyboardInterrupt):
    """Raised by Ctrl-C during training, a sweep or a profile, once everything is saved.

    Args:
        result: the value that the call would have returned. For training, it is the `Run`, which `rollmill.resume`
            can continue.
    """

    def __init__(self, result: Any) -> None:
        super().__init__(f"stopped by Ctrl-C; saved in {getattr(result, 'directory', 'its result')}")
        self.result = result


def pass_on_interrupt(result: Result) -> Result:
    """Returns the result of a call, or raises `Interrupted` if Ctrl-C stopped it under Python's default handler.

    The command line, and programs with a SIGINT handler, read the exit code from the result instead.
    """
    by_interrupt = result.exit_code == 128 + signal.SIGINT
    if by_interrupt and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        raise Interrupted(result)
    return result
