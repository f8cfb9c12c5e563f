"""Forwards frames between network interfaces as a slow network does: late, and at a limited rate.

    python benchmarks/slow_link.py p1 p2 p3 --delay-ms 5 --mbit 50

This process is the switch between the hosts of host_namespaces.py, in place of a bridge, for kernels without
netem. Each frame leaves `--delay-ms` after it came, or later where more come than an interface takes at
`--mbit`. What waits longer than `MAX_WAIT` is dropped, as by the buffer of a router. It runs in the network
namespace of the interfaces, as root, and writes a line once it forwards.
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import select
import socket
import struct
import time
from dataclasses import dataclass

ALL_PROTOCOLS, OUTGOING = 0x0003, 4
MAX_FRAME = 2**16
MAX_WAIT = 0.5
"""Seconds for which frames wait for an interface at most."""
BUFFER = 8 * 2**20
SIOCETHTOOL, CHECKSUMS_BY_DEVICE = 0x8946, 0x17
SO_RCVBUFFORCE = 33


@dataclass
class Port:
    """An interface of the switch."""

    socket: socket.socket
    free_at: float = 0.0
    """The time at which it has sent all that waits for it."""


class Switch:
    """Learns behind which interface an address is, and forwards frames to it.

    Args:
        names: the interfaces.
        delay: seconds that each frame takes.
        rate: bytes a second that an interface sends.
    """

    def __init__(self, names: list[str], delay: float, rate: float) -> None:
        self._ports = {opened.fileno(): Port(opened) for opened in map(_opened, names)}
        self._delay, self._rate = delay, rate
        self._behind: dict[bytes, Port] = {}
        self._waiting: list[tuple[float, int, Port, bytes]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Forwards frames for ever."""
        while True:
            timeout = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for number in select.select(list(self._ports), [], [], timeout)[0]:
                self._receive(self._ports[number])
            self._send_due()

    def _receive(self, source: Port) -> None:
        with contextlib.suppress(OSError):  # no more frames, or the link is down
            while True:
                frame, address = source.socket.recvfrom(MAX_FRAME)
                if address[2] != OUTGOING:
                    self._behind[frame[6:12]] = source
                    self._queue(source, frame)

    def _queue(self, source: Port, frame: bytes) -> None:
        now, one = time.monotonic(), self._behind.get(frame[:6])
        for port in [one] if one else [port for port in self._ports.values() if port is not source]:
            begins = max(now, port.free_at)
            if begins - now > MAX_WAIT:
                continue
            port.free_at = begins + len(frame) / self._rate
            heapq.heappush(self._waiting, (port.free_at + self._delay, next(self._order), port, frame))

    def _send_due(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            *_, port, frame = heapq.heappop(self._waiting)
            with contextlib.suppress(OSError):  # the link is down
                port.socket.send(frame)


def _opened(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    opened.bind((name, 0))
    opened.setblocking(False)
    return opened


def compute_checksums(name: str) -> None:
    """Has the kernel write checksums into the frames that an interface sends.

    An interface in memory leaves them out, since no bit is lost there, and a copy of its frames would be damaged.
    """
    value = ctypes.create_string_buffer(struct.pack("II", CHECKSUMS_BY_DEVICE, 0))
    request = struct.pack("16sP", name.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCETHTOOL, request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="interfaces")
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--mbit", type=float, default=50.0, help="megabits a second of each interface")
    parser.add_argument("--checksums", action="store_true", help="only have the interfaces write checksums")
    chosen = parser.parse_args()
    if chosen.checksums:
        for name in chosen.names:
            compute_checksums(name)
        return
    switch = Switch(chosen.names, chosen.delay_ms / 1e3, chosen.mbit * 1e6 / 8)
    print("forwards", flush=True)
    switch.run()


if __name__ == "__main__":
    main()
