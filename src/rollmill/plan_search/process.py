"""Controls the process that compiles one candidate of a plan search and trains it for a short time."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from rollmill.core.child_processes import start_python
from rollmill.core.errors import RollmillError
from rollmill.core.folder import Folder
from rollmill.core.process_tree import MARK, descendants_of, kill_all, kill_family, resident_memory
from rollmill.core.temporary import TemporaryFolder
from rollmill.plan_search.search.result_table import Measurement
from rollmill.plan_search.search.searching import CannotBeFused, CannotRun, OutOfTime
from rollmill.processes.logs import last_line
from rollmill.record.metric_curves import LineFollower
from rollmill.training.request import TrainingRequest

T = TypeVar("T")

LOOK_SECONDS = 0.05
MEMORY_SECONDS = 0.5
"""Seconds between two measurements of the memory of all processes, which slow the processes down."""
START_SECONDS = 600.0
"""Maximum seconds for a candidate to compile and to reach its first iterations."""
WARM_SECONDS = 0.5
STEADY_SECONDS = 3.0
"""Seconds for which throughput is measured after the warm-up."""
SOONEST_STOP_SECONDS = 1.0
EARLY_MARGIN = 1.2
"""A run is stopped early if even its throughput times this factor is lower than the best throughput so far."""


class SearchStopped(RollmillError):
    """Error: a signal has ended the search for a plan or for physics."""

    def __init__(self, name: str, exit_code: int) -> None:
        super().__init__(f"the search was stopped by {name}. Nothing was written.")
        self.exit_code = exit_code


class MetricsPoint(NamedTuple):
    """The environment steps and the time of one line of a run's metrics."""

    seconds: float
    env_steps: int


