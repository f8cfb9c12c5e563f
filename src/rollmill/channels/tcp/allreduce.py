"""All-reduce (mean) between hosts. Rank 0 gathers the operands, sums them in the order of ranks, and broadcasts
the result.

rank r -> rank 0   step, payload
rank 0 -> rank r   the steps of all ranks, and a payload, which is the mean if the steps agree
"""

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import PyTree

from rollmill.channels.errors import ChannelClosed, ConnectionLost, TimedOut
from rollmill.channels.layout import Layout, fresh_buffer
from rollmill.channels.shm.allreduce import check_steps, close_on_error, mean_over, span_views, spans
from rollmill.channels.tcp.hub import Hub
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.dialling import Backoff
from rollmill.channels.transport.handshake import PATIENCE
from rollmill.channels.waiting import NAP_MS, Abandon, Deadline, check_waiting

WORD = struct.Struct("<q")


class RootReduction:
    """Rank 0's end of an all-reduce over TCP, an implementation of `channels.protocols.Reduction`."""

    def __init__(self, layout: Layout, *, size: int, abandon: Abandon, name: str) -> None:
        self._layout = layout
        self._abandon = abandon
        self._name = name
        self._spans = spans(layout)
        self._buffers = [fresh_buffer(layout.nbytes) for _ in range(size)]
        self._parts = [span_views(self._spans, buffer) for buffer in self._buffers]
        self._others = range(1, size)
        self._connections: dict[int, Connection] = {}
        self._connected = threading.Condition()
        self._closed = threading.Event()

    def serve(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Hands the connection of another rank to `mean`, and returns when the all-reduce is closed."""
        rank = int(hello["rank"])
        with self._connected:
            if rank not in self._others or rank in self._connections:
                return
            connection.send_json({}, timeout=PATIENCE)
            connection.abandon = self._abandon
            self._connections[rank] = connection
            self._connected.notify()
        self._closed.wait()

    def mean(self, tree: PyTree, *, step: int = 0, timeout: float | None = None) -> PyTree[np.ndarray]:
        """Averages arrays over all ranks. Raises `TimedOut` unless all call it within `timeout` seconds."""
        return close_on_error(lambda: self._mean(tree, step, Deadline(timeout)), self.close)

    def close(self) -> None:
        """Ends the all-reduce for all ranks."""
        self._closed.set()
        with self._connected:
            for connection in self._connections.values():
                connection.end()

    def _mean(self, tree: PyTree, step: int, deadline: Deadline) -> PyTree[np.ndarray]:
        if self._closed.is_set():
            raise ChannelClosed(f"{self._name}: rank 0 left the reduction.")
        self._layout.pack(tree, self._buffers[0])
        steps = [step, *(self._gather(rank, deadline) for rank in self._others)]
        buffer = fresh_buffer(self._layout.nbytes)
        if len(set(steps)) == 1:
            mean_over(self._parts, span_views(self._spans, buffer))
        packed_steps = b"".join(map(WORD.pack, steps))
        for rank in self._others:
            with naming_rank(rank, self._name):
                self._connections[rank].check_silent()
                self._connections[rank].send(packed_steps, buffer.data, timeout=deadline.seconds())
        check_steps(steps, self._name)
        return self._layout.unflatten(self._layout.flat_views(buffer))

    def _gather(self, rank: int, deadline: Deadline) -> int:
        with naming_rank(rank, self._name):
            connection = self._connection(rank, deadline)
            (step,) = WORD.unpack(connection.receive(WORD.size, timeout=deadline.seconds()))
            connection.receive_into(self._buffers[rank].data, timeout=deadline.seconds())
        return step

    def _connection(self, rank: int, deadline: Deadline) -> Connection:
        with self._connected:
            while rank not in self._connections:
                check_waiting(deadline, self._abandon, "waiting for its connection")
                self._connected.wait(min(NAP_MS / 1000, max(0.0, deadline.left())))
            return self._connections[rank]


class BranchReduction:
    """The end of an all-reduce over TCP at any rank except 0, an implementation of
    `channels.protocols.Reduction`.
    """

    def __init__(
        self, layout: Layout, *, rank: int, size: int, hub: Hub, end: str, abandon: Abandon, name: str
    ) -> None:
        spans(layout)  # raises for leaves without a mean
        self._layout = layout
        self._rank = rank
        self._size = size
        self._hub = hub
        self._end = end
        self._abandon = abandon
        self._name = name
        self._buffer = fresh_buffer(layout.nbytes)
        self._connection: Connection | None = None
        self._closed = threading.Event()

    def mean(self, tree: PyTree, *, step: int = 0, timeout: float | None = None) -> PyTree[np.ndarray]:
        """Averages arrays over all ranks. Raises `TimedOut` unless all call it within `timeout` seconds."""
        return close_on_error(lambda: self._mean(tree, step, Deadline(timeout)), self.close)

    def close(self) -> None:
        """Leaves the all-reduce, which ends it for all ranks."""
        if self._closed.is_set():
            return
        self._closed.set()
        # rank 0 learns that this rank has left when the connection ends
        connection = self._connection or self._dial_once()
        if connection is not None:
            connection.close()

    def _mean(self, tree: PyTree, step: int, deadline: Deadline) -> PyTree[np.ndarray]:
        if self._closed.is_set():
            raise ChannelClosed(f"{self._name}: rank {self._rank} left the reduction.")
        self._layout.pack(tree, self._buffer)
        mean = fresh_buffer(self._layout.nbytes)
        with naming_rank(0, self._name):
            connection = self._connection = self._connection or self._dial(deadline)
            connection.send(WORD.pack(step), self._buffer.data, timeout=deadline.seconds())
            packed_steps = connection.receive(self._size * WORD.size, timeout=deadline.seconds())
            connection.receive_into(mean.data, timeout=deadline.seconds())
        check_steps([step for (step,) in WORD.iter_unpack(packed_steps)], self._name)
        return self._layout.unflatten(self._layout.flat_views(mean))

    def _dial(self, deadline: Deadline) -> Connection:
        backoff = Backoff()
        while (connection := self._dial_once()) is None:
            check_waiting(deadline, self._abandon, "connecting to it")
            self._closed.wait(min(backoff.seconds(), max(0.0, deadline.left())))
        return connection

    def _dial_once(self) -> Connection | None:
        dialled = self._hub.dial(self._end, rank=self._rank)
        if dialled is None:
            return None
        dialled[0].abandon = self._abandon
        return dialled[0]


@contextmanager
def naming_rank(rank: int, name: str) -> Iterator[None]:
    """Context manager that adds the rank of the peer to connection errors."""
    try:
        yield
    except ConnectionLost as error:
        raise ChannelClosed(f"{name}: rank {rank} left the reduction.") from error
    except TimedOut as error:
        raise TimedOut(f"{name}: rank {rank} did not join the reduction in time ({error})") from error
