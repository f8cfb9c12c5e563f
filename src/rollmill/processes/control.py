"""The interface of a worker's function to its coordinator, in a process or in a thread."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollmill.processes.messages import NOTHING, Seconds, WorkerMessage


@runtime_checkable
class Control(Protocol):
    """A worker's connection to its coordinator, safe to use from any of the worker's threads.

    The job is finished when its function returns. A function asked to stop may let `Abandoned` propagate instead
    of finishing.
    """

    def send(
        self, kind: str, fields: Mapping[str, Any] = NOTHING, arrays: Mapping[str, np.ndarray] = NOTHING
    ) -> None:
        """Sends a message, after all that this worker sent before. Arrays may be reused at once.

        Waits while the coordinator has much unread. Raises `Abandoned` if the coordinator is gone or wants this
        worker to stop, and did not take the message, and a `UsageError` if the message is too large, or does not
        consist of JSON and arrays of numbers.
        """
        ...

    def latest(self, kind: str) -> WorkerMessage | None:
        """Takes the newest message of a kind without waiting, and drops older messages. None if there is none."""
        ...

    def wait(self, kind: str, timeout: Seconds | None = None) -> WorkerMessage:
        """Waits for the oldest pending message of a kind, for at most `timeout` seconds.

        A worker that waits here is idle, not hung. Raises `Abandoned` if the coordinator wants this worker to
        stop, and `TimedOut` if none came in time.
        """
        ...

    def answer(self, kind: str, reply: Callable[[WorkerMessage], Mapping[str, Any]]) -> None:
        """Answers each message of a kind at once from now on, whatever the worker's main thread does.

        `reply` returns the fields of an answer. It is called in another thread, and should not wait.
        """
        ...

    def at(self, note: str, *, expect: Seconds = 0.0) -> None:
        """Records the next act of the worker's main thread, such as `waiting for weights`, as a sign of
        progress.

        `expect` is the number of seconds without progress to allow, if more than usual, for example for compiling.
        Takes about a microsecond.
        """
        ...

    def stopping(self) -> bool:
        """Returns whether the coordinator wants this worker to stop. Channels take it as their `abandon`."""
        ...

    def check(self) -> None:
        """Raises `Abandoned` if the coordinator wants this worker to stop."""
        ...
