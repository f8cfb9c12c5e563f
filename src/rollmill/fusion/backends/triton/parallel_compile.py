"""Compiles several Triton kernels in parallel, in separate processes.

The front end of Triton is Python code that holds the GIL, so threads would mostly compile one kernel after the
other. This process never imports Triton, which takes longer than a second, if all of its kernels come from there.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from rollmill.core.child_processes import start_python
from rollmill.core.machine import usable_cores
from rollmill.fusion.backends.triton import compile_file
from rollmill.fusion.backends.triton.compile import remember
from rollmill.fusion.backends.triton.compile_file import Compilation, KernelCode

MAX_COPIES = 16
"""Maximum number of processes that compile kernels, since a search rarely has more than 16 candidates."""


class KernelCompilers:
    """Processes that compile kernels. They are started by the first use, and are killed at the end of the last."""

    def __init__(self) -> None:
        self._process: _CompilingProcess | None = None
        self._users = 0

    @contextlib.contextmanager
    def running(self) -> Iterator["_CompilingProcess | None"]:
        """Keeps the processes running. Yields None if none can be started, or this process has a single core."""
        self._users += 1
        try:
            if self._process is None and usable_cores() > 1:
                with contextlib.suppress(OSError):
                    self._process = _CompilingProcess(min(usable_cores(), MAX_COPIES))
            yield self._process
        finally:
            self._users -= 1
            if self._users == 0 and self._process is not None:
                self._process.kill()
                self._process = None

    @contextlib.contextmanager
    def compiling(self, compilations: Sequence[Compilation]) -> Iterator[Callable[[int], None]]:
        """Compiles kernels in the background.

        Yields a function that waits until a kernel is compiled, given its index. On exit, compilations that are
        still running are cancelled if nobody else uses the processes. If a kernel does not compile here, its
        caller compiles it again and raises the error.
        """
        with self.running() as process:
            results = [process.compile(each) for each in compilations] if process is not None else []

            def wait(number: int) -> None:
                if results and (code := results[number].result()) is not None:
                    remember(compilations[number], code)

            yield wait


class _CompilingProcess:
    """A process that compiles kernels in copies of itself."""

    def __init__(self, copies: int) -> None:
        self._numbers, self._results = itertools.count(), dict[int, Future[KernelCode | None]]()
        self._has_ended, self._lock = False, threading.Lock()
        self._process = start_python(
            compile_file.__file__,
            str(copies),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True, name="rollmill-kernels")
        self._reader.start()

    def compile(self, compilation: Compilation) -> "Future[KernelCode | None]":
        """Begins to compile a kernel. The result is None if it does not compile."""
        result: Future[KernelCode | None] = Future()
        with self._lock:
            if self._has_ended:
                result.set_result(None)
                return result
            number = next(self._numbers)
            self._results[number] = result
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the reading thread notices that the process has ended
            self._process.stdin.write(json.dumps([number, compilation]) + "\n")
            self._process.stdin.flush()
        return result

    def kill(self) -> None:
        """Kills the process and its copies."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # the last line may be incomplete
                    number, fields = json.loads(line)
                    self._results.pop(number).set_result(fields and KernelCode(*fields))
        with self._lock:
            self._has_ended = True
        for result in self._results.values():
            result.set_result(None)
