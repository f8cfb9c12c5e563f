"""Encodes the records of TensorBoard event files: small protocol buffers between checksums.

They are encoded here because importing the packages that define these messages takes seconds at the start, during
which other threads wait for the GIL. Fields follow `event.proto` and `summary.proto`, and records follow TFRecord.
"""

import struct
from collections.abc import Mapping
from functools import cache
from typing import Any

POLYNOMIAL = 0x82F63B78
"""Polynomial of CRC-32C (Castagnoli), with reversed bits."""
MASK = 0xA282EAD8
"""Constant with which TFRecord masks checksums."""
VERSION = "brain.Event:2"
"""Version of the format, which the first event of each file states."""
START = 1
"""Value of `SessionLog.START`, which makes TensorBoard hide later steps of earlier files."""
RGB = 3
"""Number of channels of a picture."""
HPARAMS, SESSION_TAG = "hparams", "_hparams_/session_start_info"


def version_event(wall_time: float) -> bytes:
    """Returns the first event of a TensorBoard file, which states the version of the format."""
    return _double(1, wall_time) + _bytes(3, VERSION.encode())


def restart_event(wall_time: float, step: int) -> bytes:
    """Returns an event that makes TensorBoard hide later steps of earlier files."""
    return _double(1, wall_time) + _integer(2, step) + _bytes(7, _integer(1, START))


def scalars_event(wall_time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """Returns a TensorBoard event with named scalars, stored as float32."""
    values = (
        _bytes(1, _bytes(1, name.encode(errors="replace")) + _float(2, value)) for name, value in scalars.items()
    )
    return _double(1, wall_time) + _integer(2, step) + _bytes(5, b"".join(values))


def picture_event(wall_time: float, step: int, tag: str, encoded: bytes, *, height: int, width: int) -> bytes:
    """Returns a TensorBoard event with a picture, encoded as PNG or as an animated GIF."""
    size = _integer(1, height) + _integer(2, width) + _integer(3, RGB)
    value = _bytes(1, tag.encode(errors="replace")) + _bytes(4, size + _bytes(4, encoded))
    return _double(1, wall_time) + _integer(2, step) + _bytes(5, _bytes(1, value))


def hyperparameters_event(wall_time: float, group: str, values: Mapping[str, Any]) -> bytes:
    """Returns a TensorBoard event with the hyperparameters of a run, which the HParams page compares.

    Numbers, booleans and strings are stored as such. Other values become strings.
    """
    names = {name: _bytes(1, name.encode(errors="replace")) for name in values}
    entries = (_bytes(1, names[name] + _bytes(2, _value(values[name]))) for name in values)
    session = b"".join(entries) + _bytes(4, group.encode(errors="replace")) + _double(5, wall_time)
    plugin = _bytes(1, HPARAMS.encode()) + _bytes(2, _bytes(3, session))
    summary = _bytes(1, SESSION_TAG.encode()) + _bytes(8, ZERO_TENSOR) + _bytes(9, _bytes(1, plugin))
    return _double(1, wall_time) + _bytes(5, _bytes(1, summary))


def _value(value: Any) -> bytes:
    """Encodes a `google.protobuf.Value`."""
    if isinstance(value, bool):
        return _varint(4 << 3) + _varint(value)
    if isinstance(value, int | float):
        return _double(2, float(value))
    return _bytes(3, str(value).encode(errors="replace"))


def record(event: bytes) -> bytes:
    """Encodes a TensorBoard event as a record: its length with a checksum, then its bytes with a checksum."""
    length = struct.pack("<Q", len(event))
    return b"".join(
        [length, struct.pack("<I", _masked_checksum(length)), event, struct.pack("<I", _masked_checksum(event))]
    )


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C checksum of some bytes."""
    table, checksum = _table(), 0xFFFFFFFF
    for byte in data:
        checksum = table[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
    return checksum ^ 0xFFFFFFFF


def _masked_checksum(data: bytes) -> int:
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + MASK) & 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    """Returns the checksum's change by each byte."""

    def changed(byte: int) -> int:
        for _ in range(8):
            byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
        return byte

    return tuple(map(changed, range(256)))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value & 0xFFFFFFFFFFFFFFFF) if value else b""


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    """Encodes a number in float32. A larger one becomes an infinity."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | 5) + packed


def _varint(value: int) -> bytes:
    """Encodes an integer by seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


ZERO_TENSOR = _integer(1, 1) + _bytes(2, _bytes(2, _integer(1, 1))) + _bytes(5, struct.pack("<f", 0.0))
"""An encoded float32 tensor of shape [1], which the summaries of a plug-in must contain."""
