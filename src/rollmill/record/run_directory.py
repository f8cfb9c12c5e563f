"""The directory of a run: the paths of its files, its atomic creation, and its lock."""

import difflib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rollmill.core.errors import CheckpointError, StorageError, UsageError
from rollmill.core.folder import Folder
from rollmill.core.shell import command
from rollmill.core.stored_paths import shown, url_of
from rollmill.core.text import check_is_text
from rollmill.record.json_files import disk_is_full, plain, read_json, write_failure, write_json
from rollmill.record.run_files import (
    CONFIG,
    EVALUATIONS,
    METRICS,
    SUMMARY,
    SWEEP,
    VERSIONS,
    being_written,
    is_held,
    is_locked,
    lock_run,
)


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run's files, which need not exist. `create` creates a run, and `open` opens an existing run."""

    root: Path

    @property
    def folder(self) -> Folder:
        """The run directory as a `Folder`, whose content is not trusted."""
        return Folder(self.root)

    @property
    def config_file(self) -> Path:
        """Path of the run's configuration. A directory without this file is not a run."""
        return self.root / CONFIG

    @property
    def metrics_file(self) -> Path:
        """Path of the metrics, a file with one JSON object per line."""
        return self.root / METRICS

    @property
    def summary_file(self) -> Path:
        """Path of the summary, which is written when the run ends."""
        return self.root / SUMMARY

    @property
    def checkpoints(self) -> Folder:
        """Path of the folder with the checkpoints, each of which is a folder."""
        return self.folder.inner("checkpoints")

    @property
    def tensorboard(self) -> Folder:
        """Path of the folder with the TensorBoard event files."""
        return self.folder.inner("tensorboard")

    @property
    def fault(self) -> Folder:
        """Path of the folder with the state before an iteration that failed."""
        return self.folder.inner("fault")

    @staticmethod
    def refuse_occupied(root: Path) -> None:
        """Raises a `UsageError` if `root` is a run, a file, a directory with other files, or not a valid path."""
        check_is_text("--run-dir", root)
        if (root / CONFIG).exists():
            if RunDirectory(root).is_locked():
                raise UsageError(f"{being_written(root)} Choose another --run-dir.")
            resume = RunDirectory(root).command("resume")
            raise UsageError(f"{root} already contains a run. hint: `{resume}`, or choose another --run-dir.")
        if root.is_dir() and any(root.iterdir()):
            raise UsageError(f"{root} is not empty and does not contain a run. hint: choose another --run-dir.")
        if root.exists() and not root.is_dir():
            raise UsageError(f"{root} is a file. hint: choose another --run-dir.")
        if root.is_symlink() and not root.exists():
            raise UsageError(
                f"{root} is a link to {os.readlink(root)}, which does not exist. hint: create that folder, "
                "delete the link, or choose another --run-dir."
            )

    @staticmethod
    def check_parent(root: Path) -> None:
        """Checks that a run can be created at `root`, by writing to the nearest existing folder above it.

        Raises a `UsageError` if that folder cannot be written.
        """
        parent = next(folder for folder in _read_link(root).absolute().parents if os.path.lexists(folder))
        try:
            with tempfile.TemporaryDirectory(prefix=".rollmill-", dir=parent):
                pass
        except OSError as error:
            raise UsageError(
                f"{root} cannot be created: {_reason(error)}. hint: choose another --run-dir."
            ) from error

    @classmethod
    def create(cls, root: Path, *, config: Mapping[str, Any], versions: Mapping[str, Any]) -> "RunDirectory":
        """Creates the directory of a new run, completely or not at all.

        Raises a `UsageError` if `root` is a run, is a file, or contains other files, or if its parent is not
        writable. Raises a `StorageError` if the disk is full, and a `TypeError` if a value in `config` or
        `versions` cannot be written as JSON.
        """
        root, config, versions = Path(root), plain(config), plain(versions)
        cls.refuse_occupied(root)
        place = _read_link(root)
        partial = place.with_name(f".{place.name}.{os.getpid()}.tmp")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)  # left behind by a killed process that had this process id
            partial.mkdir()
            write_json(Folder(partial), VERSIONS, versions)
            write_json(Folder(partial), CONFIG, config)
            partial.rename(place)  # replaces an empty directory, and fails for any other
        except (OSError, StorageError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            cls.refuse_occupied(root)  # another process may have created it in the meantime
            if disk_is_full(error):
                raise write_failure(root, error) from error
            raise UsageError(
                f"{root} cannot be created: {_reason(error)}. hint: choose another --run-dir."
            ) from error
        return cls(root)

    @classmethod
    def open(cls, root: Path) -> "RunDirectory":
        """Opens the run in `root`, and checks that its configuration is readable.

        Raises a `CheckpointError` if `root` is missing or not a run, or if its configuration is damaged. A run in
        an object store is first downloaded to its working folder, which raises a `StorageError` if the store
        cannot be read.
        """
        run = cls(Path(root))
        download_run(run.root)
        if not os.path.lexists(run.config_file) and (url := url_of(run.root)):
            raise CheckpointError(f"{url} does not contain a run.")
        if not os.path.lexists(run.config_file) and os.path.lexists(run.root / SWEEP):
            raise CheckpointError(
                f"{run.root} is the directory of a sweep, not of a run. hint: name one of the runs in "
                f"{run.root}/trials, such as the first in {run.root}/table.csv, which is the best. "
                f"`rollmill sweep --resume {run.root}` continues the sweep."
            )
        if not os.path.lexists(run.config_file):
            problem = "is not the directory of a run" if run.root.exists() else "does not exist"
            raise CheckpointError(f"{run.root} {problem}. {_nearest_runs(run.root)}")
        run.read_config()
        return run

    def read_config(self) -> dict[str, Any]:
        """Reads the configuration of the run as JSON."""
        return read_json(self.folder, CONFIG)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replaces the configuration of the run atomically."""
        write_json(self.folder, CONFIG, config)

    def read_versions(self) -> dict[str, Any]:
        """Reads the versions, hardware and commits with which the run was created. Returns an empty dictionary
        without the file.
        """
        return read_json(self.folder, VERSIONS) if self.folder.has(VERSIONS) else {}

    def read_summary(self) -> dict[str, Any] | None:
        """Reads the summary of the run, or returns None if the run has never ended."""
        return read_json(self.folder, SUMMARY) if self.folder.has(SUMMARY) else None

    def command(self, name: str, *words: str) -> str:
        """Returns a shell command for this run, such as `resume`, with further arguments and the run's `--import`
        options.
        """
        return command(name, shown(self.root), *words, imports=self.imports())

    def imports(self) -> list[str]:
        """Returns the modules that the run's commands import, or none if its configuration cannot be read."""
        try:
            imports = self.read_config().get("imports", [])
        except CheckpointError:
            return []
        return [module for module in imports if isinstance(module, str)] if isinstance(imports, list) else []

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes or replaces the summary of the run atomically."""
        write_json(self.folder, SUMMARY, summary)

    def append_evaluation(self, row: Mapping[str, Any]) -> None:
        """Appends a line to the run's evaluations of checkpoints, in a single write that needs no lock."""
        try:
            descriptor = self.folder.open_to_append(EVALUATIONS)
            try:
                os.write(descriptor, f"{json.dumps(plain(row))}\n".encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_failure(self.root / EVALUATIONS, error) from error

    def lock(self) -> AbstractContextManager[None]:
        """Locks the run, so that no other process can write it. See `run_files.lock_run`."""
        return lock_run(self.root)

    def is_held(self) -> bool:
        """True if this process trains the run."""
        return is_held(self.root)

    def is_locked(self) -> bool:
        """True if another process trains the run."""
        return is_locked(self.root)


def download_run(root: Path) -> None:
    """Downloads a run from its object store, if `root` is a working folder. See `stored_runs.download_run`."""
    if (url := url_of(root)) is not None:
        from rollmill.record import stored_runs  # imported here, because only object stores need it

        stored_runs.download_run(root, url)


def _read_link(root: Path) -> Path:
    """Returns the target of a link. The user chose this link, unlike those inside a run."""
    return Path(os.path.realpath(root)) if root.is_symlink() else root


def name_run(algorithm: str, environment: str, *, seed: int, now: datetime) -> Path:
    """Returns the default directory of a run, such as `runs/ppo-CartPole-v1-seed0-20261121-101500`."""
    name = f"{algorithm}-{environment}-seed{seed}-{now:%Y%m%d-%H%M%S}"
    return Path("runs") / re.sub(r"[^\w.+-]", "-", name)


def _nearest_runs(root: Path) -> str:
    runs, folder = [], root.parent
    for folder in (root.parent, Path("runs")):
        runs = [entry.parent for entry in folder.glob(f"*/{CONFIG}")]
        if runs:
            break
    if not runs:
        return f"There are no runs in {root.parent.absolute()} or in {Path('runs')}/."
    near = difflib.get_close_matches(root.name, [run.name for run in runs], n=3, cutoff=0.5)
    newest = [run.name for run in sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True)[:3]]
    label = "Did you mean" if near else f"The newest runs in {folder}:"
    offer = (" or " if near else ", ").join(str(folder / name) for name in near or newest)
    return f"{label} {offer}{'?' if near else '.'}"


def _reason(error: Exception) -> str:
    """Returns the reason of an error, without its temporary file name."""
    return getattr(error, "strerror", None) or str(error)
