"""Reads the state of a sweep from its directory, as `entries` reads the state of a run.

This module is separate from `entries`, because reading sweeps imports JAX, and reading runs does not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmill.core.errors import RollmillError
from rollmill.overview.entries import Entry, State, read_run, small_numbers, time_of_change
from rollmill.record.run_directory import RunDirectory
from rollmill.record.status import RETURNS
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.files import SPECIFICATION
from rollmill.sweeps.metrics import extra_columns, is_of_kind


def read_sweep(root: Path, read: Callable[[Path], Entry] = read_run) -> tuple[Entry, list[Entry]]:
    """Returns the row of the sweep in `root`, and the rows of its trials that have begun.

    `read` returns the row of one trial.
    """
    try:
        sweep = SweepDirectory.open(root)
        begun = [sweep.run(trial).root for trial in sweep.trials() if sweep.run(trial).config_file.exists()]
        trials = [read(directory) for directory in begun]
        return _read_sweep(sweep, trials), trials
    except (RollmillError, OSError) as error:
        damaged = Entry(root, "sweep", "damaged", changed=time_of_change(root, [SPECIFICATION]), note=str(error))
        return damaged, []


def _read_sweep(sweep: SweepDirectory, trials: Sequence[Entry]) -> Entry:
    running = {entry.path.name for entry in trials if entry.state == "running"}
    metric = sweep.spec.metric
    rows = sweep.rows(metric, running=running)
    statuses = {row["trial"]: row["status"] for row in rows}
    finished = sum(status in ("finished", "stopped early") for status in statuses.values())
    over_seeds = rows[0].get("mean_over_seeds", rows[0][metric]) if rows else None
    request = sweep.spec.request
    return Entry(
        path=sweep.root,
        kind="sweep",
        state=_state(sweep, finished, running),
        algorithm=request.algorithm,
        environment=request.environment,
        steps=_sum(entry.steps for entry in trials),
        mean_return=over_seeds if metric.endswith("_return") else None,
        returns=_returns_of_sweep(rows, metric, over_seeds),
        steps_per_second=_sum(entry.steps_per_second for entry in trials if entry.state == "running"),
        trials=sweep.spec.num_trials,
        finished_trials=finished,
        started=time_of_change(sweep.root, [SPECIFICATION]),
        changed=max((entry.changed for entry in trials if entry.changed), default=None),
        note=f"{failed} failed" if (failed := sum(status == "failed" for status in statuses.values())) else "",
    )


def _returns_of_sweep(rows: Sequence[Mapping[str, Any]], metric: str, best: Any) -> dict[str, float]:
    """Returns the returns of agent kinds in the row of a sweep. `best` is the best value of its metric."""
    if is_of_kind(metric):
        return small_numbers({metric.removeprefix(RETURNS): best})
    if not metric.endswith("_return") or not rows or "mean_over_seeds" in rows[0]:
        return {}
    return small_numbers({name.removeprefix(RETURNS): rows[0][name] for name in extra_columns(rows)})


def _state(sweep: SweepDirectory, finished: int, running: set[str]) -> State:
    if running or RunDirectory(sweep.root).is_held() or RunDirectory(sweep.root).is_locked():
        return "running"
    return "finished" if finished >= sweep.spec.num_trials or sweep.stopping().ended else "stopped"


def _sum(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
