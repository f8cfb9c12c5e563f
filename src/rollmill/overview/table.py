"""Filters the rows of an overview, sorts them, and prints them as a table."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from rollmill.core.errors import UsageError, suggestion
from rollmill.core.text import compact, format_count, one_line, truncate
from rollmill.overview.entries import Entry
from rollmill.plotting.groups import setting_text

SortKey: TypeAlias = Literal["changed", "started", "return", "steps", "name"]
_OLDEST = datetime.min.replace(tzinfo=UTC)
_KEYS: Mapping[str, Callable[[Entry], Any]] = {
    "changed": lambda entry: entry.changed or _OLDEST,
    "started": lambda entry: entry.started or _OLDEST,
    "return": lambda entry: _return_of(entry),
    "steps": lambda entry: entry.steps or 0,
    "name": lambda entry: entry.path,
}
assert _KEYS.keys() == set(get_args(SortKey))

MAX_CELL = 40
NUMBERS = ("STEPS", "RETURN", "STEPS/S")
"""Names of the columns that hold numbers and are right-aligned."""


def _return_of(entry: Entry) -> float:
    """Returns the mean return: of one kind of agent, if the sweep compares trials by it."""
    lowest = float("-inf")
    return max(entry.returns.values(), default=lowest) if entry.mean_return is None else entry.mean_return


def filter_rows(
    entries: Sequence[Entry],
    *,
    states: Sequence[str] = (),
    algorithm: str | None = None,
    environment: str | None = None,
    where: Mapping[str, str] | None = None,
) -> list[Entry]:
    """Returns the rows with these states, algorithms, environments and settings.

    `algorithm` and `environment` may contain the wildcards `*` and `?`. `where` compares values as strings.

    Raises a `UsageError` if no row has a setting that `where` names.
    """
    check_settings(entries, where or {})
    return [
        entry
        for entry in entries
        if (not states or entry.state in states)
        and (algorithm is None or fnmatchcase(entry.algorithm, algorithm))
        and (environment is None or fnmatchcase(entry.environment, environment))
        and all(
            name in entry.settings and setting_text(entry.settings[name]) == value
            for name, value in (where or {}).items()
        )
    ]


def check_settings(entries: Sequence[Entry], names: Sequence[str] | Mapping[str, str]) -> None:
    """Raises a `UsageError` if a setting with one of these names exists in no row."""
    known = {name for entry in entries for name in entry.settings}
    for name in names:
        if entries and name not in known:
            raise UsageError(f"no run has a setting {name!r}. {suggestion(name, known)}")


def sort_rows(entries: Sequence[Entry], key: SortKey) -> list[Entry]:
    """Returns the rows sorted by a column: newest, largest or highest first, but names from A to Z."""
    return sorted(entries, key=_KEYS[key], reverse=key != "name")


def table(entries: Sequence[Entry], *, folder: Path, show: Sequence[str] = (), now: datetime | None = None) -> str:
    """Formats the rows as a table with one row per line. Each line ends with the path below `folder`.

    Args:
        entries: rows of the overview.
        folder: the folder that was searched.
        show: settings that get a column.
        now: current time. Default: the system clock.
    """
    now = now or datetime.now(UTC)
    head = ["STATE", "ALGORITHM", "ENVIRONMENT", "STEPS", "RETURN", "STEPS/S", "CHANGED", *show, "RUN"]
    rows = [head, *(_cells(entry, folder, show, now) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    lines = []
    for row in rows:
        cells = [
            f"{cell:>{width}}" if name in NUMBERS else f"{cell:<{width}}"
            for name, cell, width in zip(head[:-1], row[:-1], widths, strict=True)
        ]
        lines.append("  ".join([*cells, row[-1]]))
    return "\n".join(lines)


def _cells(entry: Entry, folder: Path, show: Sequence[str], now: datetime) -> list[str]:
    trials = (
        ""
        if entry.trials is None
        else f"  sweep, {entry.finished_trials} of {format_count(entry.trials, 'trial')}"
    )
    note = f"  ({one_line(truncate(entry.note, 80))})" if entry.note else ""
    name = entry.path.name if entry.path == folder else str(entry.path.relative_to(folder))
    cells = [
        entry.state,
        entry.algorithm or "?",
        entry.environment or "?",
        steps_text(entry),
        entry.return_text,
        "" if entry.steps_per_second is None else compact(entry.steps_per_second),
        "" if entry.changed is None else age(now - entry.changed),
        *(setting_text(entry.settings[name]) if name in entry.settings else "" for name in show),
    ]
    return [*(one_line(truncate(cell, MAX_CELL)) for cell in cells), f"{one_line(name)}{trials}{note}"]


def steps_text(entry: Entry) -> str:
    """Formats the steps so far and, for an unfinished run, their share of the planned steps."""
    if entry.steps is None:
        return ""
    share = ""
    if entry.state != "finished" and entry.planned_steps:
        share = f" ({min(entry.steps / entry.planned_steps, 1):.0%})"
    return f"{compact(float(entry.steps))}{share}"


def age(passed: timedelta) -> str:
    """Formats the time since an event in its largest unit, such as `12 s ago`, `3 h ago` or `5 d ago`."""
    seconds = max(0, int(passed.total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
