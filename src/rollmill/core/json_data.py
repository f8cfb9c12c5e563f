"""Reads untrusted JSON: files of a run, plans, and messages of other processes.

`parse_json` limits the size, nesting and integers of a document. `core.schema.read_as` then checks the document
against a dataclass. Each error is one sentence that names the source, the field and the value.
"""

import json
import math
from collections.abc import Iterable
from typing import Any

import msgspec

from rollmill.core.errors import DataError

MAX_BYTES = 16 * 2**20
MAX_DEPTH = 32
"""Limit on nested lists and objects. The deepest document of Rollmill has eight levels."""

SHOWN_CHARACTERS = 60
MAX_DECIMAL_BITS = 10_000
"""Messages write longer integers in hexadecimal, because Python writes at most 4,300 decimal digits."""
INTEGERS = range(-(2**63), 2**64)
INFINITIES = ("inf", "-inf")
"""Infinities as strings, since JSON has none. They are read wherever a number is expected."""


def parse_json(
    data: bytes | str,
    *,
    where: str,
    limit: int = MAX_BYTES,
    depth: int = MAX_DEPTH,
    error: type[Exception] = DataError,
) -> Any:
    """Parses a JSON document, more strictly than `json.loads`.

    NaN, infinity, integers beyond 64 bits and invalid Unicode are rejected. Bytes must be UTF-8. `limit` is the
    maximum number of bytes or characters, and `depth` the maximum nesting of lists and objects. If the document is
    not JSON or exceeds a limit, `error` is raised with a message that begins with `where`, the source of the
    document.
    """
    if len(data) > limit:
        raise error(f"{where} cannot be read: its {len(data):,} bytes exceed the limit of {limit:,}.")
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise error(f"{where} cannot be read: it is nested deeper than {depth} levels.") from None
    except (msgspec.MsgspecError, ValueError) as problem:
        raise error(f"{where} cannot be read: {_describe_problem(problem)}.") from None
    check_limits(value, where=where, depth=depth, error=error)
    return value


def parse_object(
    data: bytes | str,
    *,
    where: str,
    limit: int = MAX_BYTES,
    depth: int = MAX_DEPTH,
    error: type[Exception] = DataError,
) -> dict[str, Any]:
    """Parses a JSON document that must be an object, with the arguments and errors of `parse_json`."""
    value = parse_json(data, where=where, limit=limit, depth=depth, error=error)
    if not isinstance(value, dict):
        raise error(f"{where} cannot be read: expected a JSON object, got {short_json(value)}.")
    return value


def is_json(value: Any) -> bool:
    """Returns whether JSON can represent a value exactly. It cannot represent tuples, arrays or infinities."""
    try:
        return parse_json(json.dumps(value, allow_nan=False), where="value") == value
    except (DataError, RecursionError, TypeError, ValueError):
        return False


def writable(value: Any) -> Any:
    """Converts `value` to JSON types: infinities become strings, and tuples become lists."""
    if isinstance(value, dict):
        return {name: writable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [writable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def short_json(value: Any) -> str:
    """Formats `value` as JSON for messages: shortened, on one line, and without terminal control characters."""
    return shorten(json.dumps(value))


def short_repr(value: Any) -> str:
    """Returns the shortened `repr` of a Python value, for messages."""
    is_long = isinstance(value, int) and value.bit_length() > MAX_DECIMAL_BITS
    return shorten(hex(value) if is_long else repr(value))


def shorten(text: str) -> str:
    """Truncates a string to `SHOWN_CHARACTERS` characters, for messages."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def check_limits(value: Any, *, where: str, depth: int = MAX_DEPTH, error: type[Exception] = DataError) -> None:
    """Checks the nesting and the integers of a parsed document, with the arguments and errors of `parse_json`."""
    # Goes level by level, because recursion into a deep document could overflow the stack.
    level = [value]
    for _ in range(depth + 1):
        for part in level:
            if isinstance(part, int) and part not in INTEGERS:
                raise error(f"{where} cannot be read: {short_repr(part)} does not fit into 64 bits.")
        level = [inner for part in level for inner in _parts(part)]
        if not level:
            return
    raise error(f"{where} cannot be read: it is nested deeper than {depth} levels.")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _describe_problem(problem: Exception) -> str:
    text = str(problem).rstrip(".")
    return (
        text
        if "JSON" in text
        else (f"it is not valid JSON ({text[0].lower()}{text[1:]})")
        if text
        else ("it is not valid JSON")
    )
