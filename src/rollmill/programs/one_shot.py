"""Computes the one-shot mean over the GPUs of a mesh, with a kernel that reads the memory of all GPUs."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree, UInt32

from rollmill.core.errors import CannotFuse, UsageError
from rollmill.dataflow import Reduce
from rollmill.fusion import (
    LANE_BYTES,
    MAX_RANKS,
    backend_for,
    check_package,
    compile_one_shot_mean,
    num_lanes,
    one_shot_mean,
)
from rollmill.programs.meshes import AXES, over_vectors
from rollmill.programs.peer_memory import NoPeerMemory, agree, open_peer_memory

ONE_SHOT_MEANS, SPARE_LANES = 4, 64
"""Number of parameter-sized means that a program has shared memory for, and of additional lanes for small ones."""


def one_shot_means(mesh: Mesh, num_parameters: int) -> tuple[Callable[..., Reduce], Array]:
    """Returns a function that computes a program's one-shot means, and the shared memory that it takes.

    Raises `NoPeerMemory` if the GPUs cannot access each other's memory, or if the kernel cannot be compiled.
    """
    _check(mesh, num_parameters)
    lanes = ONE_SHOT_MEANS * num_lanes(num_parameters) + SPARE_LANES
    return partial(_OneShotMeans, mesh.size, lanes), open_peer_memory(mesh, lanes * LANE_BYTES)


def _check(mesh: Mesh, num_parameters: int) -> None:
    if mesh.devices.flat[0].platform != "gpu":
        raise NoPeerMemory("a one-shot all-reduce needs GPUs")
    if mesh.shape["instance"] > 1:
        raise NoPeerMemory("processes that share a GPU would wait for each other")
    if mesh.size > MAX_RANKS:
        raise NoPeerMemory(f"{mesh.size} GPUs are more than the {MAX_RANKS} that a one-shot all-reduce supports")
    agree(partial(_check_kernel, mesh, num_parameters))


def _check_kernel(mesh: Mesh, num_parameters: int) -> None:
    """Checks that this process can compile the kernel. Otherwise a training run would fail at it."""
    try:
        for device in mesh.local_devices:
            backend = backend_for(device, "tf32")
            backend.check(device)
            check_package(backend)
        compile_one_shot_mean(num_parameters, mesh.size)
    except (UsageError, CannotFuse) as error:
        raise NoPeerMemory(str(error)) from error


class _OneShotMeans:
    """One-shot means of one program. Each has lanes of its own, because XLA may compute two at a time.

    Means without free lanes, or of another dtype than float32, are flat. All processes trace the same program, and
    therefore agree on the lanes.
    """

    def __init__(self, ranks: int, lanes: int, addresses: UInt32[Array, "1 A"]) -> None:
        self._ranks, self._lanes, self._addresses, self._next = ranks, lanes, addresses, 0

    def __call__(self, tree: PyTree[Array]) -> PyTree[Array]:
        return over_vectors(partial(self._mean, self._addresses), tree)

    def _mean(self, addresses: UInt32[Array, "1 A"], vector: Float[Array, " N"]) -> Float[Array, " N"]:
        mean = jax.custom_batching.custom_vmap(self._mean_of_vector)
        mean.def_vmap(self._mean_of_batch)
        return mean(vector, addresses)

    def _mean_of_batch(
        self, size: int, in_batched: Sequence[bool], vectors: Float[Array, "B N"], addresses: UInt32[Array, "1 A"]
    ) -> tuple[Float[Array, "B N"], bool]:
        """Computes the means of several vectors as the mean of one. This is the batching rule."""
        return self._mean(addresses, vectors.reshape(-1)).reshape(vectors.shape), True

    def _mean_of_vector(self, vector: Float[Array, " N"], addresses: UInt32[Array, "1 A"]) -> Float[Array, " N"]:
        first, self._next = self._next, self._next + num_lanes(vector.size)
        if not vector.size or vector.dtype != jnp.float32 or self._next > self._lanes:
            return jax.lax.pmean(vector, AXES)
        return one_shot_mean(vector, addresses.reshape(-1), ranks=self._ranks, first_lane=first)
