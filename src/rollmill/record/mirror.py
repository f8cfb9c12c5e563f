"""Copies a run to its object store in the background while it trains.

A thread watches the run directory, and copies each checkpoint once it is complete, after the other files of the
run. Training does not wait for the store, and continues if the store fails. Failed requests are retried until they
succeed or training has ended.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

from rollmill.core.errors import CheckpointError, StorageError
from rollmill.core.folder import Folder
from rollmill.record.checkpoint_files import ARRAYS, MAX_HEADER_BYTES, RECORD
from rollmill.record.checkpoints import NAME
from rollmill.record.json_files import MAX_BYTES
from rollmill.record.object_store import MAX_PAUSE, ObjectStore
from rollmill.record.run_directory import RunDirectory
from rollmill.record.run_files import CONFIG
from rollmill.record.stored_runs import (
    CHECKPOINTS,
    MARKER,
    WRITER,
    Marker,
    checkpoint_of,
    is_run_file,
    local_marker,
    read_marker,
    write_local_marker,
)

LOOK_SECONDS = 0.5
"""Seconds between two checks of the run directory."""
FAILURES_TOLD = 3
"""Number of consecutive failures after which the user is warned."""
FINISHED_SECONDS = 600.0
"""How long a run that has finished waits for its store, in seconds."""
STOPPED_SECONDS = 8.0
"""Seconds that a run waits for its store after a signal or an error. SIGKILL often follows after 30 s."""
MAX_DEPTH = 2
"""Maximum depth of folders below the run directory whose files are copied. Checkpoints are copied separately."""

Signature: TypeAlias = tuple[int, int, int]
"""Inode, size and modification time of a file, which show whether it has changed."""
_State: TypeAlias = tuple[dict[str, Signature | None], Signature | None, Signature | None]


class _Opened(NamedTuple):
    """A whole checkpoint. It can be read to its end even if it is deleted meanwhile."""

    iteration: str
    record: bytes
    arrays: IO[bytes]


class TakenOver(StorageError):
    """Raised if another process copies the same run to the store."""


class OtherRun(TakenOver):
    """Raised if the store contains another run at the URL."""


@contextmanager
def mirror_run(
    run: RunDirectory, url: str, note: Callable[[str], None], warn: Callable[[str], None]
) -> Iterator[None]:
    """Context manager that copies a run to its object store.

    `note` prints the destination, and `warn` prints problems. At the end, the context waits for the store: some
    minutes if training has finished, and some seconds otherwise. Raises a `StorageError` if training has finished
    and files are still missing in the store.
    """
    mirror = Mirror(run, ObjectStore(url), warn)
    note(f"copying the run to {url}")
    mirror.start()
    try:
        yield
    except BaseException:
        mirror.finish(STOPPED_SECONDS)
        raise
    finished = (run.read_summary() or {}).get("status") == "finished"
    if mirror.finish(FINISHED_SECONDS if finished else STOPPED_SECONDS):
        return
    if finished:
        raise StorageError(
            f"training has finished, but the copy at {url} is incomplete: {mirror.problem}\nThe complete run is "
            f"in {run.root}{mirror.way_out}"
        )


class Mirror:
    """Copies one run to one object store in a background thread.

    Args:
        run: a run whose lock this process holds.
        store: the destination.
        note: shows a line when the store begins to fail, and when it is complete again.
    """

    def __init__(self, run: RunDirectory, store: ObjectStore, note: Callable[[str], None]) -> None:
        self._run, self._store, self._note = run, store, note
        self._writer = f"{os.uname().nodename}:{os.getpid()}:{time.time_ns()}"
        self._marker: Marker | None = None
        self._copied: dict[str, Signature] = {}
        self._checkpoints: dict[str, bytes] = {}
        """Records of the checkpoints that the store has, by iteration."""
        self._seen: _State | None = None
        self._ends = threading.Event()
        self._deadline = math.inf
        self._whole = threading.Event()
        """Set while the store has all of the run, as of the last look."""
        self._thread = threading.Thread(target=self._work, name="rollmill-store", daemon=True)
        self.problem = "the copy did not complete in time."
        self.way_out = f", and the next start on this machine completes the copy:\n  {run.command('resume')}"

    def start(self) -> None:
        """Starts the background thread that copies the run."""
        self._thread.start()

    def finish(self, seconds: float) -> bool:
        """Copies the remaining files within a time limit. Returns whether the store then has the whole run."""
        self._deadline = time.monotonic() + seconds
        self._ends.set()
        self._thread.join(seconds)
        if self._thread.is_alive() or not self._whole.is_set():
            self._note(
                f"the copy of this run at {self._store.url} is incomplete: {self.problem} The complete run is in "
                f"{self._run.root}{self.way_out}"
            )
            return False
        return True

    def _work(self) -> None:
        failures = 0
        while time.monotonic() < self._deadline:
            ends = self._ends.is_set()
            try:
                self._look(last=ends)
            except TakenOver as error:
                self.problem = str(error)
                if isinstance(error, OtherRun):
                    self.way_out = ", which the next start on this machine renames"
                self._note(f"this run is no longer copied: {error}")
                return
            except Exception as error:  # training continues after any error
                failures += 1
                self._note_failure(error, failures)
                continue
            if failures >= FAILURES_TOLD:
                self._note(f"{self._store.url} has all finished checkpoints again")
            failures = 0
            if ends:
                return
            self._ends.wait(LOOK_SECONDS)

    def _note_failure(self, error: Exception, failures: int) -> None:
        """Notes a failure, and pauses before the next try."""
        self._whole.clear()
        self.problem = str(error)
        if failures == FAILURES_TOLD:
            self._note(f"copying failed and is being retried: {error}")
        pause = min(2.0**failures / 4, MAX_PAUSE)
        if not self._ends.wait(pause):
            return
        time.sleep(min(pause, 1.0))

    def _look(self, *, last: bool) -> None:
        """Copies what has changed, if there is another checkpoint, or at the end."""
        now = self._present(), _signature(self._run.config_file), _signature(self._run.summary_file)
        if now == self._seen and not last:
            return
        self._whole.clear()
        present = sorted(now[0], key=int, reverse=True)
        with contextlib.ExitStack() as stack:
            newest = self._open(stack, present[0]) if present else None
            marker = self._claim()
            # copied after the checkpoints, so that the metrics include the lines before each checkpoint
            for name in self._files():
                self._copy_file(name)
            self._copy_checkpoint(newest)
        for iteration in present[1:]:
            with contextlib.ExitStack() as stack:
                self._copy_checkpoint(self._open(stack, iteration))
        if newest and self._checkpoints.get(newest.iteration):
            for iteration in self._checkpoints.keys() - set(present):
                self._store.delete(_object(iteration, RECORD))
                self._store.delete(_object(iteration, ARRAYS))
                del self._checkpoints[iteration]
        self._store.write(MARKER, marker.text())
        self._seen = now
        self._whole.set()

    def _claim(self) -> Marker:
        """Counts this copy, first in the working folder, after checking that no other process copies the run."""
        here = self._marker
        if here is None:
            there, here = read_marker(self._store) or Marker(), local_marker(self._run.folder)
            if there.run and (here is None or here.run != there.run):
                raise OtherRun(f"{self._store.url} now contains another run, which began in the meantime.")
            here = (here or there).named()
            here = replace(here, revision=max(here.revision, there.revision))
            write_local_marker(self._run.folder, here)
            self._copy_file(CONFIG)
            self._store.write(WRITER, self._writer.encode())
            self._store.write(MARKER, here.text())
            self._find_checkpoints()
        elif (writer := self._store.read(WRITER).decode(errors="replace")) != self._writer:
            raise TakenOver(f"another process on {writer.split(':')[0]} now writes to {self._store.url}.")
        self._marker = replace(here, revision=here.revision + 1)
        write_local_marker(self._run.folder, self._marker)
        return self._marker

    def _find_checkpoints(self) -> None:
        """Notes which checkpoints the store has already."""
        for name in self._store.sizes():
            iteration = checkpoint_of(name)
            if iteration and name.endswith(f"/{RECORD}"):
                self._checkpoints[iteration] = self._store.read(name)
            elif iteration:
                self._checkpoints.setdefault(iteration, b"")

    def _present(self) -> dict[str, Signature | None]:
        """Returns the checkpoints of the run directory, which are whole, with the signatures of their records."""
        folder = self._run.checkpoints
        return {
            name: _signature(folder.path / name / RECORD)
            for name, kind in folder.kinds().items()
            if kind == "folder" and NAME.fullmatch(name)
        }

    def _files(self) -> list[str]:
        """Returns the other files of the run, the configuration first."""
        found = sorted(name for name in _below(self._run.folder, "", MAX_DEPTH) if is_run_file(name))
        return sorted(found, key=lambda name: name != CONFIG)

    def _copy_file(self, name: str) -> None:
        signature = _signature(self._run.root / name)
        if signature is None or self._copied.get(name) == signature:
            return
        *parents, last = name.split("/")
        with Folder(self._run.root, tuple(parents)).reading(last) as file:
            self._store.write(name, file.read() if signature[1] <= MAX_BYTES else file)
        self._copied[name] = signature

    def _open(self, stack: contextlib.ExitStack, iteration: str) -> _Opened | None:
        """Opens a checkpoint. Returns None if it is gone, or just being replaced."""
        folder = self._run.checkpoints.inner(iteration)
        try:
            record = folder.read(RECORD, limit=MAX_HEADER_BYTES)
            arrays = stack.enter_context(folder.reading(ARRAYS))
            same = folder.read(RECORD, limit=MAX_HEADER_BYTES) == record
        except (FileNotFoundError, CheckpointError):
            return None
        return _Opened(iteration, record, arrays) if same else None

    def _copy_checkpoint(self, opened: _Opened | None) -> None:
        """Copies a checkpoint, its record last, unless the store has it."""
        if opened is None or self._checkpoints.get(opened.iteration) == opened.record:
            return
        # the store has another state of this iteration, which does not count without its record
        if opened.iteration in self._checkpoints:
            self._store.delete(_object(opened.iteration, RECORD))
        self._checkpoints[opened.iteration] = b""
        self._store.write(_object(opened.iteration, ARRAYS), opened.arrays)
        self._store.write(_object(opened.iteration, RECORD), opened.record)
        self._checkpoints[opened.iteration] = opened.record


def _object(iteration: str, file: str) -> str:
    return f"{CHECKPOINTS}/{iteration}/{file}"


def _signature(file: Path) -> Signature | None:
    try:
        status = file.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _below(folder: Folder, prefix: str, depth: int) -> Iterator[str]:
    """Yields the names of the files below a folder, except checkpoints."""
    for name, kind in folder.kinds().items():
        if kind == "file":
            yield prefix + name
        elif kind == "folder" and depth and name != CHECKPOINTS:
            yield from _below(folder.inner(name), f"{prefix}{name}/", depth - 1)
