"""Evaluates the checkpoints of a run as they appear, while another process trains it."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from rollmill.core.errors import CheckpointError
from rollmill.core.types import NO_OPTIONS, Options
from rollmill.dataflow import State
from rollmill.envs import as_environment
from rollmill.policies.environments import evaluator_on
from rollmill.policies.loading import weights_of_seed
from rollmill.programs.evaluation.episodes import EvaluationEpisodes
from rollmill.programs.states import held_leaves, state_shapes
from rollmill.record.checkpoints import Checkpoints, GivenLeaves
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.reopening import reopen
from rollmill.runs.saved_run import check_identity

LOOK_SECONDS = 0.5
"""Seconds between two checks for new checkpoints."""


class WatchedCheckpoint(NamedTuple):
    """The evaluation of one checkpoint of a watched run."""

    iteration: int
    episodes: EvaluationEpisodes


def watch(
    run_dir: Path,
    *,
    env: str | None = None,
    env_options: Options = NO_OPTIONS,
    episodes: int = 100,
    seed: int = 0,
    train_seed: int | None = None,
    stochastic: bool = False,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> Iterator[WatchedCheckpoint]:
    """Evaluates the existing checkpoints of a run and then each new checkpoint, oldest first.

    One compiled program evaluates them all. It ends when no process trains the run and all checkpoints are
    evaluated. Checkpoints that the run deletes before they are evaluated are skipped. See `evaluate` for arguments
    and errors.
    """
    run = RunDirectory.open(run_dir)
    graph, options = reopen(run, imports=imports, trust=trust)
    own_weights = weights_of_seed(run, graph, options.seeds, train_seed)
    weights = jax.eval_shape(graph.weights, state_shapes(graph).learner)
    other = None if env is None else as_environment(env, env_options)
    play = evaluator_on(graph, weights, other, episodes=episodes, seed=seed, stochastic=stochastic)
    shapes = state_shapes(graph, options.seeds)
    given = held_leaves(graph, shapes.key.shape)
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        for iteration in _appearing(run, checkpoints):
            state = _restore(run, checkpoints, shapes, given, iteration)
            if state is not None:
                yield WatchedCheckpoint(iteration, play(own_weights(state)))


def _appearing(run: RunDirectory, checkpoints: Checkpoints) -> Iterator[int]:
    """Iterations of checkpoints as they appear, until no process trains the run in two looks."""
    last, quiet = -1, 0
    while quiet < 2:
        # The lock is checked before the checkpoints, because a run writes its last checkpoint while it holds the
        # lock.
        quiet = 0 if run.is_locked() else quiet + 1
        new = [iteration for iteration in checkpoints.iterations() if iteration > last]
        for iteration in new:
            last = iteration
            yield iteration
        if not new and quiet < 2:
            time.sleep(LOOK_SECONDS)


def _restore(
    run: RunDirectory, checkpoints: Checkpoints, shapes: State, given: GivenLeaves, iteration: int
) -> State | None:
    """Returns the state of a checkpoint. None if it was deleted in the meantime."""
    check = lambda number, metadata: check_identity(run, metadata, number)
    try:
        restored = checkpoints.restore(shapes, iteration=iteration, check=check, given=given)
    except CheckpointError:
        if iteration in checkpoints.iterations():
            raise
        return None
    return None if restored is None else restored.state
