"""Runs in object stores, and how they are downloaded to a working folder on this machine.

A store contains the files of a run directory under their names. A checkpoint is complete once it has a record,
which is written last. The file `stored.json` identifies the run, and counts how often it was copied.
"""

import contextlib
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rollmill.core.errors import DataError, UsageError
from rollmill.core.folder import Folder
from rollmill.core.json_data import parse_json
from rollmill.core.schema import read_as
from rollmill.record.checkpoint_files import ARRAYS, MAX_HEADER_BYTES, RECORD
from rollmill.record.checkpoints import NAME, WRITING
from rollmill.record.json_files import MAX_BYTES, write_json
from rollmill.record.object_store import MissingObjectError, ObjectStore, patiently
from rollmill.record.run_files import CONFIG, is_held, is_locked

MARKER, WRITER = "stored.json", "writer.txt"
"""Names of two files: one that identifies the run, and one that names the process that copies it."""
CHECKPOINTS = "checkpoints"
TRIES = 5
"""How often a run is read again if training changes it in the meantime."""
_PART = r"(?!\.)[^/\\\x00-\x1f\x7f-\x9f]+"
_SAFE_NAME = re.compile(rf"{_PART}(/{_PART}){{0,2}}")
"""Names of files of a run. Others, such as those that begin with a dot, are neither copied nor fetched."""
MAX_NAME = 255
"""Maximum length of a file or folder name in bytes, as in common file systems."""


@dataclass(frozen=True)
class Marker:
    """The content of `stored.json`: identifies the run in a folder or a store, and how recent the copy is."""

    run: str = ""
    """Unique name of the run. Empty for a run that was copied with other tools."""
    revision: int = 0
    """How often the run was copied to the store."""

    def named(self) -> "Marker":
        """Returns the marker, with a new random name if it has none."""
        return self if self.run else replace(self, run=uuid.uuid4().hex)

    def text(self) -> bytes:
        """Returns the content of `stored.json` for this marker."""
        return json.dumps(asdict(self)).encode()


def is_run_file(name: str) -> bool:
    """Returns whether a file with this path relative to the run directory may be downloaded from a store."""
    try:
        fits = all(len(part.encode()) <= MAX_NAME for part in name.split("/"))
    except UnicodeEncodeError:  # not a valid string
        return False
    return fits and _SAFE_NAME.fullmatch(name) is not None and name not in (MARKER, WRITER)


def checkpoint_of(name: str) -> str | None:
    """Returns the iteration of the checkpoint that a file belongs to, or None if it belongs to none."""
    parts = name.split("/")
    return parts[1] if len(parts) == 3 and parts[0] == CHECKPOINTS and NAME.fullmatch(parts[1]) else None


def whole_checkpoints(names: Mapping[str, int]) -> set[str]:
    """Returns the iterations of the complete checkpoints in a store, which are those with a `record.json`.

    `names` maps the paths of all files in the store to their sizes in bytes.
    """
    return {iteration for name in names if name.endswith(f"/{RECORD}") and (iteration := checkpoint_of(name))}


def read_marker(store: ObjectStore) -> Marker | None:
    """Reads the marker of a run (`stored.json`) from an object store, or returns None if there is none."""
    try:
        return _parse(store.read(MARKER), f"{store.url}/{MARKER}")
    except MissingObjectError:
        return None


def local_marker(folder: Folder) -> Marker | None:
    """Reads the marker of a run (`stored.json`) from its working folder, or returns None if there is none."""
    try:
        return _parse(folder.read(MARKER, limit=MAX_BYTES), str(folder.path / MARKER))
    except (FileNotFoundError, DataError):
        return None


def write_local_marker(folder: Folder, marker: Marker) -> None:
    """Writes the marker of a run (`stored.json`) to its working folder."""
    write_json(folder, MARKER, asdict(marker))


def download_run(root: Path, url: str) -> None:
    """Downloads a run from its object store to its working folder, if the store has a newer state.

    The folder stays unchanged while a process on this machine trains the run. If the folder contains another run,
    it is moved aside. Raises a `StorageError` if the store cannot be read, and a `UsageError` if it contains other
    files.
    """
    store = ObjectStore(url)
    with _alone(root):
        if root.is_dir() and (is_held(root) or is_locked(root)):
            return
        for left in reversed(range(TRIES)):
            try:
                _bring(store, Folder(root))
            except MissingObjectError:  # a process that trains has deleted a checkpoint since its name was read
                if not left:
                    raise
            else:
                break


