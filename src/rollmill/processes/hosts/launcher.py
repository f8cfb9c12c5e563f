"""Starts workers on the hosts of a batch job, through the process that the batch system started on each host."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollmill.channels.errors import Damaged
from rollmill.channels.transport.addresses import listen
from rollmill.channels.transport.handshake import Admission
from rollmill.channels.transport.listener import Listener, address_of
from rollmill.core.membership import Membership
from rollmill.processes.framing import encode, receive_frame, send_frame
from rollmill.processes.handshake import claim_of, other_code, refuse, welcome
from rollmill.processes.jobs import Job
from rollmill.processes.launchers import Exit
from rollmill.processes.local_launcher import LocalHandle, LocalLauncher
from rollmill.processes.messages import WorkerMessage

WAITING_SECONDS = 20.0
"""Seconds between two notices about a host whose process has not connected."""
END_SECONDS = 2.0


@dataclass(eq=False)
class HostHandle:
    """Handle of a worker on another host."""

    number: int
    job: Job
    order: dict[str, Any]
    asked_at: float = field(default_factory=time.monotonic)
    reported: int = 0
    host: "_Host | None" = None
    """Connection to the host's process that started the worker. None before this process has connected."""
    exit: Exit | None = None


class _Host:
    """The connection to the process of a host."""

    def __init__(self, peer: socket.socket, address: str) -> None:
        self.address = address
        self._peer = peer
        self._sending = threading.Lock()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a request. If the host is gone, the request is lost, and `HostsLauncher` notices the loss."""
        with contextlib.suppress(OSError), self._sending:
            send_frame(self._peer, encode(WorkerMessage(kind, fields, {})))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)


class HostsLauncher:
    """A `Launcher` for the processes of this process's batch job. A `with` block closes it.

    The replica number of a worker is the rank of the process that starts it. If a host's process has not connected
    or has vanished, the worker waits until it connects. `show` is called with messages for the user, from any
    thread.
    """

    def __init__(self, member: Membership, show: Callable[[str], None]) -> None:
        self._member, self._show = member, show
        self._local = LocalLauncher()
        self._numbers = itertools.count()
        self._hosts: dict[int, _Host] = {}
        self._handles: dict[int, HostHandle] = {}
        self._changing = threading.Lock()
        sock, _ = listen(member.address)
        self._listener = Listener(sock, member.token, self._receive, show)

    def start(self, job: Job, address: str, token: bytes) -> LocalHandle | HostHandle:
        """Starts a worker without waiting for it, and returns its handle.

        On another host, the process of the batch job starts the worker. On this host, it is started directly.
        """
        if job.replica == self._member.rank:
            return self._local.start(job, address, token)
        order = {"job": job.to_json(), "address": address, "token": token.hex()}
        handle = HostHandle(next(self._numbers), job, order)
        with self._changing:
            self._handles[handle.number] = handle
            self._assign(handle)
        return handle

    def output(self, handle: LocalHandle | HostHandle) -> int | None:
        """Returns a file descriptor for the output of a worker on this host, or None. Other hosts print their
        workers' output.
        """
        return self._local.output(handle) if isinstance(handle, LocalHandle) else None

    def exit(self, handle: LocalHandle | HostHandle) -> Exit | None:
        """Returns how a worker ended, or None while it runs. See `Launcher.exit`."""
        if isinstance(handle, LocalHandle):
            return self._local.exit(handle)
        waited = time.monotonic() - handle.asked_at
        if handle.host is None and handle.exit is None and waited > WAITING_SECONDS * (handle.reported + 1):
            handle.reported = int(waited / WAITING_SECONDS)
            self._show(
                f"{handle.job.name} has been waiting for {waited:.0f} s for the process with rank "
                f"{handle.job.replica}"
            )
        return handle.exit

    def kill(self, handle: LocalHandle | HostHandle, *, at_once: bool = True) -> None:
        """Ends the worker. With `at_once`, kills it and all processes that it has started (SIGKILL), otherwise
        asks it to end (SIGTERM).
        """
        if isinstance(handle, LocalHandle):
            self._local.kill(handle, at_once=at_once)
        elif handle.host is None:
            handle.exit = handle.exit or Exit(None)
        else:
            handle.host.send("kill", number=handle.number, at_once=at_once)

    def abandon(self, handle: LocalHandle | HostHandle) -> None:
        """Stops tracking a worker on an unreachable host. The worker ends itself, because its connection is cut as
        well.
        """
        if isinstance(handle, LocalHandle):
            self._local.abandon(handle)
            return
        handle.exit = handle.exit or Exit(None)
        if handle.host is not None:
            handle.host.close()

    def leaving(self, handle: LocalHandle | HostHandle) -> str:
        """Returns an empty string, because batch systems do not announce that a host is about to be removed."""
        return ""

    def condition(self, handle: LocalHandle | HostHandle) -> str:
        """Returns the reason why a worker's process cannot run, such as "stopped by a signal". Known only for
        workers on this host.
        """
        return self._local.condition(handle) if isinstance(handle, LocalHandle) else ""

    def close(self) -> None:
        """Ends all workers, and the processes that started them on the other hosts."""
        with self._changing:
            hosts = list(self._hosts.values())
        for host in hosts:
            host.send("end")
        self._listener.stop()
        for thread in self._listener.end_served():
            thread.join(END_SECONDS)
        self._local.close()

    def __enter__(self) -> "HostsLauncher":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _assign(self, handle: HostHandle) -> None:
        """Asks the process of a host for a worker, if it is there."""
        host = self._hosts.get(handle.job.replica)
        if host is not None and handle.exit is None:
            handle.host = host
            host.send("start", number=handle.number, **handle.order)

    def _receive(self, peer: socket.socket, admission: Admission) -> None:
        claim = claim_of(admission)
        rank, where = _rank_of(claim.name), address_of(peer.getpeername())
        if problem := other_code(claim.code, where):
            refuse(peer, admission, problem)
            return
        if not 0 < rank < self._member.count:
            refuse(peer, admission, f"rank {rank} is not one of {self._member.count}")
            return
        welcome(peer, admission)
        host = _Host(peer, where)
        self._arrive(rank, host)
        try:
            self._listen(peer)
        finally:
            self._leave(rank, host)

    def _arrive(self, rank: int, host: _Host) -> None:
        with self._changing:
            old = self._hosts.get(rank)
            self._hosts[rank] = host
            if old is not None:  # the process has reconnected before its end was noticed
                old.close()
                self._lose(old)
            for handle in self._handles.values():
                if handle.job.replica == rank and handle.host is None:
                    self._assign(handle)
        self._show(f"rank {rank} is {host.address}")

    def _leave(self, rank: int, host: _Host) -> None:
        with self._changing:
            if self._hosts.get(rank) is host:
                del self._hosts[rank]
            self._lose(host)

    def _lose(self, host: _Host) -> None:
        for handle in self._handles.values():
            if handle.host is host and handle.exit is None:
                handle.exit = Exit(None, f"its host {host.address} can no longer be reached")

    def _listen(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, Damaged):
            while (message := receive_frame(peer)) is not None:
                handle = self._handles.get(int(message.fields["number"]))
                if handle is not None:
                    handle.exit = handle.exit or Exit(message.fields["status"], message.fields["reason"])


def _rank_of(name: str) -> int:
    rank = name.rpartition("/")[2]
    return int(rank) if rank.isdecimal() else -1
