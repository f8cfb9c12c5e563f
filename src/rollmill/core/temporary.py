"""Temporary folders that are removed even if their process is killed.

Each folder is in the cache, and its process holds a lock on it. When another process creates a temporary folder,
it removes all folders without a lock.
"""

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rollmill.core.errors import CheckpointError
from rollmill.core.folder import Folder
from rollmill.core.installation import cache_root

FOLDER = "temporary"


class TemporaryFolder:
    """A new temporary folder at `path`, named after its purpose, which `close` removes."""

    def __init__(self, purpose: str) -> None:
        self._all, self._name = _parent(), f"{purpose}-{secrets.token_hex(6)}"
        _remove_abandoned(self._all)
        with self._all.opened() as parent:
            # The lock file comes first, because a folder without one counts as abandoned.
            self._lock = self._all.open_to_append(_lock_of(self._name))
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.mkdir(self._name, 0o700, dir_fd=parent)
        self.path = self._all.path / self._name

    def close(self) -> None:
        """Removes the folder and its contents, as far as possible."""
        with contextlib.suppress(OSError):
            self._all.remove(self._name)
            self._all.remove(_lock_of(self._name))
        os.close(self._lock)


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Context manager that creates a temporary folder, named after `purpose`, and later removes it."""
    folder = TemporaryFolder(purpose)
    try:
        yield folder.path
    finally:
        folder.close()


def _parent() -> Folder:
    """Returns the parent of all folders: in the cache, or in the system's temporary files if that is read-only."""
    folder = Folder(cache_root()).inner(FOLDER)
    try:
        folder.make()
        with folder.opened() as descriptor:
            if os.access(".", os.W_OK, dir_fd=descriptor):
                return folder
    except (OSError, CheckpointError):
        pass
    return Folder(Path(tempfile.mkdtemp(prefix="rollmill-")))


def _remove_abandoned(folder: Folder) -> None:
    """Removes the folders of processes that are gone."""
    for name, kind in folder.kinds().items():
        if kind != "file" or not name.endswith(_lock_of("")):
            continue
        with contextlib.suppress(OSError, CheckpointError):
            lock = folder.open_to_append(name)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder.remove(name.removesuffix(_lock_of("")))
                folder.remove(name)
            finally:
                os.close(lock)


def _lock_of(name: str) -> str:
    return f"{name}.lock"
