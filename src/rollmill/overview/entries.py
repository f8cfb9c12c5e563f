"""Reads the state of a run from its directory, which may still be growing or be damaged.

Nothing is imported, compiled or changed, and nothing in the directory is trusted.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rollmill.core.errors import DataError, RollmillError
from rollmill.core.text import number
from rollmill.plotting.groups import object_in, settings_of
from rollmill.record.metric_curves import RETURN, newest_returns, newest_values
from rollmill.record.run_directory import RunDirectory
from rollmill.record.run_files import CONFIG, METRICS, SUMMARY, VERSIONS
from rollmill.sweeps.files import FINISHED
from rollmill.sweeps.metrics import KIND_RETURNS

State: TypeAlias = Literal["running", "finished", "stopped", "failed", "killed", "damaged"]
"""State of a run. `running`: a process is training it. `finished`: it reached its end. `stopped`: a signal or a
hook ended it, with a checkpoint. `failed`: a number was not finite. `killed`: its process ended without a summary,
and the newest checkpoint is kept. `damaged`: its files cannot be read."""

MAX_NUMBER = 1e18
"""Upper bound on the magnitude of values in a run's files. Larger values, as in a damaged file, are ignored."""
STEPS, SPEED = "env_steps", "steps_per_second"


@dataclass(frozen=True)
class Entry:
    """A run or a sweep as a row of an overview."""

    path: Path
    kind: Literal["run", "sweep"]
    state: State
    algorithm: str = ""
    environment: str = ""
    steps: int | None = None
    """Environment steps so far, over all seeds and trials."""
    planned_steps: int | None = None
    mean_return: float | None = None
    """Mean return of the latest episodes. For a sweep, the mean return of the best trial, averaged over seeds if
    the sweep varies them."""
    returns: Mapping[str, float] = field(default_factory=dict)
    """Mean return of each agent kind, if there are several kinds. For a sweep, they are those of the best trial,
    or only that of the kind by which trials are compared."""
    evaluation_return: float | None = None
    steps_per_second: float | None = None
    seed: int | None = None
    num_seeds: int | None = None
    trials: int | None = None
    """Number of trials of a sweep, or None for a run."""
    finished_trials: int | None = None
    started: datetime | None = None
    changed: datetime | None = None
    """Time of the newest line of metrics, or of the summary."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters and environment options, from dotted names to values."""
    note: str = ""
    """The reason why the directory cannot be read, or why training stopped."""

    @property
    def return_text(self) -> str:
        """Return of each agent kind, or the mean return if there is only one kind."""
        if self.returns:
            return ", ".join(f"{kind} {number(value)}" for kind, value in self.returns.items())
        return "" if self.mean_return is None else number(self.mean_return)

    def to_json(self) -> dict[str, Any]:
        """Returns the row of the overview as JSON values."""
        times = {name: _iso(getattr(self, name)) for name in ("started", "changed")}
        return {**asdict(self), **times, "path": str(self.path), "settings": dict(self.settings)}


def read_run(root: Path) -> Entry:
    """Returns the row of the run in `root`. If its files cannot be read, the row is `damaged`, with a note."""
    run = RunDirectory(root)
    try:
        return _read_run(run)
    except (RollmillError, OSError) as error:
        return Entry(root, "run", "damaged", changed=time_of_change(root, [CONFIG]), note=str(error))


def _read_run(run: RunDirectory) -> Entry:
    config, summary = run.read_config(), run.read_summary() or {}
    graph, options = object_in(config, "graph"), object_in(config, "options")
    read = newest_values(run, (STEPS, SPEED, RETURN, "evaluation/return"))
    newest = {name: value for name, value in read.items() if abs(value) < MAX_NUMBER}
    seeds = _whole(options.get("num_seeds")) or 1
    state = _state(run, summary, newest)
    is_over = state in ("finished", "stopped")
    steps, planned = newest.get(STEPS), _whole(object_in(graph, "config").get("total_timesteps"))
    return Entry(
        path=run.root,
        kind="run",
        state=state,
        algorithm=_text(graph.get("algorithm")),
        environment=_text(graph.get("environment")),
        steps=_whole(summary.get("total_env_steps")) if is_over else None if steps is None else int(steps * seeds),
        planned_steps=None if planned is None else planned * seeds,
        mean_return=_number(summary.get("final_return")) if is_over else newest.get(RETURN),
        returns=small_numbers(summary.get(KIND_RETURNS) if is_over else newest_returns(run)),
        evaluation_return=newest.get("evaluation/return"),
        steps_per_second=_number(summary.get(SPEED)) if is_over else newest.get(SPEED),
        seed=_whole(options.get("seed")),
        num_seeds=seeds,
        started=time_of_change(run.root, [VERSIONS]),
        changed=time_of_change(run.root, [METRICS, SUMMARY] if newest or summary else [CONFIG]),
        settings=_settings(config),
        note=_text(summary.get("stop_reason") or summary.get("stopped_by")) if state == "stopped" else "",
    )


def _state(run: RunDirectory, summary: Mapping[str, Any], newest: Mapping[str, float]) -> State:
    """Returns the state of a run. A summary older than the metrics comes from an earlier stop."""
    if run.is_held() or run.is_locked():
        return "running"
    summed, logged = _whole(summary.get(STEPS)), newest.get(STEPS, 0)
    if summed is not None and summed >= logged:
        return "finished" if summary.get("status") == FINISHED else "stopped"
    return "failed" if run.fault.is_folder() else "killed"


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return settings_of(config)
    except DataError:
        return {}


def time_of_change(root: Path, names: Sequence[str]) -> datetime | None:
    """Returns the time of the newest change of files in a directory."""
    times = []
    for name in names:
        try:
            times.append(os.stat(root / name, follow_symlinks=False).st_mtime)
        except OSError:
            continue
    return datetime.fromtimestamp(max(times), UTC) if times else None


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="seconds")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    return float(value) if known else None


def small_numbers(values: Any) -> dict[str, float]:
    """Returns the numbers of an object by name. Other values, and numbers above 1e18, are left out."""
    known = {name: _number(value) for name, value in values.items()} if isinstance(values, Mapping) else {}
    return {name: value for name, value in known.items() if value is not None}


def _whole(value: Any) -> int | None:
    known = isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    return value if known else None
