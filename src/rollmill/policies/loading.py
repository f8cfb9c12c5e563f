"""Loads trained policies from runs."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import NamedTuple

import jax

from rollmill.core.errors import CheckpointError, UsageError
from rollmill.core.schema import coerce
from rollmill.core.stored_paths import RunPath
from rollmill.dataflow import Graph, State, Weights
from rollmill.policies.policy import LoadedRun, Policy
from rollmill.programs.states import held_leaves, state_shapes
from rollmill.record.checkpoints import Checkpoints, Restored
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.options import RunOptions
from rollmill.runs.reopening import reopen
from rollmill.runs.saved_run import check_identity

NEWEST, BEST = "last", "best"
"""Checkpoint names. Any other checkpoint is given by the number of its iteration."""


def load(
    run_dir: str | PathLike[str],
    *,
    checkpoint: str | int = "last",
    seed: int | None = None,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> Policy:
    """Returns the policy of a run: `policy = rollmill.load(run)`, `action = policy.action(observation)`.

    Args:
        run_dir: directory of the run.
        checkpoint: `last`; the number of an iteration; or `best`, the checkpoint with the best mean return over
            seeds, from evaluations if the run had any.
        seed: the seed to load, if the run trained several. Default: the first.
        algorithm: the graph, if the run was created with parts that exist only in Python.
        imports: modules to import first, because they register the environment, network or algorithm.
        trust: allow this run directory to import the modules that it names, now and later. A run that was created
            on this machine needs no permission.

    Examples:
        >>> policy = rollmill.load("runs/cartpole", checkpoint="best")
        >>> policy.action([0.0, 0.1, 0.0, -0.1])
    """
    loaded = load_weights(
        run_dir, checkpoint=checkpoint, seed=seed, algorithm=algorithm, imports=imports, trust=trust
    )
    return Policy(loaded)


def load_weights(
    run_dir: str | PathLike[str],
    *,
    checkpoint: str | int = "last",
    seed: int | None = None,
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> LoadedRun:
    """Loads the graph of a run and the weights of its policy. See `load` for arguments and errors."""
    found = restore_run(run_dir, checkpoint=checkpoint, algorithm=algorithm, imports=imports, trust=trust)
    weights_of = weights_of_seed(found.run, found.graph, found.seeds, seed)
    weights = weights_of(found.restored.state)
    of_several = None if len(found.seeds) == 1 else found.seeds[0] if seed is None else seed
    return LoadedRun(found.graph, weights, found.restored.iteration, found.run.root.resolve().name, of_several)


def weights_of_seed(
    run: RunDirectory, graph: Graph, seeds: Sequence[int], seed: int | None
) -> Callable[[State], Weights]:
    """Returns a function from a run's training state to the policy weights of one seed, by default the first.

    Raises a `UsageError` if the run did not train this `seed`.
    """
    if seed is not None and seed not in seeds:
        raise UsageError(
            f"seed={seed} was not trained in {run.root}, which has the seeds {', '.join(map(str, seeds))}."
        )
    if len(seeds) == 1:
        return lambda state: graph.weights(state.learner)
    place = 0 if seed is None else seeds.index(seed)
    return lambda state: jax.tree.map(lambda leaf: leaf[place], graph.weights(state.learner))


class RestoredRun(NamedTuple):
    """A reopened run together with the training state of one of its checkpoints."""

    run: RunDirectory
    graph: Graph
    seeds: tuple[int, ...]
    restored: Restored


def restore_run(
    run_dir: str | PathLike[str],
    *,
    checkpoint: str | int = "last",
    algorithm: Graph | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> RestoredRun:
    """Loads a run's graph and the training state of one of its checkpoints. See `load` for the arguments.

    Raises a `CheckpointError` if the directory is not a run, or has no complete checkpoint.
    """
    run = RunDirectory.open(coerce("run_dir", RunPath, run_dir))
    graph, options = reopen(run, algorithm=algorithm, imports=imports, trust=trust)
    return _restore(run, graph, options, checkpoint)


def _restore(run: RunDirectory, graph: Graph, options: RunOptions, checkpoint: str | int) -> RestoredRun:
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        chosen = _iteration(run, checkpoints, checkpoint)
        check = lambda iteration, metadata: check_identity(run, metadata, iteration)
        shapes = state_shapes(graph, options.seeds)
        given = held_leaves(graph, shapes.key.shape)
        restored = checkpoints.restore(shapes, iteration=chosen, check=check, given=given)
    if restored is None:
        raise CheckpointError(
            f"{run.root} has no checkpoint yet. hint: `{run.command('resume')}` starts the run from the beginning."
        )
    return RestoredRun(run, graph, options.seeds, restored)


def restore_newest(run_dir: str | PathLike[str], *, count: int, imports: Sequence[str] = ()) -> list[RestoredRun]:
    """Loads the newest checkpoints of a run, at most `count`, oldest first.

    Raises a `CheckpointError` if the directory is not a run, has no checkpoint, or contains a damaged one.
    """
    run = RunDirectory.open(coerce("run_dir", RunPath, run_dir))
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        newest = checkpoints.iterations()[-count:]
    chosen: list[str | int] = [*newest] or [NEWEST]  # raises the error if there is no checkpoint
    graph, options = reopen(run, imports=imports)
    return [_restore(run, graph, options, iteration) for iteration in chosen]


def _iteration(run: RunDirectory, checkpoints: Checkpoints, checkpoint: str | int) -> int | None:
    """Returns the iteration of a checkpoint, or None for the last, which an earlier checkpoint may replace."""
    if checkpoint == BEST:
        best = checkpoints.best()
        if best is None:
            raise UsageError(
                f"{run.root} has no best checkpoint: none was saved after enough episodes for a mean return (and "
                "keep_best=0 keeps none). hint: use the last checkpoint."
            )
        return best
    if checkpoint == NEWEST:
        return None
    if not str(checkpoint).isdecimal():
        raise UsageError(
            f"checkpoint={checkpoint!r} must be {NEWEST}, {BEST} or the iteration of a saved checkpoint: "
            f"{', '.join(map(str, checkpoints.iterations())) or 'none'}."
        )
    return int(checkpoint)
