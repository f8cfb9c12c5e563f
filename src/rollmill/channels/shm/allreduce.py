"""All-reduce (mean) over ranks through shared memory, with bitwise the same result on every rank.

    1. Each rank writes its operand to its buffer, and increments its counter ARRIVED.
    2. When all have arrived, each rank averages its share of the elements over all buffers in the order of ranks,
       writes the means to the shared result, and increments its counter SUMMED.
    3. When all have summed, each rank copies the result.

One buffer for each rank is enough, because a rank that writes the operand of reduction n + 1 has seen all ranks
sum reduction n. One shared result is enough too, because a rank that writes result n + 1 has seen all ranks arrive
at n + 1, which each does after copying result n.

A rank that gives up sets a flag, and all others give up too. A rank that dies never arrives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.errors import ChannelClosed
from rollmill.channels.layout import Layout, fresh_buffer
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.memory import Fence
from rollmill.channels.waiting import Deadline, Waiter
from rollmill.core.errors import UsageError

LINE = 8  # words reserved for each rank, which fill a cache line
ARRIVED, SUMMED, STEP, LEFT, ATTACHED = range(5)
BLOCK = 1 << 15
"""Number of elements that are summed over all ranks at a time, so that the running sum stays in cache."""


class Span(NamedTuple):
    """Byte range of adjacent leaves of one dtype, which are summed as one array. The padding between them
    is zero.
    """

    dtype: np.dtype
    start: int
    stop: int


def spans(layout: Layout) -> list[Span]:
    """Divides a layout of floating-point leaves into as few spans as possible, each of one dtype."""
    merged: list[Span] = []
    ends = [leaf.offset for leaf in layout.leaves[1:]] + [layout.nbytes]
    for leaf, end in zip(layout.leaves, ends, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UsageError(
                f"{leaf} has a dtype for which no mean is defined. hint: reduce floating-point arrays."
            )
        if merged and merged[-1].dtype == leaf.dtype:
            merged[-1] = merged[-1]._replace(stop=end)
        else:
            merged.append(Span(leaf.dtype, leaf.offset, end))
    return merged


def mean_over(
    parts: Sequence[Sequence[np.ndarray]], out: Sequence[np.ndarray], *, share: int = 0, of: int = 1
) -> None:
    """Writes the mean over ranks of each span to `out`.

    `parts` holds the arrays of all spans for each rank, in the order of ranks. Only share number `share` of `of`
    equal shares is computed.
    """
    with np.errstate(all="ignore"):  # the update reports non-finite values together with their fragment
        for span, mean in enumerate(out):
            first, last = len(mean) * share // of, len(mean) * (share + 1) // of
            for start in range(first, last, BLOCK):
                block = slice(start, min(start + BLOCK, last))
                _mean([part[span][block] for part in parts], mean[block])


def _mean(parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    wide = np.promote_types(out.dtype, np.float32)
    total = out if wide == out.dtype else np.empty(out.shape, wide)
    np.copyto(total, parts[0])
    for part in parts[1:]:
        np.add(total, part.astype(wide, copy=False), out=total)
    np.divide(total, len(parts), out=total)
    if total is not out:
        np.copyto(out, total, casting="same_kind")


def span_views(layout_spans: Sequence[Span], buffer: memoryview | np.ndarray) -> list[np.ndarray]:
    """Returns flat array views of `buffer`, one for each span of a layout."""
    return [
        np.ndarray(((span.stop - span.start) // span.dtype.itemsize,), span.dtype, buffer, span.start)
        for span in layout_spans
    ]


def reduction_bytes(layout: Layout, size: int) -> int:
    """Returns the size in bytes of the memory that `size` ranks share for an all-reduce."""
    return size * (LINE * 8 + layout.nbytes) + layout.nbytes


class MemoryReduction:
    """One rank's end of an all-reduce in shared memory, an implementation of `channels.protocols.Reduction`.

    Each rank opens it once.
    """

    def __init__(
        self,
        memory: memoryview,
        layout: Layout,
        *,
        rank: int,
        doorbells: Sequence[Doorbell],
        waiter: Waiter,
        name: str,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._others = [bell for index, bell in enumerate(doorbells) if index != rank]
        self._waiter = waiter
        self._name = name
        self._fence = Fence()
        layout_spans = spans(layout)
        size, nbytes = len(doorbells), layout.nbytes
        self._lines = [memory[i * LINE * 8 : (i + 1) * LINE * 8].cast("q") for i in range(size)]
        starts = [size * LINE * 8 + i * nbytes for i in range(size + 1)]
        buffers = [memory[start : start + nbytes] for start in starts]
        self._operand = layout.flat_views(buffers[rank])
        self._parts = [span_views(layout_spans, buffer) for buffer in buffers[:size]]
        self._result_parts = span_views(layout_spans, buffers[size])
        self._result_bytes = np.ndarray((nbytes,), np.uint8, buffers[size])
        refuse_reopening(bool(self._lines[rank][ATTACHED]), name, rank)
        self._lines[rank][ATTACHED] = 1

    def mean(self, tree: PyTree, *, step: int = 0, timeout: float | None = None) -> PyTree[np.ndarray]:
        """Averages arrays over all ranks. Raises `TimedOut` unless all call it within `timeout` seconds."""
        return close_on_error(lambda: self._mean(tree, step, timeout), self.close)

    def close(self) -> None:
        """Leaves the all-reduce. Ranks that wait for this one get `ChannelClosed`."""
        self._fence()  # other ranks must see this rank's counters before they see that it has left
        self._lines[self._rank][LEFT] = 1
        self._ring_others()

    def _mean(self, tree: PyTree, step: int, timeout: float | None) -> PyTree[np.ndarray]:
        line, deadline = self._lines[self._rank], Deadline(timeout)
        number = line[ARRIVED] + 1
        self._check_left(ARRIVED, number)
        self._layout.fill(self._operand, tree)
        line[STEP] = step
        self._barrier(ARRIVED, number, deadline)
        check_steps([other[STEP] for other in self._lines], self._name)
        mean_over(self._parts, self._result_parts, share=self._rank, of=len(self._lines))
        self._barrier(SUMMED, number, deadline)
        buffer = fresh_buffer(self._layout.nbytes)
        np.copyto(buffer, self._result_bytes)
        return self._layout.unflatten(self._layout.flat_views(buffer))

    def _barrier(self, counter: int, number: int, deadline: Deadline) -> None:
        """Waits until that counter of every rank is `number`. Their earlier writes are visible afterwards."""
        self._fence()
        self._lines[self._rank][counter] = number
        self._fence()
        # The last rank to arrive wakes the others. If two arrive at the same time, at least one sees the other's
        # count.
        if self._all_at(counter, number):
            self._ring_others()
        else:
            self._waiter.until(lambda: self._all_at(counter, number), timeout=deadline.seconds())

    def _all_at(self, counter: int, number: int) -> bool | None:
        self._check_left(counter, number)
        self._fence()
        if min(line[counter] for line in self._lines) < number:
            return None
        self._fence()
        return True

    def _check_left(self, counter: int, number: int) -> None:
        """Raises if a rank left before it reached `number`. One that left later does not matter yet."""
        for rank, line in enumerate(self._lines):
            if line[LEFT]:
                self._fence()
                if rank == self._rank or line[counter] < number:
                    raise ChannelClosed(f"{self._name}: rank {rank} left the reduction.")

    def _ring_others(self) -> None:
        for doorbell in self._others:
            doorbell.ring()


def close_on_error(mean: Callable[[], PyTree[np.ndarray]], close: Callable[[], None]) -> PyTree[np.ndarray]:
    """Calls `mean` and returns its result, or calls `close` on any exception, so that other ranks stop waiting."""
    try:
        return mean()
    except BaseException:
        close()
        raise


def check_steps(steps: Sequence[int], name: str) -> None:
    """Raises a `UsageError` if ranks passed different values of `step`."""
    if len(set(steps)) > 1:
        listed = ", ".join(f"rank {rank} is at {step}" for rank, step in enumerate(steps))
        raise UsageError(
            f"{name}: ranks disagree about the step: {listed}. hint: restart all of them from one checkpoint."
        )


def refuse_reopening(opened: bool, name: str, rank: int) -> None:
    """Raises a `UsageError` if this rank has already opened the all-reduce."""
    if opened:
        raise UsageError(
            f"{name}: rank {rank} was opened before and cannot rejoin the sequence of reductions. hint: restart "
            "all ranks under a new name."
        )
