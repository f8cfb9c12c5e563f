"""Computes means over the devices of a mesh: flat, hierarchical, one-shot, or through the memory of the host.

A mesh has two axes, the GPUs and the instances that share a GPU, as in GMI-DRL (USENIX ATC 2025). The fastest
all-reduce depends on the sizes of both axes and on the number of parameters, so it is chosen by timing.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from rollmill.dataflow import Reduce, identity
from rollmill.planning.plan import AllReduce
from rollmill.programs.compiler_options import options_for
from rollmill.programs.meshes import AXES, on_each, on_own_devices, over_vectors

TIMED_REDUCTIONS, TIMINGS = 20, 5
"""All-reduces of one timing, and timings of which the shortest counts."""

PERIOD = 7
"""Length after which the values in a timed vector repeat."""

MAX_ONE_SHOT = 2**18
"""Maximum number of parameters for which the one-shot mean is tried, because it sends all values to all GPUs."""


class MeshAllReduce(NamedTuple):
    """An all-reduce that computes the mean over all devices of a mesh, for use inside the programs of the mesh."""

    reduce: Callable[..., Reduce]
    """`(*operands) -> Reduce`. A program calls it once on each device, and uses the result for all means."""
    operands: tuple[Array, ...] = ()
    """Additional arguments of a program, arrays with one row per device. Each device receives its row."""


def mesh_all_reduce(
    mesh: Mesh, way: AllReduce = "flat", host: Reduce | None = None, *, num_parameters: int = 0
) -> MeshAllReduce:
    """Returns an all-reduce of means over all devices of a mesh. All processes of the mesh must call this.

    A `flat` mean is one all-reduce over all devices. In a `hierarchical` mean, the instances of a GPU first sum
    one part each, so that each value crosses between GPUs only once. In a `one-shot` mean, each GPU reads the
    memory of all others. `host` is the function that computes the mean through the memory of the host.
    `num_parameters` is the length of the longest vector that is reduced often.

    Raises `NoPeerMemory` if the one-shot mean is impossible, for example because GPUs cannot access each other's
    memory, or because triton is missing.
    """
    if mesh.size == 1:
        return MeshAllReduce(lambda: identity)
    if way == "one-shot":
        from rollmill.programs.one_shot import one_shot_means

        means, memory = one_shot_means(mesh, num_parameters)
        return MeshAllReduce(means, (memory,))
    return MeshAllReduce(lambda: _without_operands(mesh, way, host))


def _without_operands(mesh: Mesh, way: AllReduce, host: Reduce | None) -> Reduce:
    if way == "hierarchical":
        return partial(over_vectors, partial(_mean_of_parts, *mesh.devices.shape))
    if way == "host":
        assert host is not None
        return partial(over_vectors, host)
    return partial(jax.lax.pmean, axis_name=AXES)


def _mean_of_parts(instances: int, gpus: int, vector: Float[Array, " N"]) -> Float[Array, " N"]:
    """Averages a vector: each instance of a GPU sums one part over the GPUs."""
    padded = jnp.pad(vector, (0, -vector.size % instances))
    part = jax.lax.psum_scatter(padded, "instance", tiled=True)
    part = jax.lax.psum(part, "gpu") / (instances * gpus)
    return jax.lax.all_gather(part, "instance", tiled=True)[: vector.size]


def algorithms_for(mesh: Mesh, num_parameters: int) -> Sequence[AllReduce]:
    """Returns the names of the all-reduces that are worth timing on a mesh of GPUs, for a number of parameters."""
    if mesh.shape["instance"] > 1:
        return ["flat", "host"] if mesh.shape["gpu"] == 1 else ["flat", "hierarchical", "host"]
    from rollmill.fusion import MAX_RANKS

    one_shot = 1 < mesh.size <= MAX_RANKS and num_parameters <= MAX_ONE_SHOT
    return ["flat", "one-shot"] if one_shot else ["flat"]


def time_reductions(mesh: Mesh, elements: int, means: Mapping[AllReduce, MeshAllReduce]) -> dict[AllReduce, float]:
    """Times each all-reduce of a float32 vector of length `elements`, in seconds.

    An all-reduce with wrong results has an infinite time. All processes of the mesh must call this, and all get
    the same times. `means` must include `flat`.
    """
    ranks, places = np.arange(mesh.size, dtype=np.float32), np.arange(elements, dtype=np.float32) % PERIOD
    numbers = ranks[:, None] + places
    expected = numbers.mean(axis=0)
    mine = [_shortest(means_in_a_row(mesh, mean, numbers), expected) for mean in means.values()]
    slowest = jax.jit(on_each(mesh, partial(jax.lax.pmax, axis_name=AXES)))
    rows = np.broadcast_to(np.asarray(mine, np.float32), (mesh.size, len(mine)))
    of_all = np.asarray(slowest(on_own_devices(mesh, rows)).addressable_data(0))
    return {way: float(time) for way, time in zip(means, of_all, strict=True)}


def means_in_a_row(
    mesh: Mesh, mean: MeshAllReduce, numbers: Float[np.ndarray, "devices N"]
) -> Callable[[], Array]:
    """Compiles a program of `TIMED_REDUCTIONS` means, each computed from the previous mean.

    The first mean is computed from the rows of `numbers`. Before each mean, every device adds its rank minus the
    mean of all ranks. All devices then contribute different values, and the result is still the mean of the rows.
    """
    operand = on_own_devices(mesh, numbers)

    def repeat(vector: Array, *operands: Array) -> Array:
        reduce = mean.reduce(*operands)
        own = jax.lax.axis_index(AXES).astype(jnp.float32) - (mesh.size - 1) / 2
        return jax.lax.fori_loop(0, TIMED_REDUCTIONS, lambda _, carry: reduce(carry + own), vector)

    program = jax.jit(on_each(mesh, repeat, len(mean.operands))).lower(operand, *mean.operands)
    compiled = program.compile(dict(options_for(mesh)))
    return lambda: compiled(operand, *mean.operands)


def _shortest(program: Callable[[], Array], expected: Float[np.ndarray, " N"]) -> float:
    """Returns the seconds that one mean takes, or infinity if its result is wrong.

    A mean with a wrong result is timed as well, because all processes have to take part in each mean.
    """
    found = program()  # the first call also opens channels and communicators
    is_right = all(np.allclose(shard.data, expected, rtol=1e-3) for shard in found.addressable_shards)
    seconds = []
    for _ in range(TIMINGS):
        began = time.perf_counter()
        program().block_until_ready()
        seconds.append((time.perf_counter() - began) / TIMED_REDUCTIONS)
    return min(seconds) if is_right else float("inf")


def fastest(seconds: Mapping[AllReduce, float]) -> AllReduce:
    """Returns the name of the fastest all-reduce, by the times in seconds."""
    return min(seconds, key=lambda way: seconds[way])
