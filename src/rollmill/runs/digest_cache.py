"""Stores the digests of graphs, so that later commands need not trace the same graphs again.

Digests are looked up by the settings of a run and by the sources of Rollmill. With equal settings and sources,
graphs of Rollmill's own algorithms and environments have equal digests. Stored digests are used only in processes
of the command `rollmill` that contain no code of the user, which might have replaced functions of the graph.
"""

import contextlib
import csv
import functools
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FunctionType
from typing import Any

import jax

from rollmill.core.errors import CheckpointError, DataError
from rollmill.core.folder import Folder
from rollmill.core.installation import cache_root, folder_in_cache
from rollmill.core.json_data import parse_json
from rollmill.core.schema import read_as
from rollmill.dataflow import Graph, TracedDigests, expect_digests, trace_digests
from rollmill.envs.registry import ENVIRONMENTS
from rollmill.programs.program_store import surroundings
from rollmill.record.json_files import plain
from rollmill.runs.algorithms import ALGORITHMS

PACKAGE = Path(__file__).parents[1]
COMMAND = "rollmill"
MAX_BYTES = 2**20

INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of installed packages, as they occur in the paths of their files."""
STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})


def recall_digests(graph: Graph, settings: dict[str, Any]) -> None:
    """Sets the digests of a graph to the stored ones, so that the graph is not traced for them.

    If no digests are stored, they are computed by tracing the graph, and stored. Does nothing if the settings do
    not determine what the graph computes.
    """
    file = _file_of(settings)
    if file is None:
        return
    folder = folder_in_cache(file)
    with contextlib.suppress(OSError, CheckpointError, DataError):
        content = parse_json(folder.read(file.name, limit=MAX_BYTES), where=str(file))
        expect_digests(graph, read_as(TracedDigests, content, where=str(file), error=CheckpointError))
        return
    _write(folder, file.name, trace_digests(graph))


def _write(folder: Folder, name: str, digests: TracedDigests) -> None:
    with contextlib.suppress(OSError, CheckpointError):
        folder.make()
        with folder.replacing(name, shared=True) as whole:
            whole.write(json.dumps(asdict(digests)).encode())


def _file_of(settings: dict[str, Any]) -> Path | None:
    """Returns the file of the digests, or None if they depend on more than settings and sources."""
    is_own = ALGORITHMS.is_built_in(settings["algorithm"]) and ENVIRONMENTS.is_built_in(settings["environment"])
    if not (is_own and jax.config.values["jax_enable_compilation_cache"]):
        return None
    around = surroundings(jax.devices()[0])  # also imports the modules of the platform
    try:
        modules = sorted(_foreign_modules())
    except _Untold:
        return None
    known = [plain(settings), _digest_own_sources(), modules, around]
    return cache_root() / "digests" / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]}.json"


class _Untold(Exception):
    """Raised if this process contains code from an unknown source."""


def _foreign_modules() -> Iterator[tuple[str, int, int]]:
    """Finds the modules of other packages, with the sizes of their files and the seconds of their changes.

    Raises:
        _Untold: a module belongs to no installed package or has no file, or the process was not started by the
            command `rollmill`.
    """
    main = sys.modules["__main__"]
    command = getattr(main, "__file__", None)
    if command is None or not (_is_own(command) or os.path.basename(command) == COMMAND):
        raise _Untold
    folders = _package_folders()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if module is main or (file is not None and _is_own(file)):
            continue
        if file is None:
            if _has_code(name, module):
                raise _Untold
            continue
        if any(folder in file for folder in INSTALLED) or _is_installed(file, folders):
            status = os.stat(file)
            yield name, status.st_size, int(status.st_mtime)
        elif not file.startswith(STANDARD):
            raise _Untold


def _package_folders() -> tuple[str, ...]:
    """Returns the folders of the path into which an installer has put packages, such as `--target` folders."""
    folders = [Path(entry).absolute() for entry in sys.path if entry]
    return tuple(f"{folder}{os.sep}" for folder in folders if next(folder.glob("*.dist-info"), None))


def _is_installed(file: str, folders: Sequence[str]) -> bool:
    """Returns whether an installer has put a file into a folder, which may also hold the user's code."""
    return any(
        file.removeprefix(folder) in _read_recorded(folder) for folder in folders if file.startswith(folder)
    )


@functools.cache
def _read_recorded(folder: str) -> frozenset[str]:
    """Returns the files that installers have put into a folder, relative to it."""
    files: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error), record.open(newline="") as lines:
            files.update(os.path.normpath(line[0]) for line in csv.reader(lines) if line)
    return frozenset(files)


def _has_code(name: str, module: Any) -> bool:
    """Returns whether a module without a file may contain Python code that is in no other module's file.

    Modules of the interpreter, namespace packages, and parts of a module in a file contain none.
    """
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return spec.origin not in ("built-in", "frozen") and spec.submodule_search_locations is None
    if name.rpartition(".")[0] in sys.modules:
        return False
    values = list(vars(module).values())
    inner = [part for value in values if isinstance(value, type) for part in vars(value).values()]
    return any(isinstance(value, FunctionType) for value in (*values, *inner))


def _is_own(file: str) -> bool:
    return file.startswith(f"{PACKAGE}{os.sep}")


def _digest_own_sources() -> str:
    whole = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        whole.update(f"{path.relative_to(PACKAGE)}\0".encode())
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()
