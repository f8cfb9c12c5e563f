"""Holds received messages by kind until a worker takes them."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from rollmill.channels.errors import Abandoned, TimedOut
from rollmill.core.errors import UsageError
from rollmill.processes.heartbeat import Progress
from rollmill.processes.messages import Seconds, WorkerMessage, size_of

MAX_UNTAKEN = 10_000
MAX_UNTAKEN_BYTES = 2**30
"""Maximum bytes of pending messages of one kind. A worker with more does not read the messages that it is sent."""


class Mailbox:
    """Messages for a worker, which one thread adds and others take. It also records whether the worker should
    stop.
    """

    def __init__(self) -> None:
        self._untaken: dict[str, deque[WorkerMessage]] = {}
        self._untaken_bytes: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._answers: dict[str, Callable[[WorkerMessage], None]] = {}
        self._overflowing: str | None = None
        self.stopping = False

    def put(self, message: WorkerMessage) -> None:
        """Adds a message. If too many bytes of its kind are pending, the worker gets an error instead."""
        with self._changed:
            answer = self._answers.get(message.kind)
            if answer is None:
                self._keep(message)
        if answer is not None:
            answer(message)

    def answer(self, kind: str, answer: Callable[[WorkerMessage], None]) -> None:
        """Passes messages of a kind to `answer` as they arrive, and pending messages at once."""
        with self._changed:
            self._answers[kind] = answer
            here = self._untaken.pop(kind, ())
            del self._untaken_bytes[kind]
        for message in here:
            answer(message)

    def stop(self) -> None:
        """Tells the worker to stop: all current and later calls of `wait` raise `Abandoned`."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises `Abandoned` after `stop`, and `UsageError` if too many messages are pending."""
        if self.stopping:
            raise Abandoned("the coordinator asked this worker to stop.")
        if self._overflowing is not None:
            raise UsageError(
                f"a worker has left too many messages of kind {self._overflowing!r} unread: more than "
                f"{MAX_UNTAKEN:,}, or a gigabyte. A worker must read its messages with `latest` or `wait`."
            )

    def latest(self, kind: str) -> WorkerMessage | None:
        """Returns the newest message of a kind and drops older ones, without waiting. Returns None if there is
        none.
        """
        with self._changed:
            of_kind = self._untaken.pop(kind, None)
            del self._untaken_bytes[kind]
        return of_kind[-1] if of_kind else None

    def wait(self, kind: str, timeout: Seconds | None) -> WorkerMessage:
        """Waits for the oldest pending message of a kind, and returns it.

        Raises `TimedOut` after `timeout` seconds, and `Abandoned` if the worker should stop.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self.check()
                of_kind = self._untaken.get(kind)
                if of_kind:
                    self._untaken_bytes[kind] -= size_of(of_kind[0])
                    return of_kind.popleft()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimedOut(f"no message of kind {kind!r} arrived within {timeout} s.")
                self._changed.wait(left)

    def _keep(self, message: WorkerMessage) -> None:
        of_kind = self._untaken.setdefault(message.kind, deque())
        if len(of_kind) >= MAX_UNTAKEN or self._untaken_bytes[message.kind] > MAX_UNTAKEN_BYTES:
            self._overflowing = message.kind
        else:
            of_kind.append(message)
            self._untaken_bytes[message.kind] += size_of(message)
        self._changed.notify_all()


class MailboxControl:
    """The part of a worker's `Control` that reads a mailbox and reports progress, used by processes
    and threads.
    """

    def __init__(self, mailbox: Mailbox, pulse: Progress) -> None:
        self._mailbox, self._pulse = mailbox, pulse

    def latest(self, kind: str) -> WorkerMessage | None:
        """Returns the newest message of a kind and drops older ones, without waiting. Returns None if there is
        none.
        """
        return self._mailbox.latest(kind)

    def wait(self, kind: str, timeout: Seconds | None = None) -> WorkerMessage:
        """Waits for the oldest pending message of a kind, and returns it.

        Raises `TimedOut` after `timeout` seconds, and `Abandoned` if the worker should stop.
        """
        with self._pulse.idle(f"waiting for {kind!r}"):
            return self._mailbox.wait(kind, timeout)

    def at(self, note: str, *, expect: Seconds = 0.0) -> None:
        """Reports the next activity of the main thread, such as `waiting for weights`, as a sign of progress."""
        self._pulse.note(note, expect)

    def stopping(self) -> bool:
        """Returns whether the coordinator wants this worker to stop."""
        return self._mailbox.stopping

    def check(self) -> None:
        """Raises `Abandoned` if the coordinator wants this worker to stop."""
        self._mailbox.check()
