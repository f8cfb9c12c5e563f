"""Options of TCP sockets between hosts, so that a lost link is noticed after seconds rather than hours."""

import contextlib
import socket
import struct
import sys

SECONDS_UNTIL_LOST = 20
"""Seconds without an acknowledgement after which a host is considered dead."""

PROBE_SECONDS = 4
"""Seconds without a segment after which the kernel asks the other host for one, and again."""

MAX_RETRY_MS = 2000
"""Upper bound on the pause between two retransmissions, in milliseconds, so that a restored link is used soon."""

TCP_RTO_MAX_MS = 44
"""From linux/tcp.h, since Linux 6.15."""

LAST_ACKNOWLEDGED = struct.Struct("<56xI")
"""Of `struct tcp_info`: milliseconds since the last acknowledgement, tcpi_last_ack_recv."""


def watch_link(sock: socket.socket) -> None:
    """Sets the options of a connection between hosts, and does nothing to a socket of another family.

    The kernels probe each other, so they know that the link and the host are there whatever the processes do.
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
    with contextlib.suppress(OSError):  # an older kernel waits up to twice as long as the link was down
        sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, MAX_RETRY_MS)


def seconds_unacknowledged(sock: socket.socket) -> float | None:
    """Returns the seconds since the other host's kernel acknowledged anything.

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
