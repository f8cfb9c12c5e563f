"""Reads the learning curves of runs and sweeps, and writes them as an HTML page or a PNG."""

import math
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rollmill.core.errors import CheckpointError, DataError, StorageError, UsageError
from rollmill.core.folder import open_replacement
from rollmill.core.local_paths import ALSO_IN_PYTHON, check_new_file
from rollmill.core.schema import coerce
from rollmill.core.stored_paths import RunPath
from rollmill.pictures import require_matplotlib
from rollmill.plotting.groups import AXES, Curves, SeedCurve, group_curves, object_in, setting_text, settings_of
from rollmill.plotting.html import curves_page
from rollmill.plotting.png import write_png
from rollmill.record.metric_curves import RETURN, agent_kinds, metric_curve, metric_names
from rollmill.record.run_directory import RunDirectory
from rollmill.record.run_files import SWEEP
from rollmill.record.status import RETURNS
from rollmill.sweeps.directory import SweepDirectory

KIND = "kind"
"""Setting that names the kind of agents of a curve, so that each kind is a group."""
COPIED = "copied"
"""Setting of trials of a population that copied another trial. Each of them is a group."""
CHANGED = "changed"
"""Setting of runs that were resumed with other hyperparameters, which say what changed and when."""
KIND_RETURNS_TITLE = "returns"
"""Title of a figure with the return of each agent kind."""
MAX_DIGITS = 20
"""Maximum number of digits of a seed, a 64-bit integer."""
SUFFIXES = (".html", ".png")


def plot(
    *runs: str | PathLike[str],
    output: str | Path | None = None,
    metric: str | None = None,
    x: str = "both",
    smoothing: float = 0.0,
    force: bool = False,
    baselines: Mapping[str, float] = MappingProxyType({}),
) -> Curves:
    """Draws a metric of runs: the mean over the seeds of each configuration, with its interval.

    Args:
        *runs: directories of runs and of sweeps.
        output: file to write, which ends in .html or .png. Default: nothing is written.
        metric: name of the metric. Default: the mean return, `episode/return`. For runs with several kinds of
            agents, the default is the return of each kind, `returns/KIND`, with a curve for each.
        x: horizontal axis, `steps` or `seconds`, or `both` for two figures.
        smoothing: weight of the past in an exponential moving mean of each curve, from 0 to below 1.
        force: replace an existing file.
        baselines: values of policies that are not trained, by name, such as the mean return of
            `rollmill.evaluate("random", env=...)`. Each is drawn as a horizontal line.

    Returns:
        The curves as arrays.

    Raises:
        CheckpointError: a directory is not a run, or is damaged.
        UsageError: a run has no metrics yet or lacks this one, or an option is out of range.
        StorageError: the file cannot be written.

    Examples:
        >>> curves = rollmill.plot("runs/seed0", "runs/seed1", output="curves.html")
        >>> curves.groups[0].last.mean()
    """
    axes = axes_of(x)
    file = None if output is None else coerce("output", Path, output)
    opened = _open_runs(runs)  # checked first, so that invalid runs are reported before problems of the output
    if file is not None:
        check_output(file, force=force)
    curves = _read_curves(opened, metric=coerce("metric", str | None, metric), smoothing=smoothing)._replace(
        baselines=_check_baselines(baselines)
    )
    if file is not None:
        write_curves(file, curves, axes)
    return curves


def _check_baselines(baselines: Mapping[str, float]) -> dict[str, float]:
    """Returns the levels of baselines. Raises a `UsageError` for a non-finite number."""
    found = {name: coerce(f"baseline {name}", float, value) for name, value in baselines.items()}
    for name, value in found.items():
        if not math.isfinite(value):
            raise UsageError(f"baseline {name}={value} must be a finite number.")
    return found


def axes_of(x: str) -> tuple[str, ...]:
    """Returns the horizontal axes that `x` stands for. Raises a `UsageError` for an unknown one."""
    if x not in (*AXES, "both"):
        raise UsageError(f"x={x!r} must be {', '.join(AXES)} or both.")
    return AXES if x == "both" else (x,)


class _NamedRuns(NamedTuple):
    """Returns the named runs, and the runs of the named sweeps."""

    runs: list[tuple[RunDirectory, bool]]
    """Each once, with True for a trial of a sweep, at least one."""
    waiting: list[str]
    """Names of trials that have not begun."""


def _read_curves(opened: _NamedRuns, *, metric: str | None, smoothing: float) -> Curves:
    smoothing = coerce("smoothing", float, smoothing)
    if not 0 <= smoothing < 1:
        raise UsageError(
            f"smoothing={smoothing} must be at least 0 (no smoothing) and less than 1. hint: try 0.6."
        )
    curves: list[SeedCurve] = []
    left_out = list(opened.waiting)
    for run, is_trial in opened.runs:
        found = _returns_of(run) if metric is None else curves_of(run, metric)
        curves += found
        if not found and not is_trial:
            raise _without(run, metric or RETURN)
        if not found:
            left_out.append(_name(run))
    if not curves:
        raise _without(opened.runs[0][0], metric or RETURN)
    kinds = tuple(dict.fromkeys(curve.settings[KIND] for curve in curves if KIND in curve.settings))
    metric = metric or (KIND_RETURNS_TITLE if kinds else RETURN)
    return Curves(metric, smoothing, group_curves(curves, smoothing=smoothing), tuple(left_out), kinds=kinds)


