"""Memory on each GPU of a mesh that kernels on all of its GPUs can read and write.

The CUDA driver allocates this memory instead of JAX. Other processes receive a handle, and each opens it at its
own address ("CUDA C++ Programming Guide", Interprocess Communication).
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt8, UInt32

from rollmill.core.machine import BOOT_ID
from rollmill.gpus.cuda_memory import HANDLE_BYTES, NoPeerMemory, allocate, handle_of, let_reach, open_handle

T = TypeVar("T")


def open_peer_memory(mesh: Mesh, num_bytes: int) -> UInt32[Array, "devices addresses"]:
    """Allocates zeroed memory on each GPU of a mesh, and opens other GPUs' memory until the process ends.

    Returns one row per GPU, placed on this GPU. The row contains the low and the high 32 bits of the address of
    each GPU's memory, in the order of the mesh, and the rank of the GPU in the mesh. Raises `NoPeerMemory` in all
    processes if one of them cannot open the memory, or if the processes are on several hosts.
    """
    gpus = list(mesh.devices.flat)
    mine = np.frombuffer(uuid.UUID(BOOT_ID.read_text().strip()).bytes, np.uint8)
    if (np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, mine.size) != mine).any():
        raise NoPeerMemory("the processes of the mesh are on several hosts")
    own = {rank: gpu for rank, gpu in enumerate(gpus) if gpu.process_index == jax.process_index()}
    memory = agree(lambda: {rank: allocate(gpu.local_hardware_id, num_bytes) for rank, gpu in own.items()})
    handles = _handles(gpus, own, memory)
    rows = agree(lambda: {rank: _row(rank, gpus, memory, handles) for rank in own})
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (len(gpus), 2 * len(gpus) + 1)

    def row(index: Any) -> UInt32[np.ndarray, "1 A"]:
        return rows[index[0].start or 0][None]

    return jax.make_array_from_callback(shape, sharding, row)


def _handles(gpus: Sequence[Any], own: Mapping[int, Any], memory: Mapping[int, int]) -> UInt8[np.ndarray, "R B"]:
    """Returns the handles of all GPUs' memory, by rank. Zeros if there are no other processes."""
    handles = np.zeros((len(gpus), HANDLE_BYTES), np.uint8)
    if len(own) == len(gpus):
        return handles
    mine = agree(lambda: {rank: handle_of(gpu.local_hardware_id, memory[rank]) for rank, gpu in own.items()})
    for rank, handle in mine.items():
        handles[rank] = np.frombuffer(handle, np.uint8)
    return np.asarray(multihost_utils.process_allgather(handles)).max(axis=0)


def _row(
    rank: int, gpus: Sequence[Any], memory: Mapping[int, int], handles: np.ndarray
) -> UInt32[np.ndarray, " A"]:
    """Addresses of all memory as this GPU's kernels see it, and its rank."""
    addresses = [_address(gpus[rank], peer, gpus, memory, handles) for peer in range(len(gpus))]
    return np.asarray([*(half for each in addresses for half in (each & 0xFFFFFFFF, each >> 32)), rank], np.uint32)


def _address(gpu: Any, peer: int, gpus: Sequence[Any], memory: Mapping[int, int], handles: np.ndarray) -> int:
    if peer not in memory:
        return open_handle(gpu.local_hardware_id, handles[peer].tobytes())
    if gpus[peer] is not gpu:
        let_reach(gpu.local_hardware_id, gpus[peer].local_hardware_id)
    return memory[peer]


def agree(do: Callable[[], T]) -> T:
    """Calls `do` in all processes of the mesh, and returns this process's result if it succeeds everywhere.

    Each process must call `agree`. Raises `NoPeerMemory` in all processes if `do` raised it in any process.
    """
    found, reason = None, ""
    try:
        found = do()
    except NoPeerMemory as error:
        reason = str(error)
    failed = np.asarray(multihost_utils.process_allgather(np.int32(bool(reason))))
    if failed.any():
        raise NoPeerMemory(reason or "another process cannot reach the memory of its peers")
    return cast(T, found)
