"""What all connections of a server share: requests, the application that answers them, and the resources
in use.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rollmill.serving.fair_turns import Turns
from rollmill.serving.limits import ServerLimits
from rollmill.serving.responses import Refusal, Response
from rollmill.serving.statistics import ServerStatistics
from rollmill.serving.unadmitted import Strangers


class Request(NamedTuple):
    """A complete HTTP request."""

    method: str
    path: str
    body: bytes


@runtime_checkable
class Application(Protocol):
    """Interface of objects that answer HTTP requests."""

    def admit(self, method: str, path: str, authorization: bytes) -> None:
        """Raises `Refusal` if a request is rejected because of its method, path or authorization."""
        ...

    def answer(self, request: Request, respond: Callable[[Response], None]) -> None:
        """Answers a request by calling `respond` once, now or later, or raises `Refusal`."""
        ...


class ConnectionContext:
    """What all connections of a server share: its application, limits and statistics, the open connections, and
    the bytes of requests without an answer.
    """

    def __init__(self, application: Application, limits: ServerLimits, statistics: ServerStatistics) -> None:
        self.application, self.limits, self.statistics = application, limits, statistics
        self.connections: set[Any] = set()
        self.opening: set[Any] = set()
        """Connections that were accepted, and cannot be written to yet."""
        self.strangers = Strangers()
        self.held_bytes = 0
        self.turns = Turns()
        self.stopping = False
        """True once a connection ends with the last answer that it waits for."""

    @property
    def taken(self) -> int:
        """Number of connections in use, including those about to open."""
        return len(self.connections) + len(self.opening)


class Exchange:
    """A request on a connection and its answer, which is sent after all earlier answers."""

    __slots__ = ("answer", "body_bytes", "held", "keep_alive", "old", "request", "without_body")

    def __init__(self) -> None:
        self.request: Request | Refusal | None = None
        self.answer: Response | None = None
        self.keep_alive, self.old, self.without_body = True, False, False
        self.held = self.body_bytes = 0
