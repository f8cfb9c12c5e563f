"""Examines runs: checks whether files are intact, and finds the step at which a value became non-finite."""

from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

from rollmill.core.errors import CheckpointError, RollmillError
from rollmill.core.schema import coerce
from rollmill.core.stored_paths import RunPath
from rollmill.dataflow import Graph
from rollmill.programs.faults.replay import Replayed, has_fault, has_message, replay_fault
from rollmill.record.checkpoints import Checkpoints
from rollmill.record.metrics import check_metrics
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.reopening import reopen
from rollmill.runs.saved_run import check_identity, read_options, read_saved, read_summary


class Examination(NamedTuple):
    """Findings about the files of a run, and problems found in the files."""

    notes: list[str]
    """A line for each part of the run that is intact."""
    complaints: list[str]
    """A sentence for each problem found in the run."""


def replay(
    run_dir: str | PathLike[str],
    *,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> Replayed:
    """Recomputes the step at which a run failed, operation by operation, to find the line that produced a
    non-finite value.

    Args:
        run_dir: directory of a run that stopped with a `NonFiniteError`.
        algorithm: the graph, which must be passed again if the run was created with custom Python objects.
        imports: modules to import first, because they register the environment, network or algorithm.
        trust: allow this run directory to import the modules that it names, now and later.

    Returns:
        The fault, the line that produced the value, and the inputs and outputs of the step.

    Raises:
        CheckpointError: the directory is not a run, or contains no fault that can be replayed.

    Examples:
        >>> rollmill.replay("runs/failed").line
    """
    run = RunDirectory.open(coerce("run_dir", RunPath, run_dir))
    graph, _ = reopen(run, algorithm=algorithm, imports=imports, trust=trust)
    return replay_fault(graph, run.fault)


def kept_fault(run_dir: str | PathLike[str]) -> bool:
    """Returns whether a run contains a fault to replay, or the message of a fault that cannot be replayed.

    Raises:
        CheckpointError: the directory is not a run.
    """
    folder = RunDirectory.open(coerce("run_dir", RunPath, run_dir)).fault
    return has_fault(folder) or has_message(folder)


def examine(run_dir: str | PathLike[str]) -> Examination:
    """Checks the files of a run without importing, compiling or changing anything.

    Raises:
        CheckpointError: the directory is not a run.
    """
    run = RunDirectory.open(coerce("run_dir", RunPath, run_dir))
    examined = Examination([], [])
    for look in (_configuration, _checkpoints, _metrics, _summary):
        try:
            look(run, examined)
        except (RollmillError, OSError) as error:
            examined.complaints.append(str(error))
    return examined


def _configuration(run: RunDirectory, examined: Examination) -> None:
    saved = read_saved(run)
    read_options(run)
    algorithm, environment = saved.graph["algorithm"], saved.graph["environment"]
    changed = f", changed {len(saved.changes)} times" if saved.changes else ""
    examined.notes.append(f"configuration: {algorithm} on {environment}{changed}")


def _checkpoints(run: RunDirectory, examined: Examination) -> None:
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        whole = []
        for iteration in checkpoints.iterations():
            try:
                damage = _damage_of(run, checkpoints, iteration)
            except CheckpointError:
                if iteration in checkpoints.iterations():
                    raise
                continue
            if damage is None:
                whole.append(iteration)
            elif iteration in checkpoints.iterations():  # otherwise a training run has deleted it meanwhile
                examined.complaints.append(
                    f"checkpoint {iteration} in {run.checkpoints.path} is damaged ({damage})."
                )
    if not whole:
        raise CheckpointError(
            f"{run.root} has no intact checkpoint. hint: `rollmill resume {run.root}` starts it from the "
            "beginning."
        )
    examined.notes.append(f"checkpoints: {len(whole)} intact, of iterations {', '.join(map(str, whole))}")


def _damage_of(run: RunDirectory, checkpoints: Checkpoints, iteration: int) -> str | None:
    """Returns the damage of a checkpoint, or None. Raises a `CheckpointError` if it belongs to another run."""
    damage = checkpoints.check(iteration)
    if damage is None:
        check_identity(run, checkpoints.metadata(iteration), iteration)
    return damage


def _metrics(run: RunDirectory, examined: Examination) -> None:
    if not run.folder.has(run.metrics_file.name):
        examined.notes.append("metrics: none yet")
        return
    count, complaint = check_metrics(run.folder)
    examined.notes.append(f"metrics: {count} iterations")
    if complaint:
        examined.complaints.append(complaint)


def _summary(run: RunDirectory, examined: Examination) -> None:
    summary = read_summary(run)
    if summary is None:
        examined.notes.append("summary: none yet, because the run has not ended")
        return
    examined.notes.append(f"summary: {summary['status']} after iteration {summary['iterations']}")
