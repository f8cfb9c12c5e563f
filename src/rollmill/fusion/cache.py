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
from rollmill.core.folder import Folder, read_named
from rollmill.core.installation import cache_root
from rollmill.core.json_data import parse_json

MAX_BYTES = 2**20

T = TypeVar("T")


def cached_file(folder: str, known: Sequence[object], *, packages: Sequence[str] = ()) -> Path:
    """The file of a result that depends on these values, on JAX and on packages, by their versions."""
    versions = [version(name) for name in ("jax", "jaxlib", *packages)]
    name = hashlib.sha256(json.dumps([*known, versions]).encode()).hexdigest()[:24]
    return cache_root() / folder / f"{name}.json"


def read_cached(file: Path, read: Callable[[Any], T]) -> T | None:
    """The value that `read` makes of a file's JSON; None if there is none, or a damaged one, which is removed."""
    try:
        return read(parse_json(read_named(file, limit=MAX_BYTES), where=str(file)))
    except FileNotFoundError:
        return None
    except (OSError, CheckpointError, DataError, ValueError, KeyError, TypeError):
        with contextlib.suppress(OSError):
            Folder(file.parent).remove(file.name)
        return None


def write_once(file: Path, text: str) -> None:
    """Writes a file, whole or not at all, unless it is there.

    Raises:
        OSError: it cannot be written.
    """
    folder = Folder(file.parent)
    if folder.kinds().get(file.name) != "file":
        folder.make()
        with folder.replacing(file.name, shared=True) as whole:
            whole.write(text.encode())
