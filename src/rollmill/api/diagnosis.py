"""Replays where a run met a number that was not finite."""

from collections.abc import Sequence
from pathlib import Path

from rollmill.api.training import reopen
from rollmill.dataflow import Graph
from rollmill.execution import Replayed, replay_fault
from rollmill.record import RunDirectory


def replay(run_dir: str | Path, *, algorithm: Graph | None = None, imports: Sequence[str] = ()) -> Replayed:
    """Computes the step at which a run stopped again, operation by operation.

    Args:
        run_dir: directory of a run that stopped with a `NonFiniteError`.
        algorithm: the graph again, where the run was made with parts that only Python has.
        imports: modules to import first, because they register the environment.

    Returns:
        The fault, the line that made the number, and the step's inputs and outputs.

    Raises:
        CheckpointError: if the directory is no run, or holds no fault that can be replayed.
    """
    run = RunDirectory.open(Path(run_dir))
    graph, _ = reopen(run, algorithm=algorithm, imports=imports)
    return replay_fault(graph, run.fault)
