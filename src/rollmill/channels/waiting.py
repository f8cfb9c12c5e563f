"""How an end waits: a short look around, then asleep on its doorbell until it rings."""

import math
import select
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from rollmill.channels.errors import Abandoned, TimedOut
from rollmill.channels.shm.doorbell import Doorbell

T = TypeVar("T")

Abandon: TypeAlias = Callable[[], bool]
"""Whether to stop waiting because the run is being stopped; asked about ten times a second."""

NAP_MS = 100.0
LOOKS = 30  # about 20 microseconds: less than falling asleep and being woken costs


def never() -> bool:
    """The run is not being stopped."""
    return False


class Deadline:
    """When a call that waits must give up."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = math.inf if timeout is None else time.monotonic() + timeout

    def left(self) -> float:
        """Seconds until then: infinite without a timeout, negative afterwards."""
        return self._end - time.monotonic()

    def seconds(self) -> float | None:
        """What to pass on as a timeout."""
        return None if self.timeout is None else max(0.0, self.left())

    def nap_ms(self) -> float:
        """For how long to sleep at most before asking `abandon` again."""
        return max(0.0, min(NAP_MS, self.left() * 1000))


class Waiter:
    """Waits at one end of a channel.

    Args:
        doorbell: what the other ends ring when something has changed.
        abandon: whether the run is being stopped.
        what: names the end in errors.
    """

    def __init__(self, doorbell: Doorbell, abandon: Abandon, what: str) -> None:
        self._doorbell = doorbell
        self._abandon = abandon
        self._what = what
        self._poll = select.poll()
        self._poll.register(doorbell.fileno(), select.POLLIN)

    def until(self, ready: Callable[[], T | None], *, timeout: float | None) -> T:
        """The first value of `ready` that is not None.

        Raises:
            TimedOut: `timeout` seconds passed.
            Abandoned: the run is being stopped.
        """
        if (value := ready()) is not None:
            return value
        deadline = Deadline(timeout)
        while (value := self._look(ready)) is None:
            check_waiting(deadline, self._abandon, self._what)
            if self._poll.poll(deadline.nap_ms()):
                self._doorbell.silence()  # before looking again, so that no ring is missed
        return value

    def _look(self, ready: Callable[[], T | None]) -> T | None:
        for _ in range(LOOKS):
            if (value := ready()) is not None:
                return value
        return None


def check_waiting(deadline: Deadline, abandon: Abandon, what: str) -> None:
    """Returns where waiting may go on.

    Raises:
        TimedOut: the deadline passed.
        Abandoned: the run is being stopped.
    """
    if abandon():
        raise Abandoned(f"{what} was given up, because the run is being stopped.")
    if deadline.left() <= 0:
        raise TimedOut(f"{what}: nothing happened within {deadline.timeout:g} s.")
