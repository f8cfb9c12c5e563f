"""Paths of the installation and of the cache, and the commands that install extras."""

import os
import shlex
from pathlib import Path

from rollmill.core.folder import Folder
from rollmill.core.local_paths import local_path

PROJECT = Path(__file__).parents[3]
"""Root of the repository, if Rollmill runs from a clone."""


def install_command(extra: str) -> str:
    """Returns the command that installs an extra, from the clone if there is one."""
    if (PROJECT / "pyproject.toml").is_file() and (PROJECT / "src" / "rollmill").is_dir():
        return f"pip install -e {shlex.quote(f'{PROJECT}[{extra}]')}"
    return f"pip install 'rollmill[{extra}]'"


def cache_root() -> Path:
    """Returns the cache: `$ROLLMILL_CACHE_DIR`, else `rollmill/` in `$XDG_CACHE_HOME` or `~/.cache`."""
    chosen = os.environ.get("ROLLMILL_CACHE_DIR")
    if chosen:
        return local_path("ROLLMILL_CACHE_DIR", chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rollmill")


def folder_in_cache(file: Path) -> Folder:
    """Returns the folder of a file one level below the cache's root, without following a link there."""
    return Folder(file.parent.parent, (file.parent.name,))
