"""Files of the cache.

`kernels/` holds the source of kernels, `launches/` the fastest launches, `means/` the fastest ways to take means.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from rollmill.core.installation import cache_root

T = TypeVar("T")


def cached_file(folder: str, known: Sequence[object], *, packages: Sequence[str] = ()) -> Path:
    """The file of a result that depends on these values, on JAX and on packages, by their versions."""
    versions = [version(name) for name in ("jax", "jaxlib", *packages)]
    name = hashlib.sha256(json.dumps([*known, versions]).encode()).hexdigest()[:24]
    return cache_root() / folder / f"{name}.json"


def read_cached(file: Path, read: Callable[[Any], T]) -> T | None:
    """The value that `read` makes of a file's JSON; None if there is none, or a damaged one, which is removed."""
    if not file.exists():
        return None
    try:
        return read(json.loads(file.read_text()))
    except (ValueError, KeyError, TypeError):
        file.unlink(missing_ok=True)
        return None


def write_once(file: Path, text: str) -> None:
    """Writes a file, whole or not at all, unless it is there."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
            part.write(text)
        os.replace(part.name, file)
