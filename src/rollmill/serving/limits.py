"""Limits of a server on sizes, counts and times."""

import contextlib
import resource
from dataclasses import dataclass, replace

from rollmill.core.bounds import Count, Positive

BYTES_PER_NUMBER = 32
"""The longest JSON number of 64 bits has 25 characters. A comma and spaces come on top."""

BYTES_BESIDES, BYTES_BESIDES_EACH = 4096, 128
"""Names of fields and white space of a body, and brackets and a session's id of each observation."""

DESCRIPTORS_BESIDES = 1024
"""Descriptors of a server that are no connections: JAX's, libraries' and those of connections about to close."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server. A request that exceeds one is answered with an error that names the limit."""

    body_bytes: Count
    """Most bytes of a request's body."""
    connections: Count = 1024
    """Most connections that are open at a time."""
    queued: Count = 4096
    """Most observations that wait for a batch."""
    sessions: Count = 1024
    """Most sessions of a recurrent policy."""
    session_seconds: Positive = 600.0
    """Seconds without a request after which a session may be given up for a new one."""
    head_bytes: Count = 16 * 2**10
    """Most bytes of a request's first line and headers."""
    headers: Count = 64
    """Most headers of a request."""
    held_bytes: Count = 256 * 2**20
    """Most bytes of all bodies that have been received and are not answered yet."""
    pipelined: Count = 32
    """Requests of one connection that are computed at a time. Further ones wait for their answers."""
    receive_seconds: Positive = 10.0
    """Most seconds from the first byte of a request to its last."""
    idle_seconds: Positive = 75.0
    """Most seconds between two requests of a connection."""
    send_seconds: Positive = 10.0
    """Most seconds that a client may need to take an answer."""
    drain_seconds: Positive = 30.0
    """Most seconds that the requests in flight have when the server is stopped."""

    def with_sessions(self, sessions: int, seconds: float) -> "ServerLimits":
        """Returns these limits with another number of sessions, which end after `seconds` without a request."""
        return replace(self, sessions=sessions, session_seconds=seconds)


def limits_of(max_batch: int, numbers: int) -> ServerLimits:
    """Returns the limits of a server that accepts a full batch of `max_batch` observations in one body.

    `numbers` counts the scalars of one observation and its action mask.
    """
    body = BYTES_BESIDES + max_batch * (BYTES_PER_NUMBER * numbers + BYTES_BESIDES_EACH)
    usual = ServerLimits(body)
    return replace(usual, queued=max(usual.queued, 4 * max_batch), held_bytes=max(usual.held_bytes, 4 * body))


def allow_descriptors(connections: int) -> None:
    """Raises this process's limit on file descriptors to the number needed for `connections`, as far as
    permitted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + DESCRIPTORS_BESIDES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
