"""Files of an export: written beside their place, and then renamed, so that no half of one is ever there."""

import contextlib
from pathlib import Path

from rollmill.core.errors import UsageError
from rollmill.core.folder import replacing_named
from rollmill.core.local_paths import ALSO_IN_PYTHON, check_new_file


def check_place(paths: list[Path], *, force: bool) -> None:
    """Checks where files are to be written, before anything is computed.

    Raises:
        UsageError: there is a file already, or no folder to write in.
    """
    for path in paths:
        check_new_file(path, force=force, way_out=ALSO_IN_PYTHON)


def write_files(contents: dict[Path, bytes]) -> None:
    """Writes files; each appears whole, and the last one after all others.

    Raises:
        UsageError: one cannot be written; nothing new is left behind.
    """
    path = next(iter(contents))
    try:
        with contextlib.ExitStack() as written:  # they appear in the reverse of this order
            for path, content in reversed(contents.items()):
                written.enter_context(replacing_named(path)).write(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
