"""Runs a server from its first connection to the answer to its last request."""

import asyncio
import contextlib
import errno
import gc
import socket
import sys
from collections.abc import Callable

from rollmill.record.signals import StopRequest
from rollmill.serving.application import PolicyApplication
from rollmill.serving.batching import BatchingRule
from rollmill.serving.connection import HttpConnection
from rollmill.serving.context import ConnectionContext
from rollmill.serving.decisions import BatchedPolicy
from rollmill.serving.engine import MAX_FAILURES
from rollmill.serving.limits import ServerLimits
from rollmill.serving.responses import Refusal
from rollmill.serving.statistics import ServerStatistics

TICK = 0.1
"""Seconds between two checks for stop requests and slow clients."""

REFUSED_AT_ONCE = 64
"""Maximum number of connections that are rejected at a time. Further connections wait to be accepted."""

CLOSED_AT_ONCE = 64
"""Number of connections without an admitted request that are closed if there are no file descriptors left."""


class Server:
    """Serves a compiled policy on a listening socket, in batches gathered according to `rule`.

    Clients have to send `token`, unless it is None.
    """

    def __init__(
        self,
        policy: BatchedPolicy,
        rule: BatchingRule,
        limits: ServerLimits,
        statistics: ServerStatistics,
        *,
        token: bytes | None = None,
    ) -> None:
        self._policy, self._rule, self._limits, self._token = policy, rule, limits, token
        self._statistics = statistics
        self._accepting: set[asyncio.Task] = set()

    def run(
        self, listener: socket.socket, stop: Callable[[], StopRequest | bool], *, ready: Callable[[], None]
    ) -> bool:
        """Serves until `stop()` is true, then answers the requests in flight and closes the listener.

        `stop` is called ten times a second, and `ready` once connections are accepted. Returns False if the server
        gave up because several batches failed in a row.
        """
        return asyncio.run(self._run(listener, stop, ready))

    async def _run(self, listener: socket.socket, stop: Callable, ready: Callable[[], None]) -> bool:
        loop = asyncio.get_running_loop()
        self._application = PolicyApplication(
            self._policy, self._rule, self._limits, self._statistics, token=self._token, clock=loop.time
        )
        self._context = ConnectionContext(self._application, self._limits, self._statistics)
        gc.collect()
        gc.freeze()  # otherwise a collection would visit all objects of JAX, which takes a tenth of a second
        loop.add_reader(listener, self._accept, listener)
        ready()
        try:
            while not stop() and self._application.failures < MAX_FAILURES:
                await self._tick()
            await self._drain()
        finally:
            loop.remove_reader(listener)
            listener.close()
            self._application.close()
        return self._application.failures < MAX_FAILURES

    async def _tick(self) -> None:
        await asyncio.sleep(TICK)
        now = asyncio.get_running_loop().time()
        for connection in list(self._context.connections):
            connection.check_time(now)
        self._statistics.set("open_connections", len(self._context.connections))
        self._application.count()

    async def _drain(self) -> None:
        """Answers the requests in flight. New requests are rejected, as are new connections'."""
        self._application.stopping = self._context.stopping = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.drain_seconds
        while self._application.unanswered and loop.time() < deadline:
            await self._tick()
        for connection in list(self._context.connections):
            connection.close()
        while self._context.connections and loop.time() < deadline:
            await self._tick()
        if left := self._application.unanswered:
            print(f"rollmill: {left} requests were not answered before the server stopped", file=sys.stderr)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts one connection at a time, so that workers that share the listener share the connections."""
        beyond = self._context.taken - self._limits.connections
        if beyond >= REFUSED_AT_ONCE and not len(self._context.strangers):
            self._pause(listener)
            return
        try:
            client, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            self._close_strangers()
            self._pause(listener)
            return
        client.setblocking(False)
        if client.family != socket.AF_UNIX:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        full = beyond >= 0 and not self._context.strangers.close_one()
        self._statistics.add("connections")
        connection = HttpConnection(self._context, self._refusal() if full else None)
        self._context.opening.add(connection)
        task = asyncio.get_running_loop().create_task(self._open(client, connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _open(self, client: socket.socket, connection: HttpConnection) -> None:
        try:
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client)
        finally:
            self._context.opening.discard(connection)

    def _refusal(self) -> Refusal:
        limit = self._limits.connections
        return Refusal(503, f"the limit of {limit} open connections is reached.", retry_after=1)

    def _close_strangers(self) -> None:
        """Closes connections without a token, because the process has no free file descriptors."""
        for _ in range(CLOSED_AT_ONCE):
            if not self._context.strangers.close_one():
                return

    def _pause(self, listener: socket.socket) -> None:
        """Accepts nothing for a moment. Connections wait in the listener."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(TICK, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)
