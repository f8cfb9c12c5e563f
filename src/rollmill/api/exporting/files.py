"""Files of an export: written beside their place, and then renamed, so that no half of one is ever there."""

import contextlib
import os
from pathlib import Path

from rollmill.core.errors import UsageError
from rollmill.core.new_files import ALSO_IN_PYTHON, check_new_file


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
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in contents}
    try:
        for path, content in contents.items():
            beside[path].write_bytes(content)
        for path in contents:
            beside[path].replace(path)
    except OSError as error:
        raise UsageError(
            f"{error.filename or next(iter(contents))} cannot be written: {error.strerror}."
        ) from error
    finally:
        for path in beside.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
