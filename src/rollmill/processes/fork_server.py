"""The parent process of a coordinator's workers, which forks them.

It imports once what every worker needs, and then forks workers, which therefore start much faster than a fresh
interpreter. Forking is safe while the process has a single thread and no JAX backend. If imports have started
threads, or if the system is not Linux, it starts fresh interpreters instead.

The fork server also reaps the workers, ends what they leave behind, and ends all of them when the coordinator is
gone, for whatever reason. If the fork server itself is killed, the kernel kills its workers.

Requests arrive on standard input, a socket, as one JSON object each (`channels.transport.connection`):

    {"start": number, "assignment": object for `run_as_worker`}   with a descriptor to write output to
    {"kill": number, "at_once": whether with SIGKILL and all that the worker started}

and notices are sent back in the same way: first `ready`, then `started` with a `pid`, and `ended` with a `status`.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from rollmill.channels.errors import ConnectionLost
from rollmill.channels.transport.connection import Connection
from rollmill.core.child_processes import PATH, python_command, python_environment
from rollmill.core.code_identity import own_code
from rollmill.core.interruption import leave_signals_to_coordinator
from rollmill.core.process_tree import (
    MARK,
    ON_LINUX,
    adopt_orphans,
    count_threads,
    die_with,
    kill_children,
    kill_family,
    lead_session,
)
from rollmill.processes.main import close_input, run_as_worker

MAX_REQUEST_BYTES = 64 * 2**20
"""Maximum bytes of a request, which contains the worker's environment variables and settings."""

POLL_SECONDS = 0.25
"""Seconds between two checks that the coordinator is still the parent of the fork server."""

START_WORKER = "from rollmill.processes.main import main; main()"


class _Child(NamedTuple):
    number: int
    mark: str


def main() -> None:
    """Runs the fork server until the coordinator is gone. In a forked process, runs the worker."""
    coordinator, preload, may_fork = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "fork"
    line = Connection(socket.socket(fileno=os.dup(0)))
    close_input()
    for module in filter(None, preload.split(",")):
        importlib.import_module(module)
    own_code()  # digests the imported sources now, even if the files change later
    may_fork = may_fork and ON_LINUX and count_threads() == 1
    gc.collect()
    gc.freeze()  # objects that exist now stay shared with the workers until they are written to
    server = ForkServer(line, coordinator, may_fork)
    server.notify({"ready": True, "forks": may_fork, "threads": count_threads()})
    assignment = server.serve()
    if assignment is not None:
        sys.exit(run_as_worker(assignment))


class ForkServer:
    """The main loop of a fork server: it reads requests, reaps workers, and watches the coordinator."""

    def __init__(self, line: Connection, coordinator: int, may_fork: bool) -> None:
        self._line = line
        self._coordinator = coordinator
        self._may_fork = may_fork
        self._children: dict[int, _Child] = {}
        self._woken, self._wake = _nonblocking_pipe()

    def serve(self) -> dict[str, Any] | None:
        """Serves requests until the coordinator is gone, and returns None. In a forked worker, returns the
        worker's assignment.
        """
        adopt_orphans()
        self._take_signals()
        while os.getppid() == self._coordinator:
            ready, _, _ = select.select([self._line, self._woken], [], [], POLL_SECONDS)
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._woken, 4096):
                        pass
            self._reap()
            if self._line not in ready:
                continue
            request = receive(self._line)
            if request is None:
                break
            assignment = self._handle(*request)
            if assignment is not None:
                return assignment
        self._end_all()
        return None

    def _take_signals(self) -> None:
        """Wakes the loop when a child ends. Stop signals are left to the coordinator."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        leave_signals_to_coordinator()

    def notify(self, notice: dict[str, Any]) -> None:
        """Sends a notice to the coordinator. If the coordinator is gone, this is noticed when the loop reads from
        it.
        """
        with contextlib.suppress(ConnectionLost):
            self._line.send_json(notice)

    def _handle(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | None:
        match request:
            case {"start": int(number), "assignment": dict(assignment)}:
                return self._start(number, assignment, descriptors[0] if descriptors else None)
            case {"kill": int(number), "at_once": bool(at_once)}:
                for pid, child in self._children.items():
                    if child.number == number:
                        os.kill(pid, signal.SIGKILL if at_once else signal.SIGTERM)
        return None

    def _start(self, number: int, assignment: dict[str, Any], output: int | None) -> dict[str, Any] | None:
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # blocked until the child stops ignoring it
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            self.notify({"ended": number, "status": None, "reason": f"no process could be forked: {error}"})
        if pid == 0:
            self._let_go()
            return _prepare(parent, assignment, output, self._may_fork)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if output is not None:
            os.close(output)
        if pid > 0:
            self._children[pid] = _Child(number, assignment["environment"][MARK])
            self.notify({"started": number, "pid": pid})
        return None

    def _let_go(self) -> None:
        """Closes the descriptors of this loop in a child. The parent's end of the connection stays open."""
        signal.set_wakeup_fd(-1)
        self._line.release()
        os.close(self._woken)
        os.close(self._wake)

    def _reap(self) -> None:
        """Reports the workers that ended, once the processes that they left behind are gone too."""
        for pid, status in _reap_children():
            child = self._children.pop(pid, None)
            if child is not None:
                kill_family(pid, child.mark)
                self.notify({"ended": child.number, "status": os.waitstatus_to_exitcode(status)})

    def _end_all(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid, child in self._children.items():
            kill_family(pid, child.mark)
        kill_children()  # also daemons in other sessions without the mark, which this process has adopted


def receive(line: Connection) -> tuple[dict[str, Any], list[int]] | None:
    """Receives the next JSON object and its file descriptors. Returns None once the other side is gone."""
    try:
        return line.receive_json(limit=MAX_REQUEST_BYTES)
    except ConnectionLost:
        return None


def _prepare(parent: int, assignment: dict[str, Any], output: int | None, forked: bool) -> dict[str, Any]:
    """Detaches a child from the parent's session, signals and files. Returns only if it needs no fresh
    interpreter.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    leave_signals_to_coordinator()
    lead_session()
    die_with(parent)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    if not forked:
        _become_fresh(assignment)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # otherwise all children would draw the same random values
    return assignment


def _become_fresh(assignment: dict[str, Any]) -> None:
    """Turns this process into a fresh interpreter that reads the same assignment from its standard input."""
    with open(os.memfd_create("assignment"), "w+b") if ON_LINUX else tempfile.TemporaryFile() as file:
        file.write(json.dumps(assignment).encode())
        file.flush()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        os.dup2(file.fileno(), 0)
    variables = python_environment(assignment["environment"] | {PATH: os.pathsep.join(assignment["path"])})
    os.execve(sys.executable, python_command("-c", START_WORKER), variables)


def _nonblocking_pipe() -> tuple[int, int]:
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return read_fd, write_fd


def _reap_children() -> Iterator[tuple[int, int]]:
    """Reaps children, adopted ones too: their process ids and statuses."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status
