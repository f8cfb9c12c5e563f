"""Finds and imports modules that are named from outside the program: by options, files, and ids of environments.

A module may be given by the path of its file, as in `--import walk.py`. The code that reads a name decides whether
to import it. Processes of a sweep also have a list of allowed modules, so a trial cannot import anything that the
sweep was not allowed to import.
"""

import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from rollmill.core.errors import UsageError

ONLY = "ROLLMILL_ONLY_IMPORT"
"""Environment variable that lists the modules that a process may import, separated by commas."""


class ImportRefused(UsageError):
    """Raised if this process is not allowed to import a module."""


def only_importing(modules: Iterable[str]) -> dict[str, str]:
    """Returns the environment variable under which `import_named` imports only the given modules."""
    return {ONLY: ",".join(sorted(modules))}


def import_named(name: str) -> ModuleType:
    """Imports a module by its name, or raises `ImportRefused` if this process is not allowed to."""
    allowed = os.environ.get(ONLY)
    if allowed is not None and not any(_is_within(name, module) for module in allowed.split(",")):
        raise ImportRefused(
            f"the module {name!r} was not imported, because this sweep may not import it. hint: allow the import "
            f"when you resume the sweep: --import {name}."
        )
    return importlib.import_module(name)


class FoundModule(NamedTuple):
    """The name of a module, and the folder in which Python finds it."""

    name: str
    folder: Path


def module_at(text: str) -> FoundModule:
    """Returns the module in a file or folder. Its name begins with its packages, folders with `__init__.py`."""
    path = Path(text)
    name = path.stem if path.suffix == ".py" else path.name
    names, folder = [] if name == "__init__" else [name], path.parent
    while not names or (folder / "__init__.py").is_file():
        names, folder = [folder.resolve().name, *names], folder.parent
    return FoundModule(".".join(names), folder)


def module_of_file(text: str) -> str:
    """Returns the name of the module in a `.py` file, and lets Python search its folder first, as for a script.

    A text that does not end in `.py` is the name of a module, and is returned unchanged. Raises a `UsageError` if
    the file does not exist, or if another module has its name.
    """
    if not text.endswith(".py"):
        return text
    if not os.path.isfile(text):
        raise UsageError(f"{text} cannot be imported, because there is no such file.")
    name, folder = module_at(text)
    if "." in Path(text).stem:
        raise UsageError(
            f"{text} cannot be imported, because its name contains a dot. hint: rename the file, for example to "
            f"{Path(text).stem.replace('.', '_')}.py."
        )
    top, path = name.partition(".")[0], str(folder.resolve())
    other = _other_module(top, Path(path))
    if other is not None:
        raise UsageError(
            f"{text} cannot be imported, because Python already has a module {top!r}, {other}. hint: rename the "
            "file."
        )
    if path not in map(os.path.realpath, sys.path):
        sys.path.insert(0, path)
    return name


def function_of_file(text: str) -> str:
    """Returns `MODULE:FUNCTION` for `FILE.py:FUNCTION`, as `module_of_file` does. Any other text is unchanged."""
    file, _, name = text.rpartition(":")
    return f"{module_of_file(file)}:{name}" if file.endswith(".py") else text


def files_of_modules(modules: Iterable[str]) -> dict[str, str]:
    """Returns the absolute path of the file of each module that is not installed."""
    files = {module: file_of_module(module) for module in modules}
    return {module: str(file) for module, file in files.items() if file is not None}


def file_of_module(module: str) -> Path | None:
    """Returns the path of a module that is not installed, or None if it is installed or was not found."""
    folder = folder_of_module(module)
    if folder is None or is_installed(folder):
        return None
    file = _file_in(folder, module)
    return file if file is not None and module_at(str(file)).name == module else None


def folder_of_module(module: str) -> Path | None:
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


def is_installed(folder: Path) -> bool:
    """Returns True if every process of this Python searches the folder."""
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return folder in {Path(path).resolve() for path in (*installed, site.getusersitepackages())}


def find_recorded_module(module: str, file: str, *, where: Path, named: bool) -> None:
    """Lets Python search the folder of the file from which a run imported a module, if Python does not find it.

    `where` is the directory of the run or sweep. `named` says that the user has named the module too, so that any
    module of this name is meant. Raises a `UsageError` if the file no longer exists, or if Python finds another
    module with this name.
    """
    recorded, inner = Path(file), Path(*module.split("."))
    inner = inner / recorded.name if recorded.name == "__init__.py" else inner.with_suffix(".py")
    if _is_findable(module):
        other = None if named else _other_file(module, recorded)
        if other is not None:
            raise UsageError(
                f"{where} imported {module!r} from {file}, but Python finds another module with this name, at "
                f"{other}. hint: --import {module} (imports=[{module!r}] in Python) uses that one."
            )
    elif recorded.is_file():
        module_of_file(file)
    else:
        raise UsageError(
            f"{where} imported {module!r} from {file}, which does not exist any more. hint: name its present file "
            f"with --import DIRECTORY/{inner}, or run the command with PYTHONPATH=DIRECTORY."
        )


def _is_within(name: str, module: str) -> bool:
    return bool(module) and (name == module or name.startswith(f"{module}."))


def _is_findable(module: str) -> bool:
    """Returns whether this process has imported a module or its outermost package, or could do so by name."""
    top = module.partition(".")[0]
    if top in sys.modules:
        return True
    spec = importlib.util.find_spec(top)
    return spec is not None and spec.origin is not None


def _other_file(module: str, recorded: Path) -> Path | None:
    """Returns the file in which Python finds a module, if its content differs from that of the recorded file."""
    folder = folder_of_module(module)
    found = None if folder is None else _file_in(folder, module)
    if found is None or not recorded.is_file() or found.samefile(recorded):
        return None
    return None if found.read_bytes() == recorded.read_bytes() else found


def _file_in(folder: Path, module: str) -> Path | None:
    """Returns the file of a module whose outermost package, or which itself, is in a folder."""
    inner = folder.joinpath(*module.split("."))
    files = (inner.with_name(f"{inner.name}.py"), inner / "__init__.py")
    return next((path for path in files if path.exists()), None)


def _other_module(top: str, folder: Path) -> str | None:
    """Returns where Python finds a module of this name outside the folder, or None if it finds none."""
    if top in sys.stdlib_module_names or top == "__main__":
        return "of its standard library"
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None or Path(spec.origin).resolve().is_relative_to(folder):
        return None
    return f"at {spec.origin}"
