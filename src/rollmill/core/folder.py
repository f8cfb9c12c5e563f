"""Access to folders with untrusted content: links are not followed, and only regular files are opened.

A path is trusted up to the folder's root, which the user named. Below the root, every component is opened
separately, relative to its parent and without following links. No name in a run directory can therefore lead
outside.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill.core.errors import CheckpointError

NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER_MODE = 0o775
"""Permissions of new folders before the umask. Not every user can write to them."""
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK


class ForeignFileError(CheckpointError):
    """Raised if a file or folder of a run is not safe to use: a link, a pipe, a device, or too large."""


@dataclass(frozen=True)
class Folder:
    """A folder with untrusted content, as a path below a trusted `root` that the user named."""

    root: Path
    names: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Full path of the folder, for messages."""
        return self.root.joinpath(*self.names)

    def inner(self, name: str) -> "Folder":
        """Returns a subfolder, which need not exist."""
        return Folder(self.root, (*self.names, name))

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Context manager that opens a file descriptor of the folder.

        Raises a `ForeignFileError` if a component below the root is a link.
        """
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for depth, name in enumerate(self.names, start=1):
                child = _open(descriptor, name, os.O_RDONLY | os.O_DIRECTORY, self._ancestor(depth))
                os.close(descriptor)
                descriptor = child
            yield descriptor
        finally:
            os.close(descriptor)

    def make(self) -> None:
        """Creates the folder, its parents and the root if they are missing.

        Raises a `ForeignFileError` if the path is a link or a file.
        """
        if not self.names:
            self.root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            return
        parent = Folder(self.root, self.names[:-1])
        parent.make()
        with parent.opened() as descriptor, contextlib.suppress(FileExistsError):
            os.mkdir(self.names[-1], FOLDER_MODE, dir_fd=descriptor)
        with self.opened():  # raises if the path is a link or a file
            pass

    def make_new(self) -> bool:
        """Creates the folder inside its parent, and returns whether this call created it."""
        with Folder(self.root, self.names[:-1]).opened() as descriptor:
            try:
                os.mkdir(self.names[-1], FOLDER_MODE, dir_fd=descriptor)
            except FileExistsError:
                return False
        return True

    def is_folder(self) -> bool:
        """Returns whether the path exists and is a folder, and not a link."""
        try:
            with self.opened():
                return True
        except (OSError, ForeignFileError):
            return False

    def kinds(self) -> dict[str, str]:
        """Returns the kind of each entry of the folder, by name: `file`, `folder`, `link` or `other`.

        The result is empty if the folder does not exist. Raises a `ForeignFileError` if the folder itself is a
        link or a file.
        """
        try:
            with self.opened() as descriptor, os.scandir(descriptor) as entries:
                return {entry.name: _kind(entry.stat(follow_symlinks=False).st_mode) for entry in entries}
        except FileNotFoundError:
            return {}

    def has(self, name: str) -> bool:
        """Returns whether the folder has an entry `name`, even if it is a broken link."""
        try:
            with self.opened() as descriptor:
                os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """Opens a regular file of the folder for reading bytes.

        Raises a `ForeignFileError` for a link, folder, pipe or device.
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
        """Reads the contents of a regular file of the folder.

        Raises a `ForeignFileError` for a link, folder, pipe or device, and for a file of more than `limit` bytes.
        """
        with self.reading(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise ForeignFileError(
                    f"{self.path / name} cannot be read: its {size:,} bytes exceed the limit of {limit:,}."
                )
            return file.read(limit)

    def open_to_append(self, name: str) -> int:
        """Opens a regular file of the folder for appending, creates it if necessary, and returns its descriptor.

        Raises a `ForeignFileError` for a link, folder, pipe or device, and for a file that has another hard link.
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
        """Creates a file in the folder, replacing a file or link. Returns a descriptor for writing."""
        with self.opened() as descriptor:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
            return os.open(name, NEW_FILE, 0o666, dir_fd=descriptor)

    @contextlib.contextmanager
    def replacing(self, name: str, *, shared: bool = False) -> Iterator[Any]:
        """Context manager that opens a new file, which replaces the named file or link if no error occurs.

        If the file is `shared`, several processes may replace it at the same time, each with its own partial file.
        """
        partial = f".{secrets.token_hex(8)}.tmp" if shared else f".{name}.tmp"
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
        """Renames a file or a folder within the folder."""
        with self.opened() as descriptor:
            os.rename(name, other, src_dir_fd=descriptor, dst_dir_fd=descriptor)

    def remove(self, name: str) -> None:
        """Deletes a file, a link, or a folder with its contents, without following links."""
        with self.opened() as descriptor:
            try:
                os.unlink(name, dir_fd=descriptor)
            except FileNotFoundError:
                return
            except (IsADirectoryError, PermissionError):  # macOS raises EPERM for a folder
                shutil.rmtree(name, dir_fd=descriptor)

    def _ancestor(self, depth: int) -> Path:
        return self.root.joinpath(*self.names[:depth])


def read_named(path: Path, *, limit: int) -> bytes:
    """Reads a file that the user named. It follows links, but does not read devices or pipes.

    Raises a `ForeignFileError` for a device, a pipe or a folder, and for a file of more than `limit` bytes.
    """
    with opened_named(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ForeignFileError(f"{path} cannot be read: it exceeds the limit of {limit:,} bytes.")
    return data


@contextlib.contextmanager
def opened_named(path: Path) -> Iterator[Any]:
    """Opens a file that the user named, for reading bytes, with the same rules as `read_named`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check_plain(descriptor, path)
        yield file


def open_replacement(path: Path) -> contextlib.AbstractContextManager[Any]:
    """Opens a new file that replaces a file that the user named, as `Folder.replacing` does."""
    return Folder(path.parent).replacing(path.name, shared=True)


def _open(folder: int, name: str, flags: int, path: Path) -> int:
    """Opens without following a link, and without blocking on a pipe."""
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
            f"{path} has another hard link, and writing to it would overwrite that file too. hint: delete {path}."
        )


def _foreign(path: Path, kind: str) -> ForeignFileError:
    if kind == "link":
        return ForeignFileError(
            f"{path} is a link, and links inside a run directory are not followed. hint: put the file or folder "
            "itself there, or delete the link."
        )
    names = {"file": "a file", "folder": "a folder", "other": "a pipe, a socket or a device"}
    return ForeignFileError(f"{path} is {names[kind]}, which is not supported here. hint: move it away.")


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"
