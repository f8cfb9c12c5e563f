"""The parent process of a coordinator's workers.

It imports once what every worker needs, and forks: a worker is there in a fraction of the time that a fresh
interpreter takes. Forking is safe while nothing but this one thread exists, and no JAX backend; where imports
have started threads, or the system is not Linux, it starts fresh interpreters instead.

It also answers for the workers. It reaps them, ends what they leave behind, and ends them all when the
coordinator is gone, however that came. If it is killed itself, the kernel kills its workers.

Requests come on standard input, a socket, as a length and one JSON object each:

    {"start": number, "assignment": object for `run_as_worker`}   with a descriptor to write output to
    {"kill": number, "at_once": whether with SIGKILL and all that the worker started}

and notices go back the same way: `ready` at first, `started` with a `pid`, `ended` with a `status`.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from rollmill.core.children import PATH, python_command, python_environment
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

LENGTH = struct.Struct("<I")
LOOK_SECONDS = 0.25
"""How often it looks whether the coordinator is still its parent."""

START_WORKER = "from rollmill.processes.main import main; main()"


class _Child(NamedTuple):
    number: int
    mark: str


class _Request(NamedTuple):
    fields: dict[str, Any]
    output: int | None


def main() -> None:
    """Serves until the coordinator is gone; in a forked worker, becomes it."""
    coordinator, preload, may_fork = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "fork"
    line = socket.socket(fileno=os.dup(0))
    close_input()
    for module in filter(None, preload.split(",")):
        importlib.import_module(module)
    own_code()  # of what was imported just now, whatever becomes of the files
    may_fork = may_fork and ON_LINUX and count_threads() == 1
    gc.collect()
    gc.freeze()  # what is there now is shared with the workers as long as nobody writes to it
    tell(line, {"ready": True, "forks": may_fork, "threads": count_threads()})
    with line:
        assignment = ForkServer(line, coordinator, may_fork).serve()
    if assignment is not None:
        sys.exit(run_as_worker(assignment))


class ForkServer:
    """The loop of the process: requests, ended workers, and whether the coordinator lives."""

    def __init__(self, line: socket.socket, coordinator: int, may_fork: bool) -> None:
        self._line = line
        self._coordinator = coordinator
        self._may_fork = may_fork
        self._children: dict[int, _Child] = {}
        self._woken, self._wake = _nonblocking_pipe()

    def serve(self) -> dict[str, Any] | None:
        """Until the coordinator is gone: None. In a forked worker, at once: its assignment."""
        adopt_orphans()
        self._take_signals()
        while os.getppid() == self._coordinator:
            ready, _, _ = select.select([self._line, self._woken], [], [], LOOK_SECONDS)
            if self._woken in ready:
                _empty(self._woken)
            self._bury()
            if self._line not in ready:
                continue
            request = receive(self._line)
            if request is None:
                break
            assignment = self._obey(request)
            if assignment is not None:
                return assignment
        self._end_all()
        return None

    def _take_signals(self) -> None:
        """Wakes the loop when a child ends. Signals that stop a training are left to the coordinator."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        leave_signals_to_coordinator()

    def _obey(self, request: _Request) -> dict[str, Any] | None:
        match request.fields:
            case {"start": int(number), "assignment": dict(assignment)}:
                return self._start(number, assignment, request.output)
            case {"kill": int(number), "at_once": bool(at_once)}:
                self._kill(number, at_once)
        return None

    def _start(self, number: int, assignment: dict[str, Any], output: int | None) -> dict[str, Any] | None:
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it waits until the child no longer ignores it
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            tell(self._line, {"ended": number, "status": None, "reason": f"no process could be forked: {error}"})
        if pid == 0:
            self._let_go()
            return _prepare(parent, assignment, output, self._may_fork)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if output is not None:
            os.close(output)
        if pid > 0:
            self._children[pid] = _Child(number, assignment["environment"][MARK])
            tell(self._line, {"started": number, "pid": pid})
        return None

    def _let_go(self) -> None:
        """In a child: nothing of this loop is left."""
        signal.set_wakeup_fd(-1)
        self._line.close()
        os.close(self._woken)
        os.close(self._wake)

    def _kill(self, number: int, at_once: bool) -> None:
        for pid, child in self._children.items():
            if child.number == number:
                os.kill(pid, signal.SIGKILL if at_once else signal.SIGTERM)

    def _bury(self) -> None:
        """Tells who ended, once all that a worker left behind is gone too."""
        for pid, status in _ended():
            child = self._children.pop(pid, None)
            if child is not None:
                kill_family(pid, child.mark)
                tell(self._line, {"ended": child.number, "status": os.waitstatus_to_exitcode(status)})

    def _end_all(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid, child in self._children.items():
            kill_family(pid, child.mark)
        kill_children()  # daemons in sessions of their own, which were adopted and whose environment has no mark


def tell(line: socket.socket, fields: dict[str, Any]) -> None:
    """Sends one object; nothing where the other side is gone, which shows when it is read from."""
    text = json.dumps(fields).encode()
    with contextlib.suppress(OSError):
        line.sendall(LENGTH.pack(len(text)) + text)


def ask(line: socket.socket, fields: dict[str, Any], descriptors: list[int]) -> None:
    """Sends one object, with file descriptors."""
    text = json.dumps(fields).encode()
    socket.send_fds(line, [LENGTH.pack(len(text))], descriptors)
    line.sendall(text)


def receive(line: socket.socket) -> _Request | None:
    """The next object; None where the other side is gone."""
    try:
        prefix, descriptors, _, _ = socket.recv_fds(line, LENGTH.size, 1)
        prefix += _exactly(line, LENGTH.size - len(prefix)) if prefix else b""
        text = _exactly(line, LENGTH.unpack(prefix)[0]) if prefix else b""
    except OSError:
        return None
    return _Request(json.loads(text), descriptors[0] if descriptors else None) if text else None


def _exactly(line: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = line.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionError("the other side is gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _prepare(parent: int, assignment: dict[str, Any], output: int | None, forked: bool) -> dict[str, Any]:
    """In the child: loose of the parent's session, signals and files. Returns only where it needs no fresh one."""
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
        sys.modules["numpy"].random.seed()  # all children would draw the same numbers
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


def _empty(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _ended() -> Iterator[tuple[int, int]]:
    """Reaps children, adopted ones too: their process ids and statuses."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status
