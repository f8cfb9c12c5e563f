"""Handling of Ctrl-C before a training starts. Imports nothing slow, as the command line imports it first."""

import signal
import sys
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interruption:
    """Handler of SIGINT until a training installs its own: `signal.signal(signal.SIGINT, Interruption())`.

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
        """Handles SIGINT, unless it is ignored, as in background jobs, or handled; callbacks do not print it."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        signal.signal(signal.SIGINT, self)
        usual = sys.unraisablehook
        sys.unraisablehook = lambda raised: None if raised.exc_type is KeyboardInterrupt else usual(raised)
