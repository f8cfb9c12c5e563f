"""Lets connections with received data take turns, so that each is parsed for a short time only."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

SECONDS = 0.005
"""Maximum time for turns before sockets are read again, so that no client waits for the data of others."""


Turn: TypeAlias = Callable[[], bool]
"""Function of a connection that parses part of the received data, and returns whether more remains."""


class Turns:
    """A queue of connections with data to parse. Connections with new data come before those with a backlog."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fresh: deque[Turn] = deque()
        self._backlog: deque[Turn] = deque()
        self._scheduled = False

    def ask(self, turn: Turn) -> None:
        """Adds a connection that is not in the queue yet."""
        self._fresh.append(turn)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        deadline = self._loop.time() + SECONDS
        while queue := self._fresh or self._backlog:
            turn = queue.popleft()
            if turn():
                self._backlog.append(turn)
            if self._loop.time() > deadline:
                break
        if self._fresh or self._backlog:
            self._schedule()
