"""Reads and writes the files of one checkpoint: named arrays in the safetensors format, and a JSON record.

A safetensors file consists of the length of its header in 8 bytes, the header in JSON, and the elements of all
arrays. This module implements the format, because a file must be read through a descriptor that was opened without
following links, and its header must be compared with the expected arrays before memory is allocated. A file
therefore never determines how much memory is allocated.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollmill.core.folder import Folder
from rollmill.core.json_data import parse_object
from rollmill.core.schema import read_as
from rollmill.record.leaves import LeafType, host_type

RECORD, ARRAYS = "record.json", "state.safetensors"

LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 16 * 2**20
CHUNK_BYTES = 2**20
ALIGNMENT = 8
"""Alignment of the first array in bytes, to which the header is padded."""

NAMES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8"},
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL"},
    **{"complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
"""Names of dtypes in the safetensors format. Arrays of other dtypes are stored as bytes."""


class DamageError(Exception):
    """Raised if a checkpoint is damaged. The message describes the damage."""


@dataclass(frozen=True)
class HeaderEntry:
    """The entry of one array in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class CheckpointRecord:
    """The JSON record that accompanies the arrays of a checkpoint."""

    iteration: int
    """Number of iterations completed when the checkpoint was saved."""
    leaves: dict[str, tuple[str, tuple[int, ...]]]
    """Dtype and shape of each leaf, by path."""
    sha256: str
    """SHA-256 digest of the arrays."""
    score: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata passed by the caller."""
    record_sha256: str = ""
    """Digest of all other fields of the record."""

    @property
    def types(self) -> dict[str, LeafType]:
        """Dtype and shape of each array in the checkpoint, by path."""
        return {path: LeafType(dtype, shape) for path, (dtype, shape) in self.leaves.items()}

    def lacks(self, prefix: str) -> bool:
        """Returns whether the checkpoint has no array whose path begins with `prefix`."""
        return not any(path.startswith(prefix) for path in self.leaves)


def with_digest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with a digest of its own content, which tells a damaged record from the record of another
    run.
    """
    content = {name: value for name, value in record.items() if name != "record_sha256"}
    text = json.dumps(content, sort_keys=True)
    return content | {"record_sha256": hashlib.sha256(text.encode()).hexdigest()}


