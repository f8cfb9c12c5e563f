"""Keeps the rows of a folder's runs and sweeps up to date, reading only what has changed."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rollmill.core.folder import Folder
from rollmill.overview.discovery import find_places
from rollmill.overview.entries import Entry, read_run
from rollmill.overview.sweep_entries import read_sweep
from rollmill.plotting.groups import NAMES_FIRST, setting_text
from rollmill.record.run_directory import RunDirectory
from rollmill.record.run_files import CONFIG, LOCK, METRICS, SUMMARY
from rollmill.sweeps.files import FAILURES, PROPOSALS, SPECIFICATION, STOPPING, TRIALS

MIN_SECONDS = 0.5
"""Minimum interval in seconds between two reads of the folder."""
MAX_SHARE = 0.1
"""Maximum share of the time spent on reading the folder."""
SUFFIXES = (".html", ".gif", ".mp4", ".png")
"""File endings of the pages and pictures that the board shows."""
MAX_FILES = 500
MAX_VARYING = 40
"""Maximum number of settings that get a column."""

Signature: TypeAlias = tuple[Any, ...]


class Item(NamedTuple):
    """A row of the board: a run, a sweep, or a trial of a sweep."""

    key: str
    """Path of the run or sweep below the folder, which identifies the row."""
    entry: Entry
    parent: str | None
    """Key of the sweep that a trial belongs to, or None."""
    version: int
    """Version of the folder's content in which the row last changed."""


@dataclass(frozen=True)
class Changes:
    """Rows that have changed since a version of the folder's content."""

    version: int
    items: Sequence[Item]
    gone: Sequence[str]
    """Keys of rows that no longer exist."""
    varying: Sequence[str]
    """Settings in which the runs of the folder differ."""
    files: Sequence[str]
    """Pages and pictures beside the runs, as paths below the folder."""


class FolderContents:
    """The rows of a folder's runs and sweeps. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._due = float("-inf")
        self._version = 0
        self._items: dict[str, Item] = {}
        self._gone: dict[str, int] = {}
        self._read_before: dict[Path, tuple[Signature, Any]] = {}
        self._varying: tuple[str, ...] = ()
        self._files: tuple[str, ...] = ()

    def changes(self, since: int = 0) -> Changes:
        """Returns the rows that have changed since a version, after reading the folder again if that is due."""
        with self._lock:
            self._refresh()
            changed = [item for item in self._items.values() if item.version > since]
            gone = [key for key, version in self._gone.items() if version > since] if since else []
            return Changes(self._version, changed, gone, self._varying, self._files)

    def item(self, key: str) -> Item | None:
        """Returns the row whose key is `key`, or None if no run or sweep has this key."""
        with self._lock:
            return self._items.get(key)

    def trials(self, key: str) -> list[Item]:
        """Returns the rows of a sweep's trials."""
        with self._lock:
            return [item for item in self._items.values() if item.parent == key]

    def files_beside(self, item: Item) -> list[str]:
        """Returns the pages and pictures named after a run, as `rollmill render` writes them."""
        name = item.entry.path.name
        with self._lock:
            return [file for file in self._files if Path(file).name.startswith((f"{name}.", f"{name}-"))]

    def folder(self, path: str) -> Folder:
        """Opens a subfolder by its path, without following links."""
        return Folder(self.root, tuple(part for part in Path(path).parts if part != "."))

    def _refresh(self) -> None:
        began = time.monotonic()
        if began < self._due:
            return
        self._read()
        now = time.monotonic()
        self._due = now + max(MIN_SECONDS, (now - began) / MAX_SHARE - (now - began))

    def _read(self) -> None:
        seen: dict[str, tuple[Entry, str | None]] = {}
        files: list[str] = []
        for place in find_places(self.root, suffixes=SUFFIXES):
            key = self._key(place.path)
            if place.kind == "file":
                files.append(key)
            elif place.kind == "run":
                seen[key] = self._run(place.path), None
            else:
                sweep, trials = self._sweep(place.path)
                seen[key] = sweep, None
                seen |= {self._key(trial.path): (trial, key) for trial in trials}
        self._read_before = {root: read for root, read in self._read_before.items() if self._key(root) in seen}
        self._note(seen, tuple(files[:MAX_FILES]))

    def _note(self, seen: Mapping[str, tuple[Entry, str | None]], files: tuple[str, ...]) -> None:
        """Takes over what has been read. All rows are new if they show other settings than before."""
        is_same = self._items.keys() == seen.keys() and files == self._files
        if is_same and all(self._items[key].entry is entry for key, (entry, _) in seen.items()):
            return
        varying = _varying([entry for entry, _ in seen.values()])
        anew, version, items = varying != self._varying, self._version + 1, dict[str, Item]()
        for key, (entry, parent) in seen.items():
            before = self._items.get(key)
            if before is None or before.entry is not entry or before.parent != parent or anew:
                before = Item(key, entry, parent, version)
            items[key] = before
        gone = self._items.keys() - items.keys()
        self._gone = {key: at for key, at in self._gone.items() if key not in items} | dict.fromkeys(gone, version)
        self._items, self._files, self._varying, self._version = items, files, varying, version

    def _run(self, root: Path) -> Entry:
        signature = run_signature(root)
        before = self._read_before.get(root)
        if before is None or before[0] != signature:
            self._read_before[root] = before = signature, read_run(root)
        return before[1]

    def _sweep(self, root: Path) -> tuple[Entry, list[Entry]]:
        signature = _sweep_signature(root)
        before = self._read_before.get(root)
        if before is None or before[0] != signature:
            self._read_before[root] = before = signature, read_sweep(root, self._run)
        return before[1]

    def _key(self, path: Path) -> str:
        return os.fsencode(path.relative_to(self.root)).decode("utf-8", "backslashreplace")


def run_signature(root: Path) -> Signature:
    """Returns a value that changes whenever a run's files change."""
    files = tuple(_stamp(root / name) for name in (CONFIG, METRICS, SUMMARY, "fault"))
    locked = _stamp(root / LOCK) is not None and _is_locked(root)
    return (*files, locked)


def _sweep_signature(root: Path) -> Signature:
    own = tuple(_stamp(root / name) for name in (SPECIFICATION, PROPOSALS, STOPPING, FAILURES, TRIALS))
    try:
        with os.scandir(root / TRIALS) as entries:
            trials = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        trials = []
    return (*own, _is_locked(root), *(run_signature(Path(trial)) for trial in trials))


def _is_locked(root: Path) -> bool:
    try:
        return RunDirectory(root).is_held() or RunDirectory(root).is_locked()
    except Exception:  # the lock is a link or a folder, and reading the run reports the problem
        return False


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _varying(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Returns the settings in which entries differ, in the order in which they are recorded."""
    values: dict[str, set[str]] = {}
    for entry in entries:
        for name, value in entry.settings.items():
            values.setdefault(name, set()).add(setting_text(value))
    return tuple(name for name, texts in values.items() if len(texts) > 1 and name not in NAMES_FIRST)[
        :MAX_VARYING
    ]
