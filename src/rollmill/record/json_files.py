"""JSON files that are strictly standard, and written atomically."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rollmill.core.errors import CheckpointError
from rollmill.core.folder import Folder
from rollmill.core.json_data import parse_object
from rollmill.record.storage import write_failure

MAX_BYTES = 2 * 2**20
"""Size limit for reading a JSON file of a run; a configuration has a few thousand bytes."""


def plain(value: Any) -> Any:
    """`value` in JSON's types: arrays become numbers or lists, paths text, NaN and infinities None.

    Raises:
        TypeError: a part of `value` has no JSON form.
    """
    match value:
        case None | bool() | int():
            return value
        case str():
            return value.encode("utf-8", "backslashreplace").decode()  # what is no text could not be read again
        case float():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): plain(part) for key, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
        case np.generic() | np.ndarray() | jax.Array():
            return plain(value.tolist())
        case Path():
            return plain(str(value))
    raise TypeError(f"{value!r} of type {type(value).__name__} has no JSON form")


def write_json(folder: Folder, name: str, value: Mapping[str, Any]) -> None:
    """Replaces a file by `value` atomically: a reader sees the old file or the new one.

    Raises:
        StorageError: the file cannot be written; the old one is unchanged.
        ForeignFileError: the folder is a link.
    """
    text = json.dumps(plain(value), indent=2, allow_nan=False) + "\n"
    try:
        with folder.replacing(name) as file:
            file.write(text.encode())
    except OSError as error:
        raise write_failure(folder.path / name, error) from error


def read_json(folder: Folder, name: str, *, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Reads the JSON object in a file of at most `limit` bytes.

    Raises:
        CheckpointError: the file is missing, unreadable, too large, not a regular file, or not one JSON object.
    """
    path = folder.path / name
    try:
        text = folder.read(name, limit=limit)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    return parse_object(text, where=str(path), limit=limit, error=CheckpointError)
