"""Scalars for TensorBoard, written by a thread of their own so that training never waits for them."""

import time
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from rollmill.record.storage import write_failure


class _Entry(NamedTuple):
    step: int
    wall_time: float
    scalars: dict[str, float]


class EventLog:
    """One TensorBoard event file, opened at the first entry.

    It uses tensorboardX's event file and not its `SummaryWriter`, whose background process queue
    blocks for ever once its thread has died of a full disk.

    Args:
        directory: made at the first entry.
        purge_step: on resuming, TensorBoard hides earlier files' entries from this step on.
    """

    def __init__(self, directory: Path, *, purge_step: int | None = None) -> None:
        self._directory = directory
        self._purge_step = purge_step
        self._entries: SimpleQueue[_Entry | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queues one entry; `step` is the x axis.

        Raises:
            StorageError: an earlier entry could not be written.
        """
        self._raise_error()
        if self._thread is None:
            self._thread = Thread(target=self._write_entries, name="rollmill-tensorboard", daemon=True)
            self._thread.start()
        self._entries.put(_Entry(step, time.time(), dict(scalars)))

    def close(self) -> None:
        """Writes what is queued and closes the file.

        Raises:
            StorageError: an entry could not be written.
        """
        if self._thread is not None:
            self._entries.put(None)
            self._thread.join()
            self._thread = None
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise write_failure(self._directory, self._error) from self._error

    def _write_entries(self) -> None:
        try:
            file = _open_events(self._directory, self._purge_step)
            while (entry := self._entries.get()) is not None:
                file.write_event(_event(entry))
                if self._entries.empty():
                    file.flush()
            file.close()
        except Exception as error:  # whatever it is, `add` must not queue for a thread that is gone
            self._error = error


def _open_events(directory: Path, purge_step: int | None) -> Any:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

    directory.mkdir(parents=True, exist_ok=True)
    suffix = f".{time.time_ns()}"  # without it, a file opened in the same second is overwritten
    file = EventsWriter(str(directory / "events"), suffix)
    if purge_step is not None:
        start = SessionLog(status=SessionLog.START)
        file.write_event(Event(wall_time=time.time(), step=purge_step, session_log=start))
    file.flush()
    return file


def _event(entry: _Entry) -> Any:
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    values = [Summary.Value(tag=tag, simple_value=scalar) for tag, scalar in entry.scalars.items()]
    return Event(wall_time=entry.wall_time, step=entry.step, summary=Summary(value=values))
