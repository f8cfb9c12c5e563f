"""Paths of files on this machine, as users give them."""

import dataclasses
import re
from os import PathLike
from pathlib import Path
from typing import Any

from rollmill.core.errors import UsageError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of a URL. `Path` keeps one of its two slashes; one letter is a drive of Windows."""


def local_path(name: str, path: str | PathLike[str]) -> Path:
    """A path on this machine.

    Args:
        name: the argument or option, for the message.
        path: the path, relative or absolute.

    Raises:
        UsageError: it is the URL of a bucket or of another machine.
    """
    text = str(path)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(path)
    rest = text[scheme.end() :].lstrip("/")
    url = f"{scheme.group()}/{rest}"
    if scheme.group().lower() == "file:/":
        raise UsageError(f"{name}={url} is a URL, expected a path. hint: /{rest.removeprefix('localhost/')}")
    raise UsageError(
        f"{name}={url} is a URL, and Rollmill reads and writes files and folders of this machine only. hint: name "
        "a local folder and copy it (aws s3 sync, gcloud storage rsync, rclone sync), or mount the storage as a "
        "folder (s3fs, gcsfuse, rclone mount) and name that."
    )


def check_local_paths(options: Any) -> None:
    """Checks all paths in the fields of a dataclass, and of the dataclasses that it holds.

    Raises:
        UsageError: one is a URL; names its field.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            check_local_paths(value)
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                local_path(field.name, path)
