"""The budget of a search for kernels: at most the seconds that it can save in the training."""

import contextlib
import json
import math
from typing import Any, NamedTuple

from rollmill.core.errors import CheckpointError, DataError
from rollmill.core.installation import cache_root
from rollmill.core.schema import read_as

FOLDER = "seconds"

SEARCH_SECONDS = {"gpu": 10.0, "cpu": 10.0}
"""Seconds of a search and of compiling its kernels, about, by what computes them.

A number and no measurement, so that the next run decides in the same way.
"""

SAVED = 0.6
"""Part of a training's seconds that kernels save, about: they are two to five times as fast as XLA."""


class SearchCost(NamedTuple):
    """Seconds of a run by XLA, and of a search for its kernels."""

    platform: str
    """What computes it."""
    training_seconds: float

    @property
    def limit(self) -> float:
        """Seconds after which a search ends, about the time that kernels can save."""
        return SAVED * self.training_seconds

    @property
    def pays(self) -> bool:
        """Whether kernels can save more than their search takes."""
        return self.limit >= SEARCH_SECONDS.get(self.platform, math.inf)

    def __str__(self) -> str:
        searching = SEARCH_SECONDS.get(self.platform, math.inf)
        without = f"training takes about {self.training_seconds:,.0f} s without kernels"
        return (
            f"nothing is fused: {without}, and the search for the fastest kernels {searching:,.0f} s; "
            "fusion=full fuses anyway"
        )


MIN_GAIN = 1.05
"""How many times as fast as XLA kernels have to be for `auto`, so that equally fast ones are always left out."""


class ReadyKernels(NamedTuple):
    """Measured seconds of an iteration with stored kernels and by XLA."""

    platform: str
    iterations: int
    seconds: float
    seconds_by_xla: float | None
    """None where they are not known: XLA's program was never compiled."""

    @property
    def suffice(self) -> bool:
        """Whether no search and no program by XLA can save the seconds that it takes."""
        training = self.seconds * self.iterations
        if SearchCost(self.platform, training).pays:
            return False
        if self.seconds_by_xla is None:
            return training <= SEARCH_SECONDS.get(self.platform, 0.0)
        return self.seconds_by_xla >= MIN_GAIN * self.seconds


class StoredSeconds:
    """Stores the seconds that an iteration takes by XLA. They are measured once, so that all runs decide alike.

    Args:
        name: digest of everything that they depend on. None if they are not stored.
    """

    def __init__(self, name: str | None) -> None:
        self._file = None if name is None else cache_root() / FOLDER / f"{name}.json"

    def read(self) -> float | None:
        """Returns the stored seconds. None if there are none."""
        if self._file is None:
            return None
        from rollmill.fusion.cache import read_cached

        return read_cached(self._file, self._seconds)

    def keep(self, seconds: float) -> None:
        """Stores the seconds, unless others are stored."""
        if self._file is None:
            return
        from rollmill.fusion.cache import write_once

        with contextlib.suppress(OSError, CheckpointError):  # where nothing can be kept, they are measured again
            write_once(self._file, json.dumps(seconds))

    def _seconds(self, document: Any) -> float:
        seconds = read_as(float, document, where=str(self._file))
        if not 0 < seconds < math.inf:
            raise DataError(f"{self._file}: seconds must be finite and greater than 0.")
        return seconds
