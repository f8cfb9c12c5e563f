"""Connections between two processes that carry bytes, small JSON objects and file descriptors."""

import array
import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from rollmill.channels.errors import ConnectionLost, Refused
from rollmill.channels.transport.tcp_options import watch_link
from rollmill.channels.waiting import Abandon, Deadline, check_waiting, never
from rollmill.core.json_data import parse_object

LENGTH = struct.Struct("<I")
MAX_JSON_BYTES = 1 << 16
MAX_DESCRIPTORS = 4


class Connection:
    """One end of a stream socket. One thread may send while another receives.

    Every call raises `ConnectionLost` when the stream has ended, `TimedOut` after `timeout` seconds (None: never),
    and `Abandoned` when `abandon` returns True. After `TimedOut` or `Abandoned`, part of a message may have been
    transferred, and the connection must be closed.
    """

    abandon: Abandon
    """Returns True when the run is being stopped. Blocking calls poll it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        watch_link(sock)
        self._socket = sock
        self.abandon = never

    def fileno(self) -> int:
        """Returns the file descriptor of the socket, which is readable when there is data to receive."""
        return self._socket.fileno()

    def send(self, *parts: memoryview | bytes, timeout: float | None = None) -> None:
        """Sends buffers over the connection, one after the other. Raises `TimedOut` after `timeout` seconds."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        deadline = Deadline(timeout)
        while views:
            try:
                _skip(views, self._socket.sendmsg(views))
            except BlockingIOError:
                self._sleep(select.POLLOUT, deadline)
            except OSError as error:
                raise ConnectionLost(f"the connection was lost: {error}.") from error

    def receive_some(self, view: memoryview) -> int:
        """Reads available bytes into the front of a non-empty `view`, and returns their number, which may be 0."""
        try:
            count = self._socket.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLost(f"the connection was lost: {error}.") from error
        if count == 0:
            raise ConnectionLost("the other end closed the connection.")
        return count

    def check_silent(self) -> None:
        """Checks that the other end is still connected and has sent nothing.

        Raises `ConnectionLost` if the stream has ended, and `Refused` if there is data.
        """
        if self.receive_some(memoryview(bytearray(1))):
            raise Refused("the other end sent data out of turn.")

    def receive_into(self, view: memoryview, *, timeout: float | None = None) -> None:
        """Fills `view` with received bytes. Raises `TimedOut` if they take over `timeout` seconds."""
        deadline = Deadline(timeout)
        while len(view):
            count = self.receive_some(view)
            view = view[count:]
            if count == 0:
                self._sleep(select.POLLIN, deadline)

    def receive(self, count: int, *, timeout: float | None = None) -> bytes:
        """Receives exactly `count` bytes from the connection. Raises `TimedOut` after `timeout` seconds."""
        buffer = bytearray(count)
        self.receive_into(memoryview(buffer), timeout=timeout)
        return bytes(buffer)

    def send_json(
        self, value: dict[str, Any], *, descriptors: Sequence[int] = (), timeout: float | None = None
    ) -> None:
        """Sends a small JSON object, and file descriptors with it (Unix sockets only).

        Raises `TimedOut` after `timeout` seconds.
        """
        text = json.dumps(value).encode()
        message = LENGTH.pack(len(text)) + text
        if descriptors:
            sent = self._send_descriptors(message[:1], descriptors, Deadline(timeout))
            message = message[sent:]
        self.send(message, timeout=timeout)

    def receive_json(
        self, *, limit: int = MAX_JSON_BYTES, timeout: float | None = None
    ) -> tuple[dict[str, Any], list[int]]:
        """Receives a JSON object of at most `limit` bytes, and the file descriptors sent with it, which the caller
        must close.

        Raises `Refused` if the data is too long or not a JSON object, and `TimedOut` after `timeout` seconds.
        """
        deadline = Deadline(timeout)
        first, descriptors = self._receive_descriptors(deadline)
        try:
            rest = self.receive(LENGTH.size - 1, timeout=deadline.seconds())
            (length,) = LENGTH.unpack(first + rest)
            if length > limit:
                raise Refused(f"the other end announced {length} bytes of JSON, more than the limit of {limit}.")
            text = self.receive(length, timeout=deadline.seconds())
            return parse_object(text, where="a message", limit=limit, error=Refused), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def end(self) -> None:
        """Shuts the stream down. Calls that block on it at either end raise `ConnectionLost`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Closes only the file descriptor, as in a forked child. The parent's end of the stream stays open."""
        self._socket.close()

    def close(self) -> None:
        """Shuts the stream down and closes its file descriptor."""
        self.end()
        self._socket.close()

    def _sleep(self, events: int, deadline: Deadline) -> None:
        check_waiting(deadline, self.abandon, "the other end of a connection")
        poll = select.poll()
        poll.register(self._socket.fileno(), events)
        poll.poll(deadline.nap_ms())

    def _send_descriptors(self, first: bytes, descriptors: Sequence[int], deadline: Deadline) -> int:
        while True:
            try:
                return socket.send_fds(self._socket, [first], list(descriptors))
            except BlockingIOError:
                self._sleep(select.POLLOUT, deadline)
            except OSError as error:
                raise ConnectionLost(f"the connection was lost: {error}.") from error

    def _receive_descriptors(self, deadline: Deadline) -> tuple[bytes, list[int]]:
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        while True:
            try:
                first, extras, _, _ = self._socket.recvmsg(1, room)
            except BlockingIOError:
                self._sleep(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise ConnectionLost(f"the connection was lost: {error}.") from error
            if not first:
                raise ConnectionLost("the other end closed the connection.")
            return first, _descriptors(extras)


def _skip(views: list[memoryview], count: int) -> None:
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if count:
        views[0] = views[0][count:]


def _descriptors(extras: list[tuple[int, int, bytes]]) -> list[int]:
    received = array.array("i")
    for level, kind, data in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    for descriptor in received:
        os.set_inheritable(descriptor, False)
    return list(received)
