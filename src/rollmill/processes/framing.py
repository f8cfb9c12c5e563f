"""Encodes messages as frames of bytes on a socket. A frame consists of

    4 bytes   RMW1
    4 bytes   length of the JSON, little-endian
    8 bytes   total length of the arrays, little-endian
    JSON      {"kind": string, "fields": object, "arrays": [[name, dtype, shape], ...]}
    arrays    the elements of each, one array after the other

Incoming frames are checked against limits before memory is allocated.
"""

import json
import math
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  NumPy then knows bfloat16 and its like by name
import numpy as np

from rollmill.channels.errors import Damaged
from rollmill.core.errors import UsageError
from rollmill.processes.messages import WorkerMessage, is_numeric

MAGIC = b"RMW1"
PREFIX = struct.Struct("<4sIQ")


class Limits(NamedTuple):
    """Maximum sizes of the parts of a frame."""

    json_bytes: int = 16 * 2**20
    array_bytes: int = 4 * 2**30


LIMITS = Limits()


class _Place(NamedTuple):
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def encode(message: WorkerMessage, limits: Limits = LIMITS) -> list[bytes | memoryview]:
    """Encodes a message as the parts of a frame. The parts with arrays are views of the arrays.

    Raises a `UsageError` if the message exceeds the limits.
    """
    arrays = [[name, array.dtype.name, array.shape] for name, array in message.arrays.items()]
    text = json.dumps({"kind": message.kind, "fields": message.fields, "arrays": arrays}).encode()
    views = [_as_bytes(array) for array in message.arrays.values() if array.size]
    nbytes = sum(view.nbytes for view in views)
    for size, limit, what in ((len(text), limits.json_bytes, "JSON"), (nbytes, limits.array_bytes, "arrays")):
        if size > limit:
            raise UsageError(
                f"message {message.kind!r} has {size:,} bytes of {what}, more than the limit of {limit:,}. hint: "
                "send it in parts, or through a channel."
            )
    return [PREFIX.pack(MAGIC, len(text), nbytes) + text, *views]


def send_frame(peer: socket.socket, frame: list[bytes | memoryview]) -> None:
    """Sends all parts of a frame, and waits while the peer has too much unread data."""
    for part in frame:
        peer.sendall(part)


def receive_frame(peer: socket.socket, heard: Callable[[], None] = lambda: None) -> WorkerMessage | None:
    """Receives the next message. Returns None if the peer has closed the connection between two messages.

    Raises `Damaged` if the data is not a frame, exceeds the limits, or ends in the middle of a frame.
    """
    prefix = bytearray(PREFIX.size)
    if not _fill(peer, memoryview(prefix), heard, may_end=True):
        return None
    magic, json_bytes, array_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise Damaged(f"a frame starts with {magic!r}, expected {MAGIC!r}.")
    if json_bytes > LIMITS.json_bytes or array_bytes > LIMITS.array_bytes:
        raise Damaged(
            f"a frame announces {json_bytes:,} bytes of JSON and {array_bytes:,} bytes of arrays, more than the "
            f"limits of {LIMITS.json_bytes:,} and {LIMITS.array_bytes:,}."
        )
    text = bytearray(json_bytes)
    _fill(peer, memoryview(text), heard)
    kind, fields, places = _read_header(bytes(text))
    if sum(place.nbytes for place in places) != array_bytes:
        raise Damaged(
            f"message {kind!r} announces {array_bytes:,} bytes of arrays, which does not match their shapes."
        )
    arrays = {place.name: np.empty(place.shape, place.dtype) for place in places}
    for array in arrays.values():
        if array.size:
            _fill(peer, _as_bytes(array), heard)
    return WorkerMessage(kind, fields, arrays)


def _as_bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _fill(peer: socket.socket, view: memoryview, heard: Callable[[], None], *, may_end: bool = False) -> bool:
    """Reads until `view` is full, or False where the peer ended before its first byte, and may."""
    done = 0
    while done < len(view):
        count = peer.recv_into(view[done:])
        if count == 0 and done == 0 and may_end:
            return False
        if count == 0:
            raise Damaged(f"the connection ended {len(view) - done:,} bytes before the end of a message.")
        done += count
        heard()
    return True


def _read_header(text: bytes) -> tuple[str, dict[str, Any], list[_Place]]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged("a message's header is not valid JSON.") from error
    match header:
        case {"kind": str(kind), "fields": dict(fields), "arrays": list(arrays)}:
            return kind, fields, [_read_place(entry) for entry in arrays]
    raise Damaged("a message's header must contain kind, fields and arrays.")


def _read_place(entry: Any) -> _Place:
    match entry:
        case [str(name), str(dtype), [*shape]] if all(type(size) is int and size >= 0 for size in shape):
            return _Place(name, _dtype_of(dtype), tuple(shape))
    raise Damaged("a message must describe each array by its name, dtype and shape.")


def _dtype_of(name: str) -> np.dtype:
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise Damaged(f"a message has an array of unknown dtype {name!r}.") from error
    if dtype.name != name or not is_numeric(dtype):
        raise Damaged(f"a message has an array of dtype {name!r}, which is not numeric.")
    return dtype
