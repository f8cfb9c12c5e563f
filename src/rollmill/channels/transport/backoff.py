"""Delays between retries: doubled after each, with jitter so that many processes do not retry in step."""

import random

FIRST_SECONDS, LONGEST_SECONDS = 0.02, 0.5


class Backoff:
    """Exponential backoff with jitter.

    Args:
        first: longest delay after the first attempt, in seconds.
        longest: longest delay after any attempt, in seconds.
    """

    def __init__(self, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS) -> None:
        self._first = first
        self._longest = longest
        self._limit = first

    def seconds(self) -> float:
        """The next delay in seconds: drawn between half of the current limit and all of it."""
        limit = self._limit
        self._limit = min(2 * limit, self._longest)
        return random.uniform(limit / 2, limit)

    def reset(self) -> None:
        """Restarts at the first delay, after a successful attempt."""
        self._limit = self._first
