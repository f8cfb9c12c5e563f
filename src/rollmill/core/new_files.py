"""Checks of files that a command is to write, before it computes anything."""

from pathlib import Path

from rollmill.core.errors import UsageError


def check_new_file(path: Path, *, force: bool) -> None:
    """Checks where a file is to be written.

    Args:
        path: the file.
        force: whether one that exists is replaced.

    Raises:
        UsageError: it is a folder, there is no folder for it, or it exists already.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder. hint: give the name of a file in it.")
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}.")
    if path.exists() and not force:
        raise UsageError(
            f"{path} exists already. hint: --force (force=True) replaces it, --output (output=) names another."
        )
