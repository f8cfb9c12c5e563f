"""Formats shell commands for the user to copy."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rollmill.core.imports import file_of_module, folder_of_module, is_installed


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
    folders = [
        folder for folder in map(folder_of_module, modules) if folder is not None and not is_installed(folder)
    ]
    if not given or not folders:
        return ""
    known = {Path(entry).resolve() for entry in given}
    missing = ["." if folder == Path.cwd() else str(folder) for folder in folders if folder not in known]
    return f"PYTHONPATH={shlex.quote(os.pathsep.join(dict.fromkeys([*missing, *given])))} "


def _file_of(module: str) -> str | None:
    """Returns the path of a module that is not installed, from the working directory if it is inside."""
    file = file_of_module(module)
    if file is None:
        return None
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
