"""Files of the cache.

`kernels/` holds the source of kernels, `launches/` the fastest launches, `means/` the fastest ways to take means.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from rollmill.core.errors import CheckpointError, DataError
from rollmill.core.folder import Folder
from rollmill.core.installation import cache_root, folder_in_cache
from rollmill.core.json_data import parse_json

MAX_BYTES = 2**20

T = TypeVar("T")


def cached_file(folder: str, known: Sequence[object], *, packages: Sequence[str] = ()) -> Path:
    """Returns the file of a result that depends on these values, on JAX and on packages, by their versions."""
    versions = [version(name) for name in ("jax", "jaxlib", *packages)]
    name = hashlib.sha256(json.dumps([*known, versions]).encode()).hexdigest()[:24]
    return cache_root() / folder / f"{name}.json"


def read_cached(file: Path, read: Callable[[Any], T]) -> T | None:
    """The value that `read` makes of a file's JSON; None if there is none, or a damaged one, which is removed."""
    folder = folder_in_cache(file)
    try:
        return read(parse_json(folder.read(file.name, limit=MAX_BYTES), where=str(file)))
    except FileNotFoundError:
        return None
    except (OSError, CheckpointError, DataError, ValueError, KeyError, TypeError):
        with contextlib.suppress(OSError, CheckpointError):
            folder.remove(file.name)
        return None


def write_once(file: Path, text: str) -> None:
    """Writes a file, whole or not at all, unless it is there.

    Raises an `OSError` if it cannot be written, and a `CheckpointError` if a link is in the place of its folder.
    """
    folder = folder_in_cache(file)
    if folder.kinds().get(file.name) != "file":
        _replace(folder, file.name, text)


def write_exactly(file: Path, text: str) -> None:
    """Writes a file, whole or not at all, unless it has this very content: what is imported may be nothing else.

    Raises an `OSError` if it cannot be written, and a `CheckpointError` if a link is in the place of its folder.
    """
    folder, known = folder_in_cache(file), None
    with contextlib.suppress(OSError, CheckpointError):
        known = folder.read(file.name, limit=len(text.encode()))
    if known != text.encode():
        _replace(folder, file.name, text)


def _replace(folder: Folder, name: str, text: str) -> None:
    folder.make()
    with folder.replacing(name, shared=True) as whole:
        whole.write(text.encode())
