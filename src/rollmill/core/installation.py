"""Locates the installation, reads and writes the cache, and names the commands that install extras."""

import contextlib
import hashlib
import os
import shlex
import stat
from pathlib import Path

from rollmill.core.errors import CheckpointError, UsageError
from rollmill.core.folder import Folder
from rollmill.core.local_paths import local_path

PROJECT = Path(__file__).parents[3]
"""Root of the repository, if Rollmill runs from a clone."""


def install_command(extra: str) -> str:
    """Returns the command that installs an extra, from the local clone if Rollmill runs from one."""
    if (PROJECT / "pyproject.toml").is_file() and (PROJECT / "src" / "rollmill").is_dir():
        return f"pip install -e {shlex.quote(f'{PROJECT}[{extra}]')}"
    return f"pip install 'rollmill[{extra}]'"


def cache_root() -> Path:
    """Returns the cache folder: `$ROLLMILL_CACHE_DIR`, or `rollmill/` in `$XDG_CACHE_HOME` or `~/.cache`.

    Raises a `UsageError` if other users can write to the folder, because it contains code.
    """
    chosen = os.environ.get("ROLLMILL_CACHE_DIR")
    if chosen:
        root = local_path("ROLLMILL_CACHE_DIR", chosen)
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rollmill")
    _check_writers(root)
    return root


def _check_writers(root: Path) -> None:
    """Raises a `UsageError` if other users can write to a folder of code. Root may use folders of any owner."""
    try:
        status = root.stat()
    except OSError:  # the folder does not exist or is not accessible
        return
    danger = (
        "and the compiled programs in it run with your permissions. hint: set ROLLMILL_CACHE_DIR to another folder"
    )
    if status.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"every user can write to the cache {root}, {danger}, or run `chmod o-w {shlex.quote(str(root))}`."
        )
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    if user != 0 and status.st_uid not in (0, user):
        raise UsageError(f"the cache {root} belongs to another user (uid {status.st_uid}), {danger}.")


def folder_in_cache(file: Path) -> Folder:
    """Returns a folder one level below the cache's root, without following a link there."""
    return Folder(file.parent.parent, (file.parent.name,))


def read_verified(file: Path, limit: int) -> bytes | None:
    """Returns what `write_verified` wrote to a file of the cache, of at most `limit` bytes.

    Returns None if the file cannot be read or its content is damaged. A damaged file is removed.
    """
    folder = folder_in_cache(file)
    with contextlib.suppress(OSError, CheckpointError):
        digest, _, content = folder.read(file.name, limit=limit).partition(b"\n")
        if digest == _digest(content):
            return content
        folder.remove(file.name)
    return None


def write_verified(file: Path, content: bytes) -> None:
    """Writes a file of the cache atomically, with a digest of its content in front. Does nothing if it cannot."""
    folder = folder_in_cache(file)
    with contextlib.suppress(OSError, CheckpointError):
        folder.make()
        with folder.replacing(file.name, shared=True) as whole:
            whole.write(_digest(content) + b"\n" + content)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
