"""Reads curves of a run's metrics: complete, thinned for a figure, or followed while the run is writing."""

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple, TypeGuard

import msgspec

from rollmill.core.errors import CheckpointError
from rollmill.core.folder import Folder
from rollmill.record.run_directory import RunDirectory
from rollmill.record.run_files import METRICS
from rollmill.record.status import RETURNS

MAX_LINE_BYTES = 2**20
TAIL_BYTES = 2**16
"""Number of bytes at the end of a file that are searched for the newest values. A line has about a thousand."""
LINE_START = ("iteration", "env_steps", "seconds")
"""Fields of every line that state the progress of a run."""
ENDED = "episode/ended"
"""Number of episodes that ended in the iterations of a line."""
LOSSES = "losses/"
RETURN = "episode/return"
"""Default metric of a learning curve: the mean return over all seeds of a run."""


class MetricPoint(NamedTuple):
    """The value of a metric after some environment steps."""

    env_steps: float
    value: float
    seconds: float = 0.0
    """Duration of the run so far in seconds. Only `metric_curve` sets it."""


def metric_curve(run: RunDirectory, metric: str) -> list[MetricPoint]:
    """Returns the finite values of a metric in the order of environment steps, ignoring damaged lines.

    Lines can be out of order if files were concatenated. Of several lines with the same number of steps, the last
    one counts. The fields of `LINE_START` are not metrics. Raises a `CheckpointError` if the file cannot be read,
    or contains a line that is too long.
    """
    if metric in LINE_START:
        return []
    read = (_parse(line, metric) for line in _lines(run))
    found = (point for point in read if point is not None and point.seconds >= 0 and math.isfinite(point.value))
    by_steps = {point.env_steps: point for point in found}
    return [by_steps[steps] for steps in sorted(by_steps)]


def metric_names(run: RunDirectory) -> set[str]:
    """Returns the names of a run's metrics. There are none before its first line. Raises the errors of
    `metric_curve`.
    """
    names: set[str] = set()
    for line in _lines(run):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            values = msgspec.json.decode(line, type=dict[str, object])
            names.update(name for name, value in values.items() if isinstance(value, int | float))
    return names - set(LINE_START)


