"""The mean over ranks through memory that they share; bit for bit the same in each.

    1. Each rank writes its part to its buffer, and has arrived.
    2. When all have arrived, each sums its share of the elements over all buffers in the order of ranks, writes
       their mean where all find it, and has summed.
    3. When all have summed, each copies the whole mean.

Counters say how many means each rank has arrived at and summed. One buffer a rank is enough: whoever writes
to it for mean n + 1 has seen all sum mean n. One place for the mean is enough too: whoever writes mean n + 1
has seen all arrive at it, which each does after copying mean n.

A rank that gives up says so in its line, and all others give up too; one that dies never arrives.
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

LINE = 8  # words of a rank: a cache line of its own
ARRIVED, SUMMED, STEP, LEFT, ATTACHED = range(5)
BLOCK = 1 << 15
"""Elements that are summed over all ranks before the next ones are: the running sum stays in a cache."""


class Span(NamedTuple):
    """Neighbouring leaves of one type, summed as one array; what lies between them is zeros."""

    dtype: np.dtype
    start: int
    stop: int


def spans(layout: Layout) -> list[Span]:
    """The layout as few arrays.

    Raises:
        UsageError: a leaf is of integers, whose mean is none.
    """
    found: list[Span] = []
    ends = [leaf.offset for leaf in layout.leaves[1:]] + [layout.nbytes]
    for leaf, end in zip(layout.leaves, ends, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UsageError(f"{leaf} has no mean in its own type: reduce floating-point arrays.")
        if found and found[-1].dtype == leaf.dtype:
            found[-1] = found[-1]._replace(stop=end)
        else:
            found.append(Span(leaf.dtype, leaf.offset, end))
    return found


def mean_over(
    parts: Sequence[Sequence[np.ndarray]], out: Sequence[np.ndarray], *, share: int = 0, of: int = 1
) -> None:
    """Writes the mean over ranks, or one share of its elements.

    Args:
        parts: of each rank, in order, the arrays of all spans.
        out: where the mean of each span goes.
        share: which part of each span to write.
        of: how many such parts there are.
    """
    with np.errstate(all="ignore"):  # what is not finite is found where it matters
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


def span_views(found: Sequence[Span], buffer: memoryview | np.ndarray) -> list[np.ndarray]:
    """The spans as flat arrays that lie in `buffer`."""
    return [
        np.ndarray(((span.stop - span.start) // span.dtype.itemsize,), span.dtype, buffer, span.start)
        for span in found
    ]


def reduction_bytes(layout: Layout, size: int) -> int:
    """Size of the memory that `size` ranks share."""
    return size * (LINE * 8 + layout.nbytes) + layout.nbytes


class MemoryReduction:
    """One rank's end; see `rollmill.channels.Reduction`.

    Args:
        memory: `reduction_bytes(layout, size)` bytes, zeros at first.
        layout: of the tree.
        rank: this one.
        doorbells: of all ranks.
        waiter: on this rank's.
        name: for errors.

    Raises:
        UsageError: this rank was opened before.
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
        found = spans(layout)
        size, nbytes = len(doorbells), layout.nbytes
        self._lines = [memory[i * LINE * 8 : (i + 1) * LINE * 8].cast("q") for i in range(size)]
        starts = [size * LINE * 8 + i * nbytes for i in range(size + 1)]
        buffers = [memory[start : start + nbytes] for start in starts]
        self._own = layout.flat_views(buffers[rank])
        self._parts = [span_views(found, buffer) for buffer in buffers[:size]]
        self._mean_parts = span_views(found, buffers[size])
        self._mean_bytes = np.ndarray((nbytes,), np.uint8, buffers[size])
        refuse_twice(bool(self._lines[rank][ATTACHED]), name, rank)
        self._lines[rank][ATTACHED] = 1

    def mean(self, tree: PyTree, *, step: int = 0, timeout: float | None = None) -> PyTree[np.ndarray]:
        """The mean over all ranks."""
        return over_at_error(lambda: self._mean(tree, step, timeout), self.close)

    def close(self) -> None:
        """This rank takes no further part."""
        self._fence()
        self._lines[self._rank][LEFT] = 1
        self._ring_others()

    def _mean(self, tree: PyTree, step: int, timeout: float | None) -> PyTree[np.ndarray]:
        line, deadline = self._lines[self._rank], Deadline(timeout)
        number = line[ARRIVED] + 1
        self._check_left(ARRIVED, number)
        self._layout.fill(self._own, tree)
        line[STEP] = step
        self._meet(ARRIVED, number, deadline)
        check_steps([other[STEP] for other in self._lines], self._name)
        mean_over(self._parts, self._mean_parts, share=self._rank, of=len(self._lines))
        self._meet(SUMMED, number, deadline)
        buffer = fresh_buffer(self._layout.nbytes)
        np.copyto(buffer, self._mean_bytes)
        return self._layout.unflatten(self._layout.flat_views(buffer))

    def _meet(self, counter: int, number: int, deadline: Deadline) -> None:
        """Waits until that counter of every rank is at `number`; what they wrote before is seen after."""
        self._fence()
        self._lines[self._rank][counter] = number
        self._fence()
        if self._all_at(counter, number):  # the last one, or one of those who may be: of two, one sees the other
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
        """What a rank did before it left is still good."""
        for rank, line in enumerate(self._lines):
            if line[LEFT]:
                self._fence()
                if rank == self._rank or line[counter] < number:
                    raise ChannelClosed(f"{self._name}: rank {rank} takes no further part.")

    def _ring_others(self) -> None:
        for doorbell in self._others:
            doorbell.ring()


def over_at_error(mean: Callable[[], PyTree[np.ndarray]], close: Callable[[], None]) -> PyTree[np.ndarray]:
    """What `mean` returns; whatever it raises, this rank takes no further part: the others shall not wait."""
    try:
        return mean()
    except BaseException:
        close()
        raise


def check_steps(steps: Sequence[int], name: str) -> None:
    """Raises `UsageError` where ranks reduce different things."""
    if len(set(steps)) > 1:
        told = ", ".join(f"rank {rank} says {step}" for rank, step in enumerate(steps))
        raise UsageError(f"{name}: ranks disagree about the step: {told}. Restart all from one checkpoint.")


def refuse_twice(opened: bool, name: str, rank: int) -> None:
    """Raises `UsageError` for a rank that was opened before."""
    if opened:
        raise UsageError(
            f"{name}: rank {rank} was opened before, and the others cannot know what it has forgotten. "
            "Restart all ranks under a new name."
        )
