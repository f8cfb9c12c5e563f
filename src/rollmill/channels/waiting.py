"""Waits at one end of a channel: spins briefly, then sleeps until the doorbell rings."""

import math
import select
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from rollmill.channels.errors import Abandoned, TimedOut
from rollmill.channels.shm.doorbell import Doorbell

T = TypeVar("T")

Abandon: TypeAlias = Callable[[], bool]
"""Function that returns True once the run is being stopped. It is polled about ten times a second."""

NAP_MS = 100.0
SPINS = 30  # about 20 microseconds, which is less than the time to sleep and be woken


def never() -> bool:
    """Returns False. An `Abandon` for runs that are never stopped."""
    return False


class Deadline:
    """The time at which a blocking call gives up."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = math.inf if timeout is None else time.monotonic() + timeout

    def left(self) -> float:
        """Returns the remaining seconds: infinity without a timeout, and negative once it has passed."""
        return self._end - time.monotonic()

    def seconds(self) -> float | None:
        """Returns the remaining seconds for a `timeout` argument: None without a timeout, and never negative."""
        return None if self.timeout is None else max(0.0, self.left())

    def nap_ms(self) -> float:
        """Returns the milliseconds to sleep before `abandon` is polled again."""
        return max(0.0, min(NAP_MS, self.left() * 1000))


class Waiter:
    """Blocks one end of a channel until a condition is met."""

    def __init__(self, doorbell: Doorbell, abandon: Abandon, what: str) -> None:
        self._doorbell = doorbell
        self._abandon = abandon
        self._what = what
        self._poll = select.poll()
        self._poll.register(doorbell.fileno(), select.POLLIN)

    def until(self, ready: Callable[[], T | None], *, timeout: float | None) -> T:
        """Calls `ready` until it returns a value other than None, and returns that value.

        Raises `TimedOut` after `timeout` seconds, and `Abandoned` if the run is being stopped.
        """
        if (value := ready()) is not None:
            return value
        deadline = Deadline(timeout)
        while (value := self._spin(ready)) is None:
            check_waiting(deadline, self._abandon, self._what)
            if self._poll.poll(deadline.nap_ms()):
                self._doorbell.silence()  # cleared before polling again, so that no ring is missed
        return value

    def _spin(self, ready: Callable[[], T | None]) -> T | None:
        for _ in range(SPINS):
            if (value := ready()) is not None:
                return value
        return None


def check_waiting(deadline: Deadline, abandon: Abandon, what: str) -> None:
    """Raises `TimedOut` if a deadline has passed, and `Abandoned` if the run is being stopped."""
    if abandon():
        raise Abandoned(f"{what} was aborted, because the run is being stopped.")
    if deadline.left() <= 0:
        raise TimedOut(f"{what}: nothing happened within {deadline.timeout:g} s.")
