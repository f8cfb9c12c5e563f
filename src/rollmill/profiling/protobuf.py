"""Reads fields of serialised protocol buffers: of XLA's messages a few numbers are needed, and no schema."""

from collections.abc import Iterator


def fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and the value of each field: an integer, or the bytes of anything else."""
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
    """The messages in a repeated field."""
    for field, value in fields_of(message):
        if field == number and isinstance(value, bytes):
            yield value


def part_in(message: bytes, number: int) -> bytes:
    """The message, or the text, in a field; empty if it is not there."""
    return next(parts_of(message, number), b"")


def number_in(message: bytes, number: int) -> int:
    """The integer in a field; 0 if it is not there, as protocol buffers have it."""
    return next((value for field, value in fields_of(message) if field == number and isinstance(value, int)), 0)


def numbers_in(message: bytes, number: int) -> Iterator[int]:
    """The integers of a repeated field, packed or not."""
    for field, value in fields_of(message):
        if field == number and isinstance(value, int):
            yield value
        elif field == number and isinstance(value, bytes):
            at = 0
            while at < len(value):
                each, at = _varint(value, at)
                yield each


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of seven bits a byte, the lowest first, and the place after it."""
    value, shift = 0, 0
    while data[at] >= 128:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1
