"""Latest-value channels in shared memory, with one writer and any number of readers that never block it.

The memory has a few slots, which the writer fills in turn. A slot's stamp is odd while the slot is being written,
and `2 * n` when it holds message number `n` (a seqlock). The word `LATEST` is the number of the newest complete
message. A writer that dies while writing therefore leaves the previous message readable. A reader copies a slot
and then checks that its stamp is unchanged. With four slots, this fails only if the writer laps the reader.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from rollmill.channels.errors import ChannelClosed
from rollmill.channels.layout import Layout, fresh_buffer
from rollmill.channels.protocols import Versioned
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.memory import Fence
from rollmill.channels.waiting import Waiter

NUM_SLOTS = 4
LATEST, WRITER, ENDED = 0, 8, 9
CONTROL_BYTES = 128
SLOT_BYTES = 64  # size of the header before the payload
STAMP, VERSION = 0, 1


class LatestVersion(NamedTuple):
    """Number and version of the newest message of a latest-value channel."""

    number: int
    version: int


class SeqlockBoard:
    """The shared memory of a latest-value channel: control words, and slots with a stamp and a payload each."""

    def __init__(self, memory: memoryview, layout: Layout) -> None:
        starts = range(CONTROL_BYTES, board_bytes(layout), SLOT_BYTES + layout.nbytes)
        self.layout = layout
        self.words = memory[:CONTROL_BYTES].cast("q")
        self.stamps = [memory[start : start + SLOT_BYTES].cast("q") for start in starts]
        self.payloads = [memory[start + SLOT_BYTES : start + SLOT_BYTES + layout.nbytes] for start in starts]


def board_bytes(layout: Layout) -> int:
    """Returns the size in bytes of the memory of a latest-value channel."""
    return CONTROL_BYTES + NUM_SLOTS * (SLOT_BYTES + layout.nbytes)


class BoardWriter:
    """The only writer of a latest-value channel. It replaces the previous writer, if any."""

    def __init__(self, board: SeqlockBoard, doorbells: Sequence[Doorbell], name: str) -> None:
        self._board = board
        self._words = board.words
        self._doorbells = doorbells
        self._name = name
        self._fence = Fence()
        self._views = [board.layout.flat_views(payload) for payload in board.payloads]
        self._words[WRITER] += 1
        self._owner = self._words[WRITER]
        self._words[ENDED] = 0

    def publish(self, tree: PyTree, *, version: int) -> None:
        """Replaces the value that readers see, and never blocks.

        Versions increase, except when a run goes back to a checkpoint. For weights, the version is the number of
        iterations. For the parameters of a parameter server, it is the number of updates.
        """
        # may raise, so it comes before the slot is marked as being written
        arrays = self._board.layout.on_host(tree)
        self.begin()
        for view, leaf in zip(self._views[self._slot()], arrays, strict=True):
            np.copyto(view, leaf, casting="no")
        self.finish(version)

    def begin(self) -> memoryview:
        """Starts the next message, and returns the bytes of its payload. `finish` publishes it.

        Raises `ChannelClosed` if this writer was replaced.
        """
        if self._words[WRITER] != self._owner:
            raise ChannelClosed(f"{self._name}: another writer has replaced this one.")
        self._board.stamps[self._slot()][STAMP] = 2 * self._words[LATEST] + 1
        self._fence()
        return self._board.payloads[self._slot()]

    def finish(self, version: int) -> None:
        """Publishes the message started by `begin`."""
        number, stamps = self._words[LATEST] + 1, self._board.stamps[self._slot()]
        stamps[VERSION] = version
        self._fence()
        stamps[STAMP] = 2 * number
        self._fence()
        self._words[LATEST] = number
        self._ring_all()

    def close(self) -> None:
        """Ends the stream, unless this writer was replaced.

        Readers that wait for a newer version get `ChannelClosed`, and others still get the last value.
        """
        if self._words[WRITER] == self._owner:
            self._fence()
            self._words[ENDED] = 1
            self._ring_all()

    def _slot(self) -> int:
        return (self._words[LATEST] + 1) % NUM_SLOTS

    def _ring_all(self) -> None:
        for doorbell in self._doorbells:
            doorbell.ring()


class BoardReader:
    """One reader's end of a latest-value channel, an implementation of `channels.protocols.LatestReader`."""

    def __init__(self, board: SeqlockBoard, waiter: Waiter, name: str) -> None:
        self._board = board
        self._words = board.words
        self._waiter = waiter
        self._name = name
        self._fence = Fence()
        self._payloads = [np.ndarray((board.layout.nbytes,), np.uint8, payload) for payload in board.payloads]

    def version(self) -> int | None:
        """Returns the version of the newest message, or None before the first."""
        newest = self.newest()
        return None if newest is None else newest.version

    def read(self, *, at_least: int | None = None, timeout: float | None = None) -> Versioned:
        """Copies the newest message, after waiting until its version is at least `at_least`.

        Raises `TimedOut` after `timeout` seconds.
        """
        return self._waiter.until(lambda: self._copy(at_least), timeout=timeout)

    def newest(self) -> LatestVersion | None:
        """Returns the number and version of the newest message, or None before the first."""
        while number := self._words[LATEST]:
            self._fence()
            stamps = self._board.stamps[number % NUM_SLOTS]
            version = stamps[VERSION]
            self._fence()
            if stamps[STAMP] == 2 * number:
                return LatestVersion(number, version)
        return None

    def copy_into(self, buffer: np.ndarray, newest: LatestVersion) -> bool:
        """Copies message `newest` into a buffer. Returns False if the writer overwrote it meanwhile."""
        np.copyto(buffer, self._payloads[newest.number % NUM_SLOTS])
        self._fence()
        return self._board.stamps[newest.number % NUM_SLOTS][STAMP] == 2 * newest.number

    def ended(self) -> bool:
        """Returns whether the writer has closed. Check this before `newest`, or the last message may be missed."""
        return bool(self._words[ENDED])

    def close(self) -> None:
        """Does nothing, because a reader holds no resources."""

    def _copy(self, at_least: int | None) -> Versioned | None:
        layout = self._board.layout
        while newest := self._find_wanted(at_least):
            buffer = fresh_buffer(layout.nbytes)
            if self.copy_into(buffer, newest):
                return Versioned(layout.unflatten(layout.flat_views(buffer)), newest.version)
        return None

    def _find_wanted(self, at_least: int | None) -> LatestVersion | None:
        ended = self.ended()  # read before `newest`, because the last message is published before the end
        self._fence()
        newest = self.newest()
        if newest is not None and (at_least is None or newest.version >= at_least):
            return newest
        if ended:
            raise ChannelClosed(f"{self._name}: the writer closed the channel before version {at_least}.")
        return None
