"""Initialisation from the weights of another run, on the same or another environment, or from a recording.

Copies all floating-point arrays that both learners have, with the same path and the same shape. Arrays that belong
together, such as the arrays of a layer or of running statistics, are copied together or not at all. Optimiser
states, update counts, hyperparameters and an adapted learning rate are not copied.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, PyTree

from rollmill.core.errors import UsageError
from rollmill.dataflow import Graph, State, start_learner
from rollmill.programs.compiled import begin_learner, start_state, state_shapes
from rollmill.runs.options import RunOptions

ANEW = ("optimiser", "optimisers", "progress", "hyperparameters", "rate_scale")
"""Fields of a learner that are not taken from another run."""

OBSERVATIONS = "weights.observations"
"""Place of the statistics by which a policy normalises observations."""


class GivenWeights(NamedTuple):
    """Initial arrays that replace random ones."""

    arrays: Mapping[str, np.ndarray]
    """By their place in the learner."""
    source: Mapping[str, Any]
    """The run and the iteration that they come from, and the places in the learner that it lacks; or the recording
    that they imitate."""
    unread: str | None = None
    """Statistics of the run's observations, if the training has none of these."""

    def __str__(self) -> str:
        if "file" in self.source:
            return "begins with weights that imitate {transitions:,} transitions of {file}: {agreement}".format(
                **self.source
            )
        source, lacking = self.source, self.source["lacking"]
        more = f"; {', '.join(lacking)} start with random weights" if lacking else ""
        if self.unread is not None:
            more += (
                f"; {self.unread} are left out, although its network learned from normalised observations. hint: "
                "normalize_observations=True (--normalize-observations)"
            )
        return (
            f"starts with {len(self.arrays)} arrays of {source['run']} after iteration {source['iteration']}{more}"
        )


def given_weights(graph: Graph, options: RunOptions, imports: Sequence[str]) -> GivenWeights | None:
    """Reads the initial weights from the first seed of `options.start_from`, or learns them from `options.clone`.

    Returns None without either.

    Raises a `CheckpointError` if that is not a run with a complete checkpoint, and a `UsageError` if the two
    learners have nothing in common.
    """
    if options.clone is not None:
        return _cloned(graph, options, options.clone)
    if options.start_from is None:
        return None
    from rollmill.policies.policies import restore_run

    run, other, seeds, found = restore_run(options.start_from, imports=imports)
    learner = found.state.learner
    if len(seeds) > 1:
        learner = jax.tree.map(lambda leaf: leaf[0], learner)
    theirs = _weights_of(learner)
    ours = _weights_of(jax.eval_shape(lambda: start_learner(graph, jax.random.key(0))))
    unfit = {_holder(place) for place, leaf in ours.items() if not _fits(leaf, theirs.get(place))}
    arrays = {place: np.asarray(theirs[place]) for place in ours if _holder(place) not in unfit}
    if not any(array.ndim for array in arrays.values()):
        raise UsageError(
            f"start_from={options.start_from}: {_name(other)} has no weights with the same names and shapes as "
            f"those of {_name(graph)}. hint: give both the same network."
        )
    lacking = sorted(set(ours) - set(arrays))
    source = {"run": str(run.root.resolve()), "iteration": found.iteration, "lacking": lacking}
    return GivenWeights(arrays, source, OBSERVATIONS if _has_statistics(theirs) > _has_statistics(ours) else None)


def _cloned(graph: Graph, options: RunOptions, file: Path) -> GivenWeights:
    """Returns weights that imitate a recording."""
    from rollmill.training.cloning import UPDATES, clone

    cloned = clone(graph, file, seed=options.seed, updates=options.clone_updates or UPDATES)
    is_box = isinstance(graph.action_space, spaces.Box)
    agreement = (
        f"mean squared error {cloned.agreement:.3g} of actions"
        if is_box
        else f"{cloned.agreement:.1%} of its actions are the most likely ones"
    )
    arrays = {place: np.asarray(leaf) for place, leaf in _weights_of(cloned.learner).items()}
    source = {
        "file": str(file),
        "sha256": cloned.digest,
        "transitions": cloned.transitions,
        "agreement": agreement,
    }
    return GivenWeights(arrays, source)


def begin_with(graph: Graph, seeds: Sequence[int], given: GivenWeights, state: State | None = None) -> State:
    """Returns the training state before the first iteration, with the same initial weights for all seeds.

    By default the state is created here. Environments stepped by Python are not part of it.
    """
    if state is None:
        state = _learner_alone(graph, seeds) if graph.host is not None else start_state(graph, seeds)

    def placed(path: Any, leaf: Array) -> Array:
        array = given.arrays.get(_place(path).removeprefix("learner."))
        if array is None or _place(path[:1]) != "learner":
            return leaf
        return jax.device_put(jnp.broadcast_to(array, leaf.shape).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map_with_path(placed, state)  # which takes the states of several seeds, too


def _learner_alone(graph: Graph, seeds: Sequence[int]) -> State:
    """Returns a state whose environments have not begun: zeros in their places."""
    empty, key = jax.tree.map(_zeros, state_shapes(graph, seeds)), jax.random.key(seeds[0])
    return dataclasses.replace(empty, key=key, learner=begin_learner(graph, key))


def _zeros(shape: jax.ShapeDtypeStruct) -> Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)


def _weights_of(learner: PyTree) -> dict[str, Any]:
    """Returns the learner's float arrays that can be copied, by path."""
    leaves = {_place(path): leaf for path, leaf in jax.tree.leaves_with_path(learner)}
    return {
        place: leaf for place, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating) and _taken(place)
    }


def _has_statistics(arrays: Mapping[str, Any]) -> bool:
    return any(place.startswith(f"{OBSERVATIONS}.") for place in arrays)


def _place(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _taken(place: str) -> bool:
    return not set(place.split(".")) & set(ANEW)


def _name(graph: Graph) -> str:
    return f"{graph.settings['algorithm']} on {graph.settings['environment']}"


def _holder(place: str) -> str:
    """Returns the layer, or the statistics, that an array belongs to."""
    return place.rpartition(".")[0]


def _fits(ours: Any, theirs: Any) -> bool:
    return theirs is not None and ours.shape == theirs.shape
