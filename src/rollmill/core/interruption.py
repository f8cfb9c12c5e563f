"""Handling of Ctrl-C before a training starts. Imports nothing slow, as the command line imports it first."""

import signal
import sys
from dataclasses import dataclass
from types import FrameType

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which batch systems say that a job's time is almost over; SIGTERM and SIGKILL follow."""


def leave_signals_to_coordinator() -> None:
    """Ignores in a worker the signals that stop a training: batch systems send them to all processes of a job."""
    for number in (signal.SIGINT, *NOTICES):
        signal.signal(number, signal.SIG_IGN)


@dataclass
class Interruption:
    """Handler of SIGINT until a training installs its own: `Interruption().install()`.

    It raises KeyboardInterrupt. In a finaliser or a callback Python goes on after that exception; a training that
    begins afterwards stops at its first opportunity.
    """

    asked: bool = False
    """True once the signal has arrived."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Records the signal and raises KeyboardInterrupt."""
        self.asked = True
        raise KeyboardInterrupt

    def install(self) -> None:
        """Handles SIGINT in this process, unless it is ignored, as in background jobs, or has another handler.

        Python then prints no KeyboardInterrupt that a callback raises.
        """
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        signal.signal(signal.SIGINT, self)
        usual = sys.unraisablehook
        sys.unraisablehook = lambda raised: None if raised.exc_type is KeyboardInterrupt else usual(raised)
