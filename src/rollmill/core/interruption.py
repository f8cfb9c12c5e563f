"""Ctrl-C before a training listens. It imports nothing that takes time: the command line begins with it."""

from dataclasses import dataclass
from types import FrameType


@dataclass
class Interruption:
    """The handler of Ctrl-C before a training installs its own: `signal.signal(signal.SIGINT, Interruption())`.

    It raises KeyboardInterrupt. Where that comes up in a finaliser or a callback, Python prints it and goes on; a
    training that begins after that stops at its first chance.
    """

    asked: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal."""
        self.asked = True
        raise KeyboardInterrupt
