"""Initial weights from another run, on the same or another environment, or from a recording.

All floating-point arrays that both learners have with the same path and shape are copied. Arrays that belong
together, such as the arrays of a layer or of running statistics, are copied together or not at all. Optimiser
states, update counts, hyperparameters, an adapted learning rate and a pool of opponents are not copied. Target
networks that the other learner lacks begin equal to the networks that they follow. A pool can be filled with the
checkpoints of a run.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import is_key
from rollmill.dataflow import Graph, State, start_learner
from rollmill.envs import RunningStatistics
from rollmill.programs.states import begin_learner, start_state, state_shapes
from rollmill.runs.options import RunOptions

ANEW = ("optimiser", "optimisers", "progress", "hyperparameters", "rate_scale", "pool", "opponents")
"""Fields of a learner that are always initialised, and never copied from another run."""

TARGETS = ("target", "targets")
"""Fields in which learners keep target networks. Multi-agent learners keep statistics of targets there."""

OBSERVATIONS = (
    "its networks learned from normalised observations",
    "normalize_observations=True (--normalize-observations)",
)
VALUES = "its critic learned normalised returns", "normalize_values=True (--normalize-values)"
LEFT_OUT = {
    "weights.observations": OBSERVATIONS,
    "weights.agents": OBSERVATIONS,
    "weights.values": VALUES,
    "targets": VALUES,
    "returns": ("its critic learned normalised rewards", "normalize_rewards=True (--normalize-rewards)"),
}
"""Why statistics are needed, and the setting that keeps them, by path. The second and the fourth are those of
multi-agent learners."""

OUTPUTS = ("head", "value", "advantage")
"""Names of the last layers of networks for action values."""

POOL, KEPT = "pool.networks.", "pool.kept."
"""Paths, in a learner, of the weights and counts of the pool of opponents, for each parameter set."""

NETWORKS, STATISTICS = "weights.networks.", "weights.agents."
"""Paths, in a multi-agent learner, of the network weights and of the statistics that normalise observations."""

MAX_LACKING = 6
"""Maximum number of arrays without initial weights in the user's note. `config.json` lists all of them."""


class GivenWeights(NamedTuple):
    """Initial arrays that replace randomly initialised arrays of a learner."""

    arrays: Mapping[str, np.ndarray]
    """Initial arrays by their path in the learner."""
    source: Mapping[str, Any] = MappingProxyType({})
    """Where the arrays come from: a run and an iteration, with the paths that it lacks, or a recording."""
    unread: Sequence[str] = ()
    """Paths of statistics that the other run has and this run does not use."""
    pool: Mapping[str, Any] = MappingProxyType({})
    """The run and the iterations whose weights fill the pool of opponents."""
    in_pool: Mapping[str, np.ndarray] = MappingProxyType({})
    """Arrays of the pool of opponents by their path in the learner."""

    @property
    def record(self) -> dict[str, Any]:
        """Returns the fields of `config.json` that say where the weights come from."""
        fields = {"started_from": self.source, "pool_started_from": self.pool}
        return {name: dict(value) for name, value in fields.items() if value}

    def __str__(self) -> str:
        parts = [self._of_policy] if self.source else []
        if self.pool:
            iterations = ", ".join(map(str, self.pool["iterations"]))
            parts.append(
                f"the pool of opponents begins with the weights of {self.pool['run']} after iteration {iterations}"
            )
        return "; ".join(parts)

    @property
    def _of_policy(self) -> str:
        if "file" in self.source:
            return "begins with weights that imitate {transitions:,} transitions of {file}: {agreement}".format(
                **self.source
            )
        source, lacking = self.source, self.source["lacking"]
        cut = f" and {len(lacking) - MAX_LACKING} more" if len(lacking) > MAX_LACKING else ""
        more = f"; {', '.join(lacking[:MAX_LACKING])}{cut} start with random weights" if lacking else ""
        for path in self.unread:
            reason, setting = LEFT_OUT[path]
            more += f"; {path} are left out, although {reason}. hint: {setting}"
        of_seed = f" (seed {source['seed']})" if "seed" in source else ""
        return (
            f"starts with {len(self.arrays)} arrays of {source['run']}{of_seed} after iteration "
            f"{source['iteration']}{more}"
        )


def given_weights(graph: Graph, options: RunOptions, imports: Sequence[str]) -> GivenWeights | None:
    """Reads initial weights from `options.start_from`, or trains them on the recording `options.clone`.

    A pool of opponents is filled with the checkpoints of `options.pool_from`. Returns None if none of these
    options is set.

    Raises a `CheckpointError` if the named run has no complete checkpoint. Raises a `UsageError` if the two
    learners have no arrays in common, or if nothing new would ever enter the pool.
    """
    pool = _pool_of(graph, options, imports)
    if options.clone is not None:
        given = _clone(graph, options, options.clone)
    elif options.start_from is not None:
        given = _load_start(graph, options.start_from, imports)
    else:
        return pool
    return given if pool is None else given._replace(pool=pool.pool, in_pool=pool.in_pool)


