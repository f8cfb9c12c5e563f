"""Dialling a listener that may be overloaded, with retries and exponential backoff."""

import random
import socket
import time
from collections.abc import Callable

from rollmill.channels.errors import ConnectionLost, TimedOut
from rollmill.channels.transport.handshake import converse, present
from rollmill.channels.waiting import Deadline

REACH_SECONDS = 30.0
FIRST_WAIT, MAX_WAIT = 0.05, 2.0
FIRST_SECONDS, MAX_SECONDS = 0.02, 0.5
"""Delays of a `Backoff`, unless others are given."""


class Backoff:
    """Exponential backoff with jitter."""

    def __init__(self, first: float = FIRST_SECONDS, longest: float = MAX_SECONDS) -> None:
        self._first = first
        self._longest = longest
        self._limit = first

    def seconds(self) -> float:
        """Draws the next delay in seconds, between half of the current limit and the limit."""
        limit = self._limit
        self._limit = min(2 * limit, self._longest)
        return random.uniform(limit / 2, limit)

    def reset(self) -> None:
        """Restarts at the first delay, after a successful attempt."""
        self._limit = self._first


def reach(
    connect: Callable[[], socket.socket], token: bytes, claim: bytes = b"", *, timeout: float = REACH_SECONDS
) -> socket.socket:
    """Connects to a listener and completes the handshake with the run's token and a claim.

    A listener that lacks room, time, threads or file descriptors closes the connection without an answer. Only
    then, and after a timeout, is there another attempt, until `timeout` seconds have passed. Then `ConnectionLost`
    or `TimedOut` is raised. Without a listener (`OSError`), or with a wrong token (`Refused`), waiting would not
    help.
    """
    deadline, backoff = Deadline(timeout), Backoff(FIRST_WAIT, MAX_WAIT)
    while True:
        try:
            return _try(connect, token, claim, deadline)
        except (ConnectionLost, TimedOut, BlockingIOError):  # BlockingIOError: the listen queue is full
            delay = backoff.seconds()
            if deadline.left() < delay:
                raise
            time.sleep(delay)
            if deadline.left() <= 0:  # slept too long: another attempt would only hide the error
                raise


def _try(connect: Callable[[], socket.socket], token: bytes, claim: bytes, deadline: Deadline) -> socket.socket:
    sock = connect()
    try:
        converse(sock, present(token, claim), timeout=deadline.left())
    except BaseException:
        sock.close()
        raise
    return sock
