"""Untrusted JSON: files of a run, plans, messages of other processes.

`parse_json` bounds size, nesting and integers before anything else reads a document. `read_as` checks a
document against a dataclass, so that the dataclass is the schema. Errors of both are one sentence that names
source, field and value.
"""

import dataclasses
import difflib
import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rollmill.core.errors import DataError

MAX_BYTES = 16 * 2**20
MAX_DEPTH = 32
"""Limit on nested lists and objects; the deepest document of Rollmill has eight levels."""

SHOWN_CHARACTERS = 60
LONG_BITS = 10_000
"""Size of an integer that messages write in hexadecimal: Python writes no decimals of more than 4,300 digits."""
INTEGERS = range(-(2**63), 2**64)
INFINITIES = ("inf", "-inf")
"""Text of infinities, which JSON does not have, where a number is expected."""

EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
"""Names of types in messages."""


def parse_json(
    data: bytes | str,
    *,
    where: str,
    limit: int = MAX_BYTES,
    depth: int = MAX_DEPTH,
    error: type[Exception] = DataError,
) -> Any:
    """Parses a JSON document.

    Stricter than `json.loads`: no NaN or infinity, no integer beyond 64 bits, no invalid Unicode.

    Args:
        data: the document; UTF-8 if it is bytes.
        where: its source, such as a path, with which messages begin.
        limit: largest number of bytes (or characters).
        depth: deepest nesting of lists and objects.
        error: class of the exception; called with the message.

    Raises:
        DataError: or `error`, if it is not JSON, or beyond a limit.
    """
    if len(data) > limit:
        raise error(f"{where} cannot be read: it has {len(data):,} bytes, and at most {limit:,} are read.")
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise error(f"{where} cannot be read: it is nested deeper than {depth} levels.") from None
    except (msgspec.MsgspecError, ValueError) as problem:
        raise error(f"{where} cannot be read: {_described(problem)}.") from None
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
    """Parses a JSON document whose value is an object; arguments and errors are those of `parse_json`."""
    value = parse_json(data, where=where, limit=limit, depth=depth, error=error)
    if not isinstance(value, dict):
        raise error(f"{where} cannot be read: it holds {_kind_of(value)} instead of a JSON object.")
    return value


def read_as(kind: Any, value: Any, *, where: str, field: str = "", error: type[Exception] = DataError) -> Any:
    """Converts a parsed value to a dataclass, or to any type that msgspec supports.

    Types are checked strictly: 8.0 and "8" are not integers; "inf" is accepted for a number. Fields with
    a default may be missing, unknown fields are refused. The dataclass's own checks run too.

    Args:
        kind: the schema: a class, or a generic type such as `list[Entry]`.
        value: result of `parse_json`.
        where: the document's source, with which messages begin.
        field: path of `value` in the document, such as `graph.config`.
        error: class of the exception; called with the message.

    Raises:
        DataError: or `error`, if a field is unknown, missing or of another type.
    """
    for path, known in _unknown_fields(kind, value, field):
        near = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
        suggestion = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}."
        raise error(f"{where}: {path} is unknown; {suggestion}")
    try:
        return msgspec.convert(_with_infinities(kind, value), kind)
    except msgspec.ValidationError as problem:
        raise error(f"{where}: {_complaint(kind, value, field, str(problem))}.") from None


def is_json(value: Any) -> bool:
    """True if the value survives a round trip through JSON; a tuple, an array or an infinity does not."""
    try:
        return parse_json(json.dumps(value, allow_nan=False), where="value") == value
    except (DataError, RecursionError, TypeError, ValueError):
        return False


