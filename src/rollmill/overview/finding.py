"""Finds the runs and sweeps of a folder."""

import os
from collections.abc import Iterator
from pathlib import Path

from rollmill.core.errors import UsageError
from rollmill.overview.entries import Entry, read_run, read_sweep
from rollmill.record.run_directory import CONFIG
from rollmill.sweeps.directory import SPECIFICATION

MAX_DEPTH = 4
"""Folders between the one that is named and a run."""


def find_entries(folder: Path, *, trials: bool = False) -> list[Entry]:
    """Returns the rows of all runs and sweeps in a folder and in folders inside it.

    Links are not followed. With `trials`, those of a sweep come after it.

    Raises a `UsageError` if the folder does not exist or is a file.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {problem}. hint: name the folder that holds your runs, such as runs.")
    entries: list[Entry] = []
    for root, is_sweep in _directories(folder, MAX_DEPTH):
        if is_sweep:
            sweep, own = read_sweep(root)
            entries += [sweep, *(own if trials else ())]
        else:
            entries.append(read_run(root))
    return entries


def _directories(folder: Path, depth: int) -> Iterator[tuple[Path, bool]]:
    """Returns the directories of runs and, with True, of sweeps."""
    try:
        with os.scandir(folder) as scanned:
            inside = sorted(scanned, key=lambda entry: entry.name)
    except OSError:
        return
    names = {entry.name for entry in inside}
    if SPECIFICATION in names or CONFIG in names:
        yield folder, SPECIFICATION in names
        return
    for entry in inside:
        if depth and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
            yield from _directories(folder / entry.name, depth - 1)
