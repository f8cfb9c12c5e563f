"""Tracks connections without an admitted request, which make room for new connections when a server is full."""

import ipaddress
from typing import Any, Protocol, runtime_checkable

IPV6_HOST = 64
"""Number of leading bits of an IPv6 address that identify a host, which can use all addresses below them."""


@runtime_checkable
class Closable(Protocol):
    """Interface of a connection that can be closed."""

    def give_up(self) -> None:
        """Closes the connection at once, without an answer."""
        ...


class Strangers:
    """Connections without an admitted request, grouped by host, with the oldest of each host first.

    A host with many connections loses only its own connections, so it cannot keep out clients on other hosts or
    authenticated clients.
    """

    def __init__(self) -> None:
        self._of_host: dict[str, dict[Closable, None]] = {}
        self._hosts: dict[Closable, str] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, connection: Closable, peer: Any) -> None:
        """Adds a new connection. `peer` is the address of its other end, as returned by the socket."""
        host = host_of(peer)
        self._hosts[connection] = host
        self._of_host.setdefault(host, {})[connection] = None

    def discard(self, connection: Closable) -> None:
        """Removes a connection that has been authenticated or closed."""
        if (host := self._hosts.pop(connection, None)) is None:
            return
        del self._of_host[host][connection]
        if not self._of_host[host]:
            del self._of_host[host]

    def close_one(self) -> bool:
        """Closes the oldest connection of the host with the most connections. Returns False if there are no
        connections.
        """
        if not self._hosts:
            return False
        oldest = next(iter(max(self._of_host.values(), key=len)))
        self.discard(oldest)
        oldest.give_up()
        return True


def host_of(peer: Any) -> str:
    """Returns the host of a socket's address. All clients of a Unix socket count as one host."""
    if not isinstance(peer, tuple):
        return ""
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except ValueError:
        return str(peer[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_HOST), strict=False))