def writable(value: Any) -> Any:
    """`value` with infinities as text, as `read_as` accepts them: `max_grad_norm=inf` means no clipping."""
    if isinstance(value, dict):
        return {name: writable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [writable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def short_json(value: Any) -> str:
    """`value` as JSON for messages: short, on one line, and without terminal control characters."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def check_limits(value: Any, *, where: str, depth: int = MAX_DEPTH, error: type[Exception] = DataError) -> None:
    """Checks nesting and integers of a parsed document; arguments are those of `parse_json`.

    Raises:
        DataError: or `error`, if it is nested too deeply, or an integer does not fit into 64 bits.
    """
    # Level by level, as recursion would be as deep as the document.
    level = [value]
    for _ in range(depth + 1):
        for part in level:
            if isinstance(part, int) and part not in INTEGERS:
                raise error(f"{where} cannot be read: {_short_integer(part)} does not fit into 64 bits.")
        level = [inner for part in level for inner in _parts(part)]
        if not level:
            return
    raise error(f"{where} cannot be read: it is nested deeper than {depth} levels.")


def _short_integer(value: int) -> str:
    """An integer for messages; one of thousands of digits, which Python does not write, in hexadecimal."""
    text = str(value) if value.bit_length() < LONG_BITS else hex(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _described(problem: Exception) -> str:
    text = str(problem).rstrip(".")
    return (
        text if "JSON" in text else f"it is not JSON ({text[0].lower()}{text[1:]})" if text else "it is not JSON"
    )


def _kind_of(value: Any) -> str:
    names = {
        bool: "bool",
        int: "int",
        float: "float",
        str: "str",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return EXPECTED[names[type(value)]]


# --- dataclasses as schemas -----------------------------------------------------------------------------


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _children(hint: Any, value: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """Yields key, type and value of the parts of `value` that the schema describes."""
    for kind in _alternatives(hint):
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
            yield from ((name, _hints(kind)[name], part) for name, part in value.items() if name in _hints(kind))
        elif origin is dict and isinstance(value, dict):
            yield from ((name, arguments[1], part) for name, part in value.items())
        elif origin in (list, tuple) and isinstance(value, list):
            inner = arguments if origin is tuple and ... not in arguments else arguments[:1] * len(value)
            yield from ((index, of, part) for index, (of, part) in enumerate(zip(inner, value, strict=False)))


def _joined(field: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{field}[{key}]"
    name = key if key.isidentifier() and key.isascii() and len(key) <= SHOWN_CHARACTERS else short_json(key)
    return f"{field}.{name}" if field else name


def _unknown_fields(hint: Any, value: Any, field: str) -> Iterator[tuple[str, list[str]]]:
    for kind in _alternatives(hint):
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
            yield from ((_joined(field, name), list(_hints(kind))) for name in value if name not in _hints(kind))
    for key, inner, part in _children(hint, value):
        yield from _unknown_fields(inner, part, _joined(field, key))


def _with_infinities(hint: Any, value: Any) -> Any:
    if isinstance(value, str):
        return float(value) if value in INFINITIES and float in _alternatives(hint) else value
    read = {key: _with_infinities(inner, part) for key, inner, part in _children(hint, value)}
    if isinstance(value, dict):
        return {**value, **read}
    return [read.get(index, part) for index, part in enumerate(value)] if isinstance(value, list) else value


_EXPECTED = re.compile(r"Expected `([^`]+)`( of length \d+)?")
_PATH = re.compile(r" - at `(?:key in )?\$(.*?)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")


def _complaint(kind: Any, value: Any, field: str, problem: str) -> str:
    """Msgspec's message with the value added, in JSON's terms."""
    location = _PATH.search(problem)
    path_text = location[1] if location else ""
    steps = [name or (int(index) if index else ...) for name, index, _ in _STEP.findall(path_text)]
    path, hint, invalid = _followed(kind, value, field, steps)
    missing = re.search(r"missing required field `(.+?)`", problem)
    if missing:
        return f"{_joined(path, missing[1])} is missing"
    return f"{path or 'the document'} is {short_json(invalid)}, and has to be {_expected(hint, problem)}"


def _followed(hint: Any, value: Any, field: str, steps: list[Any]) -> tuple[str, Any, Any]:
    """Path, type and value of the invalid part; msgspec does not name dictionary keys, so those are tried."""
    for step in steps:
        children = {key: (inner, part) for key, inner, part in _children(hint, value)}
        if step is ...:
            step = next((key for key, child in children.items() if not _fits(*child)), None)
        if step not in children:
            break
        field, (hint, value) = _joined(field, step), children[step]
    return field, hint, value


def _fits(hint: Any, value: Any) -> bool:
    try:
        msgspec.convert(_with_infinities(hint, value), hint)
    except msgspec.ValidationError:
        return False
    return True


def _expected(hint: Any, problem: str) -> str:
    choices = [repr(name) for kind in _alternatives(hint) for name in _literals(kind)]
    if choices:
        return " or ".join([*choices, *(["null"] if type(None) in _alternatives(hint) else [])])
    types_named = _EXPECTED.search(problem)
    if types_named is None:  # for instance a list of another length
        text = problem.partition(" - at ")[0]
        return text[:1].lower() + text[1:]
    names = [EXPECTED.get(name, name) for name in types_named[1].split(" | ")]
    return " or ".join(names) + (types_named[2] or "")


def _literals(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
