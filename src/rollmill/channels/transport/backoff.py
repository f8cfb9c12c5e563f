"""The time between two tries: it doubles each time, and chance keeps many processes from trying in step."""

import random

FIRST_SECONDS, LONGEST_SECONDS = 0.02, 0.5


class Backoff:
    """Exponential back-off with jitter.

    Args:
        first: seconds after the first try, at most.
        longest: seconds that no wait exceeds.
    """

    def __init__(self, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS) -> None:
        self._first = first
        self._longest = longest
        self._limit = first

    def seconds(self) -> float:
        """How long to wait now: from half of the current limit up to all of it."""
        limit = self._limit
        self._limit = min(2 * limit, self._longest)
        return random.uniform(limit / 2, limit)

    def reset(self) -> None:
        """Begins anew, after a try that succeeded."""
        self._limit = self._first
