"""Shell commands that are printed for the user to copy."""

import shlex
from collections.abc import Sequence
from pathlib import Path


def command(*words: str | Path, imports: Sequence[str] = ()) -> str:
    """A `rollmill` command, quoted for a shell.

    Args:
        *words: words of the command after `rollmill`.
        imports: modules to pass as `--import`.
    """
    options = [word for module in imports for word in ("--import", module)]
    return shlex.join(["rollmill", *map(str, words), *options])
