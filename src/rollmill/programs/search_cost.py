"""Limits the seconds that a run loses by searches for kernels, and predicts how long a search takes."""

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from rollmill.core.errors import CannotFuse, CheckpointError, DataError
from rollmill.core.installation import cache_root
from rollmill.core.machine import usable_cores
from rollmill.core.schema import read_as

FOLDER = "seconds"

MAX_LOSS = 0.1
"""Share of a run's time without kernels that it may lose by searches, if they find no kernel that pays.

Of five large steps, whose kernels took one to two minutes to compile, two kernels saved half of a run's time
(robots:Ant and robots:FrankaCabinet in benchmarks/robots_backends.py), and three were slower than XLA
(Bodies-12 and Bodies-20 in benchmarks/fusion_limits.py, and TagContinuous-Small-v0). A tenth is therefore less
than the saving that can be expected.
"""

MAX_COMPILE_SECONDS = 180
"""Maximum seconds to compile a kernel in a run whose duration is not estimated, as with a replay memory."""

LIKELY_SAVING, MAX_RISK = 0.5, 20.0
"""Share of a run's time that kernels are expected to save, and the seconds that searches may risk for it even if
these are more than `MAX_LOSS` of the run. Most kernels that were measured are at least twice as fast as XLA.
"""

SEARCH_SECONDS = {"gpu": 10.0, "cpu": 10.0}
"""Approximate seconds that a search takes for one kernel of a small environment, by platform, where no search of a
similar size was recorded.
"""

PROGRAM_SECONDS = {"gpu": 16.0, "cpu": 10.0}
"""Approximate seconds that the compilation of an iteration takes, by platform. 16 s were measured for PPO on
CartPole-v1 on the host of an H200, and 10 s on two cores.
"""

LOWERING_SECONDS = 3.0
"""Seconds within which a step is lowered, so that the size of its kernel is known. No budget is smaller."""

SIMILAR = 4.0
"""Two kernels are of similar size if the larger source has at most this many times as many characters."""

MARGIN = 1.5
"""Factor by which a search is expected to take longer than similar ones did."""

SHORTEST = 1e-3
"""Minimum seconds of a record, since searches on a coarse clock may take none."""

MAX_RECORDS = 64
"""Number of searches that are recorded for a kind of machine. The oldest are dropped."""


@dataclass(frozen=True)
class SearchRecord:
    """How long a search took on this kind of machine, in the form of its JSON file."""

    size: int
    """Characters of a kernel's source, times the number of kernels that one core compiles."""
    seconds: float
    """Seconds of the search. Twice the seconds until then, if it was stopped at its limit."""


class SearchRecords:
    """Records on disk how long searches took on this kind of machine, to predict the next ones.

    Args:
        kind: the platform, such as `gpu`.
        device: name of the device, which distinguishes kinds of machines, with the number of cores.
    """

    def __init__(self, kind: str, device: str) -> None:
        from rollmill.fusion.cache import cached_file

        self._default = SEARCH_SECONDS.get(kind, math.inf)
        self._file = cached_file("searches", [kind, device, usable_cores()])

    def least(self) -> float:
        """Predicts the seconds of the shortest search that can be expected, for a kernel of unknown size."""
        return max(LOWERING_SECONDS, min((each.seconds for each in self._read()), default=self._default))

    def predict(self, size: int, compile_seconds: float = 0.0) -> float:
        """Predicts the seconds of a search, with a margin, from the median of recorded searches of similar size.

        A search takes at least as long as a smaller one, and otherwise in proportion to its size. Without records
        of similar size, the prediction is `compile_seconds`, the time that the kernels of a long step take to
        compile. If these are unknown (0), it follows from the largest smaller search, or else is `SEARCH_SECONDS`.
        """
        records = self._read()
        if similar := [each for each in records if 1 / SIMILAR <= size / each.size <= SIMILAR]:
            return MARGIN * median(each.seconds * max(1.0, size / each.size) for each in similar)
        if compile_seconds:
            return max(compile_seconds, self._default)
        smaller = max((each for each in records if each.size < size), key=lambda each: each.size, default=None)
        return self._default if smaller is None else MARGIN * smaller.seconds * size / smaller.size

    def add(self, size: int, seconds: float) -> None:
        """Records a search."""
        from rollmill.fusion.cache import write_exactly

        records = [*self._read(), SearchRecord(size, max(seconds, SHORTEST))]
        with contextlib.suppress(OSError, CheckpointError):  # where nothing can be kept, nothing is learned
            write_exactly(self._file, json.dumps([asdict(each) for each in records[-MAX_RECORDS:]]))

    def _read(self) -> Sequence[SearchRecord]:
        from rollmill.fusion.cache import read_cached

        return read_cached(self._file, self._records) or ()

    def _records(self, document: Any) -> Sequence[SearchRecord]:
        records = read_as(tuple[SearchRecord, ...], document, where=str(self._file))
        if any(each.size < 1 or not 0 < each.seconds < math.inf for each in records):
            raise DataError(f"{self._file}: sizes and seconds must be finite and greater than 0.")
        return records


