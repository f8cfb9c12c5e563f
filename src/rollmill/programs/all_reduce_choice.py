"""Chooses the all-reduce that averages gradients on a mesh: the requested one, or the fastest by timing."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from rollmill.core.errors import CheckpointError, UsageError
from rollmill.dataflow import Graph, Reduce
from rollmill.planning.plan import AllReduce, AllReduceOption
from rollmill.programs.peer_memory import NoPeerMemory
from rollmill.programs.reductions import MeshAllReduce, algorithms_for, fastest, mesh_all_reduce, time_reductions
from rollmill.programs.states import state_shapes

WAYS: tuple[AllReduce, ...] = get_args(AllReduce)


class AllReduceChoice(NamedTuple):
    """An all-reduce for a mesh, with notes about how it was chosen."""

    mean: MeshAllReduce
    way: AllReduce | None = None
    """Name of the all-reduce if it was chosen by timing, otherwise None."""
    notes: Sequence[str] = ()
    """Notes for the user with the times of all available all-reduces."""


def choose_all_reduce(
    graph: Graph, mesh: Mesh, wanted: AllReduceOption, host: Reduce | None = None
) -> AllReduceChoice:
    """Returns the requested all-reduce of a mesh. For `auto`, times the available ones and returns the fastest.

    The timed vectors have one element per parameter of the graph. The choice is cached by mesh, size and software
    versions, so the same seed gives the same sums, bit for bit.

    Args:
        graph: the graph to train.
        mesh: the mesh. All of its processes must call this function.
        wanted: name of the all-reduce, or `auto`.
        host: function that computes the mean through the memory of the host, for a mesh of several processes.

    Raises:
        UsageError: the requested all-reduce is not available.
    """
    if mesh.size == 1:
        return AllReduceChoice(mesh_all_reduce(mesh))
    num_parameters = _num_parameters(graph)
    if wanted != "auto":
        return AllReduceChoice(_make_wanted(mesh, wanted, host, num_parameters))
    means = _available_means(mesh, host, num_parameters)
    if len(means) == 1:
        # on GPUs, several all-reduces may be available when the run is resumed, so the choice is recorded
        on_gpus = mesh.devices.flat[0].platform == "gpu"
        return AllReduceChoice(means["flat"], "flat" if on_gpus else None)
    file = _file_of(mesh, num_parameters, means)
    if (known := _read_stored(file)) is not None:
        return AllReduceChoice(
            means[known], known, [(f"means use {known}, the fastest way in an earlier measurement")]
        )
    seconds = time_reductions(mesh, num_parameters, means)
    chosen = fastest(seconds)
    with contextlib.suppress(OSError, CheckpointError):  # if the choice cannot be stored, the next run times again
        from rollmill.fusion.cache import write_once

        write_once(file, json.dumps({"way": chosen, "seconds": seconds}))
    return AllReduceChoice(means[chosen], chosen, [_note(num_parameters, seconds, chosen)])


def _make_wanted(mesh: Mesh, way: AllReduce, host: Reduce | None, num_parameters: int) -> MeshAllReduce:
    if way == "host" and host is None:
        raise UsageError("reduction=host needs several processes, but this run has one. hint: use reduction=auto.")
    try:
        return mesh_all_reduce(mesh, way, host, num_parameters=num_parameters)
    except NoPeerMemory as reason:
        raise UsageError(
            f"reduction={way}, requested now or chosen when the run began, is not possible here: {reason}. "
            "hint: use reduction=auto."
        ) from reason


def _available_means(mesh: Mesh, host: Reduce | None, num_parameters: int) -> dict[AllReduce, MeshAllReduce]:
    means: dict[AllReduce, MeshAllReduce] = {}
    for way in algorithms_for(mesh, num_parameters):
        try:
            means[way] = mesh_all_reduce(mesh, way, host, num_parameters=num_parameters)
        except NoPeerMemory:  # other all-reduces remain
            continue
    return means


def _file_of(mesh: Mesh, num_parameters: int, means: Mapping[AllReduce, MeshAllReduce]) -> Path:
    """Returns the file that keeps the choice among these means, named by all that their times depend on."""
    from rollmill.fusion.cache import cached_file

    kind, shape = mesh.devices.flat[0].device_kind, list(mesh.devices.shape)
    return cached_file("means", [kind, shape, jax.process_count(), num_parameters, list(means)])


def _read_stored(file: Path) -> AllReduce | None:
    """Returns the choice that all processes have stored. None if one has none, or they differ."""
    from rollmill.fusion.cache import read_cached

    own = read_cached(file, lambda it: WAYS.index(it["way"]))
    number = -1 if own is None else own
    of_all = np.asarray(multihost_utils.process_allgather(np.int32(number)))
    return WAYS[number] if number >= 0 and (of_all == number).all() else None


def _note(num_parameters: int, seconds: Mapping[AllReduce, float], chosen: AllReduce) -> str:
    times = ", ".join(
        f"{way} {1e6 * taken:.0f} us" if taken < np.inf else f"{way} is wrong" for way, taken in seconds.items()
    )
    return f"the mean of {num_parameters:,} parameters takes {times}: {chosen}"


def _num_parameters(graph: Graph) -> int:
    learner = state_shapes(graph).learner
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(graph.weights, learner)))
