"""Handles Ctrl-C while a command is still importing modules. Imports nothing slow itself."""

import os
import signal
from types import FrameType


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Ends a process that has nothing to save with one sentence and exit code 130."""
    try:
        os.write(2, b"rollmill: interrupted\n")
    finally:
        os._exit(128 + signal.SIGINT)


def install_early_handler() -> None:
    """Installs `end_at_once` for SIGINT, unless SIGINT is ignored or already has another handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
