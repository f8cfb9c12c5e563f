"""The newest message wins: one writer, any number of readers that never hold it up.

A board has a few slots, which the writer fills in turn. A slot's stamp is odd while it is being written,
and `2 * n` when it holds message number `n` (a seqlock). `latest` names the newest whole message, so that a
writer that dies in mid-write leaves the one before. A reader copies, and then looks whether the stamp is
still the same; with four slots the writer must lap it for the copy to be in vain.
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
SLOT_BYTES = 64  # before the payload
STAMP, VERSION = 0, 1


class LatestVersion(NamedTuple):
    """Which message is the newest."""

    number: int
    version: int


class SeqlockBoard:
    """The parts of the memory of a channel in which the newest wins."""

    def __init__(self, memory: memoryview, layout: Layout) -> None:
        starts = range(CONTROL_BYTES, board_bytes(layout), SLOT_BYTES + layout.nbytes)
        self.layout = layout
        self.words = memory[:CONTROL_BYTES].cast("q")
        self.stamps = [memory[start : start + SLOT_BYTES].cast("q") for start in starts]
        self.payloads = [memory[start + SLOT_BYTES : start + SLOT_BYTES + layout.nbytes] for start in starts]


def board_bytes(layout: Layout) -> int:
    """Size of a board."""
    return CONTROL_BYTES + NUM_SLOTS * (SLOT_BYTES + layout.nbytes)


class BoardWriter:
    """The writer's end; it takes the place of one that was there before. See `rollmill.channels.NewestWriter`.

    Args:
        board: shared with the readers.
        doorbells: of the readers.
        name: for errors.
    """

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
        """Replaces what readers see."""
        arrays = self._board.layout.on_host(tree)  # before the slot is marked, as it may raise
        self.begin()
        for view, leaf in zip(self._views[self._slot()], arrays, strict=True):
            np.copyto(view, leaf, casting="no")
        self.finish(version)

    def begin(self) -> memoryview:
        """The bytes of the next message, for who writes them as they are; `finish` comes after.

        Raises:
            ChannelClosed: this writer was replaced.
        """
        if self._words[WRITER] != self._owner:
            raise ChannelClosed(f"{self._name}: another writer took this one's place.")
        self._board.stamps[self._slot()][STAMP] = 2 * self._words[LATEST] + 1
        self._fence()
        return self._board.payloads[self._slot()]

    def finish(self, version: int) -> None:
        """Makes the message that was begun the newest."""
        number, stamps = self._words[LATEST] + 1, self._board.stamps[self._slot()]
        stamps[VERSION] = version
        self._fence()
        stamps[STAMP] = 2 * number
        self._fence()
        self._words[LATEST] = number
        self._ring_all()

    def close(self) -> None:
        """Nothing newer will come."""
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
    """One reader's end; see `rollmill.channels.NewestReader`."""

    def __init__(self, board: SeqlockBoard, waiter: Waiter, name: str) -> None:
        self._board = board
        self._words = board.words
        self._waiter = waiter
        self._name = name
        self._fence = Fence()
        self._payloads = [np.ndarray((board.layout.nbytes,), np.uint8, payload) for payload in board.payloads]

    def version(self) -> int | None:
        """The version of the newest message."""
        newest = self.newest()
        return None if newest is None else newest.version

    def read(self, *, at_least: int | None = None, timeout: float | None = None) -> Versioned:
        """A copy of the newest message."""
        return self._waiter.until(lambda: self._copy(at_least), timeout=timeout)

    def newest(self) -> LatestVersion | None:
        """Number and version of the newest message; None before the first."""
        while number := self._words[LATEST]:
            self._fence()
            stamps = self._board.stamps[number % NUM_SLOTS]
            version = stamps[VERSION]
            self._fence()
            if stamps[STAMP] == 2 * number:
                return LatestVersion(number, version)
        return None

    def copy_into(self, buffer: np.ndarray, newest: LatestVersion) -> bool:
        """Copies the bytes of that message; False where the writer has lapped us, and they are no good."""
        np.copyto(buffer, self._payloads[newest.number % NUM_SLOTS])
        self._fence()
        return self._board.stamps[newest.number % NUM_SLOTS][STAMP] == 2 * newest.number

    def ended(self) -> bool:
        """Whether the writer said that nothing newer will come; ask before `newest`."""
        return bool(self._words[ENDED])

    def close(self) -> None:
        """There is nothing to let go of."""

    def _copy(self, at_least: int | None) -> Versioned | None:
        layout = self._board.layout
        while newest := self._wanted(at_least):
            buffer = fresh_buffer(layout.nbytes)
            if self.copy_into(buffer, newest):
                return Versioned(layout.unflatten(layout.flat_views(buffer)), newest.version)
        return None

    def _wanted(self, at_least: int | None) -> LatestVersion | None:
        ended = self.ended()  # before looking: the last message was there before the end
        self._fence()
        newest = self.newest()
        if newest is not None and (at_least is None or newest.version >= at_least):
            return newest
        if ended:
            raise ChannelClosed(f"{self._name}: the writer closed the channel; version {at_least} never came.")
        return None
