"""Reads and writes the compiler's cache.

`kernels/` holds the source of Triton kernels, `code/` machine code for CPUs, `launches/` the fastest launch
configurations, and `means/` the fastest all-reduces.
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
from rollmill.core.installation import cache_root, folder_in_cache, read_verified, write_verified
from rollmill.core.json_data import parse_json

MAX_BYTES = 2**20
MAX_CODE_BYTES = 2**26

T = TypeVar("T")


def cached_file(folder: str, known: Sequence[object], *, packages: Sequence[str] = ()) -> Path:
    """Returns the cache file of a result that depends on `known`, JAX and the versions of `packages`."""
    versions = [version(name) for name in ("jax", "jaxlib", *packages)]
    name = hashlib.sha256(json.dumps([*known, versions]).encode()).hexdigest()[:24]
    return cache_root() / folder / f"{name}.json"


def read_cached(file: Path, read: Callable[[Any], T]) -> T | None:
    """Reads a JSON file of the cache, and converts its content with `read`.

    Returns None if the file does not exist or is damaged. A damaged file is removed.
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
    """Returns machine code from the cache, or compiles and stores it.

    `known` and the versions of `packages` identify the code.
    """
    file = cached_file("code", known, packages=packages).with_suffix("")
    code = read_verified(file, MAX_CODE_BYTES)
    if code is None:
        code = compile()
        write_verified(file, code)  # if the code cannot be stored, it is compiled again in the next run
    return code


def write_once(file: Path, text: str) -> None:
    """Writes a cache file atomically, unless it exists.

    Raises an `OSError` if it cannot be written, and a `CheckpointError` if its folder is a link.
    """
    folder = folder_in_cache(file)
    if folder.kinds().get(file.name) != "file":
        _replace(folder, file.name, text)


def write_exactly(file: Path, text: str) -> None:
    """Writes a cache file atomically, unless it already has exactly this content. Python imports these files.

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
