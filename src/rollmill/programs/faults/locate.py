"""Locates the origin of a NaN or an infinity, and saves the state needed to replay it.

Inside the compiled program, one flag per fragment says whether its outputs were finite. If an output was not
finite, the iteration is computed again from the previous state, step by step, and every value is checked. This is
possible because an iteration depends only on its state.

Shape letters: `T` steps, `E` environments, `N` rows of a minibatch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree, UInt32

from rollmill.core.errors import CheckpointError, NonFiniteError, StorageError
from rollmill.core.folder import Folder
from rollmill.dataflow import (
    COLLECT,
    LEARN,
    Batch,
    Graph,
    Learner,
    Metrics,
    State,
    Step,
    Trajectory,
    all_finite,
    collect,
    evaluate_schedules,
    identity,
    iteration_key,
    learn_minibatch,
    minibatch_gather,
    shuffled_rows,
)
from rollmill.programs.compiled import CompiledProgram
from rollmill.programs.compiler_options import program_options
from rollmill.programs.dispatch import Window
from rollmill.programs.states import held_leaves
from rollmill.record.checkpoints import Checkpoints
from rollmill.record.json_files import write_json
from rollmill.record.run_directory import RunDirectory

MESSAGE = "message.json"
"""File with the message of a run that stopped at a non-finite number, if there is no state to replay."""

SHOWN_ENVIRONMENTS = 8

ALMOST_ONE = 0.9999
"""Threshold from which a flag counts as true. Flags are averaged over devices, and the mean may be rounded."""

FINITE = "finite/"
"""Prefix of the metrics that tell whether all outputs of a fragment were finite."""

NOT_REPLAYED = (
    "The last good checkpoint is kept. Earlier data, such as the contents of a replay memory, was overwritten in "
    "this iteration.\nhint: a smaller learning_rate, or max_grad_norm."
)


NO_CHECKPOINT = "The iteration cannot be computed again, because there is no checkpoint to start from."


@dataclass(frozen=True)
class Fault:
    """The place in an iteration at which the first non-finite number appeared."""

    fragment: Literal["environment", "policy", "gradients", "update"]
    iteration: int
    """Number of the iteration, counted from 1."""
    environments: tuple[int, ...]
    """Global indices of the affected environments. Empty if the fault does not belong to single environments."""
    step: int | None = None
    """Step of the rollout in which the fault first appeared, or None if it appeared in learning."""
    epoch: int | None = None
    minibatch: int | None = None
    seed_index: int = 0

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.environments[:SHOWN_ENVIRONMENTS]))
        more = len(self.environments) - SHOWN_ENVIRONMENTS
        environments = f"environments {shown}{f' and {more} more' if more > 0 else ''}"
        place = "" if self.step is None else f", step {self.step}"
        place += "" if self.epoch is None else f", epoch {self.epoch}, minibatch {self.minibatch}"
        return (
            f"a non-finite number in fragment '{self.fragment}' at iteration {self.iteration}{place}, "
            f"{environments if self.environments else 'in no single environment'}"
        )


def is_finite(metrics: Mapping[str, np.ndarray | np.floating]) -> bool:
    """Returns whether every fragment's outputs were finite in the iteration with these metrics."""
    return all(np.all(value > ALMOST_ONE) for name, value in metrics.items() if name.startswith(FINITE))


def stop_at_nonfinite(
    first: int, rows: Sequence[Mapping[str, Any]], advice: str, *, counts: Sequence[int] | None = None
) -> None:
    """Raises `NonFiniteError` if metrics of iterations after the first `first` ones are not finite.

    The error names the fragments and the iteration, and ends with `advice`.
    """
    for last, row in zip(accumulate(counts or [1] * len(rows), initial=first + 1), rows, strict=False):
        if is_finite(row):
            continue
        fragments = [name.removeprefix("finite/") for name, value in row.items() if not is_finite({name: value})]
        raise NonFiniteError(
            f"{' and '.join(fragments) or 'the loss'} returned a non-finite number at iteration {last}. {advice}"
        )