def thinned_curve(
    run: RunDirectory, max_points: int, *, seed: int | None = None, metric: str = RETURN
) -> list[MetricPoint]:
    """Returns at most `max_points` evenly spaced points of a run's learning curve, including the last.

    Only the lines of these points are read, so the length of the file hardly matters. The curve is the mean over
    all seeds, or the curve of one `seed`.
    """
    metric = metric if seed is None else f"{metric}_seed{seed}"
    with _open(run.folder, METRICS) as file:
        if file is None:
            return []
        size = os.fstat(file.fileno()).st_size
        lines = [_line_at(file, size * number // max_points, size) for number in range(max_points - 1)]
        lines.append(_last_line(file, size))
    points = (_parse(line, metric) for line in lines)
    by_steps = {point.env_steps: point._replace(seconds=0.0) for point in points if point is not None}
    return [by_steps[steps] for steps in sorted(by_steps)]


def newest_means(run: RunDirectory, prefix: str, *, episodes: int) -> dict[str, float]:
    """Returns means over the newest lines of the metrics whose names begin with a prefix, weighted by episodes.

    Reads back from the end of the file until the lines contain `episodes` episodes, but no further than a single
    read. Lines without an episode do not count.
    """
    sums: dict[str, float] = {}
    ended = 0.0
    for line in reversed(_tail(run)):
        with contextlib.suppress(msgspec.DecodeError, RecursionError, OverflowError):
            read = msgspec.json.decode(line, type=dict[str, object])
            values = {name: value for name, value in read.items() if name.startswith(prefix) and _is_finite(value)}
            count = read.get(ENDED)
            if values and _is_finite(count) and count > 0:
                sums |= {name: sums.get(name, 0.0) + float(count) * float(value) for name, value in values.items()}
                ended += float(count)
        if ended >= episodes:
            break
    return {name: total / ended for name, total in sums.items()}


def newest_returns(run: RunDirectory) -> dict[str, float]:
    """Returns the mean return of each agent kind in the newest line in which an episode ended.

    The result is empty if there is only one kind, or if no episode has ended.
    """
    means = newest_means(run, RETURNS, episodes=1)
    return {name.removeprefix(RETURNS): mean for name, mean in means.items()} if len(means) > 1 else {}


def agent_kinds(run: RunDirectory) -> list[str] | None:
    """Returns the names of the agent kinds whose returns a run logs, or None if it has not logged a loss yet.

    Every line with losses names all kinds, even before the first episode has ended.
    """
    for line in reversed(_tail(run)):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            read = msgspec.json.decode(line, type=dict[str, object])
            if any(name.startswith((LOSSES, RETURNS)) for name in read):
                return [name.removeprefix(RETURNS) for name in read if name.startswith(RETURNS)]
    return None


def _tail(run: RunDirectory) -> list[bytes]:
    """Returns the whole lines at the end of a run's metrics."""
    with _open(run.folder, METRICS) as file:
        if file is None:
            return []
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).rpartition(b"\n")[0].splitlines()


def newest_values(run: RunDirectory, names: Sequence[str]) -> dict[str, float]:
    """Returns the newest finite values of some metrics from the last lines of a run, however long the file is.

    Metrics that do not occur in these lines are left out.
    """
    values: dict[str, float] = {}
    for line in reversed(_tail(run)):
        with contextlib.suppress(msgspec.DecodeError, RecursionError, OverflowError):
            read = msgspec.json.decode(line, type=dict[str, object])
            known = {name: read.get(name) for name in names if name not in values}
            values |= {name: float(value) for name, value in known.items() if _is_finite(value)}
        if len(values) == len(names):
            break
    return values


def _is_finite(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class LineFollower:
    """Reads new lines of a growing file. If another file replaces it, that file is read from its beginning."""

    def __init__(self, folder: Folder, name: str = METRICS) -> None:
        self._folder, self._name = folder, name
        self._file, self._position = -1, 0

    def read(self) -> list[bytes]:
        """Returns the complete lines written since the last call, or none if the file does not exist yet."""
        with _open(self._folder, self._name) as file:
            if file is None:
                return []
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._position:
                self._file, self._position = status.st_ino, 0
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return whole.splitlines()

    def read_points(self, metric: str = RETURN) -> list[MetricPoint]:
        """Returns the values of a metric in the lines written since the last call."""
        points = (_parse(line, metric) for line in self.read())
        return [point._replace(seconds=0.0) for point in points if point is not None]


@functools.cache
def _decoder(metric: str) -> msgspec.json.Decoder:
    """Returns a decoder that reads three fields of a line and skips the others."""
    value = ("value", float | None, msgspec.field(name=metric, default=None))
    return msgspec.json.Decoder(msgspec.defstruct("Line", [("env_steps", int), value, ("seconds", float, -1.0)]))


def _parse(line: bytes, metric: str) -> MetricPoint | None:
    """Returns the metric in a line, if the line is intact and has it."""
    try:
        read = _decoder(metric).decode(line)
        return None if read.value is None else MetricPoint(float(read.env_steps), read.value, read.seconds)
    except (msgspec.DecodeError, OverflowError, RecursionError):
        return None


def _lines(run: RunDirectory) -> Iterator[bytes]:
    path = run.root / METRICS
    try:
        with run.folder.reading(METRICS) as file:
            while line := file.readline(MAX_LINE_BYTES):
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    raise CheckpointError(
                        f"{path} cannot be read: a line exceeds the limit of {MAX_LINE_BYTES:,} bytes."
                    )
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


@contextlib.contextmanager
def _open(folder: Folder, name: str) -> Iterator[IO[bytes] | None]:
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(folder.reading(name))
        except (OSError, CheckpointError):
            file = None
        yield file


def _line_at(file: IO[bytes], position: int, size: int) -> bytes:
    """Returns the first whole line from a position on."""
    file.seek(max(0, position - 1))
    if position:
        file.readline(MAX_LINE_BYTES)
    return file.readline(MAX_LINE_BYTES) if file.tell() < size else b""


def _last_line(file: IO[bytes], size: int) -> bytes:
    file.seek(max(0, size - MAX_LINE_BYTES))
    return file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