def write(folder: Folder, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
    """Writes a checkpoint into a new folder and flushes it to disk."""
    with os.fdopen(folder.create(ARRAYS), "wb") as file:
        header = json.dumps(_header({name: (a.dtype, a.shape) for name, a in arrays.items()})).encode()
        header += b" " * (-len(header) % ALIGNMENT)
        file.write(LENGTH.pack(len(header)) + header)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        _flush(file)
    with os.fdopen(folder.create(RECORD), "wb") as file:
        file.write(json.dumps(record).encode())
        _flush(file)


def read_record(folder: Folder) -> CheckpointRecord:
    """Reads the record of a checkpoint. Raises a `DamageError` if it is malformed or has another digest."""
    where = str(folder.path / RECORD)
    text = folder.read(RECORD, limit=MAX_HEADER_BYTES)
    value = parse_object(text, where=where, limit=MAX_HEADER_BYTES, error=DamageError)
    record = read_as(CheckpointRecord, value, where=where, error=DamageError)
    if value != with_digest(value):
        raise DamageError("the record of the checkpoint does not match its digest")
    return record


def read_arrays(folder: Folder, types: Mapping[str, LeafType]) -> dict[str, np.ndarray]:
    """Reads the arrays of a checkpoint, after checking that the file's header and size match the expected types.

    Raises a `DamageError` if the file contains other arrays, or another number of bytes.
    """
    expected = {path: host_type(kind) for path, kind in types.items()}
    where = str(folder.path / ARRAYS)
    with folder.reading(ARRAYS) as file:
        size = os.fstat(file.fileno()).st_size
        header_bytes = _header_length(file.read(LENGTH.size), size)
        header = parse_object(file.read(header_bytes), where=where, limit=MAX_HEADER_BYTES, error=DamageError)
        # Compares the order of the arrays as well, which proves that they are contiguous from offset 0.
        expected_header = _header({name: expected[name] for name in header if name in expected})
        if header.keys() != expected.keys():
            raise DamageError("some arrays of the checkpoint are missing")
        if header != expected_header:
            raise DamageError(f"{ARRAYS} contains arrays whose types or sizes differ from the record")
        nbytes = sum(_nbytes(*kind) for kind in expected.values())
        if size != LENGTH.size + header_bytes + nbytes:
            raise DamageError(f"{ARRAYS} has {size:,} bytes, expected {LENGTH.size + header_bytes + nbytes:,}")
        return {name: array for name, array in _arrays(file, {name: expected[name] for name in header})}


def array_digest(folder: Folder, record: CheckpointRecord) -> str:
    """Computes the digest of a checkpoint's arrays on disk in chunks. Raises the errors of `read_arrays`."""
    sha, where = hashlib.sha256(), str(folder.path / ARRAYS)
    with folder.reading(ARRAYS) as file:
        size = os.fstat(file.fileno()).st_size
        header_bytes = _header_length(file.read(LENGTH.size), size)
        header = parse_object(file.read(header_bytes), where=where, limit=MAX_HEADER_BYTES, error=DamageError)
        entries = read_as(dict[str, HeaderEntry], header, where=where, error=DamageError)
        if entries.keys() != record.leaves.keys():
            raise DamageError("some arrays of the checkpoint are missing")
        _check_offsets(entries, size - header_bytes - LENGTH.size)
        for path in sorted(entries):
            begin, end = entries[path].data_offsets
            sha.update(f"{path}\0{record.types[path]}\0{end - begin}\0".encode())
            file.seek(LENGTH.size + header_bytes + begin)
            for position in range(begin, end, CHUNK_BYTES):
                sha.update(file.read(min(CHUNK_BYTES, end - position)))
    return sha.hexdigest()


def _arrays(file: Any, kinds: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> Iterator[tuple[str, np.ndarray]]:
    for name, (dtype, shape) in kinds.items():
        array = np.empty(shape, dtype)
        view = array.reshape(-1).view(np.uint8)
        if file.readinto(view.data) != view.nbytes:
            raise DamageError(f"{ARRAYS} ends in the middle of {name}")
        yield name, array


def _header(kinds: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> dict[str, Any]:
    """Returns the header of a file that holds these arrays in this order."""
    header, begin = {}, 0
    for name, (dtype, shape) in kinds.items():
        nbytes = _nbytes(dtype, shape)
        format_name = NAMES.get(dtype.name)
        header[name] = {
            "dtype": format_name or "U8",
            "shape": list(shape) if format_name else [nbytes],
            "data_offsets": [begin, begin + nbytes],
        }
        begin += nbytes
    return header


def _header_length(prefix: bytes, size: int) -> int:
    if len(prefix) < LENGTH.size:
        raise DamageError(f"{ARRAYS} ends before its header")
    (length,) = LENGTH.unpack(prefix)
    if length > min(size, MAX_HEADER_BYTES):
        raise DamageError(f"{ARRAYS} announces a header of {length:,} bytes but has only {size:,}")
    return length


def _check_offsets(entries: Mapping[str, HeaderEntry], nbytes: int) -> None:
    """Checks that the arrays are contiguous and fill the file, so that no byte is read twice."""
    expected = 0
    for begin, end in (entry.data_offsets for entry in entries.values()):
        if begin != expected or end < begin:
            raise DamageError(f"{ARRAYS} has gaps or overlaps between its arrays")
        expected = end
    if expected != nbytes:
        raise DamageError(f"{ARRAYS} has {nbytes:,} bytes of arrays, expected {expected:,}")


def _nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= int(extent)
    return count * dtype.itemsize


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
