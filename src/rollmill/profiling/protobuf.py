"""Reads fields of serialized protocol buffers without a schema, as needed for some XLA messages."""

from collections.abc import Iterator


def fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and value of each field of a message: an integer, or bytes for any other type."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        field, kind = divmod(tag, 8)
        if kind == 0:
            value, at = _varint(message, at)
            yield field, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None:
            length, at = _varint(message, at)
        yield field, message[at : at + length]
        at += length


def parts_of(message: bytes, number: int) -> Iterator[bytes]:
    """Yields the submessages in the repeated field `number`."""
    for field, value in fields_of(message):
        if field == number and isinstance(value, bytes):
            yield value


def part_in(message: bytes, number: int) -> bytes:
    """Returns the submessage or string in the field `number`, or empty bytes if it is missing."""
    return next(parts_of(message, number), b"")


def number_in(message: bytes, number: int) -> int:
    """Returns the integer in the field `number`, or 0 if it is missing."""
    return next((value for field, value in fields_of(message) if field == number and isinstance(value, int)), 0)


def numbers_in(message: bytes, number: int) -> Iterator[int]:
    """Yields the integers in the repeated field `number`, packed or not."""
    for field, value in fields_of(message):
        if field == number and isinstance(value, int):
            yield value
        elif field == number and isinstance(value, bytes):
            at = 0
            while at < len(value):
                each, at = _varint(value, at)
                yield each


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns an integer of seven bits a byte, the lowest first, and the position after it."""
    value, shift = 0, 0
    while data[at] >= 128:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1
