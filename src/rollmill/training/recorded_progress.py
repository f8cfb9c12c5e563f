"""The recorder's part of a checkpoint: the progress that it resumes from."""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from rollmill.core.errors import CheckpointError
from rollmill.core.schema import read_as
from rollmill.record.aggregates import SavedSums
from rollmill.record.checkpoints import Restored
from rollmill.record.run_directory import RunDirectory
from rollmill.training.evaluations import EvaluationProgress


class Episodes(NamedTuple):
    """Episodes counted so far."""

    ended: float = 0.0
    """All that ended, failed ones included."""
    failed: float = 0.0
    """Cut short because an environment raised, or its worker was lost."""


@dataclass(frozen=True)
class SavedWindow:
    """Recent episodes of one seed, as `EpisodeWindow.to_json` writes them."""

    recent: tuple[tuple[float, float, float], ...]
    best_return: float | None


@dataclass(frozen=True)
class RecorderState:
    """The recorder's part of a checkpoint's metadata."""

    seconds: float
    episodes: tuple[SavedWindow, ...]
    failures: tuple[float, float] = (0.0, 0.0)
    """Episodes that ended, and those of them that failed."""
    unwritten: SavedSums = field(default_factory=SavedSums)
    """Metrics of iterations whose line is not complete yet."""
    evaluations: EvaluationProgress = field(default_factory=EvaluationProgress)
    """The evaluations so far."""


PROGRESS = tuple(entry.name for entry in fields(RecorderState))


def read_progress(run: RunDirectory, restored: Restored, *, seeds: int) -> RecorderState:
    """Returns the progress that a checkpoint carries.

    Raises a `CheckpointError` with the field if it is not as a recorder writes it.
    """
    where = f"checkpoint {restored.iteration} in {run.checkpoints.path}"
    entries = {name: part for name, part in restored.metadata.items() if name in PROGRESS}
    progress = read_as(RecorderState, entries, where=where, field="metadata", error=CheckpointError)
    if len(progress.episodes) != seeds:
        raise CheckpointError(f"{where}: metadata.episodes has {len(progress.episodes)} seeds, expected {seeds}.")
    check_sums(progress.unwritten, where=where, seeds=seeds)
    return progress


def check_sums(saved: SavedSums, *, where: str, seeds: int) -> None:
    """Raises a `CheckpointError` if the sums of metrics are for another number of seeds."""
    if saved.iterations < 0:
        raise CheckpointError(f"{where}: metadata.unwritten.iterations={saved.iterations} must be at least 0.")
    if len(lengths := {len(numbers) for numbers in saved.sums.values()}) > 1:
        counts = " and ".join(map(str, sorted(lengths)))
        raise CheckpointError(
            f"{where}: metadata.unwritten.sums has {counts} seeds, expected the same number everywhere."
        )
    for name, numbers in saved.sums.items():
        if len(numbers) not in (1, seeds):
            raise CheckpointError(
                f"{where}: metadata.unwritten.sums[{name!r:.60}] has {len(numbers)} seeds, expected {seeds}."
            )
