"""Folders whose content may come from a stranger: nothing in them is followed through links, or opened unseen.

A path is trusted up to the folder's root, which the user named. Below it every component is opened by itself,
relative to the one above and without following links, so that no name in a run directory leads out of it.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.core.errors import CheckpointError

NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK


class ForeignFileError(CheckpointError):
    """Something else than a plain file or folder where one of a run's is expected: a link, a pipe, a device."""


@dataclass(frozen=True)
class Folder:
    """A folder: `root`, which the user named, and the names below it that lead there."""

    root: Path
    names: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The whole path, for messages."""
        return self.root.joinpath(*self.names)

    def inner(self, name: str) -> "Folder":
        """A folder in this one; it need not exist."""
        return Folder(self.root, (*self.names, name))

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the folder.

        Raises:
            ForeignFileError: a component below the root is a link.
            OSError: it does not exist, or cannot be opened.
        """
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for depth, name in enumerate(self.names, start=1):
                below = _open(descriptor, name, os.O_RDONLY | os.O_DIRECTORY, self._ancestor(depth))
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    def make(self) -> None:
        """Makes the folder, and the root, where they are missing.

        Raises:
            ForeignFileError: a link or a file stands in its place.
            OSError: it cannot be made.
        """
        if not self.names:
            self.root.mkdir(parents=True, exist_ok=True)
            return
        above = Folder(self.root, self.names[:-1])
        above.make()
        with above.opened() as parent, contextlib.suppress(FileExistsError):
            os.mkdir(self.names[-1], dir_fd=parent)
        with self.opened():  # refuses what stands there instead
            pass

    def is_folder(self) -> bool:
        """Whether it exists, and is a folder and no link."""
        try:
            with self.opened():
                return True
        except (OSError, ForeignFileError):
            return False

    def kinds(self) -> dict[str, str]:
        """Each name in the folder, and what it is: `file`, `folder`, `link` or `other`; empty where there is none.

        Raises:
            ForeignFileError: the folder itself is a link or a file.
            OSError: it cannot be read.
        """
        try:
            with self.opened() as descriptor, os.scandir(descriptor) as entries:
                return {entry.name: _kind(entry.stat(follow_symlinks=False).st_mode) for entry in entries}
        except FileNotFoundError:
            return {}

    def has(self, name: str) -> bool:
        """Whether there is anything of that name, a broken link too."""
        try:
            with self.opened() as descriptor:
                os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """A plain file, opened for reading bytes.

        Raises:
            ForeignFileError: it is a link, a folder, a pipe or a device.
            OSError: it does not exist, or cannot be opened.
        """
        with self.opened() as descriptor:
            file = _open(descriptor, name, os.O_RDONLY, self.path / name)
        try:
            _check_plain(file, self.path / name)
        except ForeignFileError:
            os.close(file)
            raise
        with os.fdopen(file, "rb") as opened:
            yield opened

    def read(self, name: str, *, limit: int) -> bytes:
        """The content of a plain file.

        Raises:
            ForeignFileError: it is a link, a folder, a pipe or a device, or has more than `limit` bytes.
            OSError: it does not exist, or cannot be read.
        """
        with self.reading(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise ForeignFileError(
                    f"{self.path / name} cannot be read: it has {size:,} bytes, and at most {limit:,} are read."
                )
            return file.read(limit)

    def open_to_append(self, name: str) -> int:
        """A descriptor of a plain file that is written at its end, made where it is missing.

        Raises:
            ForeignFileError: it is a link, a folder, a pipe or a device, or has a second name elsewhere.
            OSError: it cannot be opened.
        """
        with self.opened() as descriptor:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            file = _open(descriptor, name, flags, self.path / name)
        try:
            _check_plain(file, self.path / name, alone=True)
        except ForeignFileError:
            os.close(file)
            raise
        return file

    def create(self, name: str) -> int:
        """A descriptor of a new file, for writing.

        A file or link that had its name is deleted; where the link led is untouched.

        Raises:
            OSError: it cannot be made, or a folder has that name.
        """
        with self.opened() as descriptor:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
            return os.open(name, NEW_FILE, 0o666, dir_fd=descriptor)

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[Any]:
        """A file to write, which replaces `name` when the context ends without an error; otherwise `name` stays.

        Raises:
            OSError: it cannot be written.
        """
        partial = f".{name}.tmp"
        try:
            with os.fdopen(self.create(partial), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            self.rename(partial, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(partial)
            raise

    def rename(self, name: str, other: str) -> None:
        """Gives a file or folder another name in this folder.

        Raises:
            OSError: it does not exist, or cannot be renamed.
        """
        with self.opened() as descriptor:
            os.rename(name, other, src_dir_fd=descriptor, dst_dir_fd=descriptor)

    def remove(self, name: str) -> None:
        """Deletes a file, a link, or a folder with all that is in it; links in it are not followed.

        Raises:
            OSError: it cannot be deleted.
        """
        with self.opened() as descriptor:
            try:
                os.unlink(name, dir_fd=descriptor)
            except FileNotFoundError:
                return
            except (IsADirectoryError, PermissionError):  # macOS says EPERM of a folder
                shutil.rmtree(name, dir_fd=descriptor)

    def _ancestor(self, depth: int) -> Path:
        return self.root.joinpath(*self.names[:depth])


def plain_file(path: Path) -> tuple[Folder, str]:
    """Folder and name of a file whose folder the user named."""
    return Folder(path.parent), path.name


def _open(folder: int, name: str, flags: int, path: Path) -> int:
    """Opens without following a link, and without waiting for the other end of a pipe."""
    try:
        return os.open(name, flags | NO_LINK | os.O_NONBLOCK, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EMLINK):
            raise _foreign(path, _kind(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)) from error
        raise


def _check_plain(descriptor: int, path: Path, *, alone: bool = False) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _foreign(path, _kind(status.st_mode))
    if alone and status.st_nlink > 1:
        raise ForeignFileError(
            f"{path} has a second name elsewhere (a hard link), which would be overwritten with it. "
            f"hint: delete {path}."
        )


def _foreign(path: Path, kind: str) -> ForeignFileError:
    if kind == "link":
        return ForeignFileError(
            f"{path} is a link, and links inside a run directory are not followed. hint: put the file or folder "
            "itself there, or delete the link."
        )
    names = {"file": "a file", "folder": "a folder", "other": "a pipe, a socket or a device"}
    return ForeignFileError(f"{path} is {names[kind]}, which it should not be. hint: move it away.")


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"
