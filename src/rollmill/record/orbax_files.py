"""One checkpoint on disk, by Orbax: named host arrays and a JSON record in one directory.

The only file that knows Orbax. It is imported at the first use, which a plain `import rollmill`
does not pay for. Its asynchronous mode is not used: it would still compute digests and wait for an
earlier save in the caller's thread, so `Checkpoints` runs the whole of `write` in a thread of its own.
"""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the name of a directory that Orbax has not committed."""


def write(path: Path, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
    """Writes a checkpoint beside `path` and renames it to `path` when it is complete."""
    ocp = _orbax()
    stored = {name: array for name, array in arrays.items() if array.size}  # Orbax refuses empty arrays
    state = {"state": ocp.args.PyTreeSave(stored)} if stored else {}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            path.absolute(), args=ocp.args.Composite(record=ocp.args.JsonSave(dict(record)), **state)
        )


def read_record(path: Path) -> dict[str, Any]:
    """The JSON record of the checkpoint in `path`; raises whatever Orbax raises."""
    ocp = _orbax()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        return checkpointer.restore(path.absolute(), args=args)["record"]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the checkpoint in `path` but the empty ones; raises whatever Orbax raises."""
    ocp = _orbax()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore())
        return dict(checkpointer.restore(path.absolute(), args=args)["state"])


@functools.cache
def _orbax() -> ModuleType:
    import orbax.checkpoint

    # Orbax tells its progress by absl, which prints to the console; its failures reach us as exceptions.
    logging.getLogger("absl").addFilter(lambda entry: "orbax" not in entry.pathname)
    return orbax.checkpoint
