"""Files of the cache.

`kernels/` holds the source of kernels, `code/` machine code for CPUs, `launches/` the fastest launches, and
`means/` the fastest ways to take means.
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
MAX_CODE_BYTES = 2**26

T = TypeVar("T")


def cached_file(folder: str, known: Sequence[object], *, packages: Sequence[str] = ()) -> Path:
    """Returns the file of a result that depends on these values, on JAX and on packages, by their versions."""
    versions = [version(name) for name in ("jax", "jaxlib", *packages)]
    name = hashlib.sha256(json.dumps([*known, versions]).encode()).hexdigest()[:24]
    return cache_root() / folder / f"{name}.json"


def read_cached(file: Path, read: Callable[[Any], T]) -> T | None:
    """Reads a file's JSON with `read`. Returns None if the file does not exist or is damaged, and removes a
    damaged file.
    """
    folder = folder_in_cache(file)
    try:
        return read(parse_json(folder.read(file.name, limit=MAX_BYTES), where=str(file)))
    except FileNotFoundError:
        return None
    except (OSError, CheckpointError, DataError, ValueError, KeyError, TypeError):
        with contextlib.suppress(OSError, CheckpointError):
            folder.remove(file.name)
        return None


def stored_code(known: Sequence[object], compile: Callable[[], bytes], *, packages: Sequence[str]) -> bytes:
    """Returns machine code for these values and packages, from the cache or newly compiled."""
    file = cached_file("code", known, packages=packages)
    folder, name = folder_in_cache(file), file.stem
    with contextlib.suppress(OSError, CheckpointError):
        digest, _, code = folder.read(name, limit=MAX_CODE_BYTES).partition(b"\n")
        if digest == _digest(code):
            return code
    code = compile()
    with contextlib.suppress(OSError, CheckpointError):  # where nothing can be kept, it is compiled again
        folder.make()
        with folder.replacing(name, shared=True) as whole:
            whole.write(_digest(code) + b"\n" + code)
    return code


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).hexdigest().encode()


def write_once(file: Path, text: str) -> None:
    """Writes a file, whole or not at all, unless it is there.

    Raises an `OSError` if it cannot be written, and a `CheckpointError` if its folder is a link.
    """
    folder = folder_in_cache(file)
    if folder.kinds().get(file.name) != "file":
        _replace(folder, file.name, text)


def write_exactly(file: Path, text: str) -> None:
    """Writes a file, whole or not at all, unless it has this very content: what is imported may be nothing else.

    Raises an `OSError` if it cannot be written, and a `CheckpointError` if its folder is a link.
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
