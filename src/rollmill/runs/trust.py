"""Decides which modules a run may import: modules named by the user, and modules named by the user's own runs.

A configuration that was read from a directory is data. Its modules are imported only if the user names them too,
created the run in that directory, or once passed `--trust` for it. This is remembered in a file of the user,
outside of any run. A copied, unpacked or downloaded directory must be trusted again, and so must a directory whose
configuration was written by another user.
"""

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.core.errors import CheckpointError, DataError, UsageError
from rollmill.core.folder import Folder
from rollmill.core.imports import find_recorded_module
from rollmill.core.json_data import parse_json
from rollmill.core.local_paths import local_path
from rollmill.core.schema import read_as
from rollmill.core.stored_paths import run_folder, url_of
from rollmill.record.run_directory import RunDirectory
from rollmill.record.run_files import CONFIG, SWEEP
from rollmill.runs.saved_run import SavedConfig

FILE = "trusted_runs.json"
MAX_BYTES = 8 * 2**20
CONFIGURATIONS = (CONFIG, SWEEP)
"""The files of a run and of a sweep that may name modules."""

CLUSTER, START = "cluster=", "start_from="


class NamedModule(NamedTuple):
    """A module that a run's configuration names, with the field that names it."""

    module: str
    field: str
    loads_only: bool
    """True if the module is only imported, and False if one of its functions is also called."""


@dataclass(frozen=True)
class TrustedRun:
    """A run directory that may import certain modules.

    If a directory is deleted, a new directory may get its path and its inode. The file of the configuration, with
    its change time, therefore identifies a directory as well, since nobody can choose a file's change time.
    """

    path: str
    device: int
    inode: int
    modules: tuple[str, ...]
    file: int = 0
    """Inode of the configuration file."""
    changed: int = 0
    """Change time of the configuration file, in nanoseconds, as reported by the file system."""


def cluster_name(address: str) -> str:
    """Returns the name under which the address of a cluster is trusted."""
    return f"{CLUSTER}{address}"


def named_modules(
    environment: str, options: Mapping[str, Any], imports: Sequence[str], *, distribution: bool
) -> list[NamedModule]:
    """Returns the modules that a run names: its `imports`, and those in its environment's name and its options.

    `distribution` adds the module of its distribution policy, if that is going to be called for a plan.
    """
    policy = options.get("distribution", "")
    named = [NamedModule(module, "imports", True) for module in imports]
    module = environment.partition(":")[2].rpartition(":")[0]
    if module:
        named.append(NamedModule(module, f"environment {environment}", True))
    if distribution and isinstance(policy, str) and ":" in policy:
        named.append(NamedModule(policy.partition(":")[0], f"distribution {policy}", False))
    return named


def _named_in(saved: SavedConfig, *, distribution: bool) -> list[NamedModule]:
    return named_modules(saved.graph["environment"], saved.options, saved.imports, distribution=distribution)


def names_to_remember(saved: SavedConfig) -> list[str]:
    """Returns the names in a configuration that are stored as trusted together with its run.

    They are its modules, its cluster, and the object store of its initial weights.
    """
    modules = [named.module for named in _named_in(saved, distribution=True)]
    return [*modules, *named_places(saved)]


def named_places(saved: SavedConfig) -> list[str]:
    """Returns the cluster and the object store of a configuration, as names that can be trusted."""
    stored = start_name(saved.options.get("start_from"))
    return [*map(cluster_name, _addresses(saved)), *([stored] if stored else [])]


def start_name(start: object) -> str | None:
    """Returns the object store of the run that provided initial weights, as a name that can be trusted, or None
    for a local run.
    """
    url = _start_url(start)
    return url and f"{START}{url}"


def check_start(run: RunDirectory, saved: SavedConfig, *, trust: bool) -> None:
    """Checks that a run may read initial weights from an object store with the user's credentials.

    `trust` allows this now and later. Raises a `CheckpointError` with the URL if it is not allowed.
    """
    url = _start_url(saved.options.get("start_from"))
    if trust:
        remember(run, sorted({*names_to_remember(saved), *trusted_modules(run)}))
    elif url and f"{START}{url}" not in trusted_modules(run):
        raise CheckpointError(
            f"{run.root} was created elsewhere and starts from weights at {url}, which would be read with your "
            "credentials. hint: if you trust it, add --trust (trust=True), which is remembered for this "
            "directory."
        )


def _start_url(start: object) -> str | None:
    """Returns the URL that a run takes its first weights from, which its configuration may name by its folder."""
    if not isinstance(start, str):
        return None
    try:
        return url_of(run_folder("start_from", start))
    except UsageError:  # an unsupported URL, which cannot be read anyway
        return None


def check_cluster(run: RunDirectory, saved: SavedConfig, *, trust: bool) -> None:
    """Checks that a run may join the cluster whose address it names, since the cluster's code would run here.

    `trust` allows it now and later. Raises a `CheckpointError` with the address if it is not allowed.
    """
    addresses = _addresses(saved)
    if trust:
        remember(run, sorted({*names_to_remember(saved), *trusted_modules(run)}))
    known = trusted_modules(run) if addresses else set()
    if refused := [address for address in addresses if not trust and cluster_name(address) not in known]:
        raise CheckpointError(
            f"{run.root} was created elsewhere and names the cluster {refused[0]}, through which others can run "
            f"code on this machine. hint: if you trust it, add --cluster {refused[0]} (cluster= in Python), or "
            "--trust (trust=True), which is remembered for this directory. --place processes trains on this "
            "machine alone."
        )


