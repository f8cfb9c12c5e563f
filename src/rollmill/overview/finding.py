"""Finds the runs and sweeps of a folder."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from rollmill.core.local_paths import check_folder
from rollmill.overview.entries import Entry, read_run, read_sweep
from rollmill.record.run_files import CONFIG
from rollmill.sweeps.directory import SPECIFICATION

MAX_DEPTH = 4
"""Folders between the one that is named and a run."""


PlaceKind: TypeAlias = Literal["run", "sweep", "file"]


class RunPlace(NamedTuple):
    """The path of a run or sweep, or of another file in the folder."""

    path: Path
    kind: PlaceKind


def find_entries(folder: Path, *, trials: bool = False) -> list[Entry]:
    """Returns the rows of all runs and sweeps in a folder and in folders inside it.

    Links are not followed. With `trials`, the trials of a sweep follow it.

    Raises a `UsageError` if the folder does not exist or is a file.
    """
    check_folder(folder)
    entries: list[Entry] = []
    for place in find_places(folder):
        if place.kind == "sweep":
            sweep, own = read_sweep(place.path)
            entries += [sweep, *(own if trials else ())]
        else:
            entries.append(read_run(place.path))
    return entries


def find_places(folder: Path, *, suffixes: Collection[str] = (), depth: int = MAX_DEPTH) -> Iterator[RunPlace]:
    """Yields the directories of runs and sweeps in a folder, and the files beside them with one of the suffixes.

    Links are not followed, and the directories themselves are not searched.
    """
    try:
        with os.scandir(folder) as scanned:
            inside = sorted(scanned, key=lambda entry: entry.name)
    except OSError:
        return
    names = {entry.name for entry in inside}
    if SPECIFICATION in names or CONFIG in names:
        yield RunPlace(folder, "sweep" if SPECIFICATION in names else "run")
        return
    for entry in inside:
        if entry.name.startswith("."):
            continue
        if depth and entry.is_dir(follow_symlinks=False):
            yield from find_places(folder / entry.name, suffixes=suffixes, depth=depth - 1)
        elif os.path.splitext(entry.name)[1] in suffixes and entry.is_file(follow_symlinks=False):
            yield RunPlace(folder / entry.name, "file")
