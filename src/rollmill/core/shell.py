"""Commands that are printed for the user to copy."""

import shlex
from collections.abc import Sequence
from pathlib import Path


def command(*words: str | Path, imports: Sequence[str] = ()) -> str:
    """A `rollmill` command as a shell reads it, with the modules that the user named at this call.

    Args:
        *words: of the command, after `rollmill`.
        imports: modules that register environments.
    """
    named = [word for module in imports for word in ("--import", module)]
    return shlex.join(["rollmill", *map(str, words), *named])
