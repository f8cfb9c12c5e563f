"""Reads the standard output and error of workers: shows lines with the worker's name, and writes them to files."""

import contextlib
import os
import queue
import re
import selectors
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rollmill.core.folder import Folder
from rollmill.processes.jobs import Job

MAX_LINE = 4000
"""Maximum bytes of a line. Longer lines are shown in pieces."""

REMEMBERED_LINES = 40
CHUNK = 1 << 16
LAST_READS = 64
"""Maximum number of reads of an output that is dropped before its end."""
TAIL_BYTES = 4096
"""Number of bytes at the end of an output in which the last line is searched for."""
AFTER_ERRORS = ("--------------------", "For simplicity, JAX has removed its internal frames")
"""Beginnings of the lines that JAX prints below an error."""

COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
UNPRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in [*range(9), *range(10, 32), *range(127, 160)]}


class WorkerLog:
    """Divides the output of one worker into printable lines, and shows and stores them.

    `show` receives each line, marked with the job's name. A file in the folder, named after the job, receives the
    lines of all attempts.
    """

    def __init__(self, job: Job, show: Callable[[str], None], folder: Path | Folder | None) -> None:
        self._name = job.name
        self._show = show
        self._rest = b""
        self._file = None
        self.last_lines: deque[str] = deque(maxlen=REMEMBERED_LINES)
        self.ended = threading.Event()
        if folder is not None:
            folder = folder if isinstance(folder, Folder) else Folder(folder)
            folder.make()
            name = re.sub(r"[^\w.-]", "-", job.name)
            descriptor = folder.open_to_append(f"{name}.log")
            self._file = os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")
            self._keep(f"--- attempt {job.attempt} ---")

    def feed(self, data: bytes) -> None:
        """Appends the next bytes of the worker's output."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        while len(self._rest) > MAX_LINE:
            # A progress bar overwrites its line without ending it. Text that it has overwritten is dropped.
            bar = self._rest.rpartition(b"\r")[2]
            piece, self._rest = (b"", bar) if len(bar) <= MAX_LINE else (bar[:MAX_LINE], bar[MAX_LINE:])
            self._take(piece)

    def end(self) -> None:
        """Closes the log, because no more output will come."""
        self._take(self._rest)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self.ended.set()

    def _take(self, line: bytes) -> None:
        text = printable(line)
        for start in range(0, len(text), MAX_LINE):
            piece = text[start : start + MAX_LINE]
            self.last_lines.append(piece)
            self._keep(piece)
            # an error in `show` must not stop the worker that writes the lines
            with contextlib.suppress(Exception):
                self._show(f"[{self._name}] {piece}")

    def _keep(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(text + "\n")
            self._file.flush()
        except OSError as error:  # a full disk ends the file, but not the run
            self._show(f"[{self._name}] its log file is no longer written: {error}")
            self._file = None


def printable(line: bytes) -> str:
    """Returns a line without colours, cursor movements and control characters."""
    text = COLOURS.sub("", line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace"))
    return text.translate(UNPRINTABLE)


class LogReader:
    """A thread that reads the output of all workers."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._outputs: dict[WorkerLog, int] = {}
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reading = True
        self._thread = threading.Thread(target=self._run, name="rollmill-logs", daemon=True)
        self._thread.start()

    def add(self, output: int, log: WorkerLog) -> None:
        """Reads `output` into `log` from now on, and closes it at its end."""
        self._ask(lambda: self._begin(output, log))

    def drop(self, log: WorkerLog) -> None:
        """Asks the reading thread to close a log once it has read the available output, and returns at once.

        It does not wait for the end of the output, which another process may keep open.
        """
        self._ask(lambda: self._end(log))

    def close(self) -> None:
        """Stops reading, after showing the lines that workers have written so far."""
        self._ask(self._end_all)
        self._thread.join()

    def _ask(self, change: Callable[[], None]) -> None:
        self._asked.put(change)
        os.write(self._wake, b"x")

    def _run(self) -> None:
        while self._reading:
            for key, _ in self._selector.select():
                if key.fd == self._woken:
                    os.read(self._woken, 1)
                    self._asked.get()()
                elif self._outputs.get(key.data) == key.fd and _read(key.fd, key.data) == 0:
                    self._end(key.data)
        self._selector.close()
        os.close(self._woken)
        os.close(self._wake)

    def _begin(self, output: int, log: WorkerLog) -> None:
        os.set_blocking(output, False)
        self._outputs[log] = output
        self._selector.register(output, selectors.EVENT_READ, log)

    def _end(self, log: WorkerLog) -> None:
        output = self._outputs.pop(log, None)
        if output is None:
            return
        self._selector.unregister(output)
        for _ in range(LAST_READS):
            if not _read(output, log):
                break
        os.close(output)
        log.end()

    def _end_all(self) -> None:
        for log in list(self._outputs):
            self._end(log)
        self._reading = False


def _read(output: int, log: WorkerLog) -> int | None:
    """Reads once, and returns the number of bytes: 0 at the end, None if nothing is available."""
    try:
        data = os.read(output, CHUNK)
    except BlockingIOError:
        return None
    if data:
        log.feed(data)
    return len(data)


def last_line(log: Path) -> str:
    """Returns the last line of a process's log, skipping the notice that JAX prints below an error."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return next((line for line in reversed(lines) if not line.startswith(AFTER_ERRORS)), "it printed nothing")
