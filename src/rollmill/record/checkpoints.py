"""Checkpoints of a run, which are written in the background and verified when read. The last and the best are
kept.

A checkpoint is a directory named after its iteration. It is created under another name and then renamed, so it is
either complete or absent if the process dies. A digest of its content detects later damage.
"""

import contextlib
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from rollmill.core.errors import CheckpointError, DataError, StorageError, UsageError
from rollmill.core.folder import Folder, ForeignFileError
from rollmill.core.text import format_bytes
from rollmill.record.checkpoint_files import (
    DamageError,
    array_digest,
    read_arrays,
    read_record,
    with_digest,
    write,
)
from rollmill.record.json_files import disk_is_full, plain
from rollmill.record.leaves import LeafType, differences, digest, from_host, leaf_types, to_host

OVERHEAD_BYTES = 256 * 1024
"""Disk space that a checkpoint needs in addition to its arrays, in bytes."""

SHOWN_DIFFERENCES = 5
WRITING, REPLACED, DELETED = ".writing-", ".replaced-", ".deleted-"

NAME = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
"""Pattern for the names of checkpoint folders. Folders with other names, such as `007`, are ignored."""


class CheckpointWarning(UserWarning):
    """Warns that a damaged checkpoint was skipped, or that the last save failed while another exception was
    raised.
    """


class Restored(NamedTuple):
    """The content of a checkpoint. `metadata` contains the caller's entries, `iteration`, `score` and `sha256`."""

    iteration: int
    state: PyTree
    metadata: dict[str, Any]


