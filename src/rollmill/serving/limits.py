"""Limits of a server on sizes, counts and times."""

import contextlib
import resource
from dataclasses import dataclass, replace

from rollmill.core.bounds import Count, Positive

BYTES_PER_NUMBER = 32
"""Bytes reserved for a JSON number. The longest 64-bit number has 25 characters, plus a comma and spaces."""

BYTES_BESIDES, BYTES_BESIDES_EACH = 4096, 128
"""Bytes of a body reserved for field names and white space, and for brackets and a session id per observation."""

DESCRIPTORS_BESIDES = 1024
"""File descriptors reserved for other uses than open connections: JAX, libraries, closing connections."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server. A request that exceeds a limit is answered with an error that names the limit."""

    body_bytes: Count
    """Maximum size of a request's body in bytes."""
    connections: Count = 1024
    """Maximum number of open connections."""
    queued: Count = 4096
    """Maximum number of observations in the queue."""
    sessions: Count = 1024
    """Maximum number of sessions of a recurrent policy."""
    session_seconds: Positive = 600.0
    """Seconds without a request after which a new session may replace a session."""
    head_bytes: Count = 16 * 2**10
    """Maximum size of a request's first line and headers in bytes."""
    headers: Count = 64
    """Maximum number of headers in a request."""
    held_bytes: Count = 256 * 2**20
    """Maximum total size, in bytes, of received bodies whose requests have not been answered yet."""
    pipelined: Count = 32
    """Maximum number of requests of one connection that are computed at a time. Further requests wait."""
    receive_seconds: Positive = 10.0
    """Maximum time, in seconds, from the first to the last byte of a request."""
    idle_seconds: Positive = 75.0
    """Maximum time, in seconds, between two requests on a connection."""
    send_seconds: Positive = 10.0
    """Maximum time, in seconds, in which a client must receive an answer."""
    drain_seconds: Positive = 30.0
    """Maximum number of seconds in which pending requests are answered when the server stops."""


def limits_for_batches(max_batch: int, num_scalars: int) -> ServerLimits:
    """Returns the limits of a server that accepts a full batch of `max_batch` observations in one body.

    `num_scalars` counts the scalars of one observation and its action mask.
    """
    body = BYTES_BESIDES + max_batch * (BYTES_PER_NUMBER * num_scalars + BYTES_BESIDES_EACH)
    usual = ServerLimits(body)
    return replace(usual, queued=max(usual.queued, 4 * max_batch), held_bytes=max(usual.held_bytes, 4 * body))


def raise_descriptor_limit(connections: int) -> None:
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
