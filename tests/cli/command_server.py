"""Runs commands in processes forked from this one, which has imported Rollmill: `python command_server.py FD`.

A command of its own process spends most of its time on imports. Here they are done once for a whole test run: a
request on the socket FD holds the arguments and the working folder, and the descriptors of standard output and
error; the answer is the exit code. JAX has no threads before its first computation, so a fork is safe.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOADED = (
    *("gymnasium", "rollmill.training", "rollmill.hooks", "rollmill.recipes"),
    *(f"rollmill.cli.{name}" for name in ("train", "evaluate", "resume", "export", "sweep", "plan", "listing")),
    *(f"rollmill.cli.{name}" for name in ("play", "explain", "doctor", "profile", "render", "plot", "gpu")),
)
MAX_ANSWER = 64


class CommandServer:
    """A server process, and the requests to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def run(self, arguments: Sequence[str], folder: Path, *, timeout: float) -> subprocess.CompletedProcess:
        """Runs a command, and returns what it printed and its exit code.

        Raises:
            TimeoutError: it has not ended; it is killed, and so is the server.
        """
        request = json.dumps({"arguments": list(arguments), "folder": str(folder)}).encode()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            self._socket.settimeout(timeout)
            socket.send_fds(self._socket, [request], [output.fileno(), errors.fileno()])
            try:
                code = int(self._socket.recv(MAX_ANSWER))
            except TimeoutError:
                self.close()
                raise
            texts = [_text(file) for file in (output, errors)]
        return subprocess.CompletedProcess(arguments, code, *texts)

    def close(self) -> None:
        """Ends the server, and a command that still runs."""
        self._socket.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _text(file) -> str:
    file.seek(0)
    return file.read().decode()


def serve(requests: socket.socket) -> int:
    """Answers requests until the other end closes; in a command's process, returns its exit code."""
    for name in PRELOADED:
        importlib.import_module(name)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 2**20, 2)
        if not message:
            return 0
        child = os.fork()
        if child == 0:
            requests.close()
            return run_here(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def run_here(request: Mapping, descriptors: Sequence[int]) -> int:
    """Becomes the process of a command: its exit code."""
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(request["folder"])
    sys.argv = ["rollmill", *request["arguments"]]
    sys.path[0] = request["folder"]  # as `python -m` has it
    from rollmill.cli import main

    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
