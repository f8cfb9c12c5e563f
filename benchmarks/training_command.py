"""`rollmill train` as a user types it, in a process of its own: how fast it was once it was going.

The clock is that of `metrics.jsonl`. Start-up, which is imports, compilation and starting workers, ends with the
first line of it, and is told apart; some time, or some steps, of warming up follow that are not counted.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

POLL_SECONDS = 0.1
LONGEST_STARTUP = 600.0


class Steady(NamedTuple):
    """A training in its steady state."""

    steps_per_second: float
    """Environment steps, sampled and learned from."""
    startup_seconds: float
    """From the command to the metrics of the first iteration."""
    seconds: float
    """Seconds that were counted."""
    env_steps: int
    """Environment steps of the whole training."""
    final_return: float | None
    """Mean over the last 100 episodes."""


class Failed(Exception):
    """The command ended with an error, or did nothing for too long."""


def train_for(arguments: Sequence[str], *, warm_up: float, seconds: float) -> Steady:
    """Trains for as many seconds after the first iteration and the warming up, and stops as Ctrl-C does."""
    with tempfile.TemporaryDirectory() as folder:
        training = _Training(arguments, Path(folder))
        startup = training.wait_for_first_line()
        if not training.has_ended(warm_up + seconds + 1):
            training.process.send_signal(signal.SIGINT)
        lines = training.finish()
        first = lines[0]["seconds"] + warm_up
        return _between(lines, startup, first=first, last=first + seconds)


def train_through(arguments: Sequence[str], *, warm_up: int) -> Steady:
    """Trains to the end; what comes after as many environment steps is counted."""
    with tempfile.TemporaryDirectory() as folder:
        training = _Training(arguments, Path(folder))
        startup = training.wait_for_first_line()
        lines = training.finish()
        first = next(line for line in lines if line["env_steps"] >= warm_up)["seconds"]
        return _between(lines, startup, first=first, last=lines[-1]["seconds"])


def _between(lines: list[dict], startup: float, *, first: float, last: float) -> Steady:
    """From the last line that was written before one time, to the last one before another."""
    begin = max((line for line in lines if line["seconds"] <= first), key=lambda line: line["iteration"])
    end = max((line for line in lines if line["seconds"] <= last), key=lambda line: line["iteration"])
    seconds = end["seconds"] - begin["seconds"]
    if seconds <= 0:
        raise Failed("no iteration ended while the clock ran; give it more time.")
    rate = (end["env_steps"] - begin["env_steps"]) / seconds
    return Steady(rate, startup, seconds, lines[-1]["env_steps"], lines[-1].get("episode/return"))


class _Training:
    """A command that runs, and the lines of metrics that it has written."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self._metrics, self._said = folder / "run" / "metrics.jsonl", folder / "said"
        rollmill = [sys.executable, "-m", "rollmill", "train"]
        self._command = [*rollmill, *arguments, "--run-dir", str(folder / "run"), "--quiet"]
        self._began = time.perf_counter()
        with self._said.open("w") as said:
            self.process = subprocess.Popen(self._command, stdout=said, stderr=subprocess.STDOUT)

    def wait_for_first_line(self) -> float:
        """Seconds from the command to the metrics of the first iteration."""
        while not self.lines():
            if self.has_ended(POLL_SECONDS) and not self.lines():
                self.finish()
                raise Failed("the command ended without an iteration.")
            if time.perf_counter() - self._began > LONGEST_STARTUP:
                self.process.terminate()
                raise Failed(f"no iteration in {LONGEST_STARTUP:g} s:\n{self._said.read_text()}")
        return time.perf_counter() - self._began

    def has_ended(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def finish(self) -> list[dict]:
        """All lines, once it has ended."""
        if self.process.wait() not in (0, 128 + signal.SIGINT):
            command, code = " ".join(self._command), self.process.returncode
            raise Failed(f"{command} ended with {code}:\n{self._said.read_text()}")
        return self.lines()

    def lines(self) -> list[dict]:
        """Whole lines of the metrics so far."""
        text = self._metrics.read_text() if self._metrics.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
