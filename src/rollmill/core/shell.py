"""Formats shell commands for the user to copy."""

import os
import shlex
import site
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from rollmill.core.module_files import module_at


def command(*words: str | Path, imports: Sequence[str] = ()) -> str:
    """Formats a `rollmill` command from its arguments, quoted for a shell.

    Modules in `imports` become `--import` options. A module that is not installed is named by its file, or by its
    name if this process was started with `PYTHONPATH`, which then precedes the command.
    """
    path = _path_of(imports)
    options = [word for module in imports for word in ("--import", module if path else _file_of(module) or module)]
    return path + shlex.join(["rollmill", *map(str, words), *options])


def _path_of(modules: Sequence[str]) -> str:
    """Returns the `PYTHONPATH=...` by which another process finds imported modules, if this process has one."""
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders = [folder for folder in map(_folder_of, modules) if folder is not None and not _is_installed(folder)]
    if not given or not folders:
        return ""
    known = {Path(entry).resolve() for entry in given}
    missing = ["." if folder == Path.cwd() else str(folder) for folder in folders if folder not in known]
    return f"PYTHONPATH={shlex.quote(os.pathsep.join(dict.fromkeys([*missing, *given])))} "


def _file_of(module: str) -> str | None:
    """Returns the path of a module that is not installed, from the working directory if it is inside."""
    folder = _folder_of(module)
    if folder is None or _is_installed(folder):
        return None
    inner = folder.joinpath(*module.split("."))
    file = next(
        (path for path in (inner.with_name(f"{inner.name}.py"), inner / "__init__.py") if path.exists()), None
    )
    if file is None or module_at(str(file)).name != module:
        return None
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _folder_of(module: str) -> Path | None:
    """Returns the folder that contains a module, or its outermost package, or None if it is unknown.

    A module that this process has not imported is looked up, without being imported, on Python's path and in the
    current directory.
    """
    name = module.partition(".")[0]
    top = sys.modules.get(name)
    spec = PathFinder.find_spec(name, [*sys.path, os.getcwd()]) if top is None and name.isidentifier() else None
    file = getattr(top, "__file__", None) if spec is None else spec.origin
    if file is None:
        return None
    is_package = getattr(top, "__path__", None) if spec is None else spec.submodule_search_locations
    return Path(file).resolve().parents[0 if is_package is None else 1]


def _is_installed(folder: Path) -> bool:
    """Returns True if every process of this Python searches the folder."""
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return folder in {Path(path).resolve() for path in (*installed, site.getusersitepackages())}
