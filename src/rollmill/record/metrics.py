"""What a run measured: one JSON line an iteration, and the same numbers for TensorBoard."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rollmill.core.errors import CheckpointError, StorageError
from rollmill.record.event_log import EventLog
from rollmill.record.json_files import plain
from rollmill.record.run_directory import RunDirectory
from rollmill.record.storage import write_failure


class MetricsLog:
    """Appends to a run's `metrics.jsonl` and TensorBoard events. Close it, or use it in a `with`.

    Args:
        run: where to write.
        tensorboard: whether to write event files too.
        resume_from: the iteration that the run goes on from, 0 in a new run. Lines of later iterations
            and lines that cannot be read are cut, and TensorBoard is told to hide what they showed.

    Raises:
        StorageError: `metrics.jsonl` cannot be written.
    """

    def __init__(self, run: RunDirectory, *, resume_from: int, tensorboard: bool = True) -> None:
        self._path = run.metrics_file
        try:
            purge_step = _cut_after(self._path, resume_from)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise write_failure(self._path, error) from error
        self._folder = run.tensorboard
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
        try:
            purge_step = _cut_after(self._path, iteration)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise write_failure(self._path, error) from error
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
        CheckpointError: the file is missing, or a line before the last is damaged.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    read = [_parse(line) for line in lines]
    if read and read[-1] is None:
        read.pop()
    if None in read:
        raise CheckpointError(f"{path} is damaged: line {read.index(None) + 1} is no whole JSON object.")
    return [line for line in read if line is not None]


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    numbers = {tag: value for tag, value in line.items() if isinstance(value, int | float)}
    return {tag: float(value) for tag, value in numbers.items() if tag != "env_steps"}


def _cut_after(path: Path, iteration: int) -> int | None:
    """Keeps the lines up to `iteration`; returns the first environment step not covered, None in a new run."""
    if not path.exists():
        return None
    partial = path.with_name(f".{path.name}.tmp")
    covered = -1
    with path.open("rb") as old, partial.open("wb") as new:
        for line, parsed in _kept(old, iteration):
            new.write(line)
            covered = max(covered, parsed["env_steps"])
        new.flush()
        os.fsync(new.fileno())
    partial.replace(path)
    return covered + 1


def _kept(lines: Iterable[bytes], iteration: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line in lines:
        parsed = _parse(line)
        if parsed is not None and parsed["iteration"] <= iteration:
            yield line, parsed


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None where it is torn or damaged."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    whole = isinstance(value, dict) and "iteration" in value and "env_steps" in value
    return value if whole else None