class CandidateProcess:
    """A process of `rollmill.cli.candidate_process` that tries one candidate.

    It has a temporary run directory and its own environment variables. It imports its modules, which takes
    seconds, and then waits for `prepare`. `check_stop` raises `SearchStopped` after a signal.
    """

    def __init__(self, *, check_stop: Callable[[], None], environment: dict[str, str]) -> None:
        self._check_stop = check_stop
        self._temporary = TemporaryFolder("candidate")
        self._folder = self._temporary.path
        self._mark = f"plan-{os.getpid()}-{self._folder.name}"
        self._unread = b""
        self.device_peak = 0
        """Most bytes of a device that the process has reported."""
        self._leftover = 0
        """Bytes of the process that timing a stage has left: compilers do not return all that they use."""
        commands, reports = os.pipe(), os.pipe()
        with (self._folder / "output").open("wb") as output:
            self.process = start_python(
                *("-m", "rollmill.cli.candidate_process", str(os.getpid()), str(commands[0]), str(reports[1])),
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[commands[0], reports[1]],
                start_new_session=True,
                variables=environment | {MARK: self._mark},
            )
        for end in (commands[0], reports[1]):
            os.close(end)
        self._commands, self._reports = commands[1], reports[0]
        os.set_blocking(self._reports, False)

    def prepare(self, training: TrainingRequest) -> None:
        """Tells the process to compile a run. `ask(None, "program", ...)` then returns a report of the program."""
        own = {"run_dir": str(self._folder / "run"), "quiet": True, "tensorboard": False}
        self._send(json.dumps(training.changed(own).to_json()))

    def close(self) -> None:
        """Kills the process and all processes that it has started, and removes its run directory."""
        family = descendants_of(self.process.pid)
        self.process.kill()
        self.process.wait()
        kill_family(self.process.pid, self._mark)
        kill_all(family)
        for end in (self._commands, self._reports):
            os.close(end)
        self._temporary.close()

    def ask(self, command: str | None, name: str, *, seconds: float) -> Any:
        """Sends a command to the process, if one is given, and returns the report named `name`.

        Raises `CannotRun` with the reason if the process has ended, and `OutOfTime` if no report arrives within
        `seconds`.
        """
        if command is not None:
            self._send(command)
        return self._wait(lambda: self._report(name), seconds=seconds)[0]

    def measure(self, *, bound: float | None, seconds: float, seeds: int, learns_from: int) -> Measurement:
        """Trains the candidate for at most `seconds` with `seeds` seeds, and returns its speed and memory.

        Training stops early once it is clear that `bound` steps per second cannot be reached. Nothing is learned
        before `learns_from` environment steps. Raises `CannotRun` if training ended with an error, and `OutOfTime`
        if there were too few iterations.
        """
        self._send("begin")
        memory = _PeakMemory(self.process.pid)
        metrics, points = LineFollower(Folder(self._folder / "run")), list[MetricsPoint]()

        def result() -> tuple[Measurement] | None:
            self._read_reports()
            ended = self.process.poll() is not None
            lines = map(json.loads, metrics.read())
            points.extend(MetricsPoint(line["seconds"], line["env_steps"]) for line in lines)
            if points:
                memory.look()
            found = measured_between(points, bound=bound, learns_from=learns_from, ended=ended)
            return None if found is None else (found,)

        found = self._wait(result, seconds=min(seconds, START_SECONDS))[0]
        peak = self.device_peak or max(0, memory.peak - self._leftover)
        return found._replace(
            steps_per_second=found.steps_per_second * seeds, memory=float(peak) if peak else None
        )

    def _send(self, command: str) -> None:
        # the process has ended, which the wait below reports with the reason
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, f"{command}\n".encode())

    def _wait(self, look: Callable[[], T | None], *, seconds: float) -> T:
        deadline = time.monotonic() + seconds
        while True:
            self._check_stop()
            ended = self.process.poll() is not None
            found = look()
            if found is not None:
                return found
            if ended:
                raise CannotRun(self._reason())
            if time.monotonic() > deadline:
                raise OutOfTime
            select.select([self._reports], [], [], LOOK_SECONDS)
            time.sleep(LOOK_SECONDS / 10)

    def _report(self, name: str) -> tuple[Any] | None:
        for report in self._read_reports():
            if name in report:
                return (report[name],)
        return None

    def _read_reports(self) -> list[dict[str, Any]]:
        """Returns the reports so far. Keeps reports of memory, and raises reported errors."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._reports, 65536):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        reports = [json.loads(line) for line in lines]
        for report in reports:
            self.device_peak = max(self.device_peak, report.get("peak", 0))
            self._leftover = report.get("leftover", self._leftover)
            if "error" in report:
                reason = " ".join(report["error"].split())
                raise CannotBeFused(reason, report["depths"]) if report["depths"] else CannotRun(reason)
        return reports

    def _reason(self) -> str:
        """Returns the reason why the process has ended: the last line that it printed."""
        return f"its process ended with exit code {self.process.returncode}: {last_line(self._folder / 'output')}"


def measured_between(
    points: Sequence[MetricsPoint], *, bound: float | None, learns_from: int, ended: bool
) -> Measurement | None:
    """Computes a run's throughput from its lines of metrics so far. Returns None if it is too early to tell.

    The result has `stopped_early` set if the run cannot reach `bound` steps per second and should be stopped.
    Nothing is learned before `learns_from` environment steps. If `ended` is True, no further lines will come.
    """
    warm = [point for point in points if point.env_steps >= learns_from]
    steady = [point for point in warm if point.seconds >= warm[0].seconds + WARM_SECONDS]
    if ended and len(steady) < 2:  # the run ended during warm-up
        if not points or points[-1].seconds <= 0:
            return None
        return Measurement(points[-1].env_steps / points[-1].seconds)
    if len(steady) < 2:
        return None
    first, last = steady[0], steady[-1]
    seconds = last.seconds - first.seconds
    if seconds <= 0:
        return None
    rate = (last.env_steps - first.env_steps) / seconds
    if ended or seconds >= STEADY_SECONDS:
        return Measurement(rate)
    hopeless = bound is not None and seconds >= SOONEST_STOP_SECONDS and EARLY_MARGIN * rate < bound
    return Measurement(rate, stopped_early=True) if hopeless else None


class _PeakMemory:
    """Most memory that a process and its descendants have held."""

    def __init__(self, pid: int) -> None:
        self._pid, self._last, self.peak = pid, 0.0, 0

    def look(self) -> None:
        """Measures the memory again, unless the last measurement was recent."""
        now = time.monotonic()
        if now - self._last >= MEMORY_SECONDS:
            self._last, self.peak = now, max(self.peak, resident_memory(descendants_of(self._pid)))
