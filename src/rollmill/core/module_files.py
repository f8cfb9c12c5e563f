"""Modules and functions given by the path of a file, as in `--import walk.py`."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import NamedTuple

from rollmill.core.errors import UsageError


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


def _other_module(top: str, folder: Path) -> str | None:
    """Returns where Python finds a module of this name outside the folder, or None if it finds none."""
    if top in sys.stdlib_module_names or top == "__main__":
        return "of its standard library"
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None or Path(spec.origin).resolve().is_relative_to(folder):
        return None
    return f"at {spec.origin}"
