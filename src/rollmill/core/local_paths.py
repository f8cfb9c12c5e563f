"""Handles paths on this machine that users give, and checks files that are to be written."""

import dataclasses
import re
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

from rollmill.core.errors import UsageError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of a URL. `Path` removes one of its two slashes. A single letter is a Windows drive."""


def local_path(name: str, path: str | PathLike[str]) -> Path:
    """Returns a path on this machine. `name` is the argument or option to name in an error message.

    Raises a `UsageError` if the path is a URL.
    """
    text = str(path)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(path)
    rest = text[scheme.end() :].lstrip("/")
    url = f"{scheme.group()}/{rest}"
    if scheme.group().lower() == "file:/":
        raise UsageError(f"{name}={url} is a URL, expected a path. hint: use /{rest.removeprefix('localhost/')}")
    raise UsageError(
        f"{name}={url} is a URL, but only local files and folders are supported here. Only runs may be in a "
        "bucket (s3://, gs://, az://). hint: name a local folder and copy it (aws s3 sync, gcloud storage rsync, "
        "rclone sync), or mount the bucket as a folder (s3fs, gcsfuse, rclone mount)."
    )


def check_local_paths(options: Any) -> None:
    """Checks every path in a dataclass, including nested dataclasses, as `local_path` does."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            check_local_paths(value)
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                local_path(field.name, path)


def check_folder(folder: Path) -> None:
    """Raises a `UsageError` if the folder to search for runs does not exist, or is a file."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {problem}. hint: name the folder that contains your runs, such as runs.")


ALSO_IN_PYTHON = "--force (force=True) replaces it, --output (output=) names another."
ON_THE_COMMAND_LINE = "--force replaces it, --output names another."


def check_new_file(path: Path, *, force: bool, remedy: str = ON_THE_COMMAND_LINE) -> None:
    """Checks that a new file can be written to a path.

    Raises a `UsageError` if the path is a folder, or if its parent folder does not exist or cannot be written. If
    the file exists and `force` is not set, the error includes the hint `remedy`.
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder. hint: give the name of a file in it.")
        if not path.parent.is_dir():
            raise UsageError(f"{path} cannot be written: the folder {path.parent} does not exist.")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is a pipe, a socket or a device. hint: give the name of a file.")
        if path.exists() and not force:
            raise UsageError(f"{path} already exists. hint: {remedy}")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}.") from error
