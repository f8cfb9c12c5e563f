"""A hook that writes the metrics of a run as CSV."""

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollmill.core.errors import StorageError, UsageError
from rollmill.core.folder import Folder
from rollmill.core.schema import coerce
from rollmill.hooks.events import (
    Hook,
    MetricsLogged,
    PolicyEvaluated,
    TrainingEvent,
    TrainingRewound,
    TrainingStarted,
    name_hook,
)

ITERATION = "iteration"


def csv_log(path: str | Path | None = None) -> Hook:
    """Returns a hook that writes the lines of metrics.jsonl as CSV, with a column for each metric. Undefined
    values are empty.

    The file is replaced when training begins. If a resumed run is given the same path, it keeps the rows up to its
    checkpoint.

    Args:
        path: path of the file, by default `metrics.csv` in the run directory.

    Raises:
        UsageError: at the start of training, the path is a file with other contents.
        StorageError: the file cannot be written.
        CheckpointError: the path is a link, or not a regular file.
    """
    chosen = None if path is None else coerce("path", Path, path)
    table: list[_CsvTable] = []

    def hook(event: TrainingEvent) -> None:
        match event:
            case TrainingStarted():
                table[:] = [_CsvTable(chosen or event.directory / "metrics.csv")]
                table[0].cut_after(event.iteration)
            case TrainingRewound():
                table[0].cut_after(event.iteration)
            case MetricsLogged() | PolicyEvaluated():
                table[0].add(event.row)

    return name_hook("csv_log", hook)


class _CsvTable:
    """A CSV file with one row for each line of metrics."""

    def __init__(self, path: Path) -> None:
        self._path, self._columns = path, [ITERATION]
        self._folder = Folder(path.parent)

    def cut_after(self, iteration: int) -> None:
        """Keeps the rows up to an iteration."""
        columns, rows = self._read()
        if rows and ITERATION not in columns:
            raise UsageError(
                f"{self._path} already exists, and has no column {ITERATION!r}. hint: choose another path."
            )
        kept = [row for row in rows if (row[ITERATION] or "").isdecimal() and int(row[ITERATION]) <= iteration]
        self._write(columns if kept else [ITERATION], kept)

    def add(self, row: Any) -> None:
        """Appends a row. The file is rewritten if the row has other metrics than earlier rows."""
        if new := [name for name in row if name not in self._columns]:
            self._write([*self._columns, *new], self._read()[1])
        with self._errors(), open(self._folder.open_to_append(self._path.name), "a", newline="") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)

    def _read(self) -> tuple[list[str], list[dict[str, Any]]]:
        with self._errors():
            if not self._folder.has(self._path.name):
                return [ITERATION], []
            with self._folder.reading(self._path.name) as file:
                reader = csv.DictReader(io.TextIOWrapper(file, "utf-8", errors="replace", newline=""))
                rows = list(reader)
                return list(reader.fieldnames or []), rows

    def _write(self, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
        self._columns = list(columns)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        with self._errors(), self._folder.replacing(self._path.name) as file:
            file.write(text.getvalue().encode())

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self._path} cannot be opened: {error.strerror or error}.") from error
