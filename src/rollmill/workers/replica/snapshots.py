"""Each replica's part of a snapshot as named arrays, and the training state assembled from all parts.

A role says which parts of the state its replicas own (`dataflow.OwnedPart`). The assembled state does not depend
on the placement, so a run can be resumed under another distribution policy.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.core.errors import CheckpointError
from rollmill.dataflow import Collector, Learner, OwnedPart, State
from rollmill.record.leaves import from_host, to_host
from rollmill.workers.protocol import SnapshotPart, send
from rollmill.workers.replica.context import ReplicaContext

COLLECTOR, LEARNER, RINGS = "collector.", "learner.", "rings."
ENVIRONMENT = "collector.environment"


class StatePart(NamedTuple):
    """One replica's part of a snapshot of the training state."""

    lowest: int
    """Global index of the replica's first environment."""
    arrays: Mapping[str, np.ndarray]
    replica: str
    """Name of the replica, such as `actor/0`."""
    owned_parts: frozenset[OwnedPart]
    """The parts of the training state that the replica's group owns."""


def state_part(context: ReplicaContext, state: State) -> dict[str, np.ndarray]:
    """Returns the leaves that this replica owns, from a state that contains only the replica's environments."""
    return (
        collector_part(context, state.collector)
        | rings_part(context, state.rings)
        | learner_part(context, state.learner)
    )


def send_part(context: ReplicaContext, iteration: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Sends this replica's part of the state before an iteration to the coordinator."""
    send(context.control, SnapshotPart(iteration, int(context.index[0]), arrays))


def collector_part(context: ReplicaContext, collector: Collector) -> dict[str, np.ndarray]:
    """Returns the leaves of a collector that this replica owns, for a snapshot."""
    owned = context.role.owned_parts
    if OwnedPart.POLICY_INPUTS not in owned:
        return {}
    arrays = to_host({"collector": collector})
    whole = OwnedPart.ENVIRONMENTS in owned
    return {name: array for name, array in arrays.items() if whole or not name.startswith(ENVIRONMENT)}


def environment_part(context: ReplicaContext, states: Sequence[PyTree[Any]]) -> dict[str, np.ndarray]:
    """Returns environment states for a snapshot, in the order of the environments' indices, if this replica owns
    them.
    """
    if OwnedPart.ENVIRONMENTS not in context.role.owned_parts:
        return {}
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)
    return to_host({"collector": {"environment": joined}})


def learner_part(context: ReplicaContext, learner: Learner) -> dict[str, np.ndarray]:
    """Returns the leaves of the learner that this replica owns, and leaves that no fragment writes, for a
    snapshot.
    """
    owned = context.role.owned_parts
    if context.replica or not owned:
        return {}  # all replicas hold the same learner, and the first replica sends it
    others = frozenset[int]()
    if OwnedPart.PARAMETERS not in owned:
        others |= context.flow.updated_leaves
    if OwnedPart.STATISTICS not in owned:
        others |= context.flow.prepared_leaves
    arrays = to_host({"learner": learner})
    return {name: array for position, (name, array) in enumerate(arrays.items()) if position not in others}


def rings_part(context: ReplicaContext, rings: PyTree[Any]) -> dict[str, np.ndarray]:
    """Returns the replay memory of this replica's environments for a snapshot, if the replica owns one."""
    return to_host({"rings": rings}) if OwnedPart.REPLAY in context.role.owned_parts else {}


def assemble(blank: State, iteration: int, parts: Sequence[StatePart]) -> State:
    """Assembles the training state after `iteration` iterations from the parts of all replicas.

    `blank` provides the root key, and the environments if no group owns them because they begin anew. All other
    parts must come from their owners. A `CheckpointError` names a part that is missing or has another shape.
    """
    whole = to_host(blank)
    _check_whole(whole, iteration, parts)
    gathered: dict[str, list[np.ndarray]] = {"iteration": [np.asarray(iteration, np.int32)]}
    for part in sorted(parts, key=lambda part: part.lowest):
        for name, array in part.arrays.items():
            if name.startswith((COLLECTOR, RINGS)):  # these leaves have an axis of environments
                gathered.setdefault(name, []).append(array)
            else:
                gathered[name] = [array]
    for name, arrays in gathered.items():
        joined = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        if joined.shape != whole[name].shape:
            sent = f"{name} is {list(joined.shape)}, expected {list(whole[name].shape)}"
            raise CheckpointError(_unusable(iteration, sent))
        whole[name] = joined
    return from_host(whole, blank)