def _returns_of(run: RunDirectory) -> list[SeedCurve]:
    """Returns the curves of the return of each agent kind, or of the mean return if there is only one kind."""
    if len(kinds := agent_kinds(run) or ()) < 2:
        return curves_of(run, RETURN)
    return [
        curve._replace(settings={**curve.settings, KIND: kind})
        for kind in kinds
        for curve in curves_of(run, f"{RETURNS}{kind}")
    ]


def _open_runs(runs: Sequence[str | PathLike[str]]) -> _NamedRuns:
    if not runs:
        raise UsageError("expected at least one directory of a run or a sweep.")
    found: dict[str, tuple[RunDirectory, bool]] = {}
    waiting: list[str] = []
    for root in (coerce("run", RunPath, run) for run in runs):
        if not (root / SWEEP).is_file():
            found.setdefault(os.path.realpath(root), (RunDirectory.open(root), False))
            continue
        sweep = SweepDirectory.open(root)
        for trial in sweep.trials():
            directory = sweep.run(trial).root
            if (directory / "config.json").exists():
                found.setdefault(os.path.realpath(directory), (RunDirectory.open(directory), True))
            else:
                waiting.append(str(directory))
    if not found:
        raise UsageError(f"no trial of {runs[0]} has started yet.")
    return _NamedRuns(list(found.values()), waiting)


def curves_of(run: RunDirectory, metric: str) -> list[SeedCurve]:
    """Returns the curve of each seed of a run, or one curve if the metric is not recorded per seed.

    Raises a `CheckpointError` if the run is damaged.
    """
    config = run.read_config()
    try:
        settings, options = settings_of(config), object_in(config, "options")
        settings |= {COPIED: _last_copied(run, config), CHANGED: _find_changed(config)}
    except DataError as error:
        raise CheckpointError(f"{run.root / str(error)}") from error
    first, count = options.get("seed", 0), options.get("num_seeds", 1)
    curves: list[SeedCurve] = []
    if isinstance(first, int) and isinstance(count, int) and count > 1:
        for seed in sorted(seed for seed in _seeds_of(run, metric) if first <= seed < first + count):
            points = metric_curve(run, f"{metric}_seed{seed}")
            curves.append(SeedCurve(f"{_name(run)}, seed {seed}", settings, points, seed))
    curves = [curve for curve in curves if curve.points]
    alone = first if isinstance(first, int) and count == 1 else None
    curves = curves or [SeedCurve(_name(run), settings, metric_curve(run, metric), alone)]
    return [curve for curve in curves if curve.points]


def _last_copied(run: RunDirectory, config: Mapping[str, Any]) -> str | None:
    """Returns which trial a trial of a population last copied, or None. A copy is not another seed."""
    sources = [change["source"] for change in _changes_of(config) if change.get("source")]
    return f"{sources[-1]} to {_name(run)}" if sources else None


def _find_changed(config: Mapping[str, Any]) -> str | None:
    """Returns the hyperparameters with which a run was resumed after its first iteration, or None. A run that
    always had its last hyperparameters is not another seed of such a run.
    """
    parts = []
    for change in _changes_of(config):
        before, after = object_in(change, "before"), object_in(change, "after")
        if after and change.get("iteration") and not change.get("source"):
            values = [f"{name} {setting_text(before.get(name))} to {setting_text(after[name])}" for name in after]
            parts.append(f"{' and '.join(values)} after iteration {setting_text(change['iteration'])}")
    return ", ".join(parts) or None


def _changes_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    changes = config.get("changes")
    return [change for change in changes if isinstance(change, Mapping)] if isinstance(changes, list) else []


def _seeds_of(run: RunDirectory, metric: str) -> set[int]:
    """Returns the seeds that a metric is recorded for, however many a configuration names."""
    beginning = f"{metric}_seed"
    ends = (name.removeprefix(beginning) for name in metric_names(run) if name.startswith(beginning))
    return {int(end) for end in ends if end.isascii() and end.isdigit() and len(end) < MAX_DIGITS}


def _name(run: RunDirectory) -> str:
    return os.path.basename(os.path.realpath(run.root))


def _without(run: RunDirectory, metric: str) -> UsageError:
    """Returns the error for a run without a value of the metric."""
    names = sorted(metric_names(run))
    if not names:
        return UsageError(f"{run.root} has no metrics yet. hint: wait for its first iteration.")
    if metric in names:
        return UsageError(f"{run.root}: all values of {metric} are missing or not finite.")
    return UsageError(f"{run.root} has no metric {metric!r}. Known: {', '.join(names)}.")


# --- files ---------------------------------------------------------------------------------------------


def check_output(path: Path, *, force: bool) -> None:
    """Checks the path of a figure before any run is read.

    Raises a `UsageError` if its ending is unknown, or if the file exists.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path} must end in .html or .png.")
    check_new_file(path, force=force, remedy=ALSO_IN_PYTHON)
    if path.suffix == ".png":
        require_matplotlib()


def write_curves(path: Path, curves: Curves, axes: Sequence[str]) -> None:
    """Writes curves as an HTML page or a PNG, as the ending of the path says. A PNG needs matplotlib."""
    try:
        with open_replacement(path) as file:
            if path.suffix == ".png":
                write_png(file, curves, axes)
            else:
                file.write(curves_page(curves, axes).encode())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
