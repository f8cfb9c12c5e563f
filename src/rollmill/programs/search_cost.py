"""Decides whether a search for kernels pays off, and limits it to the time that kernels can save in the run."""

import contextlib
import json
import math
from typing import Any, NamedTuple

from rollmill.core.errors import CheckpointError, DataError
from rollmill.core.installation import cache_root
from rollmill.core.schema import read_as

FOLDER = "seconds"

SEARCH_SECONDS = {"gpu": 10.0, "cpu": 10.0}
"""Approximate seconds that a search takes, with the compilation of its kernels, by platform.

These are constants instead of measurements, so that the next run decides in the same way.
"""

SAVED = 0.6
"""Approximate share of a run's time that kernels save, because they are two to five times as fast as XLA."""


class SearchCost(NamedTuple):
    """Comparison of the time that a run takes by XLA with the time of a search for kernels."""

    platform: str
    """The JAX platform that the run uses, such as `gpu`."""
    training_seconds: float

    @property
    def limit(self) -> float:
        """Seconds after which a search ends: approximately the time that kernels can save."""
        return SAVED * self.training_seconds

    @property
    def pays(self) -> bool:
        """True if kernels can save more time than their search takes."""
        return self.limit >= SEARCH_SECONDS.get(self.platform, math.inf)

    def __str__(self) -> str:
        searching = SEARCH_SECONDS.get(self.platform, math.inf)
        without = f"training takes about {self.training_seconds:,.0f} s without kernels"
        return (
            f"nothing is fused: {without}, and the search for the fastest kernels {searching:,.0f} s; "
            "fusion=full fuses anyway"
        )


MIN_GAIN = 1.05
"""Minimum speed of kernels relative to XLA for `auto` to use them. Above 1, so that equally fast kernels are not
used.
"""


class ReadyKernels(NamedTuple):
    """Measured seconds of an iteration with stored kernels, and by XLA."""

    platform: str
    iterations: int
    seconds: float
    seconds_by_xla: float | None
    """Seconds of an iteration by XLA, or None if the XLA program has never been compiled."""

    @property
    def suffice(self) -> bool:
        """True if neither a search nor a program by XLA could save the time that it takes."""
        training = self.seconds * self.iterations
        if SearchCost(self.platform, training).pays:
            return False
        if self.seconds_by_xla is None:
            return training <= SEARCH_SECONDS.get(self.platform, 0.0)
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
