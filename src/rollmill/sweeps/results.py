"""Keeps the table and the report of a sweep up to date while its trials run."""

import contextlib
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rollmill.core.errors import RollmillError
from rollmill.record.metric_curves import agent_kinds
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.metrics import MAY_DIFFER, check_kind, is_of_kind, lacking
from rollmill.sweeps.report import write_report
from rollmill.sweeps.spec import Trial

SHORTEST_SECONDS = 30.0
"""Shortest time between two updates of the files while trials run."""
HIGHEST_SHARE = 0.01
"""Highest share of the time spent on updating the files, which takes seconds with thousands of trials."""


@dataclass
class SweepResults:
    """Writes the table and the report of a sweep."""

    sweep: SweepDirectory
    metric: str
    """Column of the table by which trials are compared."""
    due: float = field(default_factory=lambda: time.monotonic() + SHORTEST_SECONDS)
    """Time of `time.monotonic()` at which the next update of the files is due."""
    noted: bool = False
    """True once a note on a trial without the metric has been returned."""

    checked: bool = False
    """True once a trial has shown that it has the metric."""

    def check_kind(self, trials: Iterable[Trial]) -> None:
        """Raises a `UsageError` if the first metrics of a trial show that it lacks the metric's kind of agents.

        Trials with different environments or algorithms may have different kinds, and are not checked.
        """
        if self.checked or not is_of_kind(self.metric) or MAY_DIFFER & {*self.sweep.spec.options_varied}:
            return
        for trial in trials:
            if (kinds := agent_kinds(self.sweep.run(trial))) is not None:
                check_kind(self.metric, kinds)
                self.checked = True
                return

    def note_on(self, trial: Trial) -> str | None:
        """Returns a note on the first trial that has ended without a result of the metric's kind of agents."""
        if self.noted or not self.sweep.is_finished(trial):
            return None
        note = lacking(self.sweep.summary(trial), self.metric)
        self.noted = note is not None
        return note and f"note: trial {trial.name} {note}"

    def write(self, running: Collection[str] = ()) -> None:
        """Updates the table and the report. `running` names the trials that are still running.

        Raises a `StorageError` if a file cannot be written, and a `CheckpointError` if the result of a trial is
        damaged.
        """
        rows = self.sweep.rows(self.metric, running=running)
        self.sweep.write_table(rows)
        write_report(self.sweep, rows, self.metric)

    def write_if_due(self, running: Collection[str]) -> None:
        """Updates the table and the report if enough time has passed. Errors are ignored here, since the last
        `write` raises them.
        """
        if (began := time.monotonic()) < self.due:
            return
        with contextlib.suppress(RollmillError):
            self.write(running)
        now = time.monotonic()
        self.due = now + max(SHORTEST_SECONDS, (now - began) / HIGHEST_SHARE)
