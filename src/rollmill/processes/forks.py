"""Forks the child processes of a command, which then start without importing anything.

A command that will start children first forks a helper process, while it still has a single thread. The helper
imports the modules that the children need in addition to the command, waits for requests, and forks the children.
The helper ends with its parent, and the children end with the helper, as if the command itself had started them.
If the package's source files change on disk, the helper stops forking, because stored results of children are
found by these sources.

Requests and notices are JSON objects on a socket (`channels.transport.connection`):

    {"start": number, "words": [...], "environment": {...}}   with descriptors of input, output and others
    {"started": number, "pid": process id, or null if nothing was forked}
    {"ended": number, "status": exit code, or minus a signal}
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rollmill.channels.errors import ConnectionLost
from rollmill.channels.transport.connection import Connection
from rollmill.core.child_processes import PATH
from rollmill.core.interruption import CHECKPOINT_REQUEST, NOTICES
from rollmill.core.process_tree import ON_LINUX, condition_of, count_threads, die_with, name_process

PACKAGE = Path(__file__).parents[1]
MAX_REQUEST_BYTES = 64 * 2**20
"""Maximum bytes of a request, which contains the environment variables of a child."""

HELD = {signal.SIGINT, signal.SIGTERM, *NOTICES}
"""Signals that the forking process blocks, for itself and for its children until they can handle them."""

LOOK_SECONDS = 0.1
"""Seconds between two checks for ended children that nobody waits for."""

LOST = -signal.SIGTERM
"""Exit status of children whose forking process has ended, since it told them to stop with this signal."""


class ForkedChild:
    """A forked child process, with the methods of `subprocess.Popen` that a command uses to watch its children."""

    def __init__(self, forks: "Forks", pid: int) -> None:
        self._forks, self.pid = forks, pid
        self.returncode: int | Any = None
        """Exit code, or minus the number of a signal. None while the child runs, as far as it is known."""

    def poll(self) -> int | None:
        """Returns the child's exit code, or None while it runs."""
        if self.returncode is None:
            self._forks.hear(0.0)
        if self.returncode is None and self._forks.is_lost and not self._is_running():
            self.returncode = LOST
        return self.returncode

    def _is_running(self) -> bool:
        return Path(f"/proc/{self.pid}").exists() and condition_of(self.pid) != "dead"

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the child to end, and returns its exit code. Raises `subprocess.TimeoutExpired` after
        `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)
            self._forks.hear(left)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to the child, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM to the child."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the child."""
        self.send_signal(signal.SIGKILL)


Child: TypeAlias = subprocess.Popen | ForkedChild
"""A child process, forked or started as a program."""


class Forks:
    """A command's connection to the helper process that forks its children."""

    def __init__(self, line: Connection, pid: int) -> None:
        self._line, self._pid = line, pid
        self.is_lost = False
        """Whether the helper process is gone, so that its children have been asked to stop."""
        self._children: dict[int, ForkedChild] = {}
        self._pids: dict[int, int | None] = {}
        self._count = 0

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> ForkedChild | None:
        """Forks a child with these arguments and environment variables. Returns None if it cannot be forked.

        The first two of `descriptors` become the child's input and output. The others stay open in the child.
        """
        number, self._count = self._count, self._count + 1
        pairs = {_as_text(name): _as_text(value) for name, value in environment.items()}
        request = {"start": number, "words": [*map(_as_text, words)], "environment": pairs}
        with contextlib.suppress(ConnectionLost):
            self._line.send_json(request, descriptors=descriptors)
            while number not in self._pids:
                self._take(self._line.receive_json()[0])
        pid = self._pids.pop(number, None)
        if pid is None:
            return None
        self._children[number] = ForkedChild(self, pid)
        return self._children[number]

    def hear(self, seconds: float | None) -> None:
        """Reads the notices of the helper that arrive within `seconds`. With None, waits for the next notice."""
        if self.is_lost:
            time.sleep(LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS))
            return
        try:
            while select.select([self._line], [], [], seconds)[0]:
                self._take(self._line.receive_json()[0])
                seconds = 0.0
        except ConnectionLost:
            self.is_lost = True

    def close(self) -> None:
        """Ends the helper process. Children that still run are asked to stop."""
        self._line.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _take(self, notice: Mapping[str, object]) -> None:
        match notice:
            case {"started": int(number), "pid": int() | None as pid}:
                self._pids[number] = pid
            case {"ended": int(number), "status": int(status)} if number in self._children:
                self._children.pop(number).returncode = status
            case _:
                pass


_forks: list[Forks] = []
"""The connection of this process, if it has one."""


def forks_of_this_command() -> Forks | None:
    """Returns the connection to the helper process that forks this command's children, or None without one."""
    return _forks[-1] if _forks else None


def fork_children(preload: Sequence[str]) -> list[str] | None:
    """Forks the helper process that forks this command's children, if this is safe.

    Returns None in the command. In each child, returns the command-line arguments of its request. `preload` names
    modules that the children need.
    """
    if not ON_LINUX or count_threads() != 1 or not hasattr(os, "pidfd_open"):
        return None
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    ours, theirs = socket.socketpair()
    command = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        return None
    if pid:
        theirs.close()
        _forks.append(Forks(Connection(ours), pid))
        return None
    ours.close()
    begun = _ForkingProcess(Connection(theirs), command).serve(preload)
    if begun is None:
        os._exit(0)
    return begun


def end_forks() -> None:
    """Ends the helper process that forks this command's children, if there is one."""
    while _forks:
        _forks.pop().close()


class _ForkedProcess(NamedTuple):
    number: int
    pid: int


class _ForkingProcess:
    def __init__(self, line: Connection, command: int) -> None:
        self._line, self._command = line, command
        self._running: dict[int, _ForkedProcess] = {}
        self._interrupt = signal.getsignal(signal.SIGINT)

    def serve(self, preload: Sequence[str]) -> list[str] | None:
        """Serves until the command is gone, and returns None. In a child, returns the child's command-line
        arguments.
        """
        die_with(self._command)
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # signals for the command reach its whole process group
        name_process("rollmill forks")
        sources = _state_of_sources()
        try:
            for module in preload:
                importlib.import_module(module)
        except ImportError:
            return None
        gc.collect()
        gc.freeze()  # objects that exist now stay shared with the children until they are written to
        while True:
            ready, _, _ = select.select([self._line.fileno(), *self._running], [], [])
            for descriptor in self._running.keys() & set(ready):
                self._reap(descriptor)
            if self._line.fileno() in ready:
                try:
                    request, descriptors = self._line.receive_json(limit=MAX_REQUEST_BYTES)
                except ConnectionLost:
                    return None
                may_fork = count_threads() == 1 and _state_of_sources() == sources
                if (words := self._start(request, descriptors, may_fork)) is not None:
                    return words

    def _start(self, request: Mapping[str, object], descriptors: list[int], may_fork: bool) -> list[str] | None:
        match request:
            case {"start": int(number), "words": list(words), "environment": dict(environment)}:
                pass
            case _:
                return None
        server, pid = os.getpid(), -1
        with contextlib.suppress(OSError):
            pid = os.fork() if may_fork else -1
        if pid == 0:
            self._begin({_from_text(name): _from_text(value) for name, value in environment.items()}, descriptors)
            return [str(server), *map(_from_text, words)]
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self._running[os.pidfd_open(pid)] = _ForkedProcess(number, pid)
        self._notify({"started": number, "pid": pid if pid > 0 else None})
        return None

    def _begin(self, environment: Mapping[str, str], descriptors: list[int]) -> None:
        """Prepares the newly forked process, so that it behaves like a newly started one."""
        self._line.release()
        for descriptor in self._running:
            os.close(descriptor)
        taken, output, *_ = descriptors
        for descriptor, standard in ((taken, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        for descriptor in {taken, output} - {0, 1, 2}:
            os.close(descriptor)
        sys.stdin = os.fdopen(0, closefd=False)
        os.environ.clear()
        os.environ.update(environment)
        added = [folder for folder in environment.get(PATH, "").split(os.pathsep) if folder not in ("", *sys.path)]
        sys.path[:0] = added  # folders of modules that the command was given as files
        os.setsid()
        for number in (signal.SIGTERM, *NOTICES):
            signal.signal(number, signal.SIG_DFL)
        is_ignored = self._interrupt == signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler)
        # CHECKPOINT_REQUEST stays blocked until the child can handle it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD - {CHECKPOINT_REQUEST})
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # otherwise all children would draw the same random values

    def _reap(self, descriptor: int) -> None:
        number, pid = self._running.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._notify({"ended": number, "status": os.waitstatus_to_exitcode(status)})

    def _notify(self, notice: Mapping[str, object]) -> None:
        with contextlib.suppress(ConnectionLost):
            self._line.send_json(dict(notice))


def _state_of_sources() -> list[tuple[str, int, int]]:
    """Returns the sizes and times of change of the package's sources."""
    states = []
    for file in sorted(PACKAGE.rglob("*.py")):
        # the file has just been removed, or is the link with which an editor locks a file
        with contextlib.suppress(OSError):
            status = file.stat()
            states.append((str(file), status.st_size, status.st_mtime_ns))
    return states


def _as_text(word: str) -> str:
    """Decodes a command-line argument, which may contain any bytes, to a string that JSON can hold."""
    return os.fsencode(word).decode("latin-1")


def _from_text(text: str) -> str:
    """Returns the word that `_as_text` has turned into text."""
    return os.fsdecode(text.encode("latin-1"))
