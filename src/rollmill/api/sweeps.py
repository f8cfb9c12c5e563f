"""Sweeps: trainings with different values of options, each an ordinary run, several at a time.

The directory of a sweep holds `sweep.json`, which says what was asked for and never changes, `trials/`, with a run
and a log for each trial, and `table.csv`. What a trial has come to is read from its run alone, so a sweep that was
killed goes on where its runs stand.
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmill.core.errors import CheckpointError, UsageError
from rollmill.record import Folder, RunDirectory, StopRequest, read_json, stop_on_signals, write_json

SPECIFICATION, TRIALS, TABLE = "sweep.json", "trials", "table.csv"
LOOK_SECONDS = 0.1
"""Time between two looks at running trials."""
MOST_KILLS = 3
"""Times that a trial whose process was killed is resumed."""
TRIAL_RESULTS = ("final_return", "best_return", "env_steps", "steps_per_second", "seconds")
"""Columns of the table, from the summaries of the runs."""


@dataclass(frozen=True)
class Trial:
    """One training of a sweep."""

    name: str
    point: dict[str, str]
    """The values that it was given, by option."""
    words: tuple[str, ...]
    """Arguments of `rollmill train`, without the directory."""

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{option}={value}' for option, value in self.point.items())})"


@dataclass(frozen=True)
class SweepDirectory:
    """Paths of a sweep, and what has become of its trials."""

    root: Path

    @classmethod
    def create(cls, root: Path, trials: Sequence[Trial]) -> "SweepDirectory":
        """Creates the directory of a new sweep.

        Raises:
            UsageError: there are other files in it already.
            StorageError: it cannot be written.
        """
        if (root / SPECIFICATION).exists():
            raise UsageError(f"{root} already holds a sweep: `rollmill sweep --resume {root}`.")
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise UsageError(f"{root} is not empty and holds no sweep. Choose another --sweep-dir.")
        try:
            (root / TRIALS).mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"{root} cannot be created: {error}. Choose another --sweep-dir.") from error
        described = [{"name": trial.name, "point": trial.point, "words": trial.words} for trial in trials]
        write_json(Folder(root), SPECIFICATION, {"trials": described})
        return cls(root)

    @classmethod
    def open(cls, root: Path) -> "SweepDirectory":
        """Opens a sweep.

        Raises:
            UsageError: the directory holds none.
            CheckpointError: its specification is damaged.
        """
        if not (root / SPECIFICATION).is_file():
            raise UsageError(f"{root} holds no sweep: there is no {SPECIFICATION} in it.")
        sweep = cls(root)
        sweep.trials()
        return sweep

    def trials(self) -> list[Trial]:
        """The trials, in the order in which they were given.

        Raises:
            CheckpointError: the specification is damaged.
        """
        described = read_json(Folder(self.root), SPECIFICATION)
        try:
            trials = [
                Trial(trial["name"], dict(trial["point"]), tuple(trial["words"])) for trial in described["trials"]
            ]
            texts = [text for trial in trials for text in (trial.name, *trial.words, *trial.point.values())]
            if not all(isinstance(text, str) for text in texts) or any(
                not trial.name.isalnum() for trial in trials
            ):
                raise TypeError("a word is no text")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.root / SPECIFICATION} is damaged: {error!r}.") from error
        return trials

    def run(self, trial: Trial) -> RunDirectory:
        """The run of a trial; it need not exist yet."""
        return RunDirectory(self.root / TRIALS / trial.name)

    def log(self, trial: Trial) -> Path:
        """The file that holds all that a trial's process prints."""
        return self.root / TRIALS / f"{trial.name}.log"

    def summary(self, trial: Trial) -> dict[str, Any]:
        """The summary of a trial's run; empty before the run has ended, or if it cannot be read."""
        try:
            return self.run(trial).read_summary() or {}
        except CheckpointError:
            return {}

    def is_finished(self, trial: Trial) -> bool:
        """True if the trial came to its end."""
        return self.summary(trial).get("status") == "finished"

    def command(self, trial: Trial) -> list[str]:
        """Arguments of `rollmill` that begin a trial, or go on with it if there is a checkpoint."""
        run = self.run(trial)
        if any((run.root / "checkpoints").glob("[0-9]*")):
            return ["resume", str(run.root)]
        shutil.rmtree(run.root, ignore_errors=True)  # killed before its first checkpoint
        return ["train", *trial.words, "--run-dir", str(run.root)]

    def rows(self, metric: str) -> list[dict[str, Any]]:
        """A row for each trial: its values and results, the largest `metric` first, trials without one last."""
        rows = []
        for trial in self.trials():
            summary = self.summary(trial)
            results = {name: summary.get(name) for name in TRIAL_RESULTS}
            rows.append({"trial": trial.name, **trial.point, "status": summary.get("status", "open"), **results})
        return sorted(rows, key=lambda row: (row[metric] is None, -(row[metric] or 0.0)))

    def write_table(self, metric: str) -> list[dict[str, Any]]:
        """Writes the rows as CSV, and returns them."""
        rows = self.rows(metric)
        partial = self.root / f".{TABLE}.tmp"
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(self.root / TABLE)
        return rows


