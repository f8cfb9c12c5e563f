"""Starts worker processes on this host, through fork servers."""

import contextlib
import itertools
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.channels.errors import ConnectionLost
from rollmill.channels.transport.connection import Connection
from rollmill.core.child_processes import PATH, start_python
from rollmill.core.machine import BLAS_THREADS
from rollmill.core.process_tree import MARK, condition_of, end_leader, kill_family
from rollmill.processes import fork_server
from rollmill.processes.jobs import Job
from rollmill.processes.launchers import Exit, status_text

READ_WHILE_IMPORTING = (
    *("PYTHON", "LD_", "DYLD_", "LANG", "LC_", "TZ", "MALLOC_", "GLIBC_"),
    *("JAX", "EQX_", "ABSL_", "TF_", "MPL", "NPY_", "NUMPY_"),
    *("OPENBLAS_", "GOTO_", "OMP_", "MKL_", "KMP_", "BLIS_", "VECLIB_"),
)
"""Prefixes of environment variables that take effect when Python, NumPy, JAX or Equinox is imported.

Workers that differ in these variables need different fork servers. All other variables are set in the worker
itself.
"""

CLOSE_SECONDS = 3.0
START_SERVER = f"from {fork_server.__name__} import main; main()"


@dataclass
class LocalHandle:
    """Handle of one worker process on this host."""

    number: int
    mark: str
    output: int
    server: "ForkServerProcess"
    pid: int | None = None
    exit: Exit | None = None


class LocalLauncher:
    """A `Launcher` for this host. A `with` block closes it.

    With `fork`, workers are forked from a process that has imported `preload`, if this is safe. Forking is not
    safe if the import of one of these modules starts a thread or a JAX backend. Each worker is then a fresh
    interpreter.
    """

    def __init__(self, *, fork: bool = True, preload: Sequence[str] = ("rollmill",)) -> None:
        self._fork = fork
        self._preload = preload
        self._servers: dict[frozenset[tuple[str, str]], ForkServerProcess] = {}
        self._numbers = itertools.count()
        self._run = secrets.token_hex(8)

    @property
    def servers(self) -> tuple["ForkServerProcess", ...]:
        """The fork servers that are running."""
        return tuple(server for server in self._servers.values() if not server.gone)

    def prepare(self, jobs: Iterable[Job]) -> None:
        """Starts the fork servers that these jobs will need, so that they import modules while other work
        is done.
        """
        for job in jobs:
            self._server_for(_environment_of(job, mark=""))

    def start(self, job: Job, address: str, token: bytes) -> LocalHandle:
        """Requests a process for a job without waiting for it, and returns its handle."""
        number = next(self._numbers)
        environment = _environment_of(job, mark=f"{self._run}-{number}")
        assignment = {
            "job": job.to_json(),
            "address": address,
            "token": token.hex(),
            "environment": environment,
            "path": [os.path.abspath(folder) for folder in sys.path],
            "folder": os.getcwd(),
        }
        return self._server_for(environment).start(number, assignment)

    def output(self, handle: LocalHandle) -> int | None:
        """Returns a file descriptor of the process's output, which the caller reads and closes."""
        return handle.output

    def exit(self, handle: LocalHandle) -> Exit | None:
        """Returns how the process ended, or None while it runs."""
        return handle.exit

    def kill(self, handle: LocalHandle, *, at_once: bool = True) -> None:
        """Ends the worker. With `at_once`, kills it and all processes that it has started (SIGKILL), otherwise
        asks it to end (SIGTERM).
        """
        handle.server.ask({"kill": handle.number, "at_once": at_once})

    def abandon(self, handle: LocalHandle) -> None:
        """Stops tracking a process. Never needed here, because this host is always reachable."""
        self.kill(handle)

    def leaving(self, handle: LocalHandle) -> str:
        """Returns an empty string, because nothing announces that this host is about to be removed."""
        return ""

    def condition(self, handle: LocalHandle) -> str:
        """Returns the reason why the process cannot run, such as "stopped by a signal". Returns an empty string if
        it can run.
        """
        return condition_of(handle.pid) if handle.pid is not None else ""

    def close(self) -> None:
        """Ends all worker processes that still run, and their fork servers."""
        for server in self._servers.values():
            server.hang_up()
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def __enter__(self) -> "LocalLauncher":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _server_for(self, environment: dict[str, str]) -> "ForkServerProcess":
        """Returns the fork server that has imported under these variables, and starts it if there is none."""
        early = {name: text for name, text in environment.items() if name.startswith(READ_WHILE_IMPORTING)}
        key = frozenset(early.items()) if self._fork else frozenset()
        server = self._servers.get(key)
        if server is None or server.gone:
            server = self._servers[key] = ForkServerProcess(environment, self._fork, self._preload)
        return server