def stop_at_fault(graph: Graph, program: CompiledProgram, window: Window, directory: Folder) -> None:
    """Raises `NonFiniteError` if an iteration of the window was not finite, after saving its state to `directory`.

    The error names the fragment, the iteration and the environments.
    """
    if program.sums_iterations:
        return stop_at_nonfinite(window.first, window.metrics, NOT_REPLAYED, counts=window.counts)
    bad = next((i for i, metrics in enumerate(window.metrics) if not is_finite(metrics)), None)
    if bad is None:
        return None
    before = _state_before(graph, program, window, window.first + bad, directory)
    if before is None:
        return stop_at_nonfinite(window.first, window.metrics, NO_CHECKPOINT)
    seed_index, state = _failing_seed(before, window.metrics[bad])
    fault = replace(find_fault(graph, state), seed_index=seed_index)
    message = f"{fault}. Training stopped; the last good checkpoint is kept."
    try:
        _save(directory, fault, state)
    except (StorageError, CheckpointError) as error:
        raise NonFiniteError(f"{message} The inputs of the step could not be saved: {error}") from error
    command = RunDirectory(directory.root).command("doctor")
    raise NonFiniteError(
        f"{message} `{command}`, or `rollmill.replay` from Python, replays the step un-jitted and shows where it "
        "happens."
    )


def _state_before(
    graph: Graph, program: CompiledProgram, window: Window, iteration: int, directory: Folder
) -> PyTree | None:
    """Computes the state after some iterations again, from the state before the window.

    If that is gone, because the program `loses_state`, from the newest checkpoint, or None if there is none.
    """
    state, done = window.before, window.first
    if program.loses_state and isinstance(program.state, tuple):
        return None  # each seed has its own checkpoints
    if program.loses_state:
        for leaf in jax.tree.leaves(window.after):
            leaf.delete()
        try:
            with Checkpoints(RunDirectory(directory.root).checkpoints, read_only=True) as checkpoints:
                given = held_leaves(graph, program.state.key.shape)
                restored = checkpoints.restore(program.state, given=given._replace(left_out=None))
        except CheckpointError:
            restored = None
        if restored is None or restored.iteration > iteration:
            return None
        state, done = program.place(restored.state), restored.iteration
    state = program.to_be_overwritten(state)
    for _ in range(iteration - done):
        state, _ = program.advance(state)
    return jax.device_get(state)


def _failing_seed(state: PyTree, metrics: Mapping[str, np.ndarray]) -> tuple[int, State]:
    finite = [np.atleast_1d(value) for name, value in metrics.items() if name.startswith("finite/")]
    seeds = np.all(np.stack(finite) > ALMOST_ONE, axis=0)
    index = int(np.argmin(seeds))
    if isinstance(state, tuple):  # seeds take turns
        return index, state[index]
    return (index, state) if seeds.size == 1 else (index, jax.tree.map(lambda leaf: leaf[index], state))


