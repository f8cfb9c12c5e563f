"""Handling of Ctrl-C before a training starts. Imports nothing slow, as the command line imports it first."""

from dataclasses import dataclass
from types import FrameType


@dataclass
class Interruption:
    """Handler of SIGINT until a training installs its own: `signal.signal(signal.SIGINT, Interruption())`.

    It raises KeyboardInterrupt. In a finaliser or a callback Python prints that exception and goes on; a training
    that begins afterwards stops at its first opportunity.
    """

    asked: bool = False
    """True once the signal has arrived."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Records the signal and raises KeyboardInterrupt."""
        self.asked = True
        raise KeyboardInterrupt