def _load_start(graph: Graph, start_from: str, imports: Sequence[str]) -> GivenWeights:
    """Returns the weights of the newest checkpoint of a run."""
    from rollmill.policies.loading import restore_run

    run, other, seeds, found = restore_run(start_from, imports=imports)
    theirs = _weights_of(_of_first_seed(found.state.learner, seeds))
    learner = jax.eval_shape(lambda: start_learner(graph, jax.random.key(0)))
    ours, holders = _weights_of(learner), _holders(learner)
    unfit = {holders[place] for place, leaf in ours.items() if not _fits(leaf, theirs.get(place))}
    if _describe_outputs(graph) != _describe_outputs(other):
        unfit |= {holder for holder in holders.values() if holder.rpartition(".")[2] in OUTPUTS}
    arrays = {place: np.asarray(theirs[place]) for place in ours if holders[place] not in unfit}
    if not any(array.ndim for array in arrays.values()):
        raise UsageError(
            f"start_from={start_from}: {_name(other)} has no weights with the same names and shapes as "
            f"those of {_name(graph)}. hint: give both the same network."
        )
    arrays |= _find_followed(learner, arrays)
    lacking = sorted(set(ours) - set(arrays))
    source = {"run": str(run.root.resolve()), "iteration": found.iteration, "lacking": lacking}
    source |= {"seed": seeds[0]} if len(seeds) > 1 else {}
    unread = [p for p in LEFT_OUT if _has_statistics(p, theirs) and not _has_statistics(p, ours)]
    return GivenWeights(arrays, source, unread)