class SearchTooLong(CannotFuse):
    """Raised instead of beginning a search that is expected to exceed its time limit."""


class SearchBudget:
    """The seconds that searches for kernels may take in a run.

    The budget is a share `MAX_LOSS` of the run's time without kernels. It rises to as much as `MAX_RISK` seconds
    if kernels are expected to save more than that, after compilation of their program. The time that kernels found
    so far save is added to the budget. If no kernel is faster, searches cost the run at most the larger of
    `MAX_LOSS` of its time and `MAX_RISK` seconds.

    Args:
        training_seconds: seconds that the run takes without kernels.
        program_seconds: seconds that compiling a program with kernels takes. Kernels have to save these seconds as
            well.
        records: predicts how long searches take.
    """

    def __init__(self, training_seconds: float, program_seconds: float, records: SearchRecords) -> None:
        self._training, self._program = training_seconds, program_seconds
        self.records = records
        self.saved = 0.0
        """Seconds that the kernels found so far save in the run."""
        self.refused: set[object] = set()
        """Searches that were not begun."""
        self._expected: dict[object, float] = {}

    @property
    def limit(self) -> float:
        """Seconds that all searches together may take."""
        risk = min(LIKELY_SAVING * self._training - self._program, MAX_RISK)
        return max(MAX_LOSS * self._training, risk) + max(0.0, self.saved - self._program)

    @property
    def pays(self) -> bool:
        """True if a search may begin, because it is expected to end within the limit."""
        return self.records.least() <= self.limit

    @property
    def uses_kernels(self) -> bool:
        """True if the kernels found save more than the compilation of their program takes."""
        return self.saved > self._program or math.isinf(self._training)

    def admit(self, search: object, size: int, spent: float, compile_seconds: float = 0.0) -> None:
        """Begins a search for kernels of some size, after `spent` seconds of this budget.

        The kernels of a long step take about `compile_seconds` to compile.

        Raises `SearchTooLong` if this search is not expected to end in time, together with the searches that have
        begun.
        """
        predicted = self.records.predict(size, compile_seconds)
        if spent + sum(self._expected.values()) + predicted > self.limit:
            self.refused.add(search)
            raise SearchTooLong(
                f"the search for the fastest kernels would take about {predicted:,.0f} s, but only "
                f"{max(0.0, self.limit - spent):,.0f} s are left for it in this run",
                advice="use fusion=full to fuse anyway",
            )
        self.refused.discard(search)
        self._expected[search] = predicted

    def end(self, search: object, size: int, seconds: float, *, was_late: bool) -> None:
        """Ends a search after some seconds, and records it."""
        self._expected.pop(search, None)
        self.records.add(size, 2 * seconds if was_late else seconds)

    def __str__(self) -> str:
        return (
            f"nothing is fused: training takes about {self._training:,.0f} s without kernels. The search for the "
            f"fastest kernels takes {self.records.least():,.0f} s, but the limit in this run is "
            f"{self.limit:,.1f} s. Use fusion=full to fuse anyway"
        )


MIN_GAIN = 1.05
"""Minimum speed of kernels relative to XLA for `auto` to use them. Equally fast kernels are not used."""


class ReadyKernels(NamedTuple):
    """Measured seconds of an iteration with stored kernels, and by XLA."""

    platform: str
    iterations: int
    seconds: float
    seconds_by_xla: float | None
    """Seconds of an iteration by XLA, or None if the XLA program has never been compiled."""

    @property
    def suffice(self) -> bool:
        """True if neither a further search nor an XLA program could save more time than it takes to make."""
        training = self.seconds * self.iterations
        if MAX_LOSS * training >= SEARCH_SECONDS.get(self.platform, math.inf):
            return False
        if self.seconds_by_xla is None:
            return training <= PROGRAM_SECONDS.get(self.platform, 0.0)
        return self.seconds_by_xla >= MIN_GAIN * self.seconds


class StoredSeconds:
    """Stores on disk how many seconds an iteration takes by XLA, so that it is measured only once.

    All runs then decide by the same value.

    Args:
        name: digest of everything that the seconds depend on, or None if they are not stored.
    """

    def __init__(self, name: str | None) -> None:
        self._file = None if name is None else cache_root() / FOLDER / f"{name}.json"

    def read(self) -> float | None:
        """Returns the stored seconds, or None if there are none."""
        if self._file is None:
            return None
        from rollmill.fusion.cache import read_cached

        return read_cached(self._file, self._seconds)

    def keep(self, seconds: float) -> None:
        """Stores the seconds, unless seconds are already stored."""
        if self._file is None:
            return
        from rollmill.fusion.cache import write_once

        # if the seconds cannot be stored, the next run measures again
        with contextlib.suppress(OSError, CheckpointError):
            write_once(self._file, json.dumps(seconds))

    def _seconds(self, document: Any) -> float:
        seconds = read_as(float, document, where=str(self._file))
        if not 0 < seconds < math.inf:
            raise DataError(f"{self._file}: seconds must be finite and greater than 0.")
        return seconds
