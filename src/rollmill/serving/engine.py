"""Computes batches one after another in a separate thread, while the event loop receives requests and sends
answers.
"""

import asyncio
import threading
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.serving.batching import Batcher, pad_batch, padded_size
from rollmill.serving.decisions import BatchedPolicy, PolicyRows
from rollmill.serving.responses import Refusal
from rollmill.serving.statistics import ServerStatistics

MAX_FAILURES = 3
"""Number of consecutive failed batches after which the server gives up."""

Answer = list[Any] | Refusal


class QueuedRequest(NamedTuple):
    """A request for actions that waits in the engine's queue."""

    rows: PolicyRows
    done: Callable[[Answer], None]
    """Callback in the event loop, with an action for each observation as JSON, or the reason for none."""


class Engine:
    """Computes the batches of a server on its device, in a separate thread.

    `lost_memories` is called in the event loop if a failure has destroyed the memories of all sessions.
    """

    def __init__(
        self,
        policy: BatchedPolicy,
        batcher: Batcher[QueuedRequest],
        statistics: ServerStatistics,
        *,
        lost_memories: Callable[[], None],
    ) -> None:
        self._policy, self._batcher, self._statistics = policy, batcher, statistics
        self._lost_memories = lost_memories
        self._loop = asyncio.get_running_loop()
        self._batches: SimpleQueue[list[QueuedRequest] | None] = SimpleQueue()
        self._timer: asyncio.Handle | None = None
        self._computing = False
        self.unanswered = 0
        """Requests that wait or are computed."""
        self.failures = 0
        """Number of batches that failed since the last successful batch."""
        threading.Thread(target=self._work, name="rollmill-serve", daemon=True).start()

    def submit(self, job: QueuedRequest) -> None:
        """Appends a request to the queue. It is computed in a batch with others."""
        slots = job.rows.slot.tolist() if self._policy.recurrent else ()
        self._batcher.add(job, rows=job.rows.slot.size, slots=slots, now=self._loop.time())
        self.unanswered += 1
        self._schedule()

    def close(self) -> None:
        """Ends the thread after the current batch."""
        self._batches.put(None)

    def _schedule(self) -> None:
        """Begins the next batch when it is due, but after all requests that have arrived by now."""
        due = self._batcher.due_at()
        if self._computing or due is None:
            return
        soon = due <= self._loop.time()
        if self._timer is not None:
            if not soon or not isinstance(self._timer, asyncio.TimerHandle):
                return
            self._timer.cancel()
        self._timer = self._loop.call_soon(self._begin) if soon else self._loop.call_at(due, self._begin)

    def _begin(self) -> None:
        self._timer = None
        if not self._computing and self._batcher.rows:
            self._computing = True
            self._batches.put(self._batcher.take())

    def _work(self) -> None:
        while (jobs := self._batches.get()) is not None:
            try:
                found = self._compute(jobs)
            # an error of the device or its driver is sent as the answer to the requests
            except Exception as error:
                found = error
            try:
                self._loop.call_soon_threadsafe(self._finish, jobs, found)
            except RuntimeError:  # the event loop has ended, and nobody waits for answers
                return

    def _compute(self, jobs: Sequence[QueuedRequest]) -> list[Answer]:
        count = sum(job.rows.slot.size for job in jobs)
        size = padded_size(count)
        rows: PolicyRows = pad_batch([job.rows for job in jobs], size)
        rows.slot[count:] = self._policy.sessions
        actions = self._policy(rows)
        self._statistics.record_batch(count, size)
        return _divide(actions, [job.rows.slot.size for job in jobs])

    def _finish(self, jobs: Sequence[QueuedRequest], found: list[Answer] | Exception) -> None:
        self._computing = False
        if isinstance(found, Exception):
            self._statistics.add("failed_batches")
            if self._policy.recurrent:  # waiting requests belong to sessions whose memories are lost
                jobs = [*jobs, *self._batcher.take_all()]
            message = f"the batch could not be computed: {type(found).__name__}: {str(found)[:300]}"
            answers: Sequence[Answer] = [Refusal(500, message)] * len(jobs)
            self._count_failure()
        else:
            self.failures, answers = 0, found
        if self._batcher.rows:
            self._schedule()
        self.unanswered -= len(jobs)
        for job, answer in zip(jobs, answers, strict=True):
            job.done(answer)

    def _count_failure(self) -> None:
        self.failures += 1
        self._lost_memories()
        try:
            self._policy.reset_memories()
        except Exception:  # the device can no longer be used, so the server gives up
            traceback.print_exc()
            self.failures = MAX_FAILURES


def _divide(actions: PyTree[np.ndarray], counts: Sequence[int]) -> list[Answer]:
    """Returns each request's part of a batch's actions `[N, ...]` as JSON, or an error if they are not finite."""
    finite = np.ones(sum(counts), bool)
    for leaf in jax.tree.leaves(actions):
        if leaf.dtype.kind not in "iub":
            finite &= np.isfinite(leaf[: finite.size]).reshape(finite.size, -1).all(axis=1)
    rows, answers, first = _as_lists(actions), [], 0
    for count in counts:
        here = slice(first, first + count)
        answers.append(rows[here] if finite[here].all() else Refusal(500, NOT_FINITE))
        first += count
    return answers


NOT_FINITE = "the policy's action is not finite. hint: check the run with `rollmill doctor RUN`."


def _as_lists(actions: PyTree[np.ndarray]) -> list[Any]:
    if isinstance(actions, dict):
        parts = zip(*map(_as_lists, actions.values()), strict=True)
        return [dict(zip(actions, values, strict=True)) for values in parts]
    if isinstance(actions, tuple | list):
        return [list(values) for values in zip(*map(_as_lists, actions), strict=True)]
    return actions.tolist()
