"""What workers and their coordinator tell each other: a kind, some JSON, some arrays."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rollmill.core.errors import UsageError

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Message(NamedTuple):
    """One message; its arrays belong to whoever receives it."""

    kind: str
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]


def snapshot(kind: str, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Message:
    """The message as a receiver would get it: nothing in it is shared with the caller.

    Raises:
        UsageError: the fields have no JSON form, or an array is not one of numbers.
    """
    return Message(
        kind, json.loads(fields_as_json(kind, fields)), {n: as_numbers(n, a).copy() for n, a in arrays.items()}
    )


def fields_as_json(kind: str, fields: Mapping[str, Any]) -> str:
    """The fields as text.

    Raises:
        UsageError: they have no JSON form.
    """
    try:
        return json.dumps(dict(fields))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"message {kind!r} has a field that JSON does not hold ({error}); send arrays as arrays, "
            "and NumPy's numbers with float() or int()."
        ) from error


def as_numbers(name: str, array: Any) -> np.ndarray:
    """`array` on the host, its elements in C order and the machine's byte order.

    Raises:
        UsageError: it holds objects, text, dates or records.
    """
    array = np.asarray(array, order="C")
    if array.dtype.kind in "OSUmM" or array.dtype.fields or not array.dtype.isnative:
        raise UsageError(
            f"array {name!r} is of {array.dtype}: messages carry numbers in the machine's byte order."
        )
    return array