@dataclass
class _RunningTrial:
    trial: Trial
    process: subprocess.Popen
    slot: int
    began: float = field(default_factory=time.monotonic)


@dataclass
class _Schedule:
    """The trials that wait, those that run, and how often each was killed."""

    waiting: list[Trial]
    running: list[_RunningTrial] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def run_sweep(sweep: SweepDirectory, *, at_once: int, metric: str, say: Callable[[str], None]) -> int:
    """Runs the trials that are not finished; returns the exit code.

    A trial that fails does not stop the others. One whose process is killed is resumed. On SIGINT or SIGTERM all
    running trials stop with a checkpoint.

    Args:
        sweep: the directory.
        at_once: most trials at a time; each has a share of the cores of its own.
        metric: column of the table by which trials are compared.
        say: prints a line.

    Returns:
        0 if all trials finished, 1 if one failed, and 128 and the number of a signal.

    Raises:
        UsageError: another process runs the sweep.
    """
    with RunDirectory(sweep.root).lock(), stop_on_signals() as stop:
        trials = sweep.trials()
        schedule = _Schedule([trial for trial in trials if not sweep.is_finished(trial)])
        say(f"{len(trials)} trials, {len(trials) - len(schedule.waiting)} of them finished; {at_once} at a time")
        try:
            _run_all(sweep, schedule, at_once, stop, say)
        finally:
            _stop(schedule.running)
            sweep.write_table(metric)
        return stop.exit_code or int(bool(schedule.failed))


def _run_all(
    sweep: SweepDirectory, schedule: _Schedule, at_once: int, stop: StopRequest, say: Callable[[str], None]
) -> None:
    while (schedule.waiting or schedule.running) and not stop.requested:
        free = sorted(set(range(at_once)) - {running.slot for running in schedule.running})
        for slot in free[: len(schedule.waiting)]:
            trial = schedule.waiting.pop(0)
            schedule.running.append(_RunningTrial(trial, _started(sweep, trial, slot, at_once), slot))
            say(f"trial {trial} started")
        ended = [running for running in schedule.running if running.process.poll() is not None]
        for running in ended:
            schedule.running.remove(running)
            say(_outcome(sweep, schedule, running))
        if not ended:
            time.sleep(LOOK_SECONDS)


def _started(sweep: SweepDirectory, trial: Trial, slot: int, at_once: int) -> subprocess.Popen:
    cores = ",".join(map(str, share_of_cores(slot, at_once)))
    command = [sys.executable, "-m", "rollmill.cli.trial", str(os.getpid()), cores]
    with sweep.log(trial).open("ab") as log:
        return subprocess.Popen(
            [*command, *sweep.command(trial)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | _share_of_memory(at_once),
        )


def share_of_cores(slot: int, at_once: int) -> list[int]:
    """The cores of one of several trials at a time: as many for each, in turns if there are fewer cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) <= at_once:
        return [cores[slot % len(cores)]] if cores else []
    return cores[slot * len(cores) // at_once : (slot + 1) * len(cores) // at_once]


def _share_of_memory(at_once: int) -> dict[str, str]:
    """How much of a GPU's memory each trial takes, unless the user has said it."""
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    return {} if at_once == 1 or name in os.environ else {name: f"{0.9 / at_once:.3f}"}


def _outcome(sweep: SweepDirectory, schedule: _Schedule, running: _RunningTrial) -> str:
    """A sentence on a trial that has ended; one whose process was killed is put back among the waiting."""
    trial, code = running.trial, running.process.returncode
    seconds = time.monotonic() - running.began
    if sweep.is_finished(trial):
        summary = sweep.summary(trial)
        return f"trial {trial} finished in {seconds:.0f} s, final return {_short(summary['final_return'])}"
    killed = code < 0 or code in (129, 130, 143)
    if killed:
        schedule.kills[trial.name] = schedule.kills.get(trial.name, 0) + 1
        number = -code if code < 0 else code - 128
        how = f"was ended by {signal.Signals(number).name}"
        if schedule.kills[trial.name] <= MOST_KILLS:
            schedule.waiting.insert(0, trial)
            return f"trial {trial} {how}; it is resumed"
    else:
        how = f"failed with exit code {code}"
    schedule.failed.append(trial.name)
    return f"trial {trial} {how}: {_last_line(sweep.log(trial))} (all of it: {sweep.log(trial)})"


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "none"


def _stop(running: Sequence[_RunningTrial]) -> None:
    """Lets trials stop with a checkpoint, and waits for them."""
    for each in running:
        each.process.terminate()
    for each in running:
        each.process.wait()
