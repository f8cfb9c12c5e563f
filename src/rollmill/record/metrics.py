"""What a run measured: one JSON line an iteration, and the same numbers for TensorBoard."""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rollmill.core.errors import CheckpointError, DataError, StorageError
from rollmill.core.json_data import parse_object, read_as
from rollmill.record.event_log import EventLog
from rollmill.record.folder import Folder
from rollmill.record.json_files import plain
from rollmill.record.run_directory import METRICS, RunDirectory
from rollmill.record.storage import write_failure

MAX_LINE_BYTES = 2**20


class MetricsWarning(UserWarning):
    """A line of the metrics could not be read and is left out."""


@dataclass(frozen=True)
class LineStart:
    """The fields that every line of the metrics has."""

    iteration: int
    env_steps: int


class MetricsLog:
    """Appends to a run's `metrics.jsonl` and TensorBoard events. Close it, or use it in a `with`.

    Args:
        run: where to write.
        tensorboard: whether to write event files too.
        resume_from: the iteration that the run goes on from, 0 in a new run. Lines of later iterations
            and lines that cannot be read are cut (a `MetricsWarning` names the first of these), and
            TensorBoard is told to hide what they showed.

    Raises:
        StorageError: `metrics.jsonl` cannot be written.
    """

    def __init__(self, run: RunDirectory, *, resume_from: int, tensorboard: bool = True) -> None:
        self._run, self._path, self._folder = run, run.metrics_file, run.tensorboard
        purge_step = self._open(resume_from)
        self._events = EventLog(run.tensorboard, purge_step=purge_step) if tensorboard else None

    def write(self, iteration: int, env_steps: int, metrics: Mapping[str, Any]) -> None:
        """Adds one line; it is in the file when this returns, whole or not at all.

        Args:
            iteration: counts from 1; a checkpoint of iteration `i` follows line `i`.
            env_steps: environment steps so far, TensorBoard's x axis.
            metrics: names such as `episode/return` to host numbers (text and None are kept out of
                TensorBoard); NaN and infinities become null.

        Raises:
            StorageError: the disk is full, or another reason not to be able to write.
        """
        line = {"iteration": iteration, "env_steps": env_steps, **plain(metrics)}
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")
        if self._events is not None:
            self._events.add(env_steps, _scalars(line))

    def rewind(self, iteration: int) -> None:
        """Cuts the lines of later iterations, because the run goes on from there.

        Raises:
            StorageError: the file cannot be written.
        """
        self._file.close()
        purge_step = self._open(iteration)
        if self._events is not None:
            self._events.close()
            self._events = EventLog(self._folder, purge_step=purge_step)

    def close(self) -> None:
        """Finishes both files.

        Raises:
            StorageError: TensorBoard's file could not be written.
        """
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StorageError:
            if error is None:  # must not hide an error that is under way
                raise

    def _open(self, iteration: int) -> int | None:
        try:
            purge_step = _cut_after(self._run.folder, iteration)
            self._file = os.fdopen(self._run.folder.open_to_append(METRICS), "ab", buffering=0)
        except OSError as error:
            raise write_failure(self._path, error) from error
        return purge_step

    def _append(self, line: bytes) -> None:
        size = self._file.seek(0, os.SEEK_END)
        rest = memoryview(line)
        try:
            while rest:  # a disk that fills up takes a part first
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise write_failure(self._path, error) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, oldest first; a last line that is torn is left out.

    Raises:
        CheckpointError: the file is missing, no plain file, or a line before the last is damaged.
    """
    lines: list[dict[str, Any]] = []
    for parsed, _ in _lines(Folder(path.parent), path.name):
        if isinstance(parsed, str):
            raise CheckpointError(parsed)
        lines.append(parsed)
    return lines


def check_metrics(folder: Folder) -> tuple[int, str | None]:
    """How many whole lines there are, and the first complaint about one before the last.

    Raises:
        CheckpointError: the file is missing, or no plain file.
    """
    count, complaint = 0, None
    for parsed, _ in _lines(folder, METRICS):
        if isinstance(parsed, str):
            complaint = complaint or parsed
        else:
            count += 1
    return count, complaint


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    numbers = {tag: value for tag, value in line.items() if isinstance(value, int | float)}
    return {tag: float(value) for tag, value in numbers.items() if tag != "env_steps"}


def _cut_after(folder: Folder, iteration: int) -> int | None:
    """Keeps the lines up to `iteration`; returns the first environment step not covered, None in a new run."""
    if not folder.has(METRICS):
        return None
    covered, complaints = -1, []
    with folder.replacing(METRICS) as new:
        for parsed, line in _lines(folder, METRICS):
            if isinstance(parsed, str):
                complaints.append(parsed)
            elif parsed["iteration"] <= iteration:
                new.write(line)
                covered = max(covered, parsed["env_steps"])
    if complaints:
        more = f" So are {len(complaints) - 1} more." if len(complaints) > 1 else ""
        warnings.warn(f"{complaints[0]} The line is left out.{more}", MetricsWarning, stacklevel=4)
    return covered + 1


def _lines(folder: Folder, name: str) -> Iterator[tuple[dict[str, Any] | str, bytes]]:
    """Each line as an object, or the complaint about it, and its bytes; a last line that is torn is left out."""
    path, number = folder.path / name, 0
    try:
        with folder.reading(name) as file:
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                where = f"{path}: line {number}"
                if len(line) == MAX_LINE_BYTES:
                    _skip_line(file, line)
                    yield f"{where} has more than {MAX_LINE_BYTES:,} bytes.", line
                elif line.endswith(b"\n"):
                    yield _parse(line, where), line
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def _skip_line(file: IO[bytes], line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = file.readline(MAX_LINE_BYTES)


def _parse(line: bytes, where: str) -> dict[str, Any] | str:
    """The object in a line, or the complaint about it."""
    try:
        value = parse_object(line, where=where, limit=MAX_LINE_BYTES, depth=2)
        read_as(LineStart, {key: value[key] for key in ("iteration", "env_steps") if key in value}, where=where)
    except DataError as complaint:
        return str(complaint)
    return value