def _bring(store: ObjectStore, run: Folder) -> None:
    names = patiently(store.sizes)
    there = patiently(lambda: read_marker(store)) if MARKER in names else None
    if there is None and CONFIG in names:
        there = Marker()
    if there is None:
        if names:  # a run would have a configuration, which is copied first
            raise UsageError(
                f"{store.url} is not empty and does not contain a run: it contains {min(names)}. hint: choose "
                "another --run-dir."
            )
        return
    here = local_marker(run)
    if not there.run and _content(run, CONFIG) == patiently(lambda: store.read(CONFIG)):
        here = Marker(revision=-1)  # the first copy, or a download, of this run was interrupted
    elif (run.path / CONFIG).exists() and (here is None or here.run != there.run):
        # the working folder holds another run than the store
        number = next(n for n in range(1, 10**6) if not os.path.lexists(f"{run.path}.other-{n}"))
        Folder(run.path.parent).rename(run.path.name, f"{run.path.name}.other-{number}")
        here = None
    if here is None or _standing(here, _local_checkpoints(run)) < _standing(there, whole_checkpoints(names)):
        _fetch(store, names, run, there)


def _standing(marker: Marker, checkpoints: set[str]) -> tuple[int, int]:
    """Returns what decides between two copies of a run: the newest checkpoint, then how often it was copied."""
    return max(map(int, checkpoints), default=-1), marker.revision


def _local_checkpoints(run: Folder) -> set[str]:
    kinds = run.inner(CHECKPOINTS).kinds()
    return {name for name, kind in kinds.items() if NAME.fullmatch(name) and kind == "folder"}


def _fetch(store: ObjectStore, names: Mapping[str, int], run: Folder, marker: Marker) -> None:
    """Makes the working folder equal to the store.

    The marker is written last, so that an interrupted fetch is repeated.
    """
    checkpoints = run.inner(CHECKPOINTS)
    run.make()
    checkpoints.make()
    whole = whole_checkpoints(names)
    for iteration in sorted(whole, key=int):
        _fetch_checkpoint(store, checkpoints, iteration)
    for iteration in _local_checkpoints(run) - whole:
        checkpoints.remove(iteration)
    for name in sorted(names):
        if is_run_file(name) and not name.startswith(f"{CHECKPOINTS}/"):
            _fetch_file(store, run, name, names[name])
    write_local_marker(run, marker)


def _fetch_checkpoint(store: ObjectStore, folder: Folder, iteration: str) -> None:
    record = patiently(lambda: store.read(f"{CHECKPOINTS}/{iteration}/{RECORD}"))
    if _content(folder.inner(iteration), RECORD) == record:
        return
    partial = f"{WRITING}{iteration}"
    folder.remove(partial)
    folder.inner(partial).make()
    _download(store, f"{CHECKPOINTS}/{iteration}/{ARRAYS}", folder.inner(partial), ARRAYS)
    with folder.inner(partial).replacing(RECORD) as file:
        file.write(record)
    folder.remove(iteration)
    folder.rename(partial, iteration)


def _fetch_file(store: ObjectStore, root: Folder, name: str, size: int) -> None:
    *parents, last = name.split("/")
    folder = root
    for parent in parents:
        folder = folder.inner(parent)
    folder.make()
    if size <= MAX_BYTES and _content(folder, last) == patiently(lambda: store.read(name)):
        return  # a file that stays in place keeps its trust
    _download(store, name, folder, last)


def _download(store: ObjectStore, name: str, folder: Folder, last: str) -> None:
    def attempt() -> None:
        with folder.replacing(last) as file:
            for chunk in store.chunks(name):
                file.write(chunk)

    patiently(attempt)


def _content(folder: Folder, name: str) -> bytes | None:
    try:
        return folder.read(name, limit=MAX_HEADER_BYTES)
    except FileNotFoundError:
        return None


def _parse(text: bytes, where: str) -> Marker:
    return read_as(Marker, parse_json(text, where=where, limit=MAX_BYTES), where=where)


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Excludes other processes that download the same run."""
    Folder(root.parent).make()
    descriptor = Folder(root.parent).open_to_append(f".{root.name}.lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
