"""Maps the URLs of runs in object stores to their working folders on this machine.

A run with a URL has a *working folder* in the cache, whose path contains the URL. The path of a run therefore
determines where the run is copied to, and code that reads or writes runs uses only folders.
"""

import re
from os import PathLike
from pathlib import Path
from typing import Annotated, TypeAlias
from urllib.parse import quote, unquote

from rollmill.core.errors import UsageError
from rollmill.core.installation import cache_root
from rollmill.core.local_paths import local_path

SCHEMES = ("s3", "gs", "az")
"""URL schemes of the object stores in which a run may be recorded: Amazon, Google and Azure."""

FOLDER = "stored_runs"
MAX_NAME = 200
"""Maximum length in characters of a working folder's quoted name. File systems allow 255 bytes."""

_URL = re.compile(rf"({'|'.join(SCHEMES)}):/+([^/]+)/*(.*)", re.DOTALL)
"""The URL of a run. `Path` removes one of its two slashes."""


class OfRun:
    """Marks a path as a run directory in an annotation. Such a path may be a URL."""


RunPath: TypeAlias = Annotated[Path, OfRun()]
"""Directory of a run. A URL is converted to its working folder on this machine."""


def run_folder(name: str, path: str | PathLike[str]) -> Path:
    """Returns the folder of a run: the path itself, or the working folder of a URL.

    `name` is the name of the argument or option, for messages. Raises a `UsageError` for an unsupported kind of
    URL.
    """
    url = _URL.fullmatch(str(path))
    if url is None:
        return local_path(name, path)
    scheme, bucket, key = url.groups()
    key = key.strip("/")
    folder = quote(key, safe="")
    if not key or any(part in ("", ".", "..") for part in key.split("/")):
        raise UsageError(
            f"{name}={scheme}://{bucket}/{key} does not name a folder in the bucket. hint: use "
            f"{scheme}://{bucket}/runs/mine"
        )
    if len(folder) > MAX_NAME:
        raise UsageError(
            f"{name}={scheme}://{bucket}/{key} has more than {MAX_NAME} characters after the bucket's name."
        )
    return cache_root() / FOLDER / scheme / quote(bucket, safe="") / folder


def url_of(folder: Path) -> str | None:
    """Returns the URL whose working folder this is, or None if it is another folder."""
    parents = folder.absolute().parents
    if len(parents) < 3 or parents[2].name != FOLDER or parents[1].name not in SCHEMES:
        return None
    # compares resolved paths, because either may contain links
    if parents[2].resolve() != (cache_root() / FOLDER).resolve():
        return None
    return f"{parents[1].name}://{unquote(parents[0].name)}/{unquote(folder.name)}"


def shown(folder: Path) -> str:
    """Returns the URL of a working folder, or the path of any other folder."""
    return url_of(folder) or str(folder)
