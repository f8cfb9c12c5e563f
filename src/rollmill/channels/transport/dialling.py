"""Connects to a listener that may be overloaded, with retries and exponential backoff."""

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
    """Exponential backoff with jitter, for the delays between retries."""

    def __init__(self, first: float = FIRST_SECONDS, longest: float = MAX_SECONDS) -> None:
        self._first = first
        self._longest = longest
        self._limit = first

    def seconds(self) -> float:
        """Returns the next delay in seconds, drawn between half of the current limit and the limit."""
        limit = self._limit
        self._limit = min(2 * limit, self._longest)
        return random.uniform(limit / 2, limit)

    def reset(self) -> None:
        """Restarts with the shortest delay, after a successful attempt."""
        self._limit = self._first


def reach(
    connect: Callable[[], socket.socket], token: bytes, claim: bytes = b"", *, timeout: float = REACH_SECONDS
) -> socket.socket:
    """Connects to a listener, authenticates with the run's token, and returns the socket.

    Args:
        connect: function that opens a new connection, called once for each attempt.
        token: the secret of the run.
        claim: bytes that tell the listener who the caller is.
        timeout: seconds for all attempts. The connection is tried again if the queue of the listener is full, or
            if the listener closed it without an answer because it had no room, time, threads or file descriptors
            left.

    Raises:
        ConnectionLost: the listener closed the last connection of the available time.
        TimedOut: the listener did not answer within that time.
        OSError: `connect` failed, for example because nothing listens. Only a full queue is tried again.
        Refused: the listener rejected the token, or could not prove that it knows the token.
    """
    deadline, backoff = Deadline(timeout), Backoff(FIRST_WAIT, MAX_WAIT)
    while True:
        try:
            return _try(connect, token, claim, deadline)
        except (ConnectionLost, TimedOut, BlockingIOError):  # BlockingIOError means that the listen queue is full
            delay = backoff.seconds()
            if deadline.left() < delay:
                raise
            time.sleep(delay)
            if deadline.left() <= 0:  # the time is over, and another attempt would only hide the error
                raise


def _try(connect: Callable[[], socket.socket], token: bytes, claim: bytes, deadline: Deadline) -> socket.socket:
    sock = connect()
    try:
        converse(sock, present(token, claim), timeout=deadline.left())
    except BaseException:
        sock.close()
        raise
    return sock
