"""Replays the step in which a number became non-finite, without `jit`, so that the fault shows in plain Python."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.core.errors import CheckpointError
from rollmill.core.folder import Folder
from rollmill.core.schema import read_as
from rollmill.core.types import is_key
from rollmill.core.user_frame import user_frame
from rollmill.dataflow import (
    COLLECT,
    Collector,
    Graph,
    State,
    adapt_hyperparameters,
    identity,
    iteration_key,
    step_one,
)
from rollmill.programs.faults.locate import MESSAGE, Fault, bad_rows, learning_steps, roll_out
from rollmill.programs.states import held_leaves, state_shapes
from rollmill.record.checkpoints import Checkpoints
from rollmill.record.json_files import read_json

FAULT = "fault.json"

REPLAYED_ROWS = 8
"""Maximum number of rows of a minibatch that are replayed, because execution without `jit` is slow."""


class Replayed(NamedTuple):
    """The result of replaying a faulty step without `jit`."""

    fault: Fault
    line: str | None
    """`file:line: source` of the operation that produced the non-finite number, or None if no single operation
    did."""
    inputs: dict[str, PyTree[np.ndarray]]
    """Arguments of the fragment, by name."""
    outputs: PyTree[np.ndarray]
    """Results of the replayed fragment, as host arrays."""


def replay_fault(graph: Graph, directory: Folder) -> Replayed:
    """Replays the fault saved in `directory`. Raises a `CheckpointError` if there is no fault."""
    if not has_fault(directory):
        raise CheckpointError(_nothing_to_replay(directory))
    fault = _read_fault(graph, directory)
    with Checkpoints(directory, read_only=True) as checkpoints:
        restored = checkpoints.restore(state_shapes(graph), given=held_leaves(graph))
    if restored is None:
        raise CheckpointError(f"{directory.path} contains no state to replay from.")
    rollout = fault.fragment in ("environment", "policy")
    if not rollout and fault.epoch is None:
        raise CheckpointError(
            f"{fault}: the non-finite number did not occur again when the iteration was recomputed on one "
            "device, so no single step can be replayed. The values are close to overflow. hint: look for large "
            "rewards or learning rates."
        )
    return (_replay_step if rollout else _replay_minibatch)(graph, restored.state, fault)


def has_fault(directory: Folder) -> bool:
    """Returns whether `directory` holds a fault that can be replayed."""
    return directory.has(FAULT)


def has_message(directory: Folder) -> bool:
    """Returns whether `directory` holds the message of a run that stopped at a non-finite number."""
    return directory.has(MESSAGE)


def _read_fault(graph: Graph, directory: Folder) -> Fault:
    where = str(directory.path / FAULT)
    fault: Fault = read_as(Fault, read_json(directory, FAULT), where=where, error=CheckpointError)
    loops = graph.loops
    limits = {
        "iteration": (fault.iteration - 1, loops.iterations),
        "environments": (max(fault.environments, default=0), loops.num_envs),
        "step": (fault.step or 0, loops.num_steps),
        "epoch": (fault.epoch or 0, loops.epochs),
        "minibatch": (fault.minibatch or 0, loops.num_minibatches),
    }
    for name, (value, limit) in limits.items():
        if not 0 <= value < limit or min(fault.environments, default=0) < 0:
            raise CheckpointError(f"{where}: {name} is beyond the range of this run, {limit}.")
    if fault.fragment in ("environment", "policy") and (fault.step is None or not fault.environments):
        raise CheckpointError(f"{where}: step or environments are missing.")
    return fault


def _nothing_to_replay(directory: Folder) -> str:
    if not directory.has(MESSAGE):
        return f"{directory.root} has nothing to replay: it was not stopped by a non-finite number."
    message = str(read_json(directory, MESSAGE).get("message"))
    said = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in message)
    return (
        f"{directory.root} stopped at a non-finite number. It ran in several processes and has no state to "
        f"replay from. Its message was: {said}"
    )


def _replay_step(graph: Graph, state: State, fault: Fault) -> Replayed:
    weights, index = graph.weights(state.learner), fault.environments[0]
    collector: Collector = jax.tree.map(lambda leaf: leaf[index], state.collector)
    key = jax.random.fold_in(iteration_key(state.key, int(state.iteration), COLLECT), index)
    step = jax.jit(lambda collector, t: step_one(graph, weights, collector, key, t)[0])
    for t in range(fault.step or 0):
        collector = step(collector, t)
    line, (_, made) = _run_unjitted(lambda: step_one(graph, weights, collector, key, fault.step or 0))
    inputs = {"observation": collector.observation, "state": collector.environment, "action": made.action}
    outputs = {"extras": made.extras, "reward": made.reward, "observation": made.final_observation}
    return Replayed(fault, line, *_on_host((inputs, outputs)))


def _replay_minibatch(graph: Graph, state: State, fault: Fault) -> Replayed:
    steps = learning_steps(graph, state, roll_out(graph, state))
    step = next(s for s in steps if (s.epoch, s.minibatch) == (fault.epoch, fault.minibatch))
    # rows with non-finite values of their own first
    order = np.argsort(~bad_rows(graph, step), kind="stable")[:REPLAYED_ROWS]
    batch = jax.tree.map(lambda leaf: leaf[order], graph.condition(step.batch, identity))

    def learn():
        gradients, metrics = graph.gradients(step.learner, batch)
        return graph.weights(graph.update(adapt_hyperparameters(graph, step.learner, metrics), gradients)), metrics

    line, (_, metrics) = _run_unjitted(learn)
    return Replayed(fault, line, *_on_host(({"samples": batch.samples}, metrics)))


def _run_unjitted(function: Callable[[], Any]) -> tuple[str | None, Any]:
    """Runs operation by operation, and returns the line of the first that makes a NaN, or else an infinity."""
    line = None
    with jax.disable_jit():
        for check in (jax.debug_nans, jax.debug_infs):
            try:
                with check(True):
                    function()
            except FloatingPointError as error:
                line = line or user_frame(error)
    return line, function()


def _on_host(tree: Any) -> Any:
    return jax.device_get(jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x.dtype) else x, tree))
