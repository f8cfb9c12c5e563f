"""Parses socket addresses and opens sockets: `unix:/path`, `unix:@name` (Linux only) or `tcp:host:port`."""

import contextlib
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from rollmill.channels.transport.tcp_options import watch_link
from rollmill.core.errors import UsageError

BACKLOG = 128
HAS_ABSTRACT_PATHS = sys.platform == "linux"
PREFIX = "rollmill-"


def listen(address: str) -> tuple[socket.socket, str]:
    """Returns a listening socket, and the address at which it can be reached.

    Port 0 takes a free port, and `unix:` a free name.

    Raises a `UsageError` if it cannot listen at the address.
    """
    address = _free_name() if address == "unix:" else address
    family, where = parse_address(address)
    try:
        if family != socket.AF_UNIX:
            listener = socket.create_server(where, family=family, backlog=BACKLOG)
            return listener, f"tcp:{where[0]}:{listener.getsockname()[1]}"
        return _listen_in_host(where), address
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {error}.") from error


def parse_address(address: str) -> tuple[socket.AddressFamily, Any]:
    """Returns the address family of an address string, and the address for `socket.connect`.

    Raises a `UsageError` if the string is not an address.
    """
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return socket.AF_UNIX, f"\0{rest[1:]}" if rest.startswith("@") else rest
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdigit():
        return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port))
    raise UsageError(f"address {address!r} is not valid, expected tcp:host:port, unix:/path or unix:@name.")


def connect(address: str, *, timeout: float) -> socket.socket:
    """Returns a socket connected to an address, with options that detect a lost link to another host.

    Raises a `UsageError` for an invalid address, and an `OSError` if nothing listens there.
    """
    family, where = parse_address(address)
    peer = socket.socket(family)
    try:
        peer.settimeout(timeout)
        peer.connect(where)
        watch_link(peer)
    except BaseException:
        peer.close()
        raise
    return peer


def remove_socket_file(address: str) -> None:
    """Removes the file of a Unix socket after its listener has closed."""
    _, _, path = address.partition("unix:/")
    if path:
        file = Path("/", path)
        file.unlink(missing_ok=True)
        if file.parent.name.startswith(PREFIX):
            with contextlib.suppress(OSError):
                file.parent.rmdir()


def _listen_in_host(where: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _free_name() -> str:
    if HAS_ABSTRACT_PATHS:  # an abstract name is not a file, and disappears with the process
        return f"unix:@{PREFIX}{secrets.token_hex(8)}"
    # short, because the path of a socket has at most 104 bytes
    return f"unix:{tempfile.mkdtemp(prefix=PREFIX, dir='/tmp')}/s"
