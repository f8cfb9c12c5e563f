"""How a process reaches a listener that may be slow: it tries again, and waits longer each time."""

import socket
import time
from collections.abc import Callable

from rollmill.channels.errors import ConnectionLost, TimedOut
from rollmill.channels.transport.backoff import Backoff
from rollmill.channels.transport.handshake import converse, present
from rollmill.channels.waiting import Deadline

REACH_SECONDS = 30.0
FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0


def reach(
    connect: Callable[[], socket.socket], token: bytes, claim: bytes = b"", *, timeout: float = REACH_SECONDS
) -> socket.socket:
    """A connection to a listener that has accepted the token and the claim.

    A listener that has no room, time, thread or file descriptor closes the connection without an answer; then this
    tries again. Where nobody listens, or the token is refused, waiting would not help.

    Args:
        connect: makes a connection.
        token: that both ends know.
        claim: see `handshake`.
        timeout: seconds for all tries together.

    Raises:
        Refused: the token is wrong.
        ConnectionLost: the listener closed every connection without an answer.
        TimedOut: it did not answer.
        OSError: there is no listener.
    """
    deadline, backoff = Deadline(timeout), Backoff(FIRST_WAIT, LONGEST_WAIT)
    while True:
        try:
            return _try(connect, token, claim, deadline)
        except (ConnectionLost, TimedOut, BlockingIOError):  # the last one: its queue is full
            wait = backoff.seconds()
            if deadline.left() < wait:
                raise
        time.sleep(wait)


def _try(connect: Callable[[], socket.socket], token: bytes, claim: bytes, deadline: Deadline) -> socket.socket:
    sock = connect()
    try:
        converse(sock, present(token, claim), timeout=deadline.left())
    except BaseException:
        sock.close()
        raise
    return sock
