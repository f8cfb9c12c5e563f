"""The command `rollmill runs [FOLDER]`, which prints a table of the runs and sweeps of a folder."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from rollmill.cli.parsing import parse
from rollmill.core.errors import UsageError
from rollmill.core.options import Arg
from rollmill.core.text import format_count
from rollmill.overview.discovery import find_entries
from rollmill.overview.entries import State
from rollmill.overview.table import SortKey, check_settings, filter_rows, sort_rows, table

_States: TypeAlias = Annotated[tuple[State, ...], Arg(name="state", repeated=True)]
_Where: TypeAlias = Annotated[tuple[str, ...], Arg(metavar="NAME=VALUE", repeated=True)]
_Show: TypeAlias = Annotated[tuple[str, ...], Arg(metavar="NAME", repeated=True)]
_On: TypeAlias = Annotated[bool, Arg(only_on=True)]


@dataclass(frozen=True)
class Runs:
    """List the runs and sweeps of a folder with their state, steps, return and speed."""

    folder: Annotated[Path, Arg(metavar="[FOLDER]", positional=True)] = Path("runs")
    """Folder to search, including its subfolders. Default: runs/."""
    states: _States = ()
    """Show only runs in this state."""
    algorithm: Annotated[str | None, Arg(metavar="NAME")] = None
    """Show only runs of this algorithm. * and ? are wildcards, as in --env."""
    env: Annotated[str | None, Arg(metavar="NAME")] = None
    """Show only runs in this environment, such as 'CartPole*'."""
    where: _Where = ()
    """Show only runs with this value of a setting, such as learning_rate=0.001."""
    show: _Show = ()
    """Add a column for a setting, such as learning_rate."""
    sort: SortKey = "changed"
    """Order of the rows: newest, largest or highest first, and names from A to Z."""
    limit: int | None = None
    """Maximum number of rows."""
    trials: _On = False
    """Also list the trials of sweeps, one per row."""
    json: _On = False
    """Print an array of JSON objects with all values of each row, including settings."""


def run(arguments: list[str]) -> int:
    """Prints the table of runs and sweeps, and returns the exit code."""
    options = parse(Runs, arguments, prog="rollmill runs")
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit {options.limit} must be at least 1.")
    where = dict(_pair(text) for text in options.where)
    entries = find_entries(options.folder, trials=options.trials or bool(where))
    check_settings(entries, options.show)
    rows = filter_rows(
        entries, states=options.states, algorithm=options.algorithm, environment=options.env, where=where
    )
    rows = sort_rows(rows, options.sort)
    shown = rows[: options.limit]
    if options.json:
        print(json.dumps([entry.to_json() for entry in shown], indent=2))
    elif shown:
        print(table(shown, folder=options.folder, show=options.show))
    _note_hidden(options.folder, found=len(entries), fitting=len(rows), shown=len(shown))
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UsageError(f"--where {text} must be NAME=VALUE, such as learning_rate=0.001.")
    return name.replace("-", "_"), value


def _note_hidden(folder: Path, *, found: int, fitting: int, shown: int) -> None:
    """Prints a note to standard error if rows are left out, or if there are no rows."""
    if not found:
        print(f"note: {folder} contains no runs.", file=sys.stderr)
    elif not fitting:
        print(
            f"note: none of the {format_count(found, 'run or sweep', 'runs and sweeps')} in {folder} matches.",
            file=sys.stderr,
        )
    elif shown < fitting:
        print(f"note: {fitting - shown} more are not shown. hint: raise --limit {shown}.", file=sys.stderr)
