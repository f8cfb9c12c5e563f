"""Messages between workers and their coordinator, with a kind, JSON fields, and arrays."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rollmill.core.errors import UsageError

Seconds: TypeAlias = float | int
NOTHING: Mapping[str, Any] = MappingProxyType({})


class WorkerMessage(NamedTuple):
    """A message between a worker and its coordinator. Its arrays belong to the receiver."""

    kind: str
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]


def outgoing(kind: str, fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> WorkerMessage:
    """Creates a message with its arrays on the host. Arrays that are on the host are shared with the caller.

    Raises a `UsageError` if the kind is reserved, the fields have no JSON form, or an array is not numeric.
    """
    if not kind or kind.startswith("."):
        raise UsageError(f"a message has kind={kind!r}, but kinds that start with a dot are reserved.")
    try:
        copied = json.loads(json.dumps(dict(fields)))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"message {kind!r} has a field that cannot be represented in JSON ({error}). hint: send arrays as "
            "arrays, and convert NumPy scalars with float() or int()."
        ) from error
    return WorkerMessage(kind, copied, {name: _numbers(name, array) for name, array in arrays.items()})


def snapshot(message: WorkerMessage) -> WorkerMessage:
    """Returns a copy of a message with copies of its arrays."""
    return message._replace(arrays={name: array.copy() for name, array in message.arrays.items()})


def size_of(message: WorkerMessage) -> int:
    """Returns the bytes of a message's arrays."""
    return sum(array.nbytes for array in message.arrays.values())


def is_numeric(dtype: np.dtype) -> bool:
    """Returns whether arrays of a dtype can be sent: numeric dtypes of NumPy and JAX in native byte order."""
    return dtype.kind not in "OSUmM" and dtype.type is not np.void and dtype.isnative


def _numbers(name: str, array: Any) -> np.ndarray:
    array = np.asarray(array, order="C")
    if not is_numeric(array.dtype):
        raise UsageError(
            f"array {name!r} has the dtype {array.dtype}, but messages carry only numeric arrays in the "
            "machine's byte order."
        )
    return array