class ForkServerProcess:
    """The coordinator's side of one fork server process."""

    def __init__(self, environment: dict[str, str], fork: bool, preload: Sequence[str]) -> None:
        self.gone = False
        self.ready: dict[str, Any] | None = None
        """Its message after importing: `forks`, `threads`."""
        self._handles: dict[int, LocalHandle] = {}
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        self._line = Connection(ours)
        arguments = [str(os.getpid()), ",".join(preload) if fork else "", "fork" if fork else "fresh"]
        with theirs:
            path = os.pathsep.join(map(os.path.abspath, sys.path))
            self._process = start_python(
                *("-c", START_SERVER, *arguments),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                variables=_remove_marks(environment) | {PATH: path},
                start_new_session=True,
            )
        self._listening = threading.Thread(target=self._listen, name="rollmill-fork-server", daemon=True)
        self._listening.start()

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    def start(self, number: int, assignment: dict[str, Any]) -> LocalHandle:
        """Requests a worker from the fork server, and returns its handle without waiting."""
        output, theirs = os.pipe()
        handle = LocalHandle(number, assignment["environment"][MARK], output, self)
        with self._lock:
            self._handles[number] = handle
            if self.gone:
                handle.exit = self._exit_with_server()
        self.ask({"start": number, "assignment": assignment}, [theirs])
        os.close(theirs)
        return handle

    def ask(self, fields: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends a request to the fork server. Does nothing if the server is gone, which its handles report."""
        with contextlib.suppress(ConnectionLost), self._lock:
            self._line.send_json(fields, descriptors=descriptors)

    def hang_up(self) -> None:
        """Makes the fork server kill its workers and end."""
        self._line.end()

    def close(self) -> None:
        """Waits until the fork server has ended, after `hang_up`."""
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._listening.join(CLOSE_SECONDS)

    def _listen(self) -> None:
        while (notice := fork_server.receive(self._line)) is not None:
            self._take(notice[0])
        self._process.wait()
        with self._lock:
            self.gone = True
            self._line.close()
            left = [handle for handle in self._handles.values() if handle.exit is None]
        for handle in left:
            if handle.pid is not None:
                end_leader(handle.pid)
                kill_family(handle.pid, handle.mark)
            handle.exit = self._exit_with_server()

    def _take(self, fields: dict[str, Any]) -> None:
        match fields:
            case {"ready": True}:
                self.ready = fields
            case {"started": int(number), "pid": int(pid)}:
                self._handles[number].pid = pid
            case {"ended": int(number), "status": status}:
                with self._lock:
                    self._handles.pop(number).exit = Exit(status, fields.get("reason", ""))

    def _exit_with_server(self) -> Exit:
        return Exit(None, f"the fork server that started it ended: {status_text(self._process.returncode)}")


def _environment_of(job: Job, mark: str) -> dict[str, str]:
    """Returns all variables of a worker: this process's, the job's, and one BLAS thread unless the user chose.

    Workers share the host's cores. Each one's NumPy would otherwise start a thread for every core.
    """
    environment = dict(os.environ) | dict(job.environment) | {MARK: mark}
    if not any(name in environment for name in BLAS_THREADS):
        environment["OPENBLAS_NUM_THREADS"] = "1"
    return environment


def _remove_marks(environment: dict[str, str]) -> dict[str, str]:
    """Contains no worker's mark, except the mark of this process if it is a worker itself."""
    mine = {MARK: os.environ[MARK]} if MARK in os.environ else {}
    return {name: text for name, text in environment.items() if name != MARK} | mine
