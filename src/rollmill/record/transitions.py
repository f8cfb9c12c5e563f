"""Reads and writes recorded transitions in a NumPy archive: whole episodes, one after another.

Each array has one row per transition: `reward`, `terminated`, `truncated`, `action`, `observation` and, if not all
actions are legal, `action_mask`. The parts of a dictionary or tuple are separate arrays, such as
`observation.position`. The file contains no code.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rollmill.core.errors import StorageError, UsageError
from rollmill.core.local_paths import check_new_file, local_path

SUFFIX = ".npz"
FLAGS = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}
"""Names and dtypes of the arrays with one scalar per transition."""


def check_recording(path: str | Path) -> Path:
    """Returns the path of a new recording. Raises a `UsageError` if it cannot be written or already exists."""
    path = local_path("record", path)
    if path.suffix != SUFFIX:
        raise UsageError(
            f"record={path} must end in {SUFFIX}, because the recording is an archive of NumPy arrays."
        )
    check_new_file(path, force=False, remedy="name another file, or delete this one.")
    return path


def write_transitions(path: Path, transitions: Mapping[str, Any]) -> None:
    """Writes transitions, given as trees of arrays by name, to a file that appears only when it is complete.

    Raises a `StorageError` if the file cannot be written.
    """
    arrays = {place: leaf for name, tree in transitions.items() for place, leaf in by_place(name, tree).items()}
    beside: Path | None = None
    try:
        beside = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))
        part = beside / path.name
        np.savez_compressed(part, **arrays)
        part.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def read_transitions(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Reads recorded transitions as trees of arrays `[N, ...]`, by name.

    `expected` contains the shapes and dtypes of one transition as trees, by name. Raises a `UsageError` if the
    file is not such a recording.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # anything may be damaged: the archive, the compression, or an array header
        raise UsageError(
            f"{path} is not an archive of NumPy arrays. hint: `rollmill evaluate RUN --record FILE` writes such "
            "an archive."
        ) from error
    wanted = {**expected, **{name: jax.ShapeDtypeStruct((), kind) for name, kind in FLAGS.items()}}
    return {name: _tree(path, name, tree, arrays) for name, tree in wanted.items()}


def sha256_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file. Raises a `UsageError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error


def by_place(name: str, tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by name and path, such as `observation.position`."""
    leaves = jax.tree.leaves_with_path(tree)
    inner = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {".".join(filter(None, (name, inner(path)))): leaf for path, leaf in leaves}


def _tree(path: Path, name: str, expected: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the arrays of a tree, checked against the shapes and dtypes of one element."""
    leaves, count = [], len(np.atleast_1d(arrays.get("reward", ())))
    for place, leaf in by_place(name, expected).items():
        array = arrays.get(place)
        if array is None:
            raise UsageError(
                f"{path} has no array {place}. It contains: {', '.join(sorted(arrays)) or 'nothing'}."
            )
        if array.ndim == 0 or array.shape[1:] != leaf.shape or len(array) != count or not count:
            raise UsageError(
                f"{path}: {place} has the shape {array.shape}, expected {(count or 'N', *leaf.shape)}, with one "
                "row for each reward."
            )
        if not np.can_cast(array.dtype, leaf.dtype, casting="same_kind"):
            raise UsageError(f"{path}: {place} has the dtype {array.dtype}, expected {np.dtype(leaf.dtype)}.")
        if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
            raise UsageError(f"{path}: {place} has numbers that are not finite.")
        leaves.append(array.astype(leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)
