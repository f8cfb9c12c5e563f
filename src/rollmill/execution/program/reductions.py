"""Means over the devices of a mesh: flat, hierarchical, or through the memory of the host.

A mesh has two axes, the instances that share a GPU and the GPUs, as in GMI-DRL (USENIX ATC 2025). Which all-reduce
is the fastest depends on both counts and on the number of parameters, so it is chosen by timing.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, PyTree

from rollmill.channels import Layout, Reduction, Wire
from rollmill.dataflow import Reduce, identity
from rollmill.planning import AllReduce

AXES = ("instance", "gpu")
"""Names of a mesh's axes."""

TIMED_REDUCTIONS, TIMINGS = 20, 5
"""All-reduces of one timing, and timings of which the shortest counts."""


def mesh_of(devices: Sequence[Any], *, instances: int = 1) -> Mesh:
    """The mesh of some devices.

    Args:
        devices: one of each GPU, then the second instance of each GPU, and so on.
        instances: devices that share a GPU.
    """
    return Mesh(np.asarray(devices).reshape(instances, -1), AXES)


def mean_over(mesh: Mesh, way: AllReduce = "flat", host: Reduce | None = None) -> Reduce:
    """The mean over all devices of a mesh, for use in its programs.

    Args:
        mesh: its devices.
        way: `flat`, one all-reduce over all devices; `hierarchical`, in which the instances of a GPU first sum a
            part each, so that a number crosses between GPUs only once; or `host`.
        host: the mean through the host's memory, for this way alone.
    """
    if mesh.size == 1:
        return identity
    if way == "hierarchical":
        return partial(_over_vectors, partial(_mean_of_parts, *mesh.devices.shape))
    if way == "host":
        assert host is not None
        return partial(_over_vectors, host)
    return partial(jax.lax.pmean, axis_name=AXES)


def _over_vectors(mean: Reduce, tree: PyTree[Array]) -> PyTree[Array]:
    """The mean of a tree, whose arrays of one dtype are reduced as one vector."""
    leaves, structure = jax.tree.flatten(tree)
    by_dtype: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        by_dtype.setdefault(jnp.result_type(leaf), []).append(place)
    for places in by_dtype.values():
        vector, restore = ravel_pytree([leaves[place] for place in places])
        for place, leaf in zip(places, restore(mean(vector)), strict=True):
            leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


def _mean_of_parts(instances: int, gpus: int, vector: Float[Array, " N"]) -> Float[Array, " N"]:
    """The mean of a vector, of which each instance of a GPU sums one part over the GPUs."""
    padded = jnp.pad(vector, (0, -vector.size % instances))
    part = jax.lax.psum_scatter(padded, "instance", tiled=True)
    part = jax.lax.psum(part, "gpu") / (instances * gpus)
    return jax.lax.all_gather(part, "instance", tiled=True)[: vector.size]


def means_of(mesh: Mesh, host: Reduce) -> dict[AllReduce, Reduce]:
    """The mean in each way that there is on a mesh of GPUs; on one GPU there is no hierarchy."""
    ways: Sequence[AllReduce] = ["flat", "host"] if mesh.shape["gpu"] == 1 else ["flat", "hierarchical", "host"]
    return {way: mean_over(mesh, way, host) for way in ways}


class HostMean:
    """The mean over processes through the memory of the host, called by the compiled programs of their GPUs.

    A GPU's program makes its calls in the order in which it was compiled, the same in all processes, so vectors of
    one length can share a channel.

    Args:
        wire: opens channels between the processes.
        rank: number of this process.
        size: number of processes.
    """

    def __init__(self, wire: Wire, *, rank: int, size: int) -> None:
        self._open = partial(wire.reduction, rank=rank, size=size)
        self._channels: dict[str, Reduction] = {}

    def __call__(self, vector: Float[Array, " N"]) -> Float[Array, " N"]:
        """The mean of a traced vector."""
        return io_callback(self._mean, jax.ShapeDtypeStruct(vector.shape, vector.dtype), vector)

    def _mean(self, vector: Any) -> np.ndarray:
        operand = np.asarray(vector)
        layout = Layout.of(operand)
        name = f"mean/{operand.dtype.name}/{operand.size}"
        if name not in self._channels:
            self._channels[name] = self._open(name, layout=layout)
        return self._channels[name].mean(operand)


def time_reductions(mesh: Mesh, elements: int, means: Mapping[AllReduce, Reduce]) -> dict[AllReduce, float]:
    """Seconds of an all-reduce in each way, the same numbers in all processes.

    Args:
        mesh: the devices, all of which have to call this.
        elements: numbers that are reduced, of type float32.
        means: the mean in each way; `flat` is among them.
    """
    replicated = partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    zeros = _on_own_devices(mesh, np.zeros(elements, np.float32))
    compiled = lambda mean: jax.jit(replicated(partial(_repeated, mean), check_vma=False)).lower(zeros).compile()
    mine = [min(_timings(program, zeros)) for program in map(compiled, means.values())]
    slowest = jax.jit(replicated(partial(jax.lax.pmax, axis_name=AXES), check_vma=False))
    of_all = np.asarray(slowest(_on_own_devices(mesh, np.asarray(mine, np.float32))).addressable_data(0))
    return {way: float(time) for way, time in zip(means, of_all, strict=True)}


def _repeated(mean: Reduce, vector: Array) -> Array:
    return jax.lax.fori_loop(0, TIMED_REDUCTIONS, lambda _, carry: mean(carry), vector)


def _timings(program: Callable[[Array], Array], operand: Array) -> list[float]:
    program(operand).block_until_ready()  # opens channels and communicators
    seconds = []
    for _ in range(TIMINGS):
        began = time.perf_counter()
        program(operand).block_until_ready()
        seconds.append((time.perf_counter() - began) / TIMED_REDUCTIONS)
    return seconds


def _on_own_devices(mesh: Mesh, vector: np.ndarray) -> Array:
    """This process's vector on its own devices, in an array that counts as replicated although others differ."""
    everywhere = jax.sharding.NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(vector.shape, everywhere, lambda _: vector)


def fastest(seconds: Mapping[AllReduce, float]) -> AllReduce:
    """The way that takes the shortest time."""
    return min(seconds, key=lambda way: seconds[way])
