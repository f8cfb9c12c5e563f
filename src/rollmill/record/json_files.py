"""JSON that any reader accepts, in files that are whole or absent."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rollmill.core.errors import CheckpointError
from rollmill.record.storage import write_failure


def plain(value: Any) -> Any:
    """`value` as JSON knows it: arrays become numbers or lists, paths text, NaN and infinities None.

    Raises:
        TypeError: JSON has no form for something in `value`.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): plain(part) for key, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
        case np.generic() | np.ndarray() | jax.Array():
            return plain(value.tolist())
        case Path():
            return str(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} has no JSON form")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces `path` by `value` atomically: a reader sees the old file or the new one.

    Raises:
        StorageError: the file cannot be written; the old one is as it was.
    """
    text = json.dumps(plain(value), indent=2, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise write_failure(path, error) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`.

    Raises:
        CheckpointError: the file is missing, unreadable or not one JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} cannot be read: it holds no JSON object.")
    return value