def _addresses(saved: SavedConfig) -> list[str]:
    address = saved.options.get("cluster")
    return [address] if isinstance(address, str) and ":" in address else []


def approved_imports(
    run: RunDirectory,
    saved: SavedConfig,
    *,
    imports: Sequence[str],
    trust: bool = False,
    distribution: bool = False,
) -> tuple[str, ...]:
    """Returns the modules to import before a run is opened: the user's, and the run's own if it is trusted.

    `trust` allows this run directory to import whatever it names, now and later. `distribution` says whether its
    distribution policy is going to be called for a plan. Modules of a trusted run that Python does not find are
    imported from the files that the run recorded. Raises a `CheckpointError` with the modules if they are not
    allowed, and a `UsageError` if such a file no longer exists.
    """
    named = _named_in(saved, distribution=distribution)
    if trust:
        remember(run, sorted({*(name.module for name in named), *trusted_modules(run)}))
    trusted = {*(name.module for name in named if trust), *trusted_modules(run)}
    allowed = {*imports, *trusted}
    refused = [n for n in named if n.module not in allowed and not (n.loads_only and n.module in sys.modules)]
    if refused:
        raise _refusal(run, refused, imports)
    find_recorded(
        {name.module for name in named} & trusted, saved.import_files, where=run.root, user_imports=imports
    )
    return tuple(dict.fromkeys([*imports, *(n.module for n in named if n.field == "imports")]))


def find_recorded(
    trusted: AbstractSet[str], files: Mapping[str, str], *, where: Path, user_imports: Sequence[str]
) -> None:
    """Lets Python find the trusted modules of a run or sweep in the directory `where`, by the recorded files.

    Raises a `UsageError` if a file no longer exists, or if Python finds another module. The modules in
    `user_imports`, which the user named, may come from any file.
    """
    for module in sorted(trusted & files.keys()):
        find_recorded_module(module, files[module], where=where, named=module in user_imports)


def remember(run: RunDirectory, modules: Sequence[str]) -> None:
    """Allows this run directory to import these modules from now on. If this cannot be stored, the user is asked
    again.
    """
    if not modules:
        return
    with contextlib.suppress(OSError, CheckpointError), _lock() as folder:
        entry = _identify(run, modules)
        others = [other for other in _read(folder) if not _same(other, entry) and os.path.lexists(other.path)]
        with folder.replacing(FILE) as file:
            file.write(json.dumps([asdict(trusted) for trusted in [*others, entry]], indent=1).encode())


def trusted_modules(run: RunDirectory) -> set[str]:
    """Returns the modules that this run directory may import."""
    try:
        here, trusted = _identify(run, ()), _read(Folder(state_folder()))
    except (OSError, CheckpointError):
        return set()
    return {
        module
        for entry in trusted
        if _same(entry, here) and (entry.file, entry.changed) == (here.file, here.changed)
        for module in entry.modules
    }


def rewrite_config(run: RunDirectory, config: Mapping[str, Any]) -> None:
    """Replaces the configuration of a run, which keeps its trust."""
    trusted = trusted_modules(run)
    run.write_config(config)
    remember(run, sorted(trusted))


def _identify(run: RunDirectory, modules: Sequence[str]) -> TrustedRun:
    """Returns the current identity of the directory of a run or a sweep."""
    name = next((name for name in CONFIGURATIONS if run.folder.has(name)), CONFIGURATIONS[0])
    with run.folder.reading(name) as file:
        of_file = os.fstat(file.fileno())
    folder, path = run.root.stat(), str(run.root.resolve())
    named = tuple(sorted({*modules}))
    return TrustedRun(path, folder.st_dev, folder.st_ino, named, of_file.st_ino, of_file.st_ctime_ns)


def state_folder() -> Path:
    """Returns the folder for the user's state: `$ROLLMILL_STATE_DIR`, or `rollmill/` in the user's state
    folder.
    """
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    chosen = os.environ.get("ROLLMILL_STATE_DIR")
    return local_path("ROLLMILL_STATE_DIR", chosen) if chosen else home / "rollmill"


def _same(one: TrustedRun, other: TrustedRun) -> bool:
    """Returns whether both are one directory, which may have moved within its disk."""
    return one.inode == other.inode and (one.path == other.path or one.device == other.device)


def _read(folder: Folder) -> list[TrustedRun]:
    where = str(folder.path / FILE)
    try:
        text = folder.read(FILE, limit=MAX_BYTES)
        return read_as(list[TrustedRun], parse_json(text, where=where, limit=MAX_BYTES), where=where)
    except (FileNotFoundError, DataError):  # if the file is damaged, nothing is trusted
        return []


@contextlib.contextmanager
def _lock() -> Iterator[Folder]:
    folder = Folder(state_folder())
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = folder.open_to_append(f".{FILE}.lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def _refusal(run: RunDirectory, refused: Sequence[NamedModule], imports: Sequence[str]) -> CheckpointError:
    lines = ", ".join(f"{name.module!r} ({name.field})" for name in refused)
    modules = list(dict.fromkeys([*imports, *(name.module for name in refused)]))
    options = " ".join(f"--import {module}" for module in modules)
    return CheckpointError(
        f"{run.root} was created elsewhere and names modules that would be imported: {lines}. hint: if you trust "
        f"it, add {options} (imports={modules} in Python), or --trust (trust=True), which is remembered for this "
        "directory."
    )
