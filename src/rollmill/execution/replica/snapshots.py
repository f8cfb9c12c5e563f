"""A replica's part of the training state, as named arrays; and all parts together as the state.

The state is the same whatever the placement: a run can go on under another distribution policy.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from rollmill.dataflow import Collector, Learner, State
from rollmill.execution.replica.context import ReplicaContext
from rollmill.record import from_host, to_host

COLLECTOR = "collector."
ENVIRONMENT = "collector.environment"


class StatePart(NamedTuple):
    """What one replica contributes."""

    lowest: int
    """The first of its environments."""
    arrays: Mapping[str, np.ndarray]


def collector_part(context: ReplicaContext, collector: Collector) -> dict[str, np.ndarray]:
    """The leaves of the collector that belong to this replica's fragments."""
    arrays = to_host({"collector": collector})
    whole = context.group.has("environment")
    return {name: array for name, array in arrays.items() if whole or not name.startswith(ENVIRONMENT)}


def environment_part(states: Sequence[PyTree[Any]]) -> dict[str, np.ndarray]:
    """The environments' states of all links, in the order of their indices."""
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)
    return to_host({"collector": {"environment": joined}})


def learner_part(context: ReplicaContext, learner: Learner) -> dict[str, np.ndarray]:
    """The leaves of the learner that this replica's fragments write, and those that nobody writes."""
    if context.replica:
        return {}  # all replicas hold the same
    own = frozenset(range(len(jax.tree.leaves(learner))))
    if not context.group.has("update"):
        own = own - context.flow.updated
    if not context.group.has("gradients"):
        own = own - context.flow.prepared
    arrays = to_host({"learner": learner})
    return {name: array for place, (name, array) in enumerate(arrays.items()) if place in own}


def assemble(blank: State, iteration: int, parts: Sequence[StatePart]) -> State | None:
    """The whole state; None while a part is missing.

    Args:
        blank: a state at the beginning, from which leaves come that no part holds: environments that begin anew.
        iteration: that the state is before.
        parts: of all replicas.
    """
    found: dict[str, list[np.ndarray]] = {"iteration": [np.asarray(iteration, np.int32)]}
    for part in sorted(parts, key=lambda part: part.lowest):
        for name, array in part.arrays.items():
            if name.startswith(COLLECTOR):
                found.setdefault(name, []).append(array)
            else:
                found[name] = [array]
    whole = to_host(blank)
    if any(name.startswith("learner.") and name not in found for name in whole):
        return None
    for name, arrays in found.items():
        joined = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        if joined.shape != whole[name].shape:
            return None
        whole[name] = joined
    return from_host(whole, blank)


def share_of(state: State, index: range, *, learner: bool, environments: bool) -> dict[str, np.ndarray]:
    """What a replica with these environments is given of a restored state."""
    arrays = to_host({"learner": state.learner}) if learner else {}
    if learner and environments:
        arrays |= to_host({"key": state.key, "iteration": state.iteration})
    if environments:
        collector = to_host({"collector": state.collector})
        arrays |= {name: array[index.start : index.stop] for name, array in collector.items()}
    return arrays


def restored_collector(context: ReplicaContext, shapes: Collector) -> Collector | None:
    """The collector of this replica out of a checkpoint; None where it begins anew."""
    if not any(name.startswith(COLLECTOR) for name in context.restored):
        return None
    return from_host(context.restored, {"collector": shapes})["collector"]


def restored_learner(context: ReplicaContext, shapes: PyTree[jax.ShapeDtypeStruct]) -> Learner | None:
    """The learner out of a checkpoint; None at the beginning."""
    return from_host(context.restored, {"learner": shapes})["learner"] if context.restored else None
