"""The mean over ranks through memory that they share; bit for bit the same in each.

Each rank has two buffers, used in turn, and says by a counter which mean its newest buffer belongs to. When
all counters have reached that mean, each rank sums all buffers in the order of ranks. Two buffers are
enough: a rank writes mean n + 2 only after all have arrived at n + 1, which each does after it has read n.

A rank that gives up says so in its line, and all others give up too; one that dies never arrives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.doorbell import Doorbell
from rollmill.channels.errors import ChannelClosed
from rollmill.channels.layout import Layout, fresh_buffer
from rollmill.channels.memory import Fence
from rollmill.channels.waiting import Waiter
from rollmill.core.errors import UsageError

LINE = 8  # words of a rank: a cache line of its own
ARRIVED, LEFT, ATTACHED, STEPS = 0, 1, 2, 3  # two steps, one for each buffer
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


def mean_over(parts: Sequence[Sequence[np.ndarray]], out: Sequence[np.ndarray]) -> None:
    """Writes the mean over ranks.

    Args:
        parts: of each rank, in order, the arrays of all spans.
        out: where the mean of each span goes.
    """
    with np.errstate(all="ignore"):  # what is not finite is found where it matters
        for span, mean in enumerate(out):
            for start in range(0, len(mean), BLOCK):
                stop = start + BLOCK
                mean[start:stop] = _mean([part[span][start:stop] for part in parts])


def _mean(parts: Sequence[np.ndarray]) -> np.ndarray:
    dtype = np.promote_types(parts[0].dtype, np.float32)
    total = parts[0].astype(dtype)
    for part in parts[1:]:
        total += part.astype(dtype, copy=False)
    total /= len(parts)
    return total.astype(parts[0].dtype, copy=False)


def span_views(found: Sequence[Span], buffer: memoryview | np.ndarray) -> list[np.ndarray]:
    """The spans as flat arrays that lie in `buffer`."""
    return [
        np.ndarray(((span.stop - span.start) // span.dtype.itemsize,), span.dtype, buffer, span.start)
        for span in found
    ]


def reduction_bytes(layout: Layout, size: int) -> int:
    """Size of the memory that `size` ranks share."""
    return size * (LINE * 8 + 2 * layout.nbytes)


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
        self._spans = spans(layout)
        size, nbytes = len(doorbells), layout.nbytes
        self._lines = [memory[i * LINE * 8 : (i + 1) * LINE * 8].cast("q") for i in range(size)]
        starts = [size * LINE * 8 + i * nbytes for i in range(2 * size)]
        buffers = [memory[start : start + nbytes] for start in starts]
        self._parts = [[span_views(self._spans, buffers[2 * i + turn]) for i in range(size)] for turn in (0, 1)]
        self._own = [layout.flat_views(buffers[2 * rank + turn]) for turn in (0, 1)]
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
        line = self._lines[self._rank]
        number = line[ARRIVED] + 1
        turn = number % 2
        self._check_left(number)
        self._layout.fill(self._own[turn], tree)
        line[STEPS + turn] = step
        self._fence()
        line[ARRIVED] = number
        self._ring_others()
        self._waiter.until(lambda: self._all_arrived(number), timeout=timeout)
        check_steps([other[STEPS + turn] for other in self._lines], self._name)
        buffer = fresh_buffer(self._layout.nbytes)
        mean_over(self._parts[turn], span_views(self._spans, buffer))
        return self._layout.unflatten(self._layout.flat_views(buffer))

    def _all_arrived(self, number: int) -> bool | None:
        self._check_left(number)
        self._fence()
        if min(line[ARRIVED] for line in self._lines) < number:
            return None
        self._fence()
        return True

    def _check_left(self, number: int) -> None:
        """A rank that left after it arrived has left its part, which is still good."""
        for rank, line in enumerate(self._lines):
            if line[LEFT]:
                self._fence()
                if rank == self._rank or line[ARRIVED] < number:
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
