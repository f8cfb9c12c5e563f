"""Writes TensorBoard scalars and pictures in a background thread, so that the run never waits."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from rollmill.core.folder import Folder, ForeignFileError
from rollmill.record.event_records import (
    hyperparameters_event,
    picture_event,
    record,
    restart_event,
    scalars_event,
    version_event,
)
from rollmill.record.json_files import write_failure

PREFIX = "events.out.tfevents."
"""Beginning of the names of TensorBoard's files, before the time in seconds."""
TIME_DIGITS = 10


class EventLog:
    """Writes one TensorBoard event file, whose folder is created with the first entry.

    The file begins with the hyperparameters, if there are any. After a resume, TensorBoard hides entries of
    earlier files from `purge_step` on. The background thread imports no modules, because an import would block the
    other threads.
    """

    def __init__(
        self, folder: Folder, *, purge_step: int | None = None, hyperparameters: Mapping[str, Any] | None = None
    ) -> None:
        self._folder = folder
        self._hyperparameters = hyperparameters or {}
        self._purge_step = purge_step
        self._entries: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queues an entry with scalars at `step` on the x axis.

        Raises a `StorageError` if an earlier entry could not be written.
        """
        self._add(partial(scalars_event, time.time(), step, dict(scalars)))

    def add_picture(self, step: int, tag: str, encoded: bytes, height: int, width: int) -> None:
        """Queues a picture at `step` on the x axis, encoded as PNG or GIF. Raises the errors of `add`."""
        self._add(partial(picture_event, time.time(), step, tag, encoded, height=height, width=width))

    def _add(self, event: Callable[[], bytes]) -> None:
        self._raise_error()
        if self._thread is None:
            self._thread = Thread(target=self._write_entries, name="rollmill-tensorboard", daemon=True)
            self._thread.start()
        self._entries.put(event)

    def close(self) -> None:
        """Writes the queued entries and closes the file. Raises the errors of `add`."""
        if self._thread is not None:
            self._entries.put(None)
            self._thread.join()
            self._thread = None
        self._raise_error()

    def _raise_error(self) -> None:
        if isinstance(self._error, ForeignFileError):
            raise self._error
        if self._error is not None:
            raise write_failure(self._folder.path, self._error) from self._error

    def _write_entries(self) -> None:
        try:
            with _open_events(self._folder, self._purge_step) as file:
                if self._hyperparameters:
                    run = self._folder.root.name
                    file.write(record(hyperparameters_event(time.time(), run, self._hyperparameters)))
                while (event := self._entries.get()) is not None:
                    file.write(record(event()))
                    if self._entries.empty():
                        file.flush()
        except Exception as error:  # whatever the error, `add` must not queue entries for a thread that has ended
            self._error = error


def _open_events(folder: Folder, purge_step: int | None) -> IO[bytes]:
    folder.make()
    now = time.time()
    name = f"{PREFIX}{_next_second(folder, now):0{TIME_DIGITS}d}.{socket.gethostname()}.{time.time_ns()}"
    file = os.fdopen(folder.create(name), "wb")
    file.write(record(version_event(now)))
    if purge_step is not None:
        file.write(record(restart_event(now, purge_step)))
    file.flush()
    return file


def _next_second(folder: Folder, now: float) -> int:
    """Returns the time for the name of a new file: now, or later than the times of all earlier files.

    TensorBoard reads files in the order of their names, and never returns to an earlier one. The clock may have
    been set back since the last file, or two hosts may have different clocks.
    """
    names = (name.removeprefix(PREFIX) for name in folder.kinds() if name.startswith(PREFIX))
    times = (name.partition(".")[0] for name in names)
    return max([int(now), *(int(text) + 1 for text in times if text.isdecimal() and len(text) == TIME_DIGITS)])
