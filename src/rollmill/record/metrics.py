"""Writes and reads the metrics of a run: one JSON line for each iteration, and the same values for TensorBoard."""

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rollmill.core.errors import CheckpointError, DataError, StorageError
from rollmill.core.folder import Folder
from rollmill.core.json_data import parse_object
from rollmill.core.schema import read_as
from rollmill.record.event_log import EventLog
from rollmill.record.json_files import plain, write_failure
from rollmill.record.run_directory import RunDirectory
from rollmill.record.run_files import METRICS

MAX_LINE_BYTES = 2**20


class MetricsWarning(UserWarning):
    """Warns that a line of the metrics could not be read and was dropped."""


@dataclass(frozen=True)
class LineStart:
    """The fields at the beginning of every line of metrics."""

    iteration: int
    env_steps: int


class MetricsLog:
    """Appends lines to a run's `metrics.jsonl`, and the same values to its TensorBoard events. Close it, or use it
    as a context manager.

    If a run continues from iteration `resume_from`, lines of later iterations and unreadable lines are removed,
    and TensorBoard hides their entries. A `MetricsWarning` names the first unreadable line. A process that writes
    many runs sets `seconds`, the shortest time between two writes. Raises a `StorageError` if `metrics.jsonl`
    cannot be written.
    """

    def __init__(
        self, run: RunDirectory, *, resume_from: int, tensorboard: bool = True, seconds: float = 0.0
    ) -> None:
        self._run, self._path, self._folder = run, run.metrics_file, run.tensorboard
        self._seconds, self._written_at = seconds, -math.inf
        self._unwritten: list[bytes] = []
        purge_step = self._open(resume_from)
        self._events = self._event_log(purge_step) if tensorboard else None

    def write(self, iteration: int, env_steps: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Appends one line, completely or not at all, and returns it.

        Iterations count from 1, and a checkpoint of iteration `i` follows line `i`. Metrics are host scalars with
        names such as `episode/return`. Strings and None are not written to TensorBoard. NaN and infinities become
        null. Raises a `StorageError` if the file cannot be written, for example because the disk is full.
        """
        return self.write_lines([(iteration, env_steps, metrics)])[0]

    def write_lines(self, lines: Sequence[tuple[int, int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Appends several lines in a single write. See `write`."""
        written = [
            {"iteration": iteration, "env_steps": env_steps, **plain(metrics)}
            for iteration, env_steps, metrics in lines
        ]
        self._unwritten.append("".join(json.dumps(line, allow_nan=False) + "\n" for line in written).encode())
        if time.monotonic() - self._written_at >= self._seconds:
            self.flush()
        if self._events is not None:
            for line in written:
                self._events.add(line["env_steps"], _scalars(line))
        return written

    def flush(self) -> None:
        """Writes all lines that were held back, for example before a checkpoint. Raises a `StorageError` like
        `write`.
        """
        if not self._unwritten:
            return
        lines, self._unwritten = b"".join(self._unwritten), []
        self._append(lines)
        self._written_at = time.monotonic()

    def rewind(self, iteration: int) -> None:
        """Removes the lines after `iteration`, for a run that goes back to this iteration."""
        self.flush()
        self._file.close()
        purge_step = self._open(iteration)
        if self._events is not None:
            self._events.close()
            self._events = self._event_log(purge_step)

    def close(self) -> None:
        """Writes all remaining lines and closes both files. Raises a `StorageError` if a file could not be
        written.
        """
        try:
            self.flush()
        finally:
            self._file.close()
            if self._events is not None:
                self._events.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self.close()
        except StorageError:
            if kind is None:  # must not hide an exception in flight
                raise

    def _event_log(self, purge_step: int | None) -> EventLog:
        return EventLog(self._folder, purge_step=purge_step, hyperparameters=_hyperparameters(self._run))

    def _open(self, iteration: int) -> int | None:
        try:
            purge_step = _cut_after(self._run.folder, iteration)
            self._file = os.fdopen(self._run.folder.open_to_append(METRICS), "ab", buffering=0)
        except OSError as error:
            raise write_failure(self._path, error) from error
        return purge_step

    def _append(self, lines: bytes) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:  # writing to it would succeed, and leave nothing
            raise StorageError(
                f"{self._path} was deleted while the run was training, so its metrics would be lost. hint: start "
                "the run again, with another --run-dir."
            )
        size = self._file.seek(0, os.SEEK_END)
        remaining = memoryview(lines)
        try:
            while remaining:  # a disk that is almost full accepts only a part of the data
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise write_failure(self._path, error) from error


def _hyperparameters(run: RunDirectory) -> dict[str, Any]:
    """Returns the hyperparameters of a run by dotted names, with algorithm, environment and seed."""
    try:
        config = run.read_config()
    except CheckpointError:
        return {}
    graph, options = _object(config.get("graph")), _object(config.get("options"))
    named = {name: graph.get(name) for name in ("algorithm", "environment")} | {"seed": options.get("seed")}
    return {name: value for name, value in _flat(named | _object(graph.get("config"))) if value is not None}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a `metrics.jsonl`, oldest first. An incomplete last line is ignored.

    Raises a `CheckpointError` if the file is missing or not a regular file, or if any other line is damaged.
    """
    lines: list[dict[str, Any]] = []
    for parsed, _ in _lines(Folder(path.parent), path.name):
        if isinstance(parsed, str):
            raise CheckpointError(parsed)
        lines.append(parsed)
    return lines


def check_metrics(folder: Folder) -> tuple[int, str | None]:
    """Returns the number of intact lines, and the first problem with any line but the last.

    Raises a `CheckpointError` if the file is missing or not a regular file.
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
    """Cuts lines after `iteration`. Returns the first environment step after the rest, or None in a new run."""
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
        more = f" {len(complaints) - 1} more lines are not valid." if len(complaints) > 1 else ""
        warnings.warn(f"{complaints[0]} This line is skipped.{more}", MetricsWarning, stacklevel=4)
    return covered + 1


def _lines(folder: Folder, name: str) -> Iterator[tuple[dict[str, Any] | str, bytes]]:
    """Yields each line's object, or a description of its problem, with its bytes, except an incomplete last
    line.
    """
    path, number = folder.path / name, 0
    try:
        with folder.reading(name) as file:
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                where = f"{path}: line {number}"
                if len(line) == MAX_LINE_BYTES:
                    _skip_line(file, line)
                    yield f"{where} exceeds the limit of {MAX_LINE_BYTES:,} bytes.", line
                elif line.endswith(b"\n"):
                    yield _parse(line, where), line
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def _skip_line(file: IO[bytes], line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = file.readline(MAX_LINE_BYTES)


def _parse(line: bytes, where: str) -> dict[str, Any] | str:
    """Returns the object in a line, or a description of its problem."""
    try:
        value = parse_object(line, where=where, limit=MAX_LINE_BYTES, depth=2)
        read_as(LineStart, {key: value[key] for key in ("iteration", "env_steps") if key in value}, where=where)
    except DataError as complaint:
        return str(complaint)
    return value
