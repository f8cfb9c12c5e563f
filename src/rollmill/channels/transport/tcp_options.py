"""TCP socket options that detect a lost link to another host within seconds rather than hours."""

import contextlib
import socket
import struct
import sys

SECONDS_UNTIL_LOST = 20
"""Seconds without an acknowledgement after which another host counts as lost."""

PROBE_SECONDS = 4
"""Seconds of silence after which the kernel sends a keep-alive probe, and interval between further probes."""

MAX_RETRY_MS = 2000
"""Maximum pause between two retransmissions in milliseconds, so that a restored link is used soon."""

TCP_RTO_MAX_MS = 44
"""Number of the socket option TCP_RTO_MAX_MS in linux/tcp.h, available since Linux 6.15."""

LAST_ACKNOWLEDGED = struct.Struct("<56xI")
"""The part of `struct tcp_info` up to `tcpi_last_ack_recv`, the milliseconds since the last acknowledgement."""


def watch_link(sock: socket.socket) -> None:
    """Sets the options that detect a lost link on a TCP connection. Does nothing to other sockets.

    The kernels of both hosts probe each other, so the link counts as alive regardless of what the processes do.
    After `SECONDS_UNTIL_LOST` without an acknowledgement the connection ends with an error.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform != "linux":
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SECONDS_UNTIL_LOST // PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SECONDS_UNTIL_LOST * 1000)
    # an older kernel may wait up to twice as long before it reports a lost link
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, MAX_RETRY_MS)


def seconds_unacknowledged(sock: socket.socket) -> float | None:
    """Returns the seconds since the other host's kernel last acknowledged anything.

    While the link is up this is at most about `PROBE_SECONDS`, even if the process there is stopped or stuck.
    Returns None if the system does not report it, and for sockets within one host.
    """
    if sys.platform != "linux" or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACKNOWLEDGED.size)
    except OSError:
        return None
    return LAST_ACKNOWLEDGED.unpack(info)[0] / 1000 if len(info) == LAST_ACKNOWLEDGED.size else None
