"""The directory of one run: its files, its atomic creation, and its lock."""

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
    VERSIONS,
    being_written,
    is_held,
    is_locked,
    locked,
)


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run's files. `create` makes a run, `open` opens one. The paths need not exist."""

    root: Path

    @property
    def folder(self) -> Folder:
        """The directory as a `Folder`, whose content is not trusted."""
        return Folder(self.root)

    @property
    def config_file(self) -> Path:
        """Path of the run's configuration. A directory without it is not a run."""
        return self.root / CONFIG

    @property
    def metrics_file(self) -> Path:
        """Path of the metrics: one JSON object in each line, one line for each iteration."""
        return self.root / METRICS

    @property
    def summary_file(self) -> Path:
        """Path of the result, written when the run ends."""
        return self.root / SUMMARY

    @property
    def checkpoints(self) -> Folder:
        """Folder of the checkpoints, each a folder of its own."""
        return self.folder.inner("checkpoints")

    @property
    def tensorboard(self) -> Folder:
        """Folder of the TensorBoard event files."""
        return self.folder.inner("tensorboard")

    @property
    def fault(self) -> Folder:
        """Folder of the state before an iteration that failed."""
        return self.folder.inner("fault")

    @staticmethod
    def refuse_occupied(root: Path) -> None:
        """Raises a UsageError if `root` is a run, a file, a directory with other files, or no text."""
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
        """Checks that a run can be created at `root`, by writing to the nearest folder that exists.

        Raises a `UsageError` if that folder cannot be written.
        """
        parent = next(folder for folder in _linked(root).absolute().parents if os.path.lexists(folder))
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

        Raises a `UsageError` if `root` is a run, is a file or holds other files, or if its parent is not writable,
        and a `StorageError` if the disk is full. A value in `config` or `versions` without a JSON form is a
        `TypeError`.
        """
        root, config, versions = Path(root), plain(config), plain(versions)
        cls.refuse_occupied(root)
        place = _linked(root)
        partial = place.with_name(f".{place.name}.{os.getpid()}.tmp")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process with our process number
            partial.mkdir()
            write_json(Folder(partial), VERSIONS, versions)
            write_json(Folder(partial), CONFIG, config)
            partial.rename(place)  # replaces an empty directory, refuses any other
        except (OSError, StorageError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            cls.refuse_occupied(root)  # another process may have created it meanwhile
            if disk_is_full(error):
                raise write_failure(root, error) from error
            raise UsageError(
                f"{root} cannot be created: {_reason(error)}. hint: choose another --run-dir."
            ) from error
        return cls(root)

    @classmethod
    def open(cls, root: Path) -> "RunDirectory":
        """Opens the run in `root` and checks that its configuration is readable.

        Raises a `CheckpointError` if `root` is missing or not a run, or if its configuration is damaged. A run in
        an object store is brought to its working folder first, with a `StorageError` if the store cannot be read.
        """
        run = cls(Path(root))
        bring(run.root)
        if not os.path.lexists(run.config_file) and (url := url_of(run.root)):
            raise CheckpointError(f"{url} does not contain a run.")
        if not os.path.lexists(run.config_file):
            problem = "is not the directory of a run" if run.root.exists() else "does not exist"
            raise CheckpointError(f"{run.root} {problem}. {_nearest_runs(run.root)}")
        run.read_config()
        return run

    def read_config(self) -> dict[str, Any]:
        """Reads the configuration that `create` wrote, in its JSON form."""
        return read_json(self.folder, CONFIG)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replaces the configuration atomically."""
        write_json(self.folder, CONFIG, config)

    def read_versions(self) -> dict[str, Any]:
        """Reads the versions, hardware and commits that `create` wrote, if the file exists."""
        return read_json(self.folder, VERSIONS) if self.folder.has(VERSIONS) else {}

    def read_summary(self) -> dict[str, Any] | None:
        """Reads the summary, which exists once the run has ended for the first time."""
        return read_json(self.folder, SUMMARY) if self.folder.has(SUMMARY) else None

    def command(self, name: str, *words: str) -> str:
        """Returns a shell command on this run, such as `resume`, with further words and the run's `--import`s."""
        try:
            imports = self.read_config().get("imports", [])
        except CheckpointError:
            imports = []
        modules = [module for module in imports if isinstance(module, str)] if isinstance(imports, list) else []
        return command(name, shown(self.root), *words, imports=modules)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes or replaces the summary atomically."""
        write_json(self.folder, SUMMARY, summary)

    def append_evaluation(self, row: Mapping[str, Any]) -> None:
        """Appends a line to the evaluations of checkpoints by one write, which needs no lock."""
        try:
            descriptor = self.folder.open_to_append(EVALUATIONS)
            try:
                os.write(descriptor, f"{json.dumps(plain(row))}\n".encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_failure(self.root / EVALUATIONS, error) from error

    def lock(self) -> AbstractContextManager[None]:
        """Locks the run, so that no second process writes it. See `run_files.locked`."""
        return locked(self.root)

    def is_held(self) -> bool:
        """Returns True if this process trains the run."""
        return is_held(self.root)

    def is_locked(self) -> bool:
        """Returns True if another process trains the run."""
        return is_locked(self.root)


def bring(root: Path) -> None:
    """Brings a run from its object store, if `root` is a working folder. See `stored_runs.bring`."""
    if (url := url_of(root)) is not None:
        from rollmill.record import stored_runs  # which nothing but an object store needs

        stored_runs.bring(root, url)


def _linked(root: Path) -> Path:
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
