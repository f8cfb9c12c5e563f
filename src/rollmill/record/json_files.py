"""Reads and writes the JSON files of a run: strictly standard JSON, replaced atomically."""

import errno
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.core.errors import CheckpointError, DeviceMemoryError, StorageError
from rollmill.core.folder import Folder
from rollmill.core.json_data import parse_object
from rollmill.gpus.device_errors import known_device_error

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
FULL_TEXTS = ("No space left", "Disk quota exceeded", "RESOURCE_EXHAUSTED")


def disk_is_full(error: BaseException) -> bool:
    """Returns whether an error, or its cause, means that the disk or a quota is full."""
    if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
        return True
    if isinstance(error, DeviceMemoryError) or known_device_error(error) is not None:
        return False  # a device is out of memory, which JAX also calls RESOURCE_EXHAUSTED
    if any(text in str(error) for text in FULL_TEXTS):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and disk_is_full(cause)


def write_failure(path: Path, error: BaseException) -> StorageError:
    """Returns a `StorageError` with a hint, for an error in writing `path`. Raise it `from error`."""
    if disk_is_full(error):
        return StorageError(
            f"{path} cannot be written: the disk is full. hint: free some space and resume the run."
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return StorageError(f"{path} cannot be written: {reason}.")


MAX_BYTES = 2 * 2**20
"""Maximum size of a JSON file of a run. A configuration has a few thousand bytes."""


def plain(value: Any) -> Any:
    """Converts a value to types that JSON can hold. Raises a `TypeError` if a part of it cannot be converted.

    Arrays become scalars or lists, paths become strings, and NaN and infinities become None.
    """
    match value:
        case None | bool() | int():
            return value
        case str():
            # a string that is not valid Unicode could not be read again
            return value.encode("utf-8", "backslashreplace").decode()
        case float():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): plain(part) for key, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
        case np.generic() | np.ndarray():
            return plain(value.tolist())
        case Path():
            return plain(str(value))
    return _plain_array(value)


def _plain_array(value: Any) -> Any:
    """Converts an array of JAX to types that JSON can hold. Raises a `TypeError` for other values."""
    import jax  # imported here, because commands that only read files do not need it

    if isinstance(value, jax.Array):
        return plain(value.tolist())
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be represented in JSON")


def write_json(folder: Folder, name: str, value: Mapping[str, Any]) -> None:
    """Replaces a JSON file atomically, so that readers see either the old or the new file.

    Raises a `StorageError` if the file cannot be written. The old file is then unchanged.
    """
    text = json.dumps(plain(value), indent=2, allow_nan=False) + "\n"
    try:
        with folder.replacing(name) as file:
            file.write(text.encode())
    except OSError as error:
        raise write_failure(folder.path / name, error) from error


def read_json(folder: Folder, name: str, *, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Reads a JSON object from a file of at most `limit` bytes. Raises a `CheckpointError` if the file contains
    none.
    """
    path = folder.path / name
    try:
        text = folder.read(name, limit=limit)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    return parse_object(text, where=str(path), limit=limit, error=CheckpointError)