def _find_followed(learner: PyTree, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of target networks that the other learner lacks: those of the networks that they follow.

    `targets.0.head.weight` follows `networks.critics.0.head.weight`.
    """
    nodes = jax.tree.leaves_with_path(learner, is_leaf=_is_statistics)
    places = {_place(path) for path, node in nodes if not _is_statistics(node)}
    of_targets = {place for place in places if place.partition(".")[0] in TARGETS}
    followed: dict[str, np.ndarray] = {}
    for place in of_targets - arrays.keys():
        end = "." + place.partition(".")[2]
        leaders = [other for other in places - of_targets if other.endswith(end) and _is_taken(other)]
        if len(leaders) == 1 and leaders[0] in arrays:
            followed[place] = arrays[leaders[0]]
    return followed


def _describe_outputs(graph: Graph) -> tuple[Any, ...]:
    """Returns what outputs of networks for action values mean: means, or a distribution and its bounds."""
    from rollmill.algorithms.value_distributions import bounds_of_returns

    config = graph.settings.get("config", {})
    kind = config.get("value_distribution") or "none"
    return kind, *(bounds_of_returns(config.get("min_value"), config.get("max_value")) if kind == "c51" else ())


def _pool_of(graph: Graph, options: RunOptions, imports: Sequence[str]) -> GivenWeights | None:
    """Returns the weights with which a pool of opponents begins, or None if it begins empty."""
    config, algorithm = graph.settings.get("config", {}), graph.settings["algorithm"]
    size = config.get("pool_size")
    if not size:
        if options.pool_from is not None:
            raise UsageError(
                f"pool_from={options.pool_from} fills a pool of earlier opponents, which this training does not "
                "have. hint: mappo and ippo have one with --pool-size 10 (pool_size=10 in Python)."
                if "pool_size" in config
                else f"pool_from={options.pool_from} has no effect, because {algorithm} does not train against a "
                "pool of earlier opponents. hint: mappo and ippo do, with --pool-size 10."
            )
        return None
    ours = _places(jax.eval_shape(lambda: start_learner(graph, jax.random.key(0))))
    sets = [place.removeprefix(KEPT) for place in ours if place.startswith(KEPT)]
    if options.pool_from is None:
        if still := [name for name in sets if name in config["frozen"]]:
            raise UsageError(
                f"{still[0]} is frozen, so all of its weights in the pool would be equal. hint: use --pool-from "
                f"RUN to fill the pool with checkpoints of another run, or leave {still[0]} out of frozen."
            )
        return None
    return _fill_pool(graph, ours, sets, options.pool_from, size, imports)


def _fill_pool(
    graph: Graph, ours: Mapping[str, Any], sets: Sequence[str], pool_from: Path, size: int, imports: Sequence[str]
) -> GivenWeights:
    """Returns the weights of the newest checkpoints of a run, of all parameter sets in the pool."""
    from rollmill.policies.loading import restore_newest

    found = restore_newest(pool_from, count=size, imports=imports)
    learners = [_places(_of_first_seed(each.restored.state.learner, each.seeds)) for each in found]
    if any(place.startswith(STATISTICS) for place in (*ours, *learners[-1])):
        raise UsageError(
            f"pool_from={pool_from} is not supported with normalize_observations, because networks in the pool "
            "would read observations normalised with newer statistics. hint: train both runs without "
            "normalize_observations."
        )
    arrays: dict[str, np.ndarray] = {}
    for place, leaf in ours.items():
        if not place.startswith(POOL):
            continue
        theirs = [learner.get(NETWORKS + place.removeprefix(POOL)) for learner in learners]
        if any(array is None or array.shape != leaf.shape[1:] for array in theirs):
            name = next(name for name in sets if place.startswith(f"{POOL}{name}."))
            raise UsageError(
                f"pool_from={pool_from}: {_name(found[-1].graph)} has no parameter set {name} with the network of "
                f"{_name(graph)}. hint: use a run with the same kinds of agents, sharing and network."
            )
        arrays[place] = np.resize(np.stack([np.asarray(array) for array in theirs]), leaf.shape)
    arrays |= {KEPT + name: np.asarray(len(found), np.int32) for name in sets}
    iterations = [each.restored.iteration for each in found]
    source = {"run": str(found[-1].run.root.resolve()), "iterations": iterations}
    return GivenWeights({}, pool=source, in_pool=arrays)


def _clone(graph: Graph, options: RunOptions, file: Path) -> GivenWeights:
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

    If `state` is None, the state is created. It does not include host environments.
    """
    if state is None:
        state = _learner_alone(graph, seeds) if graph.host is not None else start_state(graph, seeds)

    arrays = {**given.arrays, **given.in_pool}

    def placed(path: Any, leaf: Array) -> Array:
        array = arrays.get(_place(path).removeprefix("learner."))
        if array is None or _place(path[:1]) != "learner":
            return leaf
        return jax.device_put(jnp.broadcast_to(array, leaf.shape).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map_with_path(placed, state)  # also works if the state has an axis of seeds


def _learner_alone(graph: Graph, seeds: Sequence[int]) -> State:
    """Returns a training state with the learner, and with zeros instead of environment states."""
    empty, key = jax.tree.map(_zeros, state_shapes(graph, seeds)), jax.random.key(seeds[0])
    return dataclasses.replace(empty, key=key, learner=begin_learner(graph, key))


def _zeros(shape: jax.ShapeDtypeStruct) -> Array:
    if is_key(shape.dtype):
        return jnp.broadcast_to(jax.random.key(0), shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)


def _of_first_seed(learner: PyTree, seeds: Sequence[int]) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], learner) if len(seeds) > 1 else learner


def _places(learner: PyTree) -> dict[str, Any]:
    """Returns the learner's arrays by path."""
    return {_place(path): leaf for path, leaf in jax.tree.leaves_with_path(learner)}


def _weights_of(learner: PyTree) -> dict[str, Any]:
    """Returns the learner's float arrays that can be copied, by path."""
    leaves = _places(learner)
    if isinstance(getattr(learner, "returns", None), dict):  # the mean returns of kinds of agents, no statistics
        leaves = {place: leaf for place, leaf in leaves.items() if not place.startswith("returns.")}
    return {
        place: leaf
        for place, leaf in leaves.items()
        if jnp.issubdtype(leaf.dtype, jnp.floating) and _is_taken(place)
    }


def _has_statistics(path: str, arrays: Mapping[str, Any]) -> bool:
    return any(place.startswith(f"{path}.") and place.endswith(".count") for place in arrays)


def _place(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_taken(place: str) -> bool:
    return not set(place.split(".")) & set(ANEW)


def _name(graph: Graph) -> str:
    return f"{graph.settings['algorithm']} on {graph.settings['environment']}"


def _holders(learner: PyTree) -> dict[str, str]:
    """Returns, for the path of each array, the path of the layer or of the statistics that it belongs to."""
    holders: dict[str, str] = {}
    for path, node in jax.tree.leaves_with_path(learner, is_leaf=_is_statistics):
        for inner, _ in jax.tree.leaves_with_path(node):
            place = _place((*path, *inner))
            holders[place] = _place(path) if _is_statistics(node) else place.rpartition(".")[0]
    return holders


def _is_statistics(node: Any) -> bool:
    return isinstance(node, RunningStatistics)


def _fits(ours: Any, theirs: Any) -> bool:
    return theirs is not None and ours.shape == theirs.shape
