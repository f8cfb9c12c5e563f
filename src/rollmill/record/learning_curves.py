"""Returns over environment steps, from the metrics of a run: of one that is running, and thinned for a figure."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import IO, NamedTuple

import msgspec

from rollmill.core.errors import CheckpointError
from rollmill.core.folder import Folder
from rollmill.record.run_directory import METRICS, RunDirectory

MOST_BYTES = 2**20
"""Size limit for a line; longer ones are passed over."""


class ReturnAt(NamedTuple):
    """The mean return of the latest episodes after some environment steps."""

    env_steps: int
    mean_return: float


RETURN = "episode/return"
"""The metric that a learning curve is of, where nobody says; the mean over all seeds of a run."""


@functools.cache
def _decoder(metric: str) -> msgspec.json.Decoder:
    """Reads two numbers of a line of metrics, and passes over the others."""
    known = ("mean_return", float | None, msgspec.field(name=metric, default=None))
    return msgspec.json.Decoder(msgspec.defstruct("Line", [("env_steps", int), known]))


class MetricsFollower:
    """Reads the returns that a running training writes, as they come.

    A run that is resumed replaces its file; it is then read from the beginning.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.folder
        self._file, self._position = -1, 0

    def read(self) -> list[ReturnAt]:
        """The returns of the lines since the last call; none while there is no file, or no return is known."""
        with _opened(self._folder) as file:
            if file is None:
                return []
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._position:
                self._file, self._position = status.st_ino, 0
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may not be complete yet
        self._position += len(whole)
        return [found for line in whole.splitlines() if (found := _parsed(line, RETURN)) is not None]


def thinned_curve(run: RunDirectory, most: int, *, seed: int | None = None) -> list[ReturnAt]:
    """At most so many points of a run's learning curve, evenly over its metrics, the last one among them.

    Only these lines are read, however long the file is. Empty if there is none.

    Args:
        run: the run.
        most: number of points.
        seed: one of several seeds of the run; default: the mean over all.
    """
    metric = RETURN if seed is None else f"{RETURN}_seed{seed}"
    with _opened(run.folder) as file:
        if file is None:
            return []
        size = os.fstat(file.fileno()).st_size
        lines = [_line_at(file, size * number // most, size) for number in range(most - 1)]
        lines.append(_last_line(file, size))
    found = {point.env_steps: point for line in lines if (point := _parsed(line, metric)) is not None}
    return [found[steps] for steps in sorted(found)]


@contextlib.contextmanager
def _opened(folder: Folder) -> Iterator[IO[bytes] | None]:
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(folder.reading(METRICS))
        except (OSError, CheckpointError):
            file = None
        yield file


def _line_at(file: IO[bytes], position: int, size: int) -> bytes:
    """The first whole line from a position on."""
    file.seek(max(0, position - 1))
    if position:
        file.readline(MOST_BYTES)
    return file.readline(MOST_BYTES) if file.tell() < size else b""


def _last_line(file: IO[bytes], size: int) -> bytes:
    file.seek(max(0, size - MOST_BYTES))
    return file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]


def _parsed(line: bytes, metric: str) -> ReturnAt | None:
    """The return in a line; None where none is known, or the line is damaged."""
    try:
        read = _decoder(metric).decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if read.mean_return is None else ReturnAt(read.env_steps, read.mean_return)
