"""Finds the runs and sweeps in a folder."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from rollmill.core.local_paths import check_folder
from rollmill.overview.entries import Entry, read_run
from rollmill.record.run_files import CONFIG
from rollmill.sweeps.files import SPECIFICATION

MAX_DEPTH = 4
"""Maximum number of folders between the searched folder and a run."""


PlaceKind: TypeAlias = Literal["run", "sweep", "file"]


class RunPlace(NamedTuple):
    """The path of a run, of a sweep, or of another file in a folder."""

    path: Path
    kind: PlaceKind


def find_entries(folder: Path, *, trials: bool = False) -> list[Entry]:
    """Returns the rows of all runs and sweeps in a folder and its subfolders.

    Links are not followed. With `trials`, each sweep is followed by its trials.

    Raises a `UsageError` if the folder does not exist or is a file.
    """
    check_folder(folder)
    entries: list[Entry] = []
    for place in find_places(folder):
        if place.kind == "sweep":
            from rollmill.overview.sweep_entries import read_sweep  # imported here, because it imports JAX

            sweep, own = read_sweep(place.path)
            entries += [sweep, *(own if trials else ())]
        else:
            entries.append(read_run(place.path))
    return entries


def find_places(folder: Path, *, suffixes: Collection[str] = (), depth: int = MAX_DEPTH) -> Iterator[RunPlace]:
    """Yields the directories of runs and sweeps in a folder and its subfolders, and files beside them with certain
    endings.

    Links are not followed, and the directories of runs and sweeps are not searched.
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
