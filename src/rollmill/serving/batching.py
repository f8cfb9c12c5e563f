"""Decides when a batch begins, which requests it contains, and to what size it is padded. The module reads no
clock, so callers pass the time.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.core.errors import UsageError

T = TypeVar("T")

MAX_ROWS = 2**16
"""Upper limit for `max_batch`."""


class BatchingRule(NamedTuple):
    """Settings for gathering requests into batches."""

    max_batch: int
    """Maximum number of observations in a batch, a power of two."""
    max_wait: float = 0.0
    """Seconds that the oldest request waits for others while the device is idle. With 0, it does not wait."""


class _Waiting(NamedTuple, Generic[T]):
    request: T
    rows: int
    slots: Sequence[int]
    arrived: float


class Batcher(Generic[T]):
    """Queues requests in order of arrival, until a batch is due according to `rule`.

    The observations of one request stay together. A batch contains at most one request of a session, since a later
    request needs the memory that the earlier request leaves.
    """

    def __init__(self, rule: BatchingRule) -> None:
        self.rule = rule
        self.rows = 0
        self._waiting: deque[_Waiting[T]] = deque()

    def add(self, request: T, *, rows: int, slots: Sequence[int] = (), now: float) -> None:
        """Appends a request with `rows` observations, at most `max_batch`, for the sessions in `slots`."""
        self._waiting.append(_Waiting(request, rows, slots, now))
        self.rows += rows

    def due_at(self) -> float | None:
        """Returns the time at which the next batch begins if the device is idle, or None if the queue is empty."""
        if not self._waiting:
            return None
        oldest = self._waiting[0].arrived
        return oldest if self.rows >= self.rule.max_batch else oldest + self.rule.max_wait

    def take(self) -> list[T]:
        """Removes and returns the requests of the next batch.

        These are the oldest requests that fit. Later requests of a session that is already in the batch are
        skipped.
        """
        taken: list[T] = []
        left: deque[_Waiting[T]] = deque()
        room, busy = self.rule.max_batch, set()
        while self._waiting and self._waiting[0].rows <= room:
            first = self._waiting.popleft()
            if busy.isdisjoint(first.slots):
                taken.append(first.request)
                room -= first.rows
            else:
                left.append(first)
            busy.update(first.slots)
        self._waiting.extendleft(reversed(left))
        self.rows -= self.rule.max_batch - room
        return taken

    def take_all(self) -> list[T]:
        """Removes and returns all queued requests."""
        taken = [waiting.request for waiting in self._waiting]
        self._waiting.clear()
        self.rows = 0
        return taken


def check_rule(rule: BatchingRule) -> BatchingRule:
    """Checks a batching rule and returns it.

    Raises a `UsageError` unless the largest batch is a power of two and the maximum wait is at most a minute.
    """
    size = rule.max_batch
    if not 1 <= size <= MAX_ROWS or size & (size - 1):
        raise UsageError(
            f"--max-batch {size} must be a power of two between 1 and {MAX_ROWS:,}, because batches are padded "
            f"to powers of two. hint: use --max-batch {min(padded_size(max(size, 1)), MAX_ROWS)}."
        )
    if not 0 <= rule.max_wait <= 60:
        raise UsageError(f"--max-wait-ms {rule.max_wait * 1000.0:g} must lie between 0 and 60000.")
    return rule


def padded_size(rows: int) -> int:
    """Returns the smallest power of two that is at least `rows`."""
    return 1 << (rows - 1).bit_length()


def padded_sizes(max_batch: int) -> list[int]:
    """Returns all possible batch sizes: the log2(max_batch) + 1 powers of two up to `max_batch`."""
    return [1 << power for power in range(max_batch.bit_length())]


def pad_batch(parts: Sequence[PyTree[np.ndarray]], size: int) -> PyTree[np.ndarray]:
    """Concatenates the rows of all parts, trees with leaves `[rows, ...]`, and adds zeros up to `size` rows."""

    def leaf(*arrays: Any) -> np.ndarray:
        result = np.zeros((size, *arrays[0].shape[1:]), arrays[0].dtype)
        np.concatenate(arrays, out=result[: sum(len(array) for array in arrays)])
        return result

    return jax.tree.map(leaf, *parts)
