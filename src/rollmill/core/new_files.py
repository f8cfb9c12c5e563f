"""Checks of files that a command is to write, before it computes anything."""

import tempfile
from pathlib import Path

from rollmill.core.errors import UsageError

ALSO_IN_PYTHON = "--force (force=True) replaces it, --output (output=) names another."
ON_THE_COMMAND_LINE = "--force replaces it, --output names another."


def check_new_file(path: Path, *, force: bool, way_out: str = ON_THE_COMMAND_LINE) -> None:
    """Checks where a file is to be written.

    Args:
        path: the file.
        force: whether one that exists is replaced.
        way_out: the hint of the error for one that exists and is not replaced.

    Raises:
        UsageError: it is a folder, there is no folder for it that can be written, or it exists already.
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder. hint: give the name of a file in it.")
        if not path.parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no folder {path.parent}.")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is a pipe, a socket or a device. hint: give the name of a file.")
        if path.exists() and not force:
            raise UsageError(f"{path} exists already. hint: {way_out}")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}.") from error
