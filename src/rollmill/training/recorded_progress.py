"""Reads and checks the part of a checkpoint that the recorder writes: the progress of a run."""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from rollmill.core.errors import CheckpointError
from rollmill.core.schema import read_as
from rollmill.record.aggregates import SavedSums
from rollmill.record.checkpoints import Restored
from rollmill.record.run_directory import RunDirectory
from rollmill.training.evaluations import EvaluationProgress


class Episodes(NamedTuple):
    """Numbers of ended and of failed episodes in a run so far."""

    ended: float = 0.0
    """Number of episodes that have ended, including failed episodes."""
    failed: float = 0.0
    """Number of episodes that ended early because their environment failed or their worker was lost."""


@dataclass(frozen=True)
class SavedWindow:
    """Recent episodes of one seed in a checkpoint, as written by `EpisodeWindow.to_json`."""

    recent: tuple[tuple[float, ...], ...]
    """Number of episodes, sum of their returns, sum of their lengths, and sum of the returns of each kind."""
    best_return: float | None
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecorderState:
    """The part of a checkpoint's metadata that the recorder writes."""

    seconds: float
    episodes: tuple[SavedWindow, ...]
    failures: tuple[float, float] = (0.0, 0.0)
    """Number of episodes that have ended, and how many of them failed."""
    unwritten: SavedSums = field(default_factory=SavedSums)
    """Sums of metrics over iterations whose log line is not complete yet."""
    evaluations: EvaluationProgress = field(default_factory=EvaluationProgress)
    """The evaluations that the run has completed so far."""


PROGRESS = tuple(entry.name for entry in fields(RecorderState))


def read_progress(run: RunDirectory, restored: Restored, *, seeds: int) -> RecorderState:
    """Returns the progress of a run from its checkpoint.

    Raises a `CheckpointError` that names the field if the checkpoint is not in the form that a recorder writes.
    """
    where = f"checkpoint {restored.iteration} in {run.checkpoints.path}"
    entries = {name: part for name, part in restored.metadata.items() if name in PROGRESS}
    progress = read_as(RecorderState, entries, where=where, field="metadata", error=CheckpointError)
    if len(progress.episodes) != seeds:
        raise CheckpointError(f"{where}: metadata.episodes has {len(progress.episodes)} seeds, expected {seeds}.")
    for window in progress.episodes:
        if any(len(ended) not in (3, 3 + len(window.kinds)) for ended in window.recent):
            raise CheckpointError(
                f"{where}: an entry of metadata.episodes.recent has another length than 3, or 3 and the number of "
                f"kinds={len(window.kinds)}."
            )
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
