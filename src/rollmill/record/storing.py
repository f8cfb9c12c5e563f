"""What trainings do for runs in object stores. Other runs import nothing for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rollmill.core.stored_paths import url_of

if TYPE_CHECKING:
    from rollmill.record.run_directory import RunDirectory


def bring(root: Path) -> None:
    """Brings a run from its object store, if `root` is a working folder: see `stored_runs.bring`."""
    if (url := url_of(root)) is not None:
        from rollmill.record import stored_runs

        stored_runs.bring(root, url)


def copied(
    run: "RunDirectory", note: Callable[[str], None], warn: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Copies a run to its object store until the context ends, if it has one: see `mirror.mirrored`."""
    url = url_of(run.root)
    if url is None:
        return nullcontext()
    from rollmill.record.mirror import mirrored

    return mirrored(run, url, note, warn)
