"""The interface with which a worker's function talks to its coordinator, in a process or in a thread."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollmill.processes.messages import NOTHING, Seconds, WorkerMessage


@runtime_checkable
class Control(Protocol):
    """A worker's connection to its coordinator. All threads of the worker may use it.

    A job is finished when its function returns. If the coordinator asks the function to stop, it may let the error
    `Abandoned` propagate instead of finishing.
    """

    def send(
        self, kind: str, fields: Mapping[str, Any] = NOTHING, arrays: Mapping[str, np.ndarray] = NOTHING
    ) -> None:
        """Sends a message to the coordinator, after all messages that this worker has sent before. Arrays may be
        reused at once.

        Waits while the coordinator has too much unread data. Raises `Abandoned` if the coordinator is gone or
        wants this worker to stop, and has not taken the message. Raises a `UsageError` if the message is too
        large, or does not consist of JSON values and numeric arrays.
        """
        ...

    def latest(self, kind: str) -> WorkerMessage | None:
        """Returns the newest message of a kind and drops older ones, without waiting. Returns None if there is
        none.
        """
        ...

    def wait(self, kind: str, timeout: Seconds | None = None) -> WorkerMessage:
        """Waits for the oldest pending message of a kind, for at most `timeout` seconds, and returns it.

        A worker that waits here is idle, not hung. Raises `Abandoned` if the coordinator wants this worker to
        stop, and `TimedOut` if no message arrives in time.
        """
        ...

    def answer(self, kind: str, reply: Callable[[WorkerMessage], Mapping[str, Any]]) -> None:
        """Answers each message of a kind immediately from now on, even while the worker's main thread computes.

        `reply` returns the fields of the answer. It is called in another thread, and should not block.
        """
        ...

    def at(self, note: str, *, expect: Seconds = 0.0) -> None:
        """Reports the main thread's next activity, such as `waiting for weights`, as a sign of progress.

        `expect` is the number of seconds without progress to allow if it is more than usual, for example for
        compiling. A call takes about a microsecond.
        """
        ...

    def stopping(self) -> bool:
        """Returns whether the coordinator wants this worker to stop. Channels take this method as
        their `abandon`.
        """
        ...

    def check(self) -> None:
        """Raises `Abandoned` if the coordinator wants this worker to stop."""
        ...