def _save(directory: Folder, fault: Fault, state: State) -> None:
    with Checkpoints(directory, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(fault.iteration - 1, state, metadata={})
    write_json(directory, "fault.json", vars(fault))


# --- finding ------------------------------------------------------------------------------------------


def find_fault(graph: Graph, state: State) -> Fault:
    """Repeats the iteration that starts from `state`, and returns where its first non-finite number appears.

    `state` is the training state of one seed, in host memory.
    """
    iteration = int(state.iteration) + 1
    trajectory = roll_out(graph, state)
    fault = _fault_of_rollout(trajectory.steps, iteration)
    if fault is not None:
        return fault
    for step in learning_steps(graph, state, trajectory):
        in_gradients = step.metrics["finite/gradients"] < 1
        if in_gradients or not all_finite(graph.weights(step.advanced)):
            fragment = "gradients" if in_gradients else "update"
            bad = bad_rows(graph, step)
            # only rows with non-finite gradients of their own
            environments = tuple(int(i) for i in np.unique(np.asarray(step.rows)[bad] % graph.loops.num_envs))
            return Fault(fragment, iteration, environments, epoch=step.epoch, minibatch=step.minibatch)
    return Fault("update", iteration, ())


def roll_out(graph: Graph, state: State) -> Trajectory:
    """Recomputes the trajectory of the iteration that starts from `state`."""
    weights, key = graph.weights(state.learner), iteration_key(state.key, int(state.iteration), COLLECT)
    return jax.jit(partial(collect, graph), compiler_options=program_options())(weights, state.collector, key)[1]


class LearningStep(NamedTuple):
    """One minibatch of an iteration, with the learner states before and after it."""

    epoch: int
    minibatch: int
    learner: Learner
    rows: UInt32[Array, " N"]
    batch: Batch
    advanced: Learner
    metrics: Metrics


def learning_steps(graph: Graph, state: State, trajectory: Trajectory) -> Iterator[LearningStep]:
    """Recomputes the minibatches of the iteration that starts from `state`, and yields them with the learner
    states.
    """
    loops = graph.loops
    prepare = jax.jit(partial(graph.prepare, reduce=identity, replicas=1))
    learner, batch = prepare(state.learner, trajectory)
    learner = evaluate_schedules(graph, learner)
    gather, learn = minibatch_gather(batch, loops), jax.jit(partial(learn_minibatch, graph))
    # the lambda is needed because `jit` hashes its function, and a tree of arrays has no hash
    take = jax.jit(lambda rows: gather(rows))
    for epoch in range(loops.epochs):
        for number, rows in enumerate(_rows_of_epoch(graph, state, epoch)):
            advanced, metrics = learn(learner, take(rows))
            yield LearningStep(epoch, number, learner, rows, take(rows), advanced, metrics)
            learner = advanced


def _fault_of_rollout(steps: Step, iteration: int) -> Fault | None:
    """Returns the first fault in a rollout, if any.

    Within a step, the policy comes first, because it reads what the environment returned in the previous step.
    """
    seen = _bad_steps(steps.observation)
    decided = _bad_steps((steps.action, steps.extras))
    made = _bad_steps((steps.reward, steps.final_observation))
    stages = np.stack([seen, decided, made], axis=1)  # [T, 3, E], in chronological order
    if not stages.any():
        return None
    first = np.argmax(stages.reshape(-1, stages.shape[-1]).any(axis=1))
    step, stage = divmod(int(first), 3)
    environments = np.flatnonzero(stages[step, stage])
    step = max(step - 1, 0) if stage == 0 else step  # the previous step produced this observation
    fragment = "policy" if stage == 1 else "environment"
    return Fault(fragment, iteration, tuple(map(int, environments)), step=step)


def _rows_of_epoch(graph: Graph, state: State, epoch: int) -> Array:
    loops = graph.loops
    key = jax.random.fold_in(iteration_key(state.key, int(state.iteration), LEARN), epoch)
    return jax.jit(partial(shuffled_rows, loops=loops))(key, state.collector.index)


def bad_rows(graph: Graph, step: LearningStep) -> Bool[np.ndarray, " N"]:
    """Returns which rows of a minibatch have non-finite gradients or metrics when computed on their own."""

    def is_bad(row: Batch) -> Bool[Array, ""]:
        alone = jax.tree.map(lambda leaf: leaf[None], row)
        return all_finite(graph.gradients(step.learner, alone)) < 1

    conditioned = graph.condition(step.batch, identity)
    return np.asarray(jax.jit(lambda batch: jax.lax.map(is_bad, batch, batch_size=256))(conditioned))


def _bad_steps(tree: PyTree[Array]) -> Bool[np.ndarray, "T E"]:
    floats = [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    shape = jax.tree.leaves(tree)[0].shape[:2]
    bad = [~np.isfinite(leaf.astype(np.float32)).reshape(*shape, -1).all(axis=-1) for leaf in floats]
    return np.logical_or.reduce(bad) if bad else np.zeros(shape, bool)
