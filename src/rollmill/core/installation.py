"""Where Rollmill is installed, how more of it is, and where it keeps what can be made again."""

import os
import shlex
from pathlib import Path

PROJECT = Path(__file__).parents[3]
"""The folder of the sources, where they are used from a clone."""


def install_command(extra: str) -> str:
    """The command that installs what this extra needs, from the clone where there is one."""
    if (PROJECT / "pyproject.toml").is_file() and (PROJECT / "src" / "rollmill").is_dir():
        return f"pip install -e {shlex.quote(f'{PROJECT}[{extra}]')}"
    return f"pip install 'rollmill[{extra}]'"


def cache_root() -> Path:
    """`$ROLLMILL_CACHE_DIR`; without it `rollmill/` in `$XDG_CACHE_HOME` or `~/.cache`."""
    own = os.environ.get("ROLLMILL_CACHE_DIR")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rollmill")