def _check_whole(whole: Mapping[str, np.ndarray], iteration: int, parts: Sequence[StatePart]) -> None:
    """Raises a `CheckpointError` with replica, part and leaf if a replica did not send all leaves that it owns."""
    for part in parts:
        if foreign := sorted(part.arrays.keys() - whole.keys()):
            raise CheckpointError(
                _unusable(iteration, f"{part.replica} sent {foreign[0]}, which does not belong to it")
            )
        for name in whole.keys() - part.arrays.keys():
            if (kind := _kind_by_environment(name)) in part.owned_parts:
                raise CheckpointError(_unusable(iteration, f"{part.replica} sent no {kind} ({name})"))
    sent = frozenset[str]().union(*(part.arrays for part in parts))
    for name in sorted(whole.keys() - sent):
        # the learner and the replay memory never begin anew, under any placement
        if name.startswith((LEARNER, RINGS)):
            kind = (
                f"{OwnedPart.PARAMETERS} or {OwnedPart.STATISTICS}"
                if name.startswith(LEARNER)
                else OwnedPart.REPLAY
            )
            raise CheckpointError(_unusable(iteration, f"{_owners(parts, kind)} sent no {kind} ({name})"))


def _kind_by_environment(name: str) -> OwnedPart | None:
    """Returns the part of the state that a leaf belongs to, if it is divided along the environments."""
    if name.startswith(RINGS):
        return OwnedPart.REPLAY
    if not name.startswith(COLLECTOR):
        return None
    return OwnedPart.ENVIRONMENTS if name.startswith(ENVIRONMENT) else OwnedPart.POLICY_INPUTS


def _owners(parts: Sequence[StatePart], kind: str) -> str:
    """Names the replicas that own a kind of state, or all of them if none does."""
    owners = [part.replica for part in parts if any(owned in kind for owned in part.owned_parts)]
    return " and ".join(owners or [part.replica for part in parts])


def _unusable(iteration: int, problem: str) -> str:
    return (
        f"the state after iteration {iteration} cannot be saved, because {problem}. The run keeps its earlier "
        "checkpoints. hint: this is a bug in Rollmill, or a worker runs another version; please report it."
    )


def share_of(
    state: State, index: range, *, learner: bool, environments: bool, rings: bool = False
) -> dict[str, np.ndarray]:
    """Returns the leaves of a restored state with which a replica begins, for the environments in `index`."""
    arrays = to_host({"learner": state.learner}) if learner else {}
    if learner and environments:
        arrays |= to_host({"key": state.key, "iteration": state.iteration})
    by_environment = {"collector": state.collector} if environments else {}
    by_environment |= {"rings": state.rings} if rings else {}
    return arrays | {name: a[index.start : index.stop] for name, a in to_host(by_environment).items()}


def restored_collector(context: ReplicaContext, shapes: Collector) -> Collector | None:
    """Returns this replica's collector from the checkpoint, or None if the replica begins without one."""
    return _restore(context, COLLECTOR, shapes)


def restored_rings(context: ReplicaContext, shapes: PyTree[jax.ShapeDtypeStruct]) -> PyTree[Any] | None:
    """Returns the replay memory of this replica's environments from the checkpoint, or None if it begins empty."""
    return _restore(context, RINGS, shapes)


def restored_learner(context: ReplicaContext) -> Learner | None:
    """Returns the learner from the checkpoint, or None at the beginning of a run."""
    return _restore(context, LEARNER, context.flow.state.learner)


def _restore(context: ReplicaContext, prefix: str, shapes: PyTree[Any]) -> Any:
    arrays, name = context.begin.arrays, prefix.rstrip(".")
    if not any(path.startswith(prefix) for path in arrays):
        return None
    return from_host(arrays, {name: shapes})[name]
