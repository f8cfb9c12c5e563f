"""Counts repeated losses of child processes, and ends child processes."""

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable

from rollmill.processes.forks import Child


class LossCounter:
    """Counts consecutive losses by name. Losses are consecutive if less than `settled_seconds` of work lie between
    them.
    """

    def __init__(self, settled_seconds: float = float("inf")) -> None:
        self._settled_seconds = settled_seconds
        self._counts: Counter[str] = Counter()

    def add(self, name: str, *, worked_seconds: float = 0.0) -> int:
        """Counts a loss after `worked_seconds` of work. Returns the number of consecutive losses."""
        if worked_seconds > self._settled_seconds:
            del self._counts[name]
        self._counts[name] += 1
        return self._counts[name]

    def clear(self) -> None:
        """Resets the counts of all names."""
        self._counts.clear()


def ending(code: int) -> str:
    """Describes how a process ended, such as `was ended by SIGKILL` or `exited with 1`."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def end_all(processes: Iterable[Child], *, patience: float | None = None) -> None:
    """Terminates children and waits until they have ended. Kills those still running after `patience` seconds."""
    processes = list(processes)
    for process in processes:
        process.terminate()
    deadline = None if patience is None else time.monotonic() + patience
    for process in processes:
        try:
            process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