class LeftOut(NamedTuple):
    """A part of the training state that a checkpoint may leave out, and that is then initialised again."""

    prefix: str
    """Prefix of the paths of all leaves in this part."""
    begin: Callable[[int, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
    """Maps the iteration and the leaves of a checkpoint to the leaves that it lacks, and to leaves that replace
    others because of this, by path."""


class GivenLeaves(NamedTuple):
    """Leaves of a restored state that do not come from its checkpoint, by path."""

    replacing: Mapping[str, np.ndarray] = MappingProxyType({})
    """Leaves that replace leaves of a checkpoint. The checkpoint may have other leaves at these paths, or none."""
    counted: Callable[[int], Mapping[str, np.ndarray]] = lambda iteration: {}
    """Maps the iteration to leaves that a checkpoint need not contain."""
    left_out: LeftOut | None = None


class Checkpoints:
    """The checkpoints in one directory, of which the last `keep_last` and the best `keep_best` are kept.

    Only one process may write to a directory at a time (`RunDirectory.lock`). With `read_only`, nothing in the
    directory is changed, even if another process is writing the run. Otherwise, a missing directory is created. A
    `Folder` rejects links below the root. Use the object as a context manager, or call `close`: if a save is still
    running when the interpreter exits, it is lost. The disk needs space for one checkpoint more than are kept,
    because the oldest is deleted only after the newest is complete.

    Raises a `StorageError` if the directory cannot be created or cleaned up, and a `ForeignFileError` if the
    directory, or a checkpoint in it, is a link or a file.
    """

    def __init__(
        self, directory: Path | Folder, *, keep_last: int = 3, keep_best: int = 1, read_only: bool = False
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise UsageError(f"keep_last={keep_last} must be at least 1 and keep_best={keep_best} at least 0.")
        self._folder = directory if isinstance(directory, Folder) else Folder(Path(directory))
        self.directory = self._folder.path
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.read_only = read_only
        self._scores: dict[int, float] = {}
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollmill-checkpoint")
        self._pending: Future[None] | None = None
        if not read_only:
            self._prepare()

    def iterations(self) -> tuple[int, ...]:
        """Returns the iterations of all checkpoints in ascending order, without verifying their content."""
        try:
            kinds = self._folder.kinds()
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error.strerror or error}.") from error
        return tuple(
            sorted(int(name) for name, kind in kinds.items() if NAME.fullmatch(name) and kind == "folder")
        )

    def best(self) -> int | None:
        """Returns the iteration of the checkpoint with the highest score, or None without scores. Among equal
        scores, the newest counts.
        """
        self.wait()
        ranked = self._order_by_score(self.iterations())
        return ranked[0] if ranked and self._scores[ranked[0]] > -math.inf else None

    def save(
        self, iteration: int, state: PyTree, *, metadata: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Copies `state` to the host and writes a checkpoint in the background. Blocks only while an earlier save
        is running.

        `state` is a pytree of arrays, which may include typed random keys. All arrays must be addressable by this
        process. A larger `score` is better, and None and NaN count as the worst. In `metadata`, NaN and infinities
        become None. Once the checkpoint is complete, checkpoints of later iterations are deleted, because the run
        went back to this iteration. A checkpoint of the same iteration is replaced.

        Raises a `StorageError` if the disk has too little space for this save, or if the previous save failed, and
        a `UsageError` if a leaf of `state` is not a numeric array.
        """
        if self.read_only:
            raise UsageError(f"the checkpoints in {self.directory} are open for reading only.")
        self.wait()
        types, arrays = leaf_types(state), to_host(state)
        needed = sum(array.nbytes for array in arrays.values()) + OVERHEAD_BYTES
        if _free_bytes(self.directory) < needed:
            raise self._disk_full(iteration, needed)
        record = {
            "iteration": iteration,
            "score": None if score is None else plain(float(score)),
            "metadata": plain(metadata),
            "leaves": {path: [kind.dtype, list(kind.shape)] for path, kind in types.items()},
        }
        self._pending = self._worker.submit(self._write, record, types, arrays, needed)

    def restore(
        self,
        abstract_state: PyTree,
        *,
        iteration: int | None = None,
        check: Callable[[int, dict[str, Any]], None] | None = None,
        given: GivenLeaves | None = None,
    ) -> Restored | None:
        """Reads the newest intact checkpoint, or the one of `iteration`. Returns None if there are none.

        For a damaged checkpoint, a `CheckpointWarning` is issued, and the one before it is read. Bits, dtypes and
        shapes are restored exactly, but weakly typed arrays become strongly typed. Leaves of `abstract_state` that
        have a sharding or are committed arrays determine the placement of restored arrays. `check` is called with
        the iteration and metadata before arrays are read, and may raise. `given` leaves do not come from the
        checkpoint.

        Raises a `CheckpointError` if no checkpoint is intact, if `iteration` is missing or damaged, or if a
        checkpoint contains the state of another algorithm, network or iteration.
        """
        self.wait()
        present = self.iterations()
        if iteration is not None and iteration not in present:
            known = ", ".join(map(str, present)) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint {iteration}. Known: {known}.")
        reasons = []
        for candidate in reversed(present) if iteration is None else [iteration]:
            try:
                return self._load(candidate, abstract_state, check, given or GivenLeaves())
            except (DamageError, ForeignFileError, DataError, OSError) as damage:
                reasons.append(f"checkpoint {candidate} in {self.directory} is damaged ({_reason(damage)})")
            if iteration is None:
                warnings.warn(f"{reasons[-1]}. Trying the previous checkpoint.", CheckpointWarning, stacklevel=2)
        if reasons:
            raise CheckpointError(
                "there is no intact checkpoint to resume from:\n  "
                + "\n  ".join(reasons)
                + (
                    f"\nhint: restore {self.directory} from a backup, choose another iteration, or start again "
                    "with another --run-dir."
                )
            )
        return None

    @property
    def saved(self) -> bool:
        """Returns whether all saves are complete: False while a save is running, and after a failed save until
        `wait` raises its error.
        """
        return self._pending is None or (self._pending.done() and self._pending.exception() is None)

    def wait(self) -> None:
        """Blocks until no save is running.

        Raises a `StorageError` if the save failed. Earlier checkpoints are then unchanged.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for a running save, as `wait` does, and ends the background thread."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self.close()
        except StorageError as failure:
            if kind is None:
                raise
            # a warning, because an error would hide the exception in flight
            warnings.warn(str(failure), CheckpointWarning, stacklevel=2)

    def _write(
        self, record: dict[str, Any], types: Mapping[str, LeafType], arrays: Mapping[str, np.ndarray], needed: int
    ) -> None:
        """Writes a save to disk in the background thread, after its copy to the host."""
        iteration = record["iteration"]
        record = with_digest(record | {"sha256": digest(types, arrays)})
        try:
            if self._holds(iteration, record):
                return
            self._put(iteration, arrays, record)
            self._scores[iteration] = _rank(record["score"])
            self._prune(iteration)
        except Exception as error:  # the training thread must learn of any error
            with contextlib.suppress(OSError, CheckpointError):
                self._clean_up()
            raise self._failure(iteration, needed, error) from error

    def _put(self, iteration: int, arrays: Mapping[str, np.ndarray], record: dict[str, Any]) -> None:
        """Writes a checkpoint under a temporary name, then renames it, moving an existing one aside first."""
        # If the process dies between the two renames, `_clean_up` restores the old checkpoint.
        partial, name = f"{WRITING}{iteration}", str(iteration)
        self._folder.remove(partial)
        self._folder.inner(partial).make()
        write(self._folder.inner(partial), arrays, record)
        if self._folder.has(name):
            self._folder.rename(name, f"{REPLACED}{iteration}")
        self._folder.rename(partial, name)
        with self._folder.opened() as descriptor:
            os.fsync(descriptor)

    def _load(
        self,
        iteration: int,
        abstract_state: PyTree,
        check: Callable[[int, dict[str, Any]], None] | None,
        given: GivenLeaves,
    ) -> Restored:
        folder = self._folder.inner(str(iteration))
        record = read_record(folder)
        if record.iteration != iteration:
            raise CheckpointError(
                f"checkpoint {iteration} in {self.directory} contains iteration {record.iteration}: its folder "
                f"was renamed, or copied over another. hint: rename it to {record.iteration}, or move it out of "
                f"{self.directory}. Otherwise, {self._recovery_hint(iteration)}"
            )
        if check is not None:
            check(iteration, record.metadata)
        wanted, counted = leaf_types(abstract_state), given.counted(iteration)
        lacking = {path: leaf for path, leaf in counted.items() if path in wanted and path not in record.types}
        unneeded = {path for path in counted if path not in wanted}
        leaves = {**given.replacing, **lacking}
        places = {_parent(path) for path in given.replacing}
        stored = {
            path: kind
            for path, kind in record.types.items()
            if _parent(path) not in places and path not in unneeded
        }
        wanted = {path: kind for path, kind in wanted.items() if path not in leaves}
        part = given.left_out if given.left_out and record.lacks(given.left_out.prefix) else None
        if part is not None:
            wanted = {path: kind for path, kind in wanted.items() if not path.startswith(part.prefix)}
        if lines := differences(stored, wanted):
            raise self._other_state(iteration, record.metadata, lines)
        arrays = read_arrays(folder, record.types)
        if digest(record.types, arrays) != record.sha256:
            raise DamageError("the arrays of the checkpoint do not match their digest")
        if part is not None:
            leaves = {**part.begin(iteration, arrays), **leaves}
        fields = {"iteration": record.iteration, "score": record.score, "sha256": record.sha256}
        return Restored(iteration, from_host({**arrays, **leaves}, abstract_state), record.metadata | fields)

    def _prepare(self) -> None:
        try:
            self._folder.make()
            self._clean_up()
            kinds = self._folder.kinds()
        except OSError as error:
            raise StorageError(f"{self.directory} cannot be written: {error.strerror or error}.") from error
        for name, kind in kinds.items():
            if NAME.fullmatch(name) and kind != "folder":
                raise ForeignFileError(
                    f"{self.directory / name} is not a folder, but checkpoint {name} must be written there. "
                    "hint: move it away."
                )

    def _clean_up(self) -> None:
        """Removes remains of interrupted saves, and restores a checkpoint that one had moved aside."""
        for name in self._folder.kinds():
            original = name.removeprefix(REPLACED)
            if name.startswith(REPLACED) and not self._folder.has(original):
                self._folder.rename(name, original)
            elif name.startswith((REPLACED, DELETED, WRITING)):
                with contextlib.suppress(OSError):
                    self._folder.remove(name)

    def _holds(self, iteration: int, record: dict[str, Any]) -> bool:
        try:
            existing = read_record(self._folder.inner(str(iteration)))
        except (DamageError, CheckpointError, DataError, OSError):
            return False
        return iteration in self._scores and existing.record_sha256 == record["record_sha256"]

    def metadata(self, iteration: int) -> dict[str, Any]:
        """Returns the caller's entries in the metadata of a checkpoint."""
        try:
            return read_record(self._folder.inner(str(iteration))).metadata
        except (DamageError, DataError, OSError) as damage:
            raise CheckpointError(f"checkpoint {iteration} in {self.directory}: {_reason(damage)}.") from damage

    def check(self, iteration: int) -> str | None:
        """Verifies a checkpoint, reading its arrays in chunks. Returns a description of the damage, or None if it
        is intact.
        """
        try:
            record = read_record(self._folder.inner(str(iteration)))
            if record.iteration != iteration:
                return f"it contains iteration {record.iteration}"
            if array_digest(self._folder.inner(str(iteration)), record) != record.sha256:
                return "its content does not match its digest"
        except (DamageError, CheckpointError, DataError, OSError) as damage:
            return _reason(damage)
        return None

    def _prune(self, newest: int) -> None:
        """Deletes all checkpoints after `newest`, and those neither among the last nor the best."""
        past = [i for i in self.iterations() if i <= newest]
        keep = {*past[-self.keep_last :], *self._order_by_score(past)[: self.keep_best]}
        for iteration in set(self.iterations()) - keep:
            trash = f"{DELETED}{iteration}"
            self._folder.remove(trash)
            # renamed first, because a partly deleted checkpoint would look damaged
            self._folder.rename(str(iteration), trash)
            self._scores.pop(iteration, None)
        self._clean_up()

    def _order_by_score(self, iterations: Sequence[int]) -> list[int]:
        for iteration in iterations:
            if iteration not in self._scores:
                self._scores[iteration] = self._read_score(iteration)
        return sorted(iterations, key=lambda i: (self._scores[i], i), reverse=True)

    def _read_score(self, iteration: int) -> float:
        try:
            record = read_record(self._folder.inner(str(iteration)))
        except (DamageError, CheckpointError, DataError, OSError):
            return -math.inf
        return _rank(record.score) if record.iteration == iteration else -math.inf

    def _recovery_hint(self, iteration: int) -> str:
        earlier = [i for i in self.iterations() if i != iteration]
        if not earlier:
            return "there is no earlier checkpoint."
        return f"checkpoint {earlier[-1]} is intact: resume from iteration {earlier[-1]}."

    def _disk_full(self, iteration: int, needed: int) -> StorageError:
        free = _free_bytes(self.directory)
        return StorageError(
            f"the disk of {self.directory} is full: checkpoint {iteration} needs {format_bytes(needed)}, but "
            f"only {format_bytes(free)} are free. hint: free some space; {self._recovery_hint(iteration)}"
        )

    def _failure(self, iteration: int, needed: int, error: Exception) -> StorageError:
        if disk_is_full(error):
            return self._disk_full(iteration, needed)
        return StorageError(
            f"checkpoint {iteration} cannot be written to {self.directory}: {_first_line(error)}; "
            f"{self._recovery_hint(iteration)}"
        )

    def _other_state(self, iteration: int, metadata: dict[str, Any], lines: list[str]) -> CheckpointError:
        origin = ", ".join(f"{k}={v}" for k, v in metadata.items() if isinstance(v, str | int | float))
        more = len(lines) - SHOWN_DIFFERENCES
        shown = lines[:SHOWN_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])
        return CheckpointError(
            (
                f"checkpoint {iteration} in {self.directory} belongs to another algorithm or network "
                f"({origin or 'it does not name its run'}):\n  "
            )
            + "\n  ".join(shown)
            + (
                "\nhint: resume it with the configuration that it was written with, or start with another "
                "--run-dir."
            )
        )


def _rank(score: float | None) -> float:
    return -math.inf if score is None else score


def _reason(damage: Exception) -> str:
    return _first_line(damage) if isinstance(damage, OSError) else str(damage)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _free_bytes(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError as error:
        raise StorageError(f"{directory} cannot be written: {error.strerror or error}.") from error


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
